--!include succeed
--!include claim
--!lazily settle
-- One round trip of a busy child: settles the delivery just executed, then claims the next (R23). Also settle-only and claim-only.
-- KEYS: nil, the supervisor's bell, Q queue bells, Q pause flags, for Q <= 10 the Q streams of each band from p9 down to p0,
--   the settled task's record and result (when something is settled).
-- ARGV: event base, consumer, worker_id, park, lease_ms, prefetch, Q, Q queue names, kind ('-' settles nothing) and, for other kinds,
--   task_id, stream, entry_id, delivery, facts, result, result_size, result_flag, result_kept, delay_ms, spend, error_class, message, traceback,
--   cause, max_attempts, first_unknown, outcome; flags (c claim, o own pending, p park, w woken, e everywhere), rotation,
--   number of held entries, their stream and entry_id.
-- Returns: settle's answer ('none' without one), the delivery begun or nil, held (stream, entry_id …), paused queues,
--   flags (m look again at once, p more in the park), problems, counts (what, n …). A delivery: stream, entry_id, task_id, queue, delivery,
--   band, ms waited, ms since it was first met as unknown or nil, the record's values in the order of _begin.lua.
-- Atomic because the entry leaves our hands only in the step that writes its successor, and so that no instant exists in which a
-- task is nowhere, or the child holds two.
local consumer, worker, park = ARGV[2], ARGV[3], ARGV[4]
local total = tonumber(ARGV[7])
local at = 8 + total
local kind, answer = ARGV[at], 'none'

-- A success of a delivery that is ours in all three parts is settled here; everything else by _settle.lua, also what has a long history.
local function settle_ok()
  local v = try('HMGET', KEYS[#KEYS - 1], 'stream', 'entry_id', 'queue', 'task_type', 'attempt', 'started_at_ms', 'idempotency_key', 'created_at_ms',
    'due_at_ms', 'status', 'delivery', 'consumer')
  if v[10] ~= 'running' or v[2] ~= ARGV[at + 3] or v[1] ~= ARGV[at + 2] or v[11] ~= ARGV[at + 4] or v[12] ~= consumer
    or #v[11] > 1 and tonumber(v[11]) > 20 then return false end
  succeed(ARGV[at + 1], ARGV[at + 4], v, worker, consumer, ARGV[at + 5], ARGV[at + 6], ARGV[at + 7], ARGV[at + 8], ARGV[at + 9])
  return true
end

local lean = kind == 'ok' and settle_ok()
if lean then
  answer = 'settled'
elseif kind ~= '-' then
  local a = { unpack(ARGV, at, at + 18) }
  answer = settle({ kind = a[1], id = a[2], stream = a[3], entry = a[4], delivery = a[5], facts = a[6], result = a[7], result_size = a[8],
    result_flag = a[9], result_kept = a[10], delay_ms = a[11], spend = a[12], error_class = a[13], message = a[14], traceback = a[15],
    cause = a[16], max_attempts = a[17], first_unknown = a[18], outcome = a[19] }, consumer, worker, park)
end
if kind ~= '-' then at = at + 18 end
local flags = ARGV[at + 1]
if flags == '' then return { answer, false, {}, {}, '', {}, counted() } end
if not lean then unrefusable() end
local queues, waiting, skip = {}, {}, {}
for i = 1, total do queues[i] = ARGV[7 + i] end
for k = 1, 2 * tonumber(ARGV[at + 3]), 2 do
  local stream, entry = ARGV[at + 3 + k], ARGV[at + 4 + k]
  waiting[k], waiting[k + 1] = stream, entry
  skip[stream .. ' ' .. entry] = true
end
local c = { consumer = consumer, worker = worker, park = park, lease = ARGV[5], prefetch = ARGV[6], queues = queues,
  rotation = tonumber(ARGV[at + 2]), waiting = waiting, skip = skip, first_pause = 3 + total, held = {}, problems = {}, paused = {},
  paused_names = {}, tries = 0 }
if flags ~= 'c' then
  c.own, c.parked = string.find(flags, 'o', 1, true), string.find(flags, 'p', 1, true)
  c.woken, c.everywhere = string.find(flags, 'w', 1, true), string.find(flags, 'e', 1, true)
end
c.bell_of = function(i) return KEYS[2 + i] end
c.stream_of = function(i, band)
  if total > 10 then return P .. 'stream:' .. queues[i] .. ':p' .. band end
  return KEYS[2 + 2 * total + (9 - band) * total + i]
end
claim(c)
local seen = ((not c.begun and c.tries >= TRIES) and 'm' or '') .. (c.park_left and 'p' or '')
return { answer, c.begun or false, c.held, c.paused_names, seen, c.problems, counted() }
