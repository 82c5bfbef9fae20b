--!include entry
-- Whether an accepted task has a place (R9).
local PLACE_FIELDS = { 'status', 'updated_at_ms', 'lease_ms', 'stream', 'entry_id', 'due_at_ms' }

local function has_entry(r)
  if r.entry_id == '' or r.stream == '' then return false end
  return owner_of(r.stream, r.entry_id) ~= nil or read_entry(r.stream, r.entry_id) ~= nil
end

-- The record (its PLACE_FIELDS and `names`) of a task that waits or runs, untouched for `least` ms (a running one: for its lease, if that is longer),
-- that is in no band and no zset; else nil.
local function placeless(id, least)
  local r = record(id, PLACE_FIELDS)
  if not r then return nil end
  local touched = tonumber(r.updated_at_ms) or 0
  if r.status == 'running' then least = math.max(least, tonumber(r.lease_ms) or 0) end
  if NOW - touched <= least then return nil end
  if r.status == 'queued' or r.status == 'running' then return not has_entry(r) and r or nil end
  if r.status ~= 'scheduled' and r.status ~= 'retry_scheduled' then return nil end
  return not try('ZSCORE', SCHEDULE, id) and not try('ZSCORE', CLAIMED, id) and r or nil
end
