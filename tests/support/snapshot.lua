-- Where every task is at one instant: the oracle of "an accepted task is in at least one place" (R9).
--
-- KEYS    none: a test's own server, never a cluster
-- ARGV    1 key prefix; 2 JSON list of task ids whose records are wanted besides those met on the way
-- returns JSON:
--   time_ms
--   bands        stream → {length, last_delivered ("" without group)}
--   undelivered  [[stream, entry id, task id]…]           beyond last-delivered-id
--   pending      [[stream, entry id, task id, consumer, idle ms, deliveries]…]   task id "" where the body is gone
--   strays       [[stream, entry id, task id]…]           delivered, but pending for nobody: nobody will ever look
--   schedule, claimed   [[task id, score]…]
--   dead_letters [[entry id, task id]…]
--   records      task id → {status, entry_id, consumer, delivery, attempt, crashes} (absent: no record)
--   odd          [key…]                                   band keys that are no streams
-- Atomic, because between two questions a task may move from a place not yet asked about to one already asked.

local prefix, wanted = ARGV[1], cjson.decode(ARGV[2])
local out = { bands = {}, undelivered = {}, pending = {}, strays = {}, dead_letters = {}, records = {}, odd = {} }
local met = {}

-- Spelled here and not taken from the package: a witness does not ask the accused.
local function band_keys()
  local literal = string.gsub(prefix, '[%*%?%[%]%\\]', '\\%0')
  local keys = redis.call('KEYS', literal .. 'stream:*:p[0-9]')
  table.sort(keys)
  return keys
end

local function meet(task_id)
  if task_id ~= '' then
    met[task_id] = true
  end
  return task_id
end

local function task_of(fields)
  for i = 1, #fields, 2 do
    if fields[i] == 'task_id' then
      return meet(fields[i + 1])
    end
  end
  return ''
end

local function last_delivered(stream)
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local facts = {}
    for i = 1, #group, 2 do
      facts[group[i]] = group[i + 1]
    end
    if facts.name == 'workers' then
      return facts['last-delivered-id']
    end
  end
  return nil
end

local function read_band(stream)
  local bodies, entries, fresh, claimed = {}, {}, {}, {}
  for _, entry in ipairs(redis.call('XRANGE', stream, '-', '+')) do
    bodies[entry[1]] = task_of(entry[2])
    entries[#entries + 1] = { entry[1], bodies[entry[1]] }
  end
  local last = last_delivered(stream)
  for _, entry in ipairs(redis.call('XRANGE', stream, last and '(' .. last or '-', '+')) do
    fresh[entry[1]] = true
    out.undelivered[#out.undelivered + 1] = { stream, entry[1], bodies[entry[1]] }
  end
  if last then
    -- As many as there are: with a fixed count, what lies beyond it would look like strays.
    local count = redis.call('XPENDING', stream, 'workers')[1]
    for _, p in ipairs(count > 0 and redis.call('XPENDING', stream, 'workers', '-', '+', count) or {}) do
      claimed[p[1]] = true
      out.pending[#out.pending + 1] = { stream, p[1], bodies[p[1]] or '', p[2], p[3], p[4] }
    end
  end
  for _, entry in ipairs(entries) do
    if not fresh[entry[1]] and not claimed[entry[1]] then
      out.strays[#out.strays + 1] = { stream, entry[1], entry[2] }
    end
  end
  out.bands[stream] = { length = #entries, last_delivered = last or "" }
end

local function members(key)
  local flat, pairs_of = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES'), {}
  for i = 1, #flat, 2 do
    pairs_of[#pairs_of + 1] = { meet(flat[i]), flat[i + 1] }
  end
  return pairs_of
end

for _, stream in ipairs(band_keys()) do
  if redis.call('TYPE', stream).ok == 'stream' then
    read_band(stream)
  else
    out.odd[#out.odd + 1] = stream
  end
end
out.schedule = members(prefix .. 'retry:schedule')
out.claimed = members(prefix .. 'retry:claimed')
for _, entry in ipairs(redis.call('XRANGE', prefix .. 'stream:dead-letter', '-', '+')) do
  out.dead_letters[#out.dead_letters + 1] = { entry[1], task_of(entry[2]) }
end
for _, task_id in ipairs(redis.call('ZRANGE', prefix .. 'tasks:recent', 0, -1)) do
  meet(task_id)
end
for _, task_id in ipairs(wanted) do
  meet(task_id)
end
local fields = { 'status', 'entry_id', 'consumer', 'delivery', 'attempt', 'crashes' }
for task_id in pairs(met) do
  local key, record = prefix .. 'task:' .. task_id, {}
  local values = redis.call('HMGET', key, unpack(fields))
  for i, name in ipairs(fields) do
    record[name] = values[i] or ''
  end
  if redis.call('EXISTS', key) == 1 then
    out.records[task_id] = record
  end
end
local now = redis.call('TIME')
out.time_ms = now[1] * 1000 + math.floor(now[2] / 1000)
return cjson.encode(out)
