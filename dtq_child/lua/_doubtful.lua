--!include record
--!include bury
--!include rebuild
--!include idempotency
--!exports look_closer
-- An entry that is not just what its record says (R11, R25): unreadable, without a record, another's, over, cancelled, expired, taken over.
local LOOK_FIELDS = { 'status', 'entry_id', 'stream', 'delivery', 'attempt', 'max_attempts', 'crashes', 'max_crashes', 'timeout_ms',
  'soft_timeout_ms', 'retry', 'metadata', 'trace', 'idempotency_key', 'queued_at_ms', 'first_unknown_at_ms', 'store_result', 'payload',
  'task_type', 'expires_at_ms', 'due_at_ms', 'queue', 'created_at_ms' }

-- Over before its first start: cancelled or expired. The entry goes, the key is free.
local function end_unstarted(r, id, stream, entry_id, status, event, worker)
  call('HSET', key_task(id), 'status', status, 'updated_at_ms', NOWS, 'finished_at_ms', NOWS, 'consumer', '')
  call('EXPIRE', key_task(id), RETENTION_S)
  remove_entry(stream, entry_id)
  end_idempotency(r, id, nil)
  count(status)
  emit(event, id, r.queue, r.task_type, r.attempt, worker)
end

-- The record of the entry's task, rebuilt if it is missing; nil and why when there can be none.
local function record_of(stream, band, entry_id, entry)
  local r, wrong = record(entry.task_id, LOOK_FIELDS)
  if wrong then return nil, 'its record cannot be read: ' .. wrong end
  -- Without a status it is no record, but what some late write left of one.
  if not r or r.status == '' then
    rebuild(stream, band, entry_id, entry)
    r = record(entry.task_id, LOOK_FIELDS)
  end
  -- A record of another program's may lack what its entry says.
  for _, name in ipairs({ 'attempt', 'payload', 'task_type', 'max_attempts', 'timeout_ms', 'idempotency_key', 'queue' }) do
    if r[name] == '' and (entry[name] or '') ~= '' then
      r[name] = entry[name]
      call('HSET', key_task(entry.task_id), name, r[name])
    end
  end
  return r
end

-- {id, values} for `start` if the entry may begin; nil when it has been dealt with.
local function look_closer(c, stream, queue, band, entry_id, flat)
  local entry = fields_of(flat)
  local why, r = unreadable(entry, queue, band), nil
  if not why then r, why = record_of(stream, band, entry_id, entry) end
  if why then return bury_unreadable(stream, queue, band, entry_id, flat, why, c.worker) end
  local id = entry.task_id
  local other = r.entry_id ~= '' and (r.entry_id ~= entry_id or r.stream ~= stream)
  if other or (r.status ~= 'queued' and r.status ~= 'running') then
    return absorb(stream, entry_id, id, queue, entry.task_type, r.attempt, c.worker, other and 'another_entry' or r.status)
  end
  if try('SREM', CANCELLED, id) == 1 then return end_unstarted(r, id, stream, entry_id, 'cancelled', 'TASK_CANCELLED', c.worker) end
  if r.expires_at_ms ~= '' and (tonumber(r.delivery) or 0) == 0 and NOW > (tonumber(r.expires_at_ms) or NOW) then
    return end_unstarted(r, id, stream, entry_id, 'expired', 'TASK_EXPIRED', c.worker)
  end
  if r.due_at_ms ~= '' then
    try('ZREM', SCHEDULE, id)
    try('ZREM', CLAIMED, id)
  end
  if r.queued_at_ms == '' then r.queued_at_ms = r.created_at_ms end
  local values = {}
  for i = 1, 21 do values[i] = r[LOOK_FIELDS[i]] ~= '' and r[LOOK_FIELDS[i]] or false end
  return { id = id, values = values }
end
