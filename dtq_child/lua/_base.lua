-- Base: the clock, the names, text. Every script begins with it.
-- Expects from the loader the constants P (key prefix), GROUP, KEEP_S (a waiting task's record), RETENTION_S, SUCCEEDED_RETENTION_S, RESULT_RETENTION_S,
-- IDEM_TTL_S, DLQ_MAXLEN, AUDIT_MAXLEN, RECENT_MAX, MAX_ATTEMPTS, MAX_CRASHES. KEYS[1] is <prefix>nil, ARGV[1] the event base (24 hex).
-- Times are epoch milliseconds of this server (R12).
local call, try = redis.call, redis.pcall
local clock = call('TIME')
local NOW = clock[1] * 1000 + math.floor(clock[2] / 1000)
local NOWS = string.format('%.0f', NOW)

local function key_task(id) return P .. 'task:' .. id end
local function key_result(id) return P .. 'result:' .. id end
local function key_idempotency(queue, key) return P .. 'idempotency:' .. queue .. ':' .. key end
local function key_stream(queue, band) return P .. 'stream:' .. queue .. ':p' .. band end
local function key_bell(queue) return P .. 'bell:q:' .. queue end
local function key_worker(worker) return P .. 'worker:' .. worker end
local function key_worker_bell(worker) return P .. 'bell:w:' .. worker end
local function key_paused(queue) return P .. 'queue:' .. queue .. ':paused' end
local SCHEDULE, CLAIMED, DEAD_LETTERS = P .. 'retry:schedule', P .. 'retry:claimed', P .. 'stream:dead-letter'
local AUDIT, CANCELLED, RECENT, QUEUES = P .. 'stream:audit', P .. 'cancelled', P .. 'tasks:recent', P .. 'queues'
local HINT, EVENTS = P .. 'hint', P .. 'events'

-- The (queue, band) of a band's key.
local function split_stream(stream)
  local queue, band = string.match(string.sub(stream, #P + 8), '^(.*):p(%d)$')
  return queue, tonumber(band)
end

-- From here on maxmemory refuses nothing (R13): it refuses only a script's first write.
local function unrefusable() call('DEL', KEYS[1]) end

local function failed(reply) return type(reply) == 'table' and reply.err ~= nil end

-- What this script has seen, returned to the caller as a flat list.
local counts = {}
local function count(what) counts[what] = (counts[what] or 0) + 1 end
local function counted()
  local flat = {}
  for what, n in pairs(counts) do
    flat[#flat + 1] = what
    flat[#flat + 1] = n
  end
  return flat
end

-- A JSON string. Names are plain almost always; cjson escapes the rest.
local function quoted(text)
  if string.find(text, '^[%w_%.%-: ]*$') then return '"' .. text .. '"' end
  return cjson.encode(text)
end

-- Whole number from text, within bounds, or nil.
local function whole(text, low, high)
  if not text or not string.find(text, '^%-?%d+$') then return nil end
  local number = tonumber(text)
  if number < low or number > high then return nil end
  return number
end

-- Only the first n bytes, cut before a UTF-8 sequence that would be broken.
local function clipped(text, n)
  if #text <= n then return text end
  while n > 0 and string.byte(text, n + 1) >= 128 and string.byte(text, n + 1) < 192 do n = n - 1 end
  return string.sub(text, 1, n)
end

-- The oldest call that needs it pays for the hash: field → value of HMGET, '' for a missing one, and whether any was there.
local function record(id, names)
  local values = try('HMGET', key_task(id), unpack(names))
  if failed(values) then return nil, values.err end
  local r, found = {}, false
  for i = 1, #names do
    local value = values[i]
    if value then found = true end
    r[names[i]] = value or ''
  end
  if not found then return nil end
  return r
end

-- A record that is not terminal outlives its due time by the longer of the retention and one year.
local function keep(id, due)
  local seconds = KEEP_S
  if due and due > NOW then seconds = seconds + math.ceil((due - NOW) / 1000) end
  call('EXPIRE', key_task(id), string.format('%.0f', seconds))
end
