--!include base
--!exports idempotency_holder hold_idempotency keep_idempotency end_idempotency idempotency_free
-- The idempotency key of a task (R21).
local function idempotency_value(id, state, hash)
  return '{"task_id":"' .. id .. '","state":"' .. state .. '","updated_at":' .. NOWS .. ',"payload_hash":"' .. hash .. '"}'
end

-- The holder of a key: {task_id, state, payload_hash} or nil.
local function idempotency_holder(key)
  local value = try('GET', key)
  if type(value) ~= 'string' then return nil end
  local ok, holder = pcall(cjson.decode, value)
  if not ok or type(holder) ~= 'table' or type(holder.task_id) ~= 'string' then return nil end
  return holder
end

-- A key lives as long as the record of its task that waits or runs: a week more than it, for a task that runs for that long has its
-- record renewed by heartbeats.
local function idempotency_ttl(due)
  local seconds = math.max(IDEM_TTL_S, KEEP_S + 604800)
  if due and due > NOW then seconds = seconds + math.ceil((due - NOW) / 1000) end
  return string.format('%.0f', seconds)
end

-- The key becomes this task's.
local function hold_idempotency(key, id, hash, due)
  call('SET', key, idempotency_value(id, 'processing', hash), 'EX', idempotency_ttl(due))
end

-- Written anew with the record, if the key still names this task.
local function keep_idempotency(queue, key, id, due)
  if key == '' then return end
  local holder = idempotency_holder(key_idempotency(queue, key))
  if holder and holder.task_id == id then try('EXPIRE', key_idempotency(queue, key), idempotency_ttl(due)) end
end

-- The end of a task for its key (R21): `completed` goes on deduplicating for what remains of the TTL since enqueue or due time,
-- `failed` stays readable as long and binds nobody, nil (cancelled, expired) frees the key. Only if the key still names this task.
local function end_idempotency(r, id, state)
  if r.idempotency_key == '' then return end
  local key = key_idempotency(r.queue, r.idempotency_key)
  local holder = idempotency_holder(key)
  if not holder or holder.task_id ~= id then return end
  if not state then return call('DEL', key) end
  local since = math.max(tonumber(r.created_at_ms) or NOW, tonumber(r.due_at_ms) or 0)
  local left = math.max(1, math.ceil(IDEM_TTL_S - (NOW - since) / 1000))
  call('SET', key, idempotency_value(id, state, holder.payload_hash or ''), 'EX', string.format('%.0f', left))
end

-- A key that binds nobody: no holder, `failed`, or a holder whose task is over or unknown.
local function idempotency_free(holder)
  if not holder or holder.state == 'failed' then return true end
  if holder.state == 'completed' then return false end
  local status = try('HGET', key_task(holder.task_id), 'status')
  return not (status == 'queued' or status == 'scheduled' or status == 'running' or status == 'retry_scheduled')
end
