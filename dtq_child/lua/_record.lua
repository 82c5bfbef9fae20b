--!include entry
-- Records: what the endings of a task read of one, and the history of its executions.
local ENDING_FIELDS = { 'status', 'stream', 'entry_id', 'delivery', 'consumer', 'queue', 'task_type', 'payload', 'attempt', 'max_attempts',
  'priority', 'timeout_ms', 'idempotency_key', 'crashes', 'max_crashes', 'created_at_ms', 'due_at_ms', 'started_at_ms', 'lease_ms', 'metadata' }

-- Keeps the newest 20 executions. `facts`: a JSON object as text with what the process knew ('' or '{}' if nothing).
local function execution_json(r, worker, consumer, outcome, facts)
  local head = '{"worker_id":"' .. worker .. '","consumer":"' .. consumer .. '","attempt":' .. (r.attempt ~= '' and r.attempt or '0')
    .. ',"started_at_ms":' .. (r.started_at_ms ~= '' and r.started_at_ms or 'null')
    .. ',"finished_at_ms":' .. NOWS .. ',"outcome":"' .. outcome .. '"'
  if facts == '' or facts == '{}' then return head .. '}' end
  return head .. ',' .. string.sub(facts, 2)
end

-- Makes room for one more. Deliveries that were taken over or released left none: what is there is counted, not reckoned.
local function forget_old_execution(id, delivery)
  if delivery <= 20 then return end
  local names, kept = try('HKEYS', key_task(id)), {}
  for i = 1, failed(names) and 0 or #names do kept[#kept + 1] = tonumber(string.match(names[i], '^execution:(%d+)$')) end
  table.sort(kept)
  for i = 1, #kept - 19 do call('HDEL', key_task(id), 'execution:' .. kept[i]) end
end
