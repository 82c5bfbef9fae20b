--!include event
-- A supervisor's record of itself (R29). Emits WORKER_STARTED when it was not known (or had been given up), and WORKER_RELOADED when its field
-- `reload` tells of another reload than before, with what it tells as metadata.
-- KEYS: nil, its hash, workers, queues, task_types, its bell.
-- ARGV: event base, worker_id, ms it has to live without another beat, ms since it started, n queues, the queues, m task types, m times task
--   type and JSON of its declaration, then the fields of the hash and their values.
-- Returns: 1 if it was not known, else 0.
-- Atomic because a member of `workers` without a hash is taken for a dead one.
unrefusable()
local worker, ttl, age = ARGV[2], ARGV[3], tonumber(ARGV[4])
local at = 6
local queues, types = tonumber(ARGV[5]), 0
for i = at, at + queues - 1 do try('SADD', KEYS[4], ARGV[i]) end
at = at + queues
types = tonumber(ARGV[at])
for i = at + 1, at + 2 * types, 2 do try('HSET', KEYS[5], ARGV[i], ARGV[i + 1]) end
at = at + 2 * types + 1
local fields, reload = { 'worker_id', worker, 'last_heartbeat', NOWS }, ''
for i = at, #ARGV do fields[#fields + 1] = ARGV[i] end
for i = at, #ARGV, 2 do if ARGV[i] == 'reload' then reload = ARGV[i + 1] end end
local before = try('HGET', KEYS[2], 'reload')
call('HSET', KEYS[2], unpack(fields))
if reload ~= '' and reload ~= before then emit('WORKER_RELOADED', '', '', '', '', worker, reload) end
call('HSETNX', KEYS[2], 'started_at', string.format('%.0f', NOW - age))
call('PEXPIRE', KEYS[2], ttl)
-- The bell goes with its worker; a ring on a living one's must not outlast it either.
try('PEXPIRE', KEYS[6], ttl)
local new = try('SADD', KEYS[3], worker)
if new ~= 1 then return 0 end
emit('WORKER_STARTED', '', '', '', '', worker)
return 1
