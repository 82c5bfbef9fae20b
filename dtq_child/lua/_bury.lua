--!include entry
--!exports trim_dead_letters bury_unreadable
-- Burying what is no task.
local function trim_dead_letters()
  local trimmed = try('XTRIM', DEAD_LETTERS, 'MAXLEN', '~', DLQ_MAXLEN)
  if type(trimmed) == 'number' and trimmed > 0 then counts.dead_letters_trimmed = (counts.dead_letters_trimmed or 0) + trimmed end
end

-- An entry that is no task goes to the dead letters once, its bytes kept under `raw:<field>`.
local function bury_unreadable(stream, queue, band, id, flat, reason, worker)
  local letter = { 'task_id', '', 'queue', queue, 'task_type', '', 'payload', '', 'attempt', '0', 'max_attempts', '0', 'priority', band,
    'timeout_ms', '', 'idempotency_key', '', 'failed_at_ms', NOWS, 'attempts_made', '0', 'last_error', reason,
    'last_error_class', 'UnreadableEntry', 'retryable', '0', 'worker_id', worker, 'original_queue', queue,
    'cause', '{"unreadable":' .. quoted(reason) .. ',"stream":' .. quoted(stream) .. ',"entry_id":"' .. id .. '"}' }
  for i = 1, math.min(#flat, 2000), 2 do
    letter[#letter + 1] = 'raw:' .. flat[i]
    letter[#letter + 1] = flat[i + 1]
  end
  -- Not kept, so not removed: it stays pending and is met again.
  if failed(try('XADD', DEAD_LETTERS, '*', unpack(letter))) then return count('unburied') end
  trim_dead_letters()
  remove_entry(stream, id)
  count('unreadable')
  emit('TASK_DEAD_LETTERED', '', queue, '', '0', worker, '{"cause":"UnreadableEntry"}')
end
