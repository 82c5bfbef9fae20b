--!include leading
--!include sweeping
-- Deletes consumers of dead workers that have nothing pending in one stream (R15, R32).
-- KEYS: nil, the lock, one stream. ARGV: event base, worker_id, most.
-- Returns: deleted (-1: we do not lead).
-- Atomic because a consumer deleted with something pending would lose it, and because a worker may come back to life.
unrefusable()
if not leading(ARGV[2]) then return -1 end
local dead = {}
return sweep(KEYS[3], tonumber(ARGV[3]), function(worker)
  if dead[worker] == nil then dead[worker] = worker ~= ARGV[2] and try('EXISTS', key_worker(worker)) == 0 end
  return dead[worker]
end)
