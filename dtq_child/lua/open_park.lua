--!include opening
-- Opens the park of a supervisor whose children claim nothing for a while: others need not wait for its lease to run out.
-- KEYS: nil, the streams of its queues.
-- ARGV: event base, park.
-- Returns: entries that others may take now and could not before.
-- Atomic because an entry that a child begins between the look and the XCLAIM would be taken away from it.
unrefusable()
local opened = 0
for i = 2, #KEYS do
  if try('EXISTS', KEYS[i]) == 1 then opened = opened + open_park(KEYS[i], ARGV[2]) end
end
return opened
