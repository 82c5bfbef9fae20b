--!include leading
--!include placeless
--!include adding
-- Gives tasks that had no place in two rounds a place again (R32): a new entry, or the schedule. Spends nothing.
-- KEYS: nil, the lock, queues. ARGV: event base, worker_id, least ms untouched, n, then n times task_id, updated_at_ms as it was seen.
-- Returns: requeued (-1: we do not lead), problems, and the task ids.
-- Atomic because all of it is looked at again in the step that writes.
unrefusable()
if not leading(ARGV[2]) then return { -1, {}, {} } end
local least, problems, done = tonumber(ARGV[3]), {}, {}

local function add_again(id)
  local r = record(id, { 'queue', 'task_type', 'payload', 'attempt', 'max_attempts', 'priority', 'timeout_ms', 'idempotency_key' })
  local band = whole(r.priority, 0, 9)
  if not band or not string.find(r.queue, '^[%w_%.%-]+$') then return 'its record names no queue or no priority' end
  local stream = key_stream(r.queue, band)
  local attempt = r.attempt ~= '' and r.attempt or '1'
  r.priority = band
  local entry = add_entry(try, stream, id, r, attempt)
  if failed(entry) then return stream .. ': ' .. entry.err end
  call('HSET', key_task(id), 'status', 'queued', 'stream', stream, 'entry_id', entry, 'consumer', '', 'queued_at_ms', NOWS, 'updated_at_ms', NOWS)
  try('SADD', KEYS[3], r.queue)
  hint(r.queue, band)
  ring(key_bell(r.queue))
  emit('TASK_QUEUED', id, r.queue, r.task_type, attempt, '', '{"reconciled":true}')
end

for k = 0, tonumber(ARGV[4]) - 1 do
  local id, seen = ARGV[5 + 2 * k], ARGV[6 + 2 * k]
  local r = placeless(id, least)
  local why = nil
  if r and r.updated_at_ms == seen then
    if r.status == 'queued' or r.status == 'running' then
      why = add_again(id)
    else
      call('ZADD', SCHEDULE, tonumber(r.due_at_ms) and r.due_at_ms or NOWS, id)
      call('HSET', key_task(id), 'updated_at_ms', NOWS)
    end
    if why then problems[#problems + 1] = id .. ': ' .. why else done[#done + 1] = id end
    if not why then keep(id, tonumber(r.due_at_ms)) end
  end
end
return { #done, problems, done }
