--!include sweeping
--!include opening
-- A supervisor takes its leave: what lies in its park is anybody's at once, its record goes, its bell, and its consumers with nothing pending.
-- KEYS: nil, its hash, workers, its bell, then the streams of its queues.
-- ARGV: event base, worker_id, park.
-- Returns: consumers deleted.
-- Atomic because a consumer is deleted only if nothing is pending for it in that same step (R15).
unrefusable()
local worker, park = ARGV[2], ARGV[3]

local deleted = 0
for i = 5, #KEYS do
  if try('EXISTS', KEYS[i]) == 1 then
    open_park(KEYS[i], park)  -- its children are gone: others need not wait for its lease to run out
    deleted = deleted + sweep(KEYS[i], 1000, function(who) return who == worker end)
  end
end
try('DEL', KEYS[4])
try('DEL', KEYS[2])
if try('SREM', KEYS[3], worker) == 1 then emit('WORKER_STOPPED', '', '', '', '', worker) end
return deleted
