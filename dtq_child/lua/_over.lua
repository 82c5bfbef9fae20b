--!include record
--!include idempotency
-- Over before its time: cancelled or expired, wherever the task is. Entry and zset members go, the idempotency key is free.
local OVER_FIELDS = { 'status', 'stream', 'entry_id', 'queue', 'task_type', 'attempt', 'idempotency_key', 'created_at_ms', 'due_at_ms',
  'worker_id', 'delivery', 'consumer', 'started_at_ms' }

-- r: at least OVER_FIELDS. A running one keeps its consumer and delivery: by them its supervisor knows whom to stop (R33).
local function end_early(r, id, status, event)
  call('ZREM', SCHEDULE, id)
  call('ZREM', CLAIMED, id)
  if r.entry_id ~= '' then remove_entry(r.stream, r.entry_id) end
  call('HSET', key_task(id), 'status', status, 'updated_at_ms', NOWS, 'finished_at_ms', NOWS)
  if r.status == 'running' then
    forget_old_execution(id, tonumber(r.delivery) or 0)
    call('HSET', key_task(id), 'execution:' .. r.delivery, execution_json(r, r.worker_id, r.consumer, status, ''))
  else
    call('HSET', key_task(id), 'consumer', '')
  end
  call('EXPIRE', key_task(id), RETENTION_S)
  end_idempotency(r, id, nil)
  count(status)
  emit(event, id, r.queue, r.task_type, r.attempt, r.worker_id)
end
