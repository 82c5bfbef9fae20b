--!include leading
--!include event
-- Forgets workers whose record has ended without a farewell; each is told as WORKER_STALE (R32).
-- KEYS: nil, the lock, workers. ARGV: event base, worker_id.
-- Returns: the workers forgotten, or -1 when we do not lead.
-- Atomic because a worker that writes its record in that moment is alive.
unrefusable()
if not leading(ARGV[2]) then return -1 end
local gone = {}
local known = try('SMEMBERS', KEYS[3])
for i = 1, failed(known) and 0 or #known do
  local worker = known[i]
  if worker ~= ARGV[2] and try('EXISTS', key_worker(worker)) == 0 then
    try('SREM', KEYS[3], worker)
    try('DEL', key_worker_bell(worker))
    emit('WORKER_STALE', '', '', '', '', worker)
    gone[#gone + 1] = worker
  end
end
return gone
