--!include leading
--!include over
--!include adding
-- Promotion, step 2: claimed ids whose record is due get their entry (R31). Works from `claimed` itself, whoever put it there.
-- KEYS: nil, the lock, claimed, schedule, cancelled, queues. ARGV: event base, worker_id, most.
-- Returns: looked at (-1: we do not lead), promoted, left in claimed, problems, counts.
-- Atomic because the entry, the record that names it and the end of the claim are one step: an id is never in no place, and a second leader that
-- works on the same claims finds the record no longer due.
unrefusable()
local problems, queues = {}, {}
local FIELDS = { 'status', 'queue', 'task_type', 'payload', 'attempt', 'max_attempts', 'priority', 'timeout_ms', 'idempotency_key', 'due_at_ms',
  'expires_at_ms', 'delivery', 'stream', 'entry_id', 'created_at_ms', 'worker_id', 'consumer', 'started_at_ms' }
-- A member that cannot be promoted now waits this long, out of the way of the others.
local ASIDE_MS = 60000

local function aside(id, why)
  problems[#problems + 1] = id .. ': ' .. why
  call('ZADD', KEYS[4], string.format('%.0f', NOW + ASIDE_MS), id)
  call('ZREM', KEYS[3], id)
  count('set_aside')
end

local function add(r, id, queue, band)
  local stream = key_stream(queue, band)
  r.priority = band
  local entry = add_entry(try, stream, id, r, r.attempt ~= '' and r.attempt or '1')
  if failed(entry) then return aside(id, stream .. ': ' .. entry.err) end
  call('HSET', key_task(id), 'status', 'queued', 'stream', stream, 'entry_id', entry, 'consumer', '', 'queued_at_ms', NOWS, 'updated_at_ms', NOWS)
  call('ZREM', KEYS[3], id)
  keep(id)
  hint(queue, band)
  queues[queue] = (queues[queue] or 0) + 1
  count('promoted')
  emit(r.status == 'scheduled' and 'TASK_QUEUED' or 'TASK_RETRIED', id, queue, r.task_type, r.attempt, '')
end

local function promote(id)
  local r, wrong = record(id, FIELDS)
  if wrong then return aside(id, wrong) end
  if not r or (r.status ~= 'scheduled' and r.status ~= 'retry_scheduled') then
    -- No record: nothing that could run. Another status: its place is elsewhere.
    call('ZREM', KEYS[3], id)
    return count(r and 'not_due' or 'recordless')
  end
  local due = tonumber(r.due_at_ms)
  if due and due > NOW then
    call('ZADD', KEYS[4], r.due_at_ms, id)
    call('ZREM', KEYS[3], id)
    return count('not_due')
  end
  if try('SREM', KEYS[5], id) == 1 then return end_early(r, id, 'cancelled', 'TASK_CANCELLED') end
  if r.expires_at_ms ~= '' and (tonumber(r.delivery) or 0) == 0 and NOW > (tonumber(r.expires_at_ms) or NOW) then
    return end_early(r, id, 'expired', 'TASK_EXPIRED')
  end
  local band = whole(r.priority, 0, 9)
  if not band or not string.find(r.queue, '^[%w_%.%-]+$') then return aside(id, 'its record names no queue or no priority') end
  return add(r, id, r.queue, band)
end

if not leading(ARGV[2]) then return { -1, 0, 0, {}, {} } end
local ids = call('ZRANGE', KEYS[3], 0, tonumber(ARGV[3]) - 1)
for i = 1, #ids do promote(ids[i]) end
for queue, tokens in pairs(queues) do
  try('SADD', KEYS[6], queue)
  ring(key_bell(queue), tokens)
end
return { #ids, counts.promoted or 0, call('ZCARD', KEYS[3]), problems, counted() }
