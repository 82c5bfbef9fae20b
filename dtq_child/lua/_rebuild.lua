--!include record
--!include idempotency
--!exports rebuild absorb
-- What becomes of an entry whose record is missing, or means something else.
-- A readable entry whose record is missing is not dropped (R9).
local function rebuild(stream, band, entry_id, entry)
  local id, queue = entry.task_id, entry.queue
  local key = entry.idempotency_key or ''
  call('HSET', key_task(id), 'task_id', id, 'queue', queue, 'task_type', entry.task_type, 'payload', entry.payload,
    'priority', band, 'status', 'queued', 'attempt', entry.attempt, 'max_attempts', entry.max_attempts or '', 'crashes', '0',
    'timeout_ms', entry.timeout_ms or '', 'idempotency_key', key, 'created_at_ms', NOWS, 'updated_at_ms', NOWS,
    'queued_at_ms', NOWS, 'stream', stream, 'entry_id', entry_id, 'delivery', '0', 'metadata', '{"rebuilt":true}')
  keep(id)
  if key ~= '' and idempotency_free(idempotency_holder(key_idempotency(queue, key))) then
    hold_idempotency(key_idempotency(queue, key), id, redis.sha1hex(entry.payload))
  end
  count('rebuilt')
end

-- An entry we own that its record does not mean any more.
local function absorb(stream, entry_id, id, queue, task_type, attempt, worker, why)
  remove_entry(stream, entry_id)
  count('absorbed')
  emit('TASK_DUPLICATE_ABSORBED', id, queue, task_type, attempt, worker, '{"why":"' .. why .. '"}')
end
