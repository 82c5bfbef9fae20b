--!include event
--!lazily doubtful
--!lazily hinted
--!lazily idempotency
-- Beginning an entry, and reading new ones by strict priority (R22, R25). Lean, because every task pays for it: an entry that is just what
-- its record says begins here, every other one is looked at by _doubtful.lua. Every call is guarded: one bad band never blocks the
-- others nor hides a settle's answer (R14). `c`: see _claim.lua.
local TRIES = 64

-- Makes an entry we own running under the next delivery number. v: the record's values in the order of `begin`.
local function start(c, stream, queue, band, entry_id, id, v)
  local delivery = (tonumber(v[4]) or 0) + 1
  local rec = P .. 'task:' .. id
  call('HSET', rec, 'status', 'running', 'delivery', delivery, 'consumer', c.consumer, 'worker_id', c.worker, 'stream', stream,
    'entry_id', entry_id, 'attempt', v[5], 'started_at_ms', NOWS, 'updated_at_ms', NOWS, 'lease_ms', c.lease)
  call('EXPIRE', rec, KEEP_S)
  if v[14] and v[14] ~= '' then keep_idempotency(queue, v[14], id) end
  emit('TASK_STARTED', id, queue, v[19], v[5], c.worker, delivery > 1 and '{"delivery":' .. delivery .. '}' or nil)
  local waited = NOW - (tonumber(v[15]) or NOW)
  return { stream, entry_id, id, queue, delivery, band, waited > 0 and waited or 0, v[16] and NOW - (tonumber(v[16]) or NOW) or false, v }
end

-- The delivery, or nil when the entry was dealt with otherwise.
local function begin(c, stream, queue, band, entry_id, flat)
  local id = flat[1] == 'task_id' and flat[2] or ''
  local v = try('HMGET', P .. 'task:' .. id, 'status', 'entry_id', 'stream', 'delivery', 'attempt', 'max_attempts', 'crashes', 'max_crashes',
    'timeout_ms', 'soft_timeout_ms', 'retry', 'metadata', 'trace', 'idempotency_key', 'queued_at_ms', 'first_unknown_at_ms', 'store_result',
    'payload', 'task_type', 'expires_at_ms', 'due_at_ms')
  if v[1] == 'queued' and v[2] == entry_id and v[3] == stream and not v[20] and not v[21] and v[5] and v[18] and v[19]
    and try('SISMEMBER', CANCELLED, id) == 0 then
    return start(c, stream, queue, band, entry_id, id, v)
  end
  local found = look_closer(c, stream, queue, band, entry_id, flat)
  if not found then return nil end
  return start(c, stream, queue, band, entry_id, found.id, found.values)
end

-- Up to n undelivered entries of a band; its group is made in place when it is missing (from id 0).
local function read_new(c, stream, n)
  local got = try('XREADGROUP', 'GROUP', GROUP, c.consumer, 'COUNT', n, 'STREAMS', stream, '>')
  if got and got.err and string.find(got.err, 'NOGROUP', 1, true) then
    try('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
    count('groups_made')
    got = try('XREADGROUP', 'GROUP', GROUP, c.consumer, 'COUNT', n, 'STREAMS', stream, '>')
  end
  if got and got.err then
    c.problems[#c.problems + 1] = stream .. ': ' .. got.err
    return nil
  end
  return got and got[1] and got[1][2]
end

-- Entries handed to us: the first startable one begins, the others are held.
local function take(c, stream, queue, band, entries)
  for i = 1, #entries do
    local entry = entries[i]
    if c.begun then
      c.held[#c.held + 1] = stream
      c.held[#c.held + 1] = entry[1]
    else
      c.tries = c.tries + 1
      c.begun = begin(c, stream, queue, band, entry[1], entry[2])
    end
  end
end

-- New entries of one band, until one has begun; true when the search is over.
local function take_band(c, stream, queue, band, i, n)
  local length = try('XLEN', stream)
  if length == 0 then return false end
  if type(length) ~= 'number' then
    c.problems[#c.problems + 1] = stream .. ': ' .. length.err
    return false
  end
  while not c.begun and c.tries < TRIES do
    local entries = read_new(c, stream, n)
    if not entries or #entries == 0 then return false end
    take(c, stream, queue, band, entries)
  end
  c.at_band = band
  return true
end

-- New entries of the bands above floor (-1: all bands), p9 first, the queues in turn within a band.
local function take_new(c, floor, n)
  local queues, total = c.queues, #c.queues
  if total > 10 and not c.everywhere then
    for _, at in ipairs(hinted_bands(queues, c.rotation, floor)) do
      if not c.paused[at.queue] and take_band(c, at.stream, at.queue, at.band, at.i, n) then return end
    end
    return
  end
  for band = 9, floor + 1, -1 do
    for k = 0, total - 1 do
      local i = (c.rotation + k) % total + 1
      local queue = queues[i]
      if not c.paused[queue] and take_band(c, c.stream_of(i, band), queue, band, i, n) then return end
    end
  end
end
