--!include standing
--!include over
-- Looks at what our children execute, and nothing else; ids that other programs put into the cancelled set are cancelled here (R33).
-- KEYS: nil, the cancelled set, then the record of each delivery.
-- ARGV: event base, n, then n times stream, entry_id, consumer, task_id, delivery.
-- Returns: n words as heartbeat's.
-- Atomic because a delivery is cancelled only while it is the one that runs: a successor is never hit.
local listed = try('SCARD', KEYS[2])
local anybody = type(listed) == 'number' and listed > 0
local words = {}
for k = 0, tonumber(ARGV[2]) - 1 do
  local stream, entry, consumer, id, delivery = ARGV[3 + 5 * k], ARGV[4 + 5 * k], ARGV[5 + 5 * k], ARGV[6 + 5 * k], ARGV[7 + 5 * k]
  local word, r = standing(id, stream, entry, delivery, consumer)
  if anybody and word == 'ours' and try('SREM', KEYS[2], id) == 1 then
    unrefusable()
    end_early(r, id, 'cancelled', 'TASK_CANCELLED')
    word = 'cancelled'
  end
  words[k + 1] = word
end
return words
