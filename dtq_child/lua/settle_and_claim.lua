--!lazily turn
-- One round trip of a busy child: settles the delivery just executed, then claims the next (R23). Also settle-only and claim-only.
-- KEYS: nil, the supervisor's bell, Q queue bells, Q pause flags, for Q <= 10 the Q streams of each band from p9 down to p0,
--   the settled task's record and result (when something is settled).
-- ARGV: event base, minute ('<minutes since 1970> <the same as YYYY-MM-DDTHH:MM:>', what the child last heard), consumer, worker_id, park,
--   lease_ms, prefetch, Q, Q queue names, kind ('-' settles nothing) and, for other kinds,
--   task_id, stream, entry_id, delivery, facts, result, result_size, result_flag, result_kept, queue, task_type, attempt, then for kinds other than
--   ok: delay_ms, spend, error_class, message, traceback, cause, max_attempts, first_unknown, outcome; flags (c claim, o own pending, p park, w woken, e everywhere), rotation,
--   number of held entries, their stream and entry_id.
-- Returns: of the usual turn 'settled', the delivery begun, the minute. Of every other one settle's answer ('none' without one), the delivery
--   begun or nil, held (stream, entry_id …), paused queues, flags (m look again at once, p more in the park), problems, counts (what, n …).
--   A delivery: stream, entry_id, task_id, queue, delivery, band, ms waited, ms since it was first met as unknown or nil, the record's values
--   in the order of _begin.lua.
-- Atomic because the entry leaves our hands only in the step that writes its successor, and so that no instant exists in which a
-- task is nowhere, or the child holds two.
local call, try = redis.call, redis.pcall
local total = tonumber(ARGV[8])
local at = 9 + total
local kind, consumer, worker = ARGV[at], ARGV[3], ARGV[4]
local flags_at = at + (kind == '-' and 1 or kind == 'ok' and 13 or 22)
-- Only the usual turn is written out below, without a function: a server makes functions anew at every call, and they would cost more than
-- all the work. Whatever is not usual is left to whole_turn, before anything has been written for it. The two number their events apart (f…).
if kind ~= 'ok' or ARGV[flags_at] ~= 'c' or ARGV[flags_at + 2] ~= '0' or ARGV[7] ~= '1' or total > 10 or ARGV[at + 8] ~= ''
  or ARGV[at + 5] == '{}' or ARGV[at + 11] == '' then
  return whole_turn(nil, flags_at, nil)
end
local id, stream, entry_id, queue, task_type, attempt = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 10], ARGV[at + 11], ARGV[at + 12]
local rec = KEYS[#KEYS - 1]
local v = try('HMGET', rec, 'status', 'entry_id', 'delivery', 'consumer', 'started_at_ms', 'idempotency_key', 'stream')
if v[1] ~= 'running' or v[2] ~= entry_id or v[3] ~= ARGV[at + 4] or v[4] ~= consumer or v[7] ~= stream or (v[6] and v[6] ~= '')
  or #v[3] > 1 then
  return whole_turn(nil, flags_at, nil)
end
if ARGV[at + 9] == '1' then
  local reply = try('SET', KEYS[#KEYS], ARGV[at + 6], 'EX', RESULT_RETENTION_S)
  if reply.err then return whole_turn(nil, flags_at, nil) end
end
-- A full Redis refuses a script's first write if it needs memory, and these two never do; what follows them is not asked any more (R13).
try('XACK', stream, GROUP, entry_id)
try('XDEL', stream, entry_id)
local instant = call('TIME')
local seconds, milliseconds = tonumber(instant[1]), string.sub(instant[2] + 1000000, 2, 4)
local nows = instant[1] .. milliseconds
local now = tonumber(nows)

-- ISO 8601 UTC, as in _event.lua.
local minute, date = math.floor(seconds / 60), ARGV[2]
if string.sub(date, 1, -19) == tostring(minute) then
  date = string.sub(date, -17) .. string.sub(seconds % 60 + 100, 2) .. '.' .. milliseconds .. 'Z'
else
  local z, rest = math.floor(seconds / 86400) + 719468, seconds % 86400
  local era = math.floor(z / 146097)
  local doe = z - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524) - math.floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  local mp = math.floor((5 * doy + 2) / 153)
  local month = mp < 10 and mp + 3 or mp - 9
  date = string.format('%04d-%02d-%02dT%02d:%02d:%02d.%sZ', yoe + era * 400 + (month <= 2 and 1 or 0), month,
    doy - math.floor((153 * mp + 2) / 5) + 1, math.floor(rest / 3600), math.floor(rest / 60) % 60, rest % 60, milliseconds)
end

call('HSET', rec, 'status', 'succeeded', 'updated_at_ms', nows, 'finished_at_ms', nows, 'result_size', ARGV[at + 7], 'execution:' .. v[3],
  '{"worker_id":"' .. worker .. '","consumer":"' .. consumer .. '","attempt":' .. attempt .. ',"started_at_ms":' .. (v[5] or 'null')
  .. ',"finished_at_ms":' .. nows .. ',"outcome":"succeeded",' .. string.sub(ARGV[at + 5], 2))
call('EXPIRE', rec, SUCCEEDED_RETENTION_S)
try('PUBLISH', EVENTS, '{"event_id":"' .. ARGV[1] .. 'f0000001","ts":"' .. date .. '","type":"TASK_SUCCEEDED","task_id":"' .. id .. '","queue":"' .. queue
  .. '","task_type":"' .. task_type .. '","attempt":' .. attempt .. ',"worker_id":"' .. worker .. '"}')

local rotation = tonumber(ARGV[flags_at + 1])
for i = 1, total do
  if try('GET', KEYS[2 + total + i]) then return whole_turn('settled', flags_at, nil) end
end
for k = 0, 10 * total - 1 do
  local i = (rotation + k) % total + 1
  local band = 9 - math.floor(k / total)
  local next_stream = KEYS[2 + 2 * total + (9 - band) * total + i]
  if try('XLEN', next_stream) ~= 0 then
    local got = try('XREADGROUP', 'GROUP', GROUP, consumer, 'COUNT', 1, 'STREAMS', next_stream, '>')
    local read = got and got[1] and got[1][2] and got[1][2][1]
    if got and not read then return whole_turn('settled', flags_at, nil) end
    if read then
      local flat, next_queue = read[2], ARGV[8 + i]
      local next_id = flat[1] == 'task_id' and flat[2] or ''
      local next_rec = P .. 'task:' .. next_id
      local w = try('HMGET', next_rec, 'status', 'entry_id', 'stream', 'delivery', 'attempt', 'max_attempts', 'crashes', 'max_crashes',
        'timeout_ms', 'soft_timeout_ms', 'retry', 'metadata', 'trace', 'idempotency_key', 'queued_at_ms', 'first_unknown_at_ms', 'store_result',
        'payload', 'task_type', 'expires_at_ms', 'due_at_ms')
      if w[1] ~= 'queued' or w[2] ~= read[1] or w[3] ~= next_stream or w[14] or w[16] or w[20] or w[21] or not w[5] or not w[18] or not w[19]
        or (w[19] ~= task_type and not string.find(w[19], '^[%w_%.%-:]+$')) or try('SISMEMBER', CANCELLED, next_id) ~= 0 then
        return whole_turn('settled', flags_at, { next_stream, next_queue, band, read[1], flat })
      end
      local delivery = (tonumber(w[4]) or 0) + 1
      call('HSET', next_rec, 'status', 'running', 'delivery', delivery, 'consumer', consumer, 'worker_id', worker, 'stream', next_stream,
        'entry_id', read[1], 'attempt', w[5], 'started_at_ms', nows, 'updated_at_ms', nows, 'lease_ms', ARGV[6])
      call('EXPIRE', next_rec, KEEP_S)
      try('PUBLISH', EVENTS, '{"event_id":"' .. ARGV[1] .. 'f0000002","ts":"' .. date .. '","type":"TASK_STARTED","task_id":"' .. next_id
        .. '","queue":"' .. next_queue .. '","task_type":"' .. w[19] .. '","attempt":' .. w[5] .. ',"worker_id":"' .. worker
        .. (delivery > 1 and '","metadata":{"delivery":' .. delivery .. '}}' or '"}'))
      return { 'settled', { next_stream, read[1], next_id, next_queue, delivery, band, math.max(0, now - (tonumber(w[15]) or now)), false, w }, minute }
    end
  end
end
return whole_turn('settled', flags_at, nil)
