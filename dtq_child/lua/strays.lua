--!include entry
-- Lists what is pending under our consumers and idle, but not among what rows name (R28): a claim that landed after its child had died, or
-- whose reply was lost for good.
-- KEYS: nil, then the streams of all our queues.
-- ARGV: event base, worker_id, park, least idle time in ms, n, then n times the stream and entry_id that rows name.
-- Returns: of each, at most 100: stream, entry_id, consumer, idle ms, task_id ('' if it cannot be read), and the delivery if its record runs
--   under that consumer, else 0: what begins later is then not what was meant.
-- Atomic because consumer, entry and record are told as of one instant; it changes nothing.
local own, park, idle = ARGV[2] .. ':', ARGV[3], ARGV[4]
local named, found, MOST = {}, {}, 100
for k = 0, tonumber(ARGV[5]) - 1 do named[ARGV[6 + 2 * k] .. ' ' .. ARGV[7 + 2 * k]] = true end

local function tell(stream, entry_id, consumer, idle_ms)
  local entry = read_entry(stream, entry_id)
  local id, delivery = entry and entry.task_id or '', '0'
  local r = id ~= '' and record(id, { 'status', 'consumer', 'delivery', 'entry_id', 'stream' }) or nil
  if r and r.status == 'running' and r.consumer == consumer and r.entry_id == entry_id and r.stream == stream then delivery = r.delivery end
  found[#found + 1] = { stream, entry_id, consumer, idle_ms, id, delivery }
end

local function look(stream, consumer)
  local start = '-'
  while #found < MOST do
    local pending = try('XPENDING', stream, GROUP, 'IDLE', idle, start, '+', MOST, consumer)
    if failed(pending) or #pending == 0 then return end
    for i = 1, #pending do
      if not named[stream .. ' ' .. pending[i][1]] then tell(stream, pending[i][1], consumer, pending[i][3]) end
      start = '(' .. pending[i][1]
    end
  end
end

for i = 2, #KEYS do
  local length = try('XLEN', KEYS[i])
  local summary = type(length) == 'number' and length > 0 and try('XPENDING', KEYS[i], GROUP)
  if summary and not failed(summary) and summary[1] > 0 then
    for c = 1, #summary[4] do
      local consumer = summary[4][c][1]
      if consumer ~= park and string.sub(consumer, 1, #own) == own then look(KEYS[i], consumer) end
    end
  end
end
return found
