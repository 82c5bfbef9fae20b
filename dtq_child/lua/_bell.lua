--!include base
-- Bells: short lists of wake-up tokens (R24); a hint, never the truth. Rung by every script that makes an entry available.
local BELL_MAX = 64

local function ring(bell, tokens)
  local length = try('LLEN', bell)
  if type(length) ~= 'number' or length >= BELL_MAX then return end
  tokens = math.min(tokens or 1, BELL_MAX - length)
  if tokens == 1 then return try('RPUSH', bell, '1') end
  local many = {}
  for i = 1, tokens do many[i] = '1' end
  try('RPUSH', bell, unpack(many))
end

-- Above ten queues children look first where the hint index says (R22). Score 0 is p9: an ascending range is the order of priority.
local function hint(queue, band)
  local queues = try('SCARD', QUEUES)
  if type(queues) == 'number' and queues > 10 then try('ZADD', HINT, 9 - band, queue .. ':p' .. band) end
end
