--!include letter
--!include adding
-- Puts a dead-lettered task back into its queue: attempt 1, no crashes. A record that has expired is rebuilt from the dead letter.
-- KEYS: nil, record, dead letters, queues.
-- ARGV: event base, task_id, dead letter's stream id ('' = the record's), actor, via, request_id, detail.
-- Returns: requeued | not_dead, status | not_found | conflict, task_id, queue, key.
-- Atomic because the dead letter goes only in the step that writes the entry; the entry is the first write: refused whole at maxmemory (R13).
local id = ARGV[2]
local r = record(id, { 'status', 'queue', 'task_type', 'payload', 'priority', 'max_attempts', 'timeout_ms', 'idempotency_key', 'dead_letter_id',
  'metadata' })
if r and r.status ~= 'dead_lettered' then return { 'not_dead', r.status } end
local letter_id = ARGV[3] ~= '' and ARGV[3] or (r and r.dead_letter_id or '')
local letter = read_letter(letter_id)
-- Somebody else's letter is not ours to take out.
if letter and letter.task_id ~= id then return { 'not_found' } end
if not r then
  if not letter or unreadable(letter, letter.queue, whole(letter.priority, 0, 9)) then return { 'not_found' } end
  r = { queue = letter.queue, task_type = letter.task_type, payload = letter.payload, priority = letter.priority, max_attempts = letter.max_attempts,
    timeout_ms = letter.timeout_ms, idempotency_key = letter.idempotency_key, metadata = '{"rebuilt":true}', rebuilt = true }
end
local key = r.idempotency_key ~= '' and key_idempotency(r.queue, r.idempotency_key) or nil
local holder = key and idempotency_holder(key)
if holder and holder.task_id ~= id and not idempotency_free(holder) then return { 'conflict', holder.task_id, r.queue, r.idempotency_key } end
-- It is no longer what discard.lua said of it last.
r.metadata = string.gsub(string.gsub(r.metadata, ',"discarded":true}$', '}'), '^{"discarded":true}$', '{}')
local stream = key_stream(r.queue, r.priority)
local entry = add_entry(call, stream, id, r, '1')
call('HSET', KEYS[2], 'task_id', id, 'queue', r.queue, 'task_type', r.task_type, 'payload', r.payload, 'priority', r.priority,
  'status', 'queued', 'attempt', '1', 'max_attempts', r.max_attempts, 'crashes', '0', 'timeout_ms', r.timeout_ms, 'idempotency_key', r.idempotency_key,
  'updated_at_ms', NOWS, 'queued_at_ms', NOWS, 'stream', stream, 'entry_id', entry, 'consumer', '', 'dead_letter_id', '', 'metadata', r.metadata)
if r.rebuilt then call('HSET', KEYS[2], 'created_at_ms', NOWS, 'delivery', '0') end
call('HDEL', KEYS[2], 'finished_at_ms', 'first_unknown_at_ms', 'due_at_ms', 'expires_at_ms')
keep(id)
if letter_id ~= '' then call('XDEL', KEYS[3], letter_id) end
if key then hold_idempotency(key, id, redis.sha1hex(r.payload)) end
try('SADD', KEYS[4], r.queue)
hint(r.queue, tonumber(r.priority))
ring(key_bell(r.queue))
emit('TASK_QUEUED', id, r.queue, r.task_type, '1', '', '{"requeued":true}')
audit({ actor = ARGV[4], action = 'requeue', task_id = id, queue = r.queue, via = ARGV[5], request_id = ARGV[6], detail = ARGV[7] })
return { 'requeued' }
