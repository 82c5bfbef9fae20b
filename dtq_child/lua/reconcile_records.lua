--!include leading
--!include placeless
-- Looks for records of the newest tasks that say they wait or run, have not been touched for a while, and have no place (R32). Changes nothing.
-- KEYS: nil, the lock, tasks:recent. ARGV: event base, worker_id, rank to begin at, most, least ms untouched.
-- Returns: next rank (0 at the end, -1: we do not lead), then of each suspect task_id and updated_at_ms.
-- Atomic because a task in transit between two places would look placeless. Entries are read whole, so it ends early after some megabytes.
if not leading(ARGV[2]) then return { -1, {} } end
local rank, most, least = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local suspects, bytes, MOST_BYTES = {}, 0, 4194304
local ids = try('ZREVRANGE', KEYS[3], rank, rank + most - 1)
if failed(ids) then return { 0, {} } end
local looked = 0
for i = 1, #ids do
  looked = i
  local r = placeless(ids[i], least)
  if r then
    suspects[#suspects + 1] = ids[i]
    suspects[#suspects + 1] = r.updated_at_ms
  end
  local size = try('HSTRLEN', key_task(ids[i]), 'payload')
  bytes = bytes + (type(size) == 'number' and size or 0)
  if bytes > MOST_BYTES then break end
end
local done = looked == #ids and #ids < most
return { done and 0 or rank + looked, suspects }
