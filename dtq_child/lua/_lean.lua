-- Lean: the clock, and what every script keeps count of. Every script begins with it.
-- The loader writes constants into the text where their names stand: P (key prefix), GROUP, the keys that are one of a kind (SCHEDULE, CLAIMED,
-- DEAD_LETTERS, AUDIT, CANCELLED, RECENT, QUEUES, HINT, EVENTS), KEEP_S (a waiting task's record), RETENTION_S, SUCCEEDED_RETENTION_S,
-- RESULT_RETENTION_S, IDEM_TTL_S, DLQ_MAXLEN, AUDIT_MAXLEN, RECENT_MAX, MAX_ATTEMPTS, MAX_CRASHES. KEYS[1] is <prefix>nil, ARGV[1] the
-- event base (24 hex). Times are epoch milliseconds of this server (R12).
local call, try = redis.call, redis.pcall
local clock = call('TIME')
local NOW = clock[1] * 1000 + math.floor(clock[2] / 1000)
local NOWS = string.format('%.0f', NOW)

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
