--!include record
--!include bury
--!include rebuild
--!exports dead_letter schedule_again back_to_park judge_crash
-- Endings of a delivery that is known to be ours: dead letter, another try later, back to the park, a crash judged.
-- `r`: the record's fields ENDING_FIELDS. `e`: error_class, message, traceback, cause (JSON or ''), brief (a shorter cause for the event, or nil),
-- facts (JSON or '').

-- made: attempts spent so far. A dead letter carries the payload, so it can be requeued after its record has expired.
local function dead_letter(r, id, worker, consumer, made, outcome, e)
  local letter = try('XADD', DEAD_LETTERS, '*', 'task_id', id, 'queue', r.queue, 'task_type', r.task_type, 'payload', r.payload,
    'attempt', r.attempt, 'max_attempts', r.max_attempts, 'priority', r.priority, 'timeout_ms', r.timeout_ms,
    'idempotency_key', r.idempotency_key, 'failed_at_ms', NOWS, 'attempts_made', made, 'last_error', e.message,
    'last_error_class', e.error_class, 'retryable', '0', 'worker_id', worker, 'original_queue', r.queue, 'cause', e.cause ~= '' and e.cause or '{}')
  -- A stream of the wrong type: the record alone keeps what is known.
  if failed(letter) then
    count('unlettered')
    letter = ''
  end
  trim_dead_letters()
  call('HSET', key_task(id), 'status', 'dead_lettered', 'updated_at_ms', NOWS, 'finished_at_ms', NOWS, 'dead_letter_id', letter,
    'max_attempts', r.max_attempts, 'last_error', e.message, 'last_error_class', e.error_class, 'traceback', e.traceback,
    'execution:' .. r.delivery, execution_json(r, worker, consumer, outcome, e.facts))
  call('EXPIRE', key_task(id), RETENTION_S)
  remove_entry(r.stream, r.entry_id)
  end_idempotency(r, id, 'failed')
  emit('TASK_FAILED', id, r.queue, r.task_type, r.attempt, worker, '{"error_class":' .. quoted(e.error_class) .. '}')
  emit('TASK_DEAD_LETTERED', id, r.queue, r.task_type, r.attempt, worker, '{"error_class":' .. quoted(e.error_class) .. ',"dead_letter_id":"' .. letter .. '"}')
end

-- Another try after delay_ms; attempt: the one to be executed then. The successor's place is written before the entry goes.
local function schedule_again(r, id, worker, consumer, attempt, delay_ms, outcome, e)
  local due = string.format('%.0f', NOW + delay_ms)
  call('ZADD', SCHEDULE, due, id)
  call('HSET', key_task(id), 'status', 'retry_scheduled', 'attempt', attempt, 'due_at_ms', due, 'updated_at_ms', NOWS, 'consumer', '',
    'entry_id', '', 'crashes', r.crashes ~= '' and r.crashes or '0', 'max_attempts', r.max_attempts, 'last_error', e.message,
    'last_error_class', e.error_class, 'traceback', e.traceback,
    'execution:' .. r.delivery, execution_json(r, worker, consumer, outcome, e.facts))
  keep(id, NOW + delay_ms)
  keep_idempotency(r.queue, r.idempotency_key, id, NOW + delay_ms)
  remove_entry(r.stream, r.entry_id)
  emit('TASK_RETRY_SCHEDULED', id, r.queue, r.task_type, attempt, worker, '{"due_at_ms":' .. due .. ',"outcome":"' .. outcome .. '"}')
end

-- Queued again at its own entry. to_anyone: released instead of parked. why: JSON of the event's metadata.
local function back_to_park(r, id, worker, consumer, park, to_anyone, outcome, facts, why)
  if to_anyone then release_entry(r.stream, r.entry_id, park) else park_entry(r.stream, r.entry_id, park) end
  local fields = { 'status', 'queued', 'consumer', '', 'updated_at_ms', NOWS, 'queued_at_ms', NOWS, 'crashes', r.crashes ~= '' and r.crashes or '0' }
  if outcome then
    fields[#fields + 1] = 'execution:' .. r.delivery
    fields[#fields + 1] = execution_json(r, worker, consumer, outcome, facts)
  end
  call('HSET', key_task(id), unpack(fields))
  keep(id)
  keep_idempotency(r.queue, r.idempotency_key, id)
  emit('TASK_QUEUED', id, r.queue, r.task_type, r.attempt, worker, why)
end

-- A process died under it, or its lease ran out (R16). delays: ms after the 2nd, 3rd … crash. Returns what was done.
local function judge_crash(r, id, worker, consumer, park, to_anyone, delays, e)
  local crashes = (tonumber(r.crashes) or 0) + 1
  r.crashes = tostring(crashes)
  count('crashes')
  if crashes >= (tonumber(r.max_crashes) or MAX_CRASHES) then
    local last = e.message
    e = { error_class = 'PoisonTask', message = 'the process executing it died ' .. crashes .. ' times; the last time: ' .. last,
      traceback = e.traceback, cause = e.cause, facts = e.facts }
    call('HSET', key_task(id), 'crashes', crashes)
    dead_letter(r, id, worker, consumer, (tonumber(r.attempt) or 1) - 1, 'crashed', e)
    return 'dead'
  end
  if crashes == 1 then
    call('HSET', key_task(id), 'last_error', e.message, 'last_error_class', e.error_class, 'traceback', e.traceback)
    back_to_park(r, id, worker, consumer, park, to_anyone, 'crashed', e.facts,
      '{"redelivery":true,"cause":' .. (e.brief or (e.cause ~= '' and e.cause or 'null')) .. '}')
    return 'parked'
  end
  schedule_again(r, id, worker, consumer, r.attempt, tonumber(delays[math.min(crashes - 1, #delays)]), 'crashed', e)
  return 'scheduled'
end
