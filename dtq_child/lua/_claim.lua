--!include begin
--!lazily came_back
-- Claiming: own pending, held, parked, then new entries by strict priority (R22).
-- c: consumer, worker, park, lease, prefetch, queues (names), rotation, waiting (held: stream, entry_id …), skip (the same as a set),
-- own, parked, woken, everywhere (booleans), stream_of(i, band), bell_of(i) → keys, first_pause (index of the first pause flag in KEYS).
local function look_at_pauses(c)
  local total, values = #c.queues, nil
  if total == 1 then
    values = { try('GET', KEYS[c.first_pause]) }
  else
    values = try('MGET', unpack(KEYS, c.first_pause, c.first_pause + total - 1))
  end
  for i = 1, total do
    if values[i] then
      c.paused[c.queues[i]] = true
      c.paused_names[#c.paused_names + 1] = c.queues[i]
    end
  end
end

local function claim(c)
  look_at_pauses(c)
  if c.own then take_own(c) end
  if #c.waiting > 0 then take_held(c) end
  if not c.begun and c.parked then take_parked(c) end
  if not c.begun and #c.held == 0 and c.tries < TRIES then take_new(c, -1, c.prefetch) end
  if c.begun then
    if c.woken then pass_on(c) end
  elseif c.tries < TRIES and #c.held == 0 then
    silence(c)
  end
end
