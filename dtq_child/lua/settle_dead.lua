--!include ending
--!include settle
-- Ends everything that is pending for a dead child (R16, R28), then deletes its consumer wherever nothing is left for it.
-- KEYS: nil, the supervisor's bell, then the streams of all its queues.
-- ARGV: event base, consumer, worker_id, park, to_anyone ('1': none of our children may claim), how, exact ('1': we killed it, only the
--   execution of the row is to blame), the row's execution: task_id, stream, entry_id, delivery ('' four times: none, or no row),
--   error_class, message, traceback, cause, brief (a cause without the stack), facts, kind (retry | dead), delay_ms, outcome ('' unless how is 'ended'), max_attempts and
--   max_crashes as the child had resolved them ('' without a row), then the delays in ms after the 2nd, 3rd … crash.
--   how: crash (what runs is judged as a crash), ended (the row's execution is settled as kind says), release (nothing is spent).
-- Returns: left ('1': run it again, there is more), then task_id, what of each: parked, released, scheduled, dead, retry, absorbed …, and counts.
-- Atomic because what the dead child held is looked at, judged and moved as one, and because a consumer deleted with something pending would
-- lose it. Safe to run again: the second run finds nothing pending.
unrefusable()
local consumer, worker, park, to_anyone = ARGV[2], ARGV[3], ARGV[4], ARGV[5] == '1'
local how, exact = ARGV[6], ARGV[7] == '1'
local named = { id = ARGV[8], stream = ARGV[9], entry = ARGV[10], delivery = ARGV[11] }
local e = { error_class = ARGV[12], message = ARGV[13], traceback = ARGV[14], cause = ARGV[15], brief = ARGV[16], facts = ARGV[17] }
local delays = {}
for i = 23, #ARGV do delays[#delays + 1] = ARGV[i] end
local BATCH, MOST = 64, 256
local done, told, woken, rung = 0, {}, 0, {}

local function tell(id, what)
  told[#told + 1] = id
  told[#told + 1] = what
  count(what)
  return what
end

-- An entry came back: our children look into the park; what anybody may take is rung for at its queue, too.
local function wake(stream, anybody)
  woken = woken + 1
  if anybody then rung[split_stream(stream)] = true end
end

-- Claimed and not begun: nothing happened to it.
local function hand_back(stream, entry, id)
  if to_anyone then release_entry(stream, entry, park) else park_entry(stream, entry, park) end
  wake(stream, to_anyone)
  return tell(id, to_anyone and 'released' or 'parked')
end

local function release_begun(r, id)
  back_to_park(r, id, worker, consumer, park, true, 'released', e.facts, '{"released":true}')
  wake(r.stream, true)
  return tell(id, 'released')
end

local function settle_named(id)
  local o = { kind = ARGV[18], id = id, stream = named.stream, entry = named.entry, delivery = named.delivery, facts = e.facts, delay_ms = ARGV[19],
    spend = '1', error_class = e.error_class, message = e.message, traceback = e.traceback, cause = e.cause, outcome = ARGV[20],
    max_attempts = ARGV[21], first_unknown = '' }
  settle(o, consumer, worker, park)
  return tell(id, o.kind)
end

-- r: running under the dead consumer, at this entry.
local function judge(r, id, is_named)
  if how == 'release' or (exact and not is_named) then return release_begun(r, id) end
  if how == 'ended' and is_named then return settle_named(id) end
  if is_named and ARGV[22] ~= '' then r.max_crashes = ARGV[22] end
  local what = judge_crash(r, id, worker, consumer, park, to_anyone, delays, e)
  if what == 'parked' then wake(r.stream, to_anyone) end
  return tell(id, what)
end

-- The record of a readable entry, rebuilt if it is missing: as running if the row was executing it.
local function record_of(stream, band, entry_id, entry, is_named)
  local r, wrong = record(entry.task_id, ENDING_FIELDS)
  if r or wrong then return r, wrong end
  rebuild(stream, band, entry_id, entry)
  if is_named then
    call('HSET', key_task(entry.task_id), 'status', 'running', 'delivery', named.delivery, 'consumer', consumer, 'worker_id', worker)
  end
  return record(entry.task_id, ENDING_FIELDS)
end

local function end_entry(stream, entry_id)
  local queue, band = split_stream(stream)
  local entry, flat = read_entry(stream, entry_id)
  if not entry then
    try('XACK', stream, GROUP, entry_id)
    return count('bodies_gone')
  end
  local why = unreadable(entry, queue, band)
  if why then return bury_unreadable(stream, queue, band, entry_id, flat, why, worker) end
  local id = entry.task_id
  local is_named = named.id == id and named.entry == entry_id and named.stream == stream
  local r, wrong = record_of(stream, band, entry_id, entry, is_named)
  if wrong then return bury_unreadable(stream, queue, band, entry_id, flat, 'its record cannot be read: ' .. wrong, worker) end
  local other = r.entry_id ~= '' and (r.entry_id ~= entry_id or r.stream ~= stream)
  if other or (r.status ~= 'queued' and r.status ~= 'running') then
    return absorb(stream, entry_id, id, queue, entry.task_type, r.attempt, worker, other and 'another_entry' or r.status)
  end
  if r.status == 'queued' then return hand_back(stream, entry_id, id) end
  if r.consumer ~= consumer then
    -- Held by the dead child, running under another by the record: given back to that one, whose heartbeat or reaper decides.
    try('XCLAIM', stream, GROUP, r.consumer, 0, entry_id, 'IDLE', 0, 'JUSTID')
    return tell(id, 'given_back')
  end
  forget_old_execution(id, tonumber(r.delivery) or 0)
  return judge(r, id, is_named and r.delivery == named.delivery)
end

-- Everything pending for the consumer in one stream; true when nothing is left.
local function end_stream(stream)
  while done < MOST do
    local pending = try('XPENDING', stream, GROUP, '-', '+', BATCH, consumer)
    if failed(pending) or #pending == 0 then return true end
    for i = 1, #pending do
      end_entry(stream, pending[i][1])
      done = done + 1
    end
  end
  return false
end

local left = ''
for i = 3, #KEYS do
  if try('EXISTS', KEYS[i]) == 1 then
    if end_stream(KEYS[i]) then
      try('XGROUP', 'DELCONSUMER', KEYS[i], GROUP, consumer)
    else
      left = '1'
    end
  end
end
for queue in pairs(rung) do ring(key_bell(queue)) end
if woken > 0 then ring(KEYS[2], woken) end
return { left, told, counted() }
