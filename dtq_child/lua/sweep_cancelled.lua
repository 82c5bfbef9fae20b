--!include leading
-- Keeps the set of cancelled ids small: those whose task is over go, and what is above the bound (R32).
-- KEYS: nil, the lock, cancelled. ARGV: event base, worker_id, cursor, most members kept.
-- Returns: next cursor ('0' at the end, '-' when we do not lead), ids dropped.
-- Atomic because an id whose record appears in that moment must stay.
unrefusable()
if not leading(ARGV[2]) then return { '-', 0 } end
local OVER = { succeeded = true, dead_lettered = true, cancelled = true, expired = true }
local page = try('SSCAN', KEYS[3], ARGV[3], 'COUNT', 500)
if failed(page) then return { '0', 0 } end
local dropped = 0
for i = 1, #page[2] do
  local status = try('HGET', key_task(page[2][i]), 'status')
  if type(status) == 'string' and OVER[status] then dropped = dropped + try('SREM', KEYS[3], page[2][i]) end
end
local excess = call('SCARD', KEYS[3]) - tonumber(ARGV[4])
if excess > 0 then dropped = dropped + #call('SPOP', KEYS[3], math.min(excess, 1000)) end
return { page[1], dropped }
