--!include leading
-- Promotion, step 1: due members of the schedule become claimed (R31). Step 2 is promote_add.
-- KEYS: nil, the lock, schedule, claimed. ARGV: event base, worker_id, most.
-- Returns: moved (-1: we do not lead), ms until the next member is due ('' if there is none), size of claimed.
-- Atomic because a member is in one of the two at every instant.
unrefusable()
if not leading(ARGV[2]) then return { -1, '', 0 } end
local due = call('ZRANGEBYSCORE', KEYS[3], '-inf', NOWS, 'LIMIT', 0, tonumber(ARGV[3]))
for i = 1, #due do
  call('ZADD', KEYS[4], NOWS, due[i])
  call('ZREM', KEYS[3], due[i])
end
local next_due = call('ZRANGE', KEYS[3], 0, 0, 'WITHSCORES')
local wait = next_due[2] and string.format('%.0f', math.max(0, math.min(tonumber(next_due[2]) - NOW, 1e12))) or ''
return { #due, wait, call('ZCARD', KEYS[4]) }
