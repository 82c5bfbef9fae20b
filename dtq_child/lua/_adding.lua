--!include base
--!exports add_entry
-- The one place that builds an entry: a dispatch snapshot of the record (DESIGN section 4).

-- r: queue, task_type, payload, max_attempts, priority, timeout_ms, idempotency_key ('' for what is not known). with: call, or try, which returns an error
-- instead of raising it.
local function add_entry(with, stream, id, r, attempt)
  return with('XADD', stream, '*', 'task_id', id, 'queue', r.queue, 'task_type', r.task_type, 'payload', r.payload, 'attempt', attempt,
    'max_attempts', r.max_attempts, 'priority', r.priority, 'timeout_ms', r.timeout_ms, 'idempotency_key', r.idempotency_key)
end
