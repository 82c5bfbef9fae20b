--!include lean
-- Base: names and text.
local function key_task(id) return P .. 'task:' .. id end
local function key_result(id) return P .. 'result:' .. id end
local function key_idempotency(queue, key) return P .. 'idempotency:' .. queue .. ':' .. key end
local function key_stream(queue, band) return P .. 'stream:' .. queue .. ':p' .. band end
local function key_bell(queue) return P .. 'bell:q:' .. queue end
local function key_worker(worker) return P .. 'worker:' .. worker end
local function key_worker_bell(worker) return P .. 'bell:w:' .. worker end
local function key_paused(queue) return P .. 'queue:' .. queue .. ':paused' end

-- The (queue, band) of a band's key.
local function split_stream(stream)
  local queue, band = string.match(string.sub(stream, #P + 8), '^(.*):p(%d)$')
  return queue, tonumber(band)
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
