--!include lean
-- Looks which of our queues are paused, and which band of the others holds the entry that has waited longest to be handed out. Changes nothing
-- (R37).
-- KEYS: nil, the pause flag of each queue, then the ten bands of the first queue, of the second …
-- ARGV: event base, number of queues.
-- Returns: that band ('' if nothing waits), the age of its entry in ms, then the numbers (from 1) of the paused queues.
-- Atomic, or what waits in a queue could be found after its pause was looked for and before it began.
local queues = tonumber(ARGV[2])

local function last_delivered(stream)
  local groups = try('XINFO', 'GROUPS', stream)
  if failed(groups) then return nil end
  for i = 1, #groups do
    local group = groups[i]
    local named = {}
    for k = 1, #group, 2 do named[group[k]] = group[k + 1] end
    if named.name == GROUP then return named['last-delivered-id'] end
  end
  return '0-0'
end

-- The id of the first entry beyond what was handed out, or nil.
local function first_waiting(stream)
  local length = try('XLEN', stream)
  if type(length) ~= 'number' or length == 0 then return nil end
  local last = last_delivered(stream)
  if not last then return nil end
  local found = try('XRANGE', stream, '(' .. last, '+', 'COUNT', 1)
  if failed(found) or not found[1] then return nil end
  return found[1][1]
end

local band, oldest, paused = '', -1, {}
for i = 1, queues do
  if try('EXISTS', KEYS[1 + i]) == 1 then
    paused[#paused + 1] = i
  else
    for k = queues + 2 + (i - 1) * 10, queues + 1 + i * 10 do
      local id = first_waiting(KEYS[k])
      local age = id and NOW - tonumber(string.match(id, '^%d+'))
      if age and age > oldest then band, oldest = KEYS[k], age end
    end
  end
end
return { band, oldest, unpack(paused) }
