--!include record
--!include idempotency
--!include adding
-- Accepts tasks, all of one call or none (R10, R18, R21). Known ids answer with the task they are.
-- KEYS: nil, tasks:recent, queues, schedule, then four a task: record, stream, idempotency key (nil key when none), queue bell.
-- ARGV: event base, n, depth limit, then 19 a task: task_id, queue, task_type, payload, priority, max_attempts, timeout_ms, soft_timeout_ms,
--   max_crashes, retry, idempotency_key, payload_hash, delay_ms, eta_ms, expires_ms (from now), metadata, trace, store_result, expires_at_ms.
-- Returns: 'ok' and n times (0 new | 1 known id | 2 deduplicated, task_id, status); 'full', where, depth; 'conflict', task_id, index;
--   'bad', message.
-- Atomic because a task is in no place until its record and its entry are written together, and because checks and writes of a call are one
-- decision. The first write is one that maxmemory refuses: refused whole (R13).
local n, limit = tonumber(ARGV[2]), tonumber(ARGV[3])
local NAMES = { 'id', 'queue', 'task_type', 'payload', 'priority', 'max_attempts', 'timeout_ms', 'soft_timeout_ms', 'max_crashes', 'retry', 'idempotency_key',
  'hash', 'delay_ms', 'eta_ms', 'expires_ms', 'metadata', 'trace', 'store_result', 'expires_at_ms' }
local reply, todo, depth, new, by_id, by_key = { 'ok' }, {}, {}, {}, {}, {}

local function queue_depth(queue)
  local total = 0
  for band = 0, 9 do
    local length = try('XLEN', key_stream(queue, band))
    if type(length) == 'number' then total = total + length end
  end
  return total
end

local function arguments(k)
  local a, at = {}, 3 + (k - 1) * #NAMES
  for i = 1, #NAMES do a[NAMES[i]] = ARGV[at + i] end
  local base = 4 + (k - 1) * 4
  a.record, a.stream, a.idempotency, a.bell = KEYS[base + 1], KEYS[base + 2], KEYS[base + 3], KEYS[base + 4]
  local due = a.delay_ms ~= '' and NOW + tonumber(a.delay_ms) or (a.eta_ms ~= '' and tonumber(a.eta_ms) or NOW)
  a.due = due > NOW and due or nil
  return a
end

-- The task that answers instead of this one: same id, or same idempotency key. A table {code, id, status}, {'conflict', id}, {'bad', why}, or nil.
local function existing(a)
  if by_id[a.id] then return { 1, a.id, by_id[a.id] } end
  local status = try('HGET', a.record, 'status')
  if failed(status) then return { 'bad', a.record .. ': ' .. status.err } end
  if status then return { 1, a.id, status } end
  if a.idempotency_key == '' then return nil end
  local holder = by_key[a.idempotency] or idempotency_holder(a.idempotency)
  if not holder or (not by_key[a.idempotency] and idempotency_free(holder)) then return nil end
  local hash = holder.payload_hash
  if type(hash) == 'string' and hash ~= '' and hash ~= a.hash then return { 'conflict', holder.task_id } end
  status = try('HGET', key_task(holder.task_id), 'status')
  return { 2, holder.task_id, type(status) == 'string' and status or holder.status or 'succeeded' }
end

-- Where it would go, and whether there is room; '' or the refusal.
local function room(a)
  local where = a.due and '' or a.queue
  if not depth[where] then
    local now = a.due and try('ZCARD', KEYS[4]) or queue_depth(a.queue)
    if type(now) ~= 'number' then return { 'bad', KEYS[4] .. ': ' .. now.err } end
    depth[where], new[where] = now, 0
  end
  new[where] = new[where] + 1
  if depth[where] + new[where] > limit then return { 'full', a.due and 'the schedule' or a.queue, depth[where] } end
  local length = a.due and 0 or try('XLEN', a.stream)
  if failed(length) then return { 'bad', a.stream .. ': ' .. length.err } end
  return nil
end

local function write(a)
  local entry, due = '', ''
  if a.due then
    due = string.format('%.0f', a.due)
    call('ZADD', KEYS[4], due, a.id)
  else
    entry = add_entry(call, a.stream, a.id, a, '1')
  end
  local fields = { 'task_id', a.id, 'queue', a.queue, 'task_type', a.task_type, 'payload', a.payload, 'priority', a.priority,
    'status', a.due and 'scheduled' or 'queued', 'attempt', '1', 'max_attempts', a.max_attempts, 'crashes', '0', 'timeout_ms', a.timeout_ms,
    'created_at_ms', NOWS, 'updated_at_ms', NOWS, 'queued_at_ms', a.due and due or NOWS, 'stream', a.stream, 'entry_id', entry, 'delivery', '0' }
  local function optional(name, value)
    if value ~= '' then
      fields[#fields + 1] = name
      fields[#fields + 1] = value
    end
  end
  optional('due_at_ms', due)
  optional('soft_timeout_ms', a.soft_timeout_ms)
  optional('max_crashes', a.max_crashes)
  optional('retry', a.retry)
  optional('idempotency_key', a.idempotency_key)
  optional('metadata', a.metadata)
  optional('trace', a.trace)
  optional('store_result', a.store_result)
  optional('expires_at_ms', a.expires_ms ~= '' and string.format('%.0f', NOW + tonumber(a.expires_ms)) or a.expires_at_ms)
  call('HSET', a.record, unpack(fields))
  keep(a.id, a.due)
  if a.idempotency_key ~= '' then hold_idempotency(a.idempotency, a.id, a.hash, a.due) end
  try('ZADD', KEYS[2], NOWS, a.id)
  emit('TASK_QUEUED', a.id, a.queue, a.task_type, '1', '', a.due and '{"due_at_ms":' .. due .. '}' or nil)
end

for k = 1, n do
  local a = arguments(k)
  local known = existing(a)
  if known and known[1] == 'conflict' then return { 'conflict', known[2], k - 1 } end
  if known and known[1] == 'bad' then return known end
  if not known then
    local refusal = room(a)
    if refusal then return refusal end
    known = { 0, a.id, a.due and 'scheduled' or 'queued' }
    todo[#todo + 1] = a
    by_id[a.id] = known[3]
    if a.idempotency_key ~= '' then by_key[a.idempotency] = { task_id = a.id, payload_hash = a.hash, status = known[3] } end
  end
  for i = 1, 3 do reply[#reply + 1] = known[i] end
end

for i = 1, #todo do write(todo[i]) end
local queues, streams, bells = {}, {}, {}
for i = 1, #todo do
  local a = todo[i]
  queues[a.queue] = true
  if not a.due then
    streams[a.stream] = a
    bells[a.bell] = (bells[a.bell] or 0) + 1
  end
end
-- The names first: whether hints are needed depends on their number.
for queue in pairs(queues) do try('SADD', KEYS[3], queue) end
for _, a in pairs(streams) do hint(a.queue, tonumber(a.priority)) end
for bell, tokens in pairs(bells) do ring(bell, tokens) end
if #todo > 0 then try('ZREMRANGEBYRANK', KEYS[2], 0, -RECENT_MAX - 1) end
return reply
