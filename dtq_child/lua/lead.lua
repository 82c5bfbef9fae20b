--!include base
-- Wins the scheduler's lock, or renews it (R31).
-- KEYS: nil, the lock. ARGV: event base, worker_id, ms to hold it.
-- Returns: won | renewed | held (by another), its holder.
-- Atomic because only the holder may extend it, and only nobody's may be taken.
unrefusable()
local holder = call('GET', KEYS[2])
if holder == ARGV[2] then
  call('PEXPIRE', KEYS[2], ARGV[3])
  return { 'renewed', holder }
end
if holder then
  -- A lock without an end would outlive its holder for ever.
  if call('PTTL', KEYS[2]) == -1 then call('PEXPIRE', KEYS[2], ARGV[3]) end
  return { 'held', holder }
end
call('SET', KEYS[2], ARGV[2], 'NX', 'PX', ARGV[3])
return { 'won', ARGV[2] }
