--!include record
--!include succeed
--!lazily ending
--!lazily rebuild
--!exports settle
-- Settling a delivery under its whole token (R11). Answers settled | rebuilt | already | fenced.
-- o: kind ok|retry|dead|release, id, stream, entry, delivery, facts, result, result_size, result_flag ('' | truncated | unavailable text),
-- delay_ms, spend ('1'|'0'), error_class, message, traceback, cause, max_attempts (resolved), first_unknown ('1'|''), result_kept ('1'|'').

-- What the execution's history will say.
local function outcome_word(o)
  if o.kind == 'ok' then return 'succeeded' end
  if o.kind == 'release' then return 'released' end
  if o.first_unknown == '1' then return 'unknown' end
  return (o.outcome or '') ~= '' and o.outcome or 'failed'
end

-- The record says that this very delivery has this very outcome: a resend whose first reply was lost. Another outcome under our name is
-- a reaper's (crashed) or a cancel's: refused, and counted, like any settle that came too late.
local function has_outcome(id, o, consumer)
  local text = call('HGET', key_task(id), 'execution:' .. o.delivery)
  return text and string.find(text, '"consumer":"' .. consumer .. '"', 1, true) ~= nil
    and string.find(text, '"outcome":"' .. outcome_word(o) .. '"', 1, true) ~= nil
end

local function refuse(o, queue, task_type, attempt, worker)
  count('fenced')
  emit('TASK_DUPLICATE_ABSORBED', o.id, queue, task_type, attempt, worker, '{"why":"fenced","delivery":' .. o.delivery .. '}')
  return nil, 'fenced'
end

-- The record, if this settle counts; else nil and the answer.
local function fence(o, consumer, worker)
  local r, wrong = record(o.id, ENDING_FIELDS)
  if r and r.status == 'running' and r.entry_id == o.entry and r.stream == o.stream and r.delivery == o.delivery and r.consumer == consumer then
    return r, 'settled'
  end
  if r and has_outcome(o.id, o, consumer) then return nil, 'already' end
  if r then return refuse(o, r.queue, r.task_type, r.attempt, worker) end
  local queue, band = split_stream(o.stream)
  -- A record that cannot be read is no missing one: its entry is buried when it is met again.
  local entry = not wrong and owner_of(o.stream, o.entry) == consumer and read_entry(o.stream, o.entry)
  if not entry or entry.task_id ~= o.id or unreadable(entry, queue, band) then return refuse(o, queue or '', '', '', worker) end
  unrefusable()
  rebuild(o.stream, band, o.entry, entry)
  call('HSET', key_task(o.id), 'status', 'running', 'delivery', o.delivery, 'consumer', consumer, 'worker_id', worker)
  return record(o.id, ENDING_FIELDS), 'rebuilt'
end

local function retry(r, o, worker, consumer)
  unrefusable()
  local attempt = tonumber(r.attempt) or 1
  if o.first_unknown == '1' then
    call('HSETNX', key_task(o.id), 'first_unknown_at_ms', NOWS)
  else
    emit('TASK_FAILED', o.id, r.queue, r.task_type, r.attempt, worker, '{"error_class":' .. quoted(o.error_class) .. '}')
  end
  schedule_again(r, o.id, worker, consumer, o.spend == '1' and attempt + 1 or attempt, tonumber(o.delay_ms), outcome_word(o), o)
end

-- park, to_anyone: only for kind release.
local function settle(o, consumer, worker, park)
  local r, answer = fence(o, consumer, worker)
  if not r then return answer end
  forget_old_execution(o.id, tonumber(o.delivery))
  if o.max_attempts ~= '' then r.max_attempts = o.max_attempts end
  if o.kind == 'ok' then
    succeed(o.id, o.delivery, { r.stream, r.entry_id, r.queue, r.task_type, r.attempt, r.started_at_ms ~= '' and r.started_at_ms or nil, r.idempotency_key,
      r.created_at_ms, r.due_at_ms }, worker, consumer, o.facts, o.result, o.result_size, o.result_flag, o.result_kept)
  elseif o.kind == 'retry' then
    retry(r, o, worker, consumer)
  elseif o.kind == 'dead' then
    unrefusable()
    local attempt = tonumber(r.attempt) or 1
    dead_letter(r, o.id, worker, consumer, o.spend == '1' and attempt or attempt - 1, outcome_word(o), o)
  else
    unrefusable()
    back_to_park(r, o.id, worker, consumer, park, true, outcome_word(o), o.facts, '{"released":true}')
  end
  return answer
end
