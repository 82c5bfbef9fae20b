--!include sweeping
-- A supervisor takes its leave: its record, its bell, and its consumers with nothing pending. What is pending stays where it is.
-- KEYS: nil, its hash, workers, its bell, then the streams of its queues.
-- ARGV: event base, worker_id.
-- Returns: consumers deleted.
-- Atomic because a consumer is deleted only if nothing is pending for it in that same step (R15).
unrefusable()
local worker = ARGV[2]
local deleted = 0
for i = 5, #KEYS do
  deleted = deleted + sweep(KEYS[i], 1000, function(who) return who == worker end)
end
try('DEL', KEYS[4])
try('DEL', KEYS[2])
if try('SREM', KEYS[3], worker) == 1 then emit('WORKER_STOPPED', '', '', '', '', worker) end
return deleted
