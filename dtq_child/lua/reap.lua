--!include ending
-- Takes over entries of other supervisors whose lease ran out, into the park of this one (R30).
-- KEYS: nil, the supervisor's bell, Q pause flags, the Q streams of each band from p9 down to p0.
-- ARGV: event base, worker_id, park, visibility timeout in ms, most startable entries in the park, the server times in ms between which a
--   running task may be judged ('' and '': none may), Q, Q queue names, first stream to look at (1 …), id after which to go on ('' from its
--   start), then the delays in ms after the 2nd, 3rd … crash.
-- Returns: server time in ms, startable entries in the park, taken (startable ones), more ('1': there was no room for some), stream and id to go
--   on from (0 and '' at the end), told (task_id, what, of each), problems, counts.
-- Atomic because owner, idle time and record are those of the instant in which the entry moves: two reapers never judge the same death, and a
-- lease renewed a moment ago is kept.
unrefusable()
local worker, park, visible = ARGV[2], ARGV[3], tonumber(ARGV[4])
local room, total = tonumber(ARGV[5]), tonumber(ARGV[8])
local judging = ARGV[6] ~= '' and NOW >= tonumber(ARGV[6]) and NOW <= tonumber(ARGV[7])
local at = 9 + total
local first, after = tonumber(ARGV[at]), ARGV[at + 1]
local own = worker .. ':'
local delays, told, problems = {}, {}, {}
for i = at + 2, #ARGV do delays[#delays + 1] = ARGV[i] end
local PAGE, LOOKS = 100, 500
local startable, taken, more, looked = 0, 0, '', 0

local function tell(id, what)
  told[#told + 1] = id
  told[#told + 1] = what
  count(what)
end

local function is_own(consumer) return string.sub(consumer, 1, #own) == own end

-- Whether others have something pending there; counts what is startable in our park. XLEN first: most bands are empty.
local function of_others(stream, paused)
  local length = try('XLEN', stream)
  if type(length) ~= 'number' then problems[#problems + 1] = stream .. ': ' .. length.err end
  if type(length) ~= 'number' or length == 0 then return false end
  local summary = try('XPENDING', stream, GROUP)
  if failed(summary) or summary[1] == 0 then return false end
  local others = false
  for i = 1, #summary[4] do
    local consumer, n = summary[4][i][1], tonumber(summary[4][i][2])
    if consumer == park and not paused then startable = startable + n end
    others = others or not is_own(consumer)
  end
  return others
end

local function lease_text(idle, consumer)
  return 'no heartbeat of ' .. consumer .. ' for ' .. string.format('%.1f', idle / 1000) .. ' s: its lease ran out'
end

-- A running one: its process counts as dead. The execution is told under the name of the one who had it.
local function judge(r, id, owner, idle, paused)
  local consumer = r.consumer ~= '' and r.consumer or owner
  local cause = '{"kind":"lease_expired","consumer":' .. quoted(consumer) .. ',"idle_ms":' .. string.format('%.0f', idle)
    .. ',"reaped_by":' .. quoted(worker) .. '}'
  forget_old_execution(id, tonumber(r.delivery) or 0)
  local what = judge_crash(r, id, string.match(consumer, '^(.*):[^:]*$') or '', consumer, park, false, delays,
    { error_class = 'ChildDied', message = lease_text(idle, consumer), traceback = '', cause = cause, facts = '{"cause":' .. cause .. '}' })
  if what == 'parked' and not paused then taken = taken + 1 end
  tell(id, what)
end

local function lease_over(r, idle)
  return judging and idle > (tonumber(r.lease_ms) or 0) and not is_own(r.consumer)
end

-- One entry of somebody else, idle for longer than our visibility timeout.
local function look(stream, queue, band, entry_id, owner, idle, paused)
  local entry, flat = read_entry(stream, entry_id)
  if not entry then
    try('XACK', stream, GROUP, entry_id)
    return count('bodies_gone')
  end
  local why = unreadable(entry, queue, band)
  if why then return bury_unreadable(stream, queue, band, entry_id, flat, why, worker) end
  local id = entry.task_id
  local r, wrong = record(id, ENDING_FIELDS)
  if wrong then return bury_unreadable(stream, queue, band, entry_id, flat, 'its record cannot be read: ' .. wrong, worker) end
  if not r then
    -- Perhaps it runs: taken only when a running one could be.
    if not judging or paused then return end
    rebuild(stream, band, entry_id, entry)
    r = record(id, ENDING_FIELDS)
  end
  local other = r.entry_id ~= '' and (r.entry_id ~= entry_id or r.stream ~= stream)
  if other or (r.status ~= 'queued' and r.status ~= 'running') then
    return absorb(stream, entry_id, id, queue, entry.task_type, r.attempt, worker, other and 'another_entry' or r.status)
  end
  if r.status == 'running' then
    if lease_over(r, idle) then judge(r, id, owner, idle, paused) end
  elseif not paused then
    park_entry(stream, entry_id, park)
    taken = taken + 1
    tell(id, 'taken')
  end
end

-- Pages through what has been idle for long in one stream; false with the id to go on from when this call has looked at enough.
local function walk(stream, queue, band, paused, from)
  local start = from == '' and '-' or '(' .. from
  while true do
    local pending = try('XPENDING', stream, GROUP, 'IDLE', visible, start, '+', PAGE)
    if failed(pending) or #pending == 0 then return true end
    for i = 1, #pending do
      local entry_id, owner, idle = pending[i][1], pending[i][2], tonumber(pending[i][3])
      looked = looked + 1
      if not is_own(owner) then
        if not paused and startable + taken >= room then
          more = '1'
          return true
        end
        look(stream, queue, band, entry_id, owner, idle, paused)
      end
      start = '(' .. entry_id
      if looked >= LOOKS then return false, entry_id end
    end
    if #pending < PAGE then return true end
  end
end

local paused, foreign = {}, {}
for i = 1, total do paused[i] = try('GET', KEYS[2 + i]) and true or false end
for k = 1, 10 * total do foreign[k] = of_others(KEYS[2 + total + k], paused[(k - 1) % total + 1]) end
local next_stream, next_id = 0, ''
for k = first, 10 * total do
  local i = (k - 1) % total + 1
  if foreign[k] then
    local done, id = walk(KEYS[2 + total + k], ARGV[8 + i], 9 - math.floor((k - 1) / total), paused[i], k == first and after or '')
    if not done then
      next_stream, next_id = k, id
      break
    end
  end
end
if startable + taken > 0 then ring(KEYS[2], math.max(1, taken)) end
return { NOWS, startable, taken, more, next_stream, next_id, told, problems, counted() }
