--!include event
-- Sweeping: consumers that nobody will use again go, if nothing is pending for them.

-- The worker whose consumer it is (`<worker>:<slot>.<life>` or `<worker>:park`), or nil for a name that is not of our making.
local function worker_of(consumer)
  return string.match(consumer, '^(.+):%d+%.%d+$') or string.match(consumer, '^(.+):park$')
end

-- Deletes at most `most` consumers of the stream whose worker `unwanted` says yes to. Returns how many.
local function sweep(stream, most, unwanted)
  local found = try('XINFO', 'CONSUMERS', stream, GROUP)
  if failed(found) then return 0 end
  local deleted = 0
  for i = 1, #found do
    local facts = {}
    for k = 1, #found[i], 2 do facts[found[i][k]] = found[i][k + 1] end
    local worker = worker_of(facts.name)
    if deleted < most and facts.pending == 0 and worker and unwanted(worker) then
      try('XGROUP', 'DELCONSUMER', stream, GROUP, facts.name)
      deleted = deleted + 1
    end
  end
  return deleted
end
