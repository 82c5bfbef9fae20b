--!include begin
--!include record
--!include bell
--!lazily ending
--!exports take_own take_parked take_held pass_on silence
-- The less usual sources of a claim, and its bells.

-- Calls visit(stream, queue, band, i) from p9 down, queues in turn within a band, until it answers true.
local function each_band(c, visit)
  local total = #c.queues
  for band = 9, 0, -1 do
    for k = 0, total - 1 do
      local i = (c.rotation + k) % total + 1
      if visit(c.stream_of(i, band), c.queues[i], band, i) then return end
    end
  end
end

local function holds_entries(stream)
  local length = try('XLEN', stream)
  return type(length) == 'number' and length > 0 and length
end

-- Out of our hands into the park, because its queue is paused: what we began unheard is queued again, nothing spent.
local function put_down(c, stream, id, entry)
  local task = entry.task_id or ''
  local r = record(task, ENDING_FIELDS)
  if r and r.status == 'running' and r.consumer == c.consumer and r.entry_id == id and r.stream == stream then
    back_to_park(r, task, c.worker, c.consumer, c.park, false, nil, '', '{"released":true}')
  else
    park_entry(stream, id, c.park)
  end
end

-- An entry that is pending under our own name begins, or is held.
local function take_back(c, stream, queue, band, id)
  local entry, flat = read_entry(stream, id)
  if not flat then
    try('XACK', stream, GROUP, id)
    count('bodies_gone')
  elseif c.paused[queue] then
    put_down(c, stream, id, entry)
  else
    take(c, stream, queue, band, { { id, flat } })
  end
end

-- What is pending under our own name and not in our hands: a claim whose reply was lost (R10).
local function take_own(c)
  each_band(c, function(stream, queue, band)
    if not holds_entries(stream) then return false end
    local pending = try('XPENDING', stream, GROUP, '-', '+', 32, c.consumer)
    for k = 1, failed(pending) and 0 or #pending do
      local id = pending[k][1]
      if not c.skip[stream .. ' ' .. id] then take_back(c, stream, queue, band, id) end
    end
    return false
  end)
end

-- What came back: looked at before anything new. Leaves c.park_left when more is there than was taken.
local function take_parked(c)
  each_band(c, function(stream, queue, band)
    if c.paused[queue] or not holds_entries(stream) then return false end
    local pending = try('XPENDING', stream, GROUP, '-', '+', 16, c.park)
    for k = 1, failed(pending) and 0 or #pending do
      if c.begun then
        c.park_left = true
        return true
      end
      local id = pending[k][1]
      local got = try('XCLAIM', stream, GROUP, c.consumer, 0, id)
      if failed(got) or not got[1] or not got[1][2] then
        try('XACK', stream, GROUP, id)
        count('bodies_gone')
      else
        take(c, stream, queue, band, got)
      end
    end
    c.park_left = c.park_left or (not failed(pending) and #pending == 16)
    return false
  end)
end

-- The held entries of paused queues are put down. Of the others the best begins, unless a higher band has something new.
local function take_held(c)
  local held, highest = {}, -1
  for k = 1, #c.waiting, 2 do
    local stream, id = c.waiting[k], c.waiting[k + 1]
    local queue, band = split_stream(stream)
    if not c.paused[queue] then
      held[#held + 1] = { stream = stream, id = id, queue = queue, band = band }
      highest = math.max(highest, band)
    elseif owner_of(stream, id) == c.consumer then
      take_back(c, stream, queue, band, id)
    end
  end
  if highest >= 0 and not c.begun then take_new(c, highest, 1) end
  for band = highest, 0, -1 do
    for _, e in ipairs(held) do
      if e.band == band and c.begun then
        c.held[#c.held + 1] = e.stream
        c.held[#c.held + 1] = e.id
      elseif e.band == band and owner_of(e.stream, e.id) == c.consumer then
        take_back(c, e.stream, e.queue, band, e.id)
      end
    end
  end
end

-- A child that was woken and leaves something behind wakes the next one.
local function pass_on(c)
  if c.park_left then ring(key_worker_bell(c.worker)) end
  each_band(c, function(stream, queue, band, i)
    if band > (c.at_band or 9) or c.paused[queue] then return false end
    local n = holds_entries(stream)
    if not n then return false end
    local pending = try('XPENDING', stream, GROUP)
    if not failed(pending) and n <= pending[1] then return false end
    ring(c.bell_of(i))
    return true
  end)
end

local function silence(c)
  local bells = {}
  for i = 1, #c.queues do
    if not c.paused[c.queues[i]] then bells[#bells + 1] = c.bell_of(i) end
  end
  if c.parked then bells[#bells + 1] = key_worker_bell(c.worker) end
  if #bells > 0 then try('DEL', unpack(bells)) end
end
