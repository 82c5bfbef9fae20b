--!include leading
-- Gives the scheduler's lock back, if it is still ours.
-- KEYS: nil, the lock. ARGV: event base, worker_id.
-- Returns: 1, or 0 when it was not ours.
-- Atomic because between a look and a DEL somebody else may have won it.
unrefusable()
if not leading(ARGV[2]) then return 0 end
return call('DEL', KEYS[2])
