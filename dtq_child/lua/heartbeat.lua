--!include standing
--!include record
-- Renews the leases of what our children have in hand, and says what each has become (R29).
-- KEYS: nil, then the record of each delivery (nil for a held entry: its row does not know its task).
-- ARGV: event base, n, then n times stream, entry_id, consumer, task_id, delivery ('' and '' for a held entry).
-- Returns: n words: ours | settled | cancelled | superseded | gone (nobody's; held: no longer pending under that name).
-- Atomic because an entry is renewed only while it is ours: a claim of our own would take it from whoever has it now.
unrefusable()
local words = {}

local function renew(stream, entry, consumer)
  try('XCLAIM', stream, GROUP, consumer, 0, entry, 'IDLE', 0, 'JUSTID')
end

-- Ours by the record, pending for nobody: the group was destroyed or lost by a failover. Without FORCE nobody would ever look at it.
local function restore(stream, entry, consumer, id)
  if read_entry(stream, entry) then
    try('XCLAIM', stream, GROUP, consumer, 0, entry, 'IDLE', 0, 'FORCE', 'JUSTID')
  else
    -- No entry at all: the settle needs none; this touch keeps reconcile from taking the record for a stranded one.
    call('HSET', key_task(id), 'updated_at_ms', NOWS)
  end
end

for k = 0, tonumber(ARGV[2]) - 1 do
  local stream, entry, consumer, id, delivery = ARGV[3 + 5 * k], ARGV[4 + 5 * k], ARGV[5 + 5 * k], ARGV[6 + 5 * k], ARGV[7 + 5 * k]
  local owner = owner_of(stream, entry)
  local word = 'gone'
  if id ~= '' then word = standing(id, stream, entry, delivery, consumer) end
  if word == 'ours' and not owner then
    restore(stream, entry, consumer, id)
  elseif word == 'ours' or (word == 'gone' and owner == consumer) then
    renew(stream, entry, consumer)
    word = 'ours'
  end
  words[k + 1] = word
end
for k = 1, #words do
  if words[k] == 'ours' and ARGV[1 + 5 * k] ~= '' then keep(ARGV[1 + 5 * k]) end
end
return words
