--!include entry
-- Standing: what has become of a delivery that one of our children has in hand. The record decides, not the pending list (R29, R33).
local STANDING_FIELDS = { 'status', 'stream', 'entry_id', 'delivery', 'consumer', 'queue', 'task_type', 'attempt', 'idempotency_key',
  'created_at_ms', 'due_at_ms', 'started_at_ms', 'worker_id' }

-- ours | settled (its outcome is written, the reply may be under way) | cancelled | superseded (somebody else was given the task) | gone
-- (no record), and the record. A crash written under our name is a reaper's: it took us for dead.
local function standing(id, stream, entry, delivery, consumer)
  local r = record(id, STANDING_FIELDS)
  if not r then return 'gone' end
  if r.delivery == delivery and r.consumer == consumer then
    if r.status == 'running' and r.entry_id == entry and r.stream == stream then return 'ours', r end
    if r.status == 'cancelled' then return 'cancelled', r end
  end
  local told = try('HGET', key_task(id), 'execution:' .. delivery)
  if type(told) ~= 'string' or not string.find(told, '"consumer":"' .. consumer .. '"', 1, true) then return 'superseded', r end
  if string.find(told, '"outcome":"cancelled"', 1, true) then return 'cancelled', r end
  if string.find(told, '"outcome":"crashed"', 1, true) then return 'superseded', r end
  return 'settled', r
end
