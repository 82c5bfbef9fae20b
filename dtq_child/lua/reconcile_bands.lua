--!include leading
--!include entry
-- Looks for entries that were handed out and are pending for nobody, and gives them a place again (R32): what the record says is running goes
-- back to that consumer with a fresh lease, everything else is released into our park.
-- KEYS: nil, the lock, our bell, one stream. ARGV: event base, worker_id, park, id to go on from ('' from the start), most pending entries to
--   pass.
-- Returns: id to go on from ('' at the end, '-' when we do not lead), then the entry ids found.
-- Atomic because an entry that is being handed out or settled in that moment would look the same.
unrefusable()
local worker, park, from, most = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local stream, found, PAGE = KEYS[4], {}, 16
if not leading(worker) then return { '-', found } end

-- Nothing beyond it was handed out; nil without a group.
local function last_delivered()
  local groups = try('XINFO', 'GROUPS', stream)
  for i = 1, failed(groups) and 0 or #groups do
    local facts = {}
    for k = 1, #groups[i], 2 do facts[groups[i][k]] = groups[i][k + 1] end
    if facts.name == GROUP then return facts['last-delivered-id'] end
  end
  return nil
end

local function place(entry_id, flat)
  local id = fields_of(flat).task_id
  local r = id and record(id, { 'status', 'consumer', 'entry_id', 'stream' })
  if r and r.status == 'running' and r.consumer ~= '' and r.entry_id == entry_id and r.stream == stream then
    -- Its process may well be at work: should it not be, its lease runs out.
    try('XCLAIM', stream, GROUP, r.consumer, 0, entry_id, 'IDLE', 0, 'FORCE', 'JUSTID')
  else
    try('XCLAIM', stream, GROUP, park, 0, entry_id, 'TIME', 0, 'FORCE', 'JUSTID')
  end
  found[#found + 1] = entry_id
end

-- Entries strictly between two neighbours of the pending list (to the last one handed out, at its end). Bodies are read for strays alone.
local function search(after, before)
  while true do
    local strays = try('XRANGE', stream, after, before, 'COUNT', PAGE)
    if failed(strays) or #strays == 0 then return end
    for i = 1, #strays do
      place(strays[i][1], strays[i][2])
      after = '(' .. strays[i][1]
    end
  end
end

local function beyond(id, other)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  local other_ms, other_seq = string.match(other, '^(%d+)-(%d+)$')
  ms, other_ms = tonumber(ms), tonumber(other_ms)
  return ms > other_ms or (ms == other_ms and tonumber(seq) > tonumber(other_seq))
end

local last = last_delivered()
if not last or try('XLEN', stream) == 0 then return { '', found } end
local after = from == '' and '-' or '(' .. from
local pending = try('XPENDING', stream, GROUP, after, '+', most)
if failed(pending) then return { '', found } end
local next_id = ''
for i = 1, #pending do
  local entry_id = pending[i][1]
  -- A lease restored by force may lie beyond it, and what is between waits to be handed out.
  if beyond(entry_id, last) then break end
  search(after, '(' .. entry_id)
  after, next_id = '(' .. entry_id, i == most and entry_id or ''
end
if next_id == '' then search(after, last) end
if #found > 0 then ring(KEYS[3], #found) end
return { next_id, found }
