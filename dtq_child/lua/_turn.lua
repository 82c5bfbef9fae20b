--!include succeed
--!include claim
--!lazily settle
--!exports whole_turn
-- A turn in full: every kind of settle and every source of a claim. The usual turn does not come here (settle_and_claim.lua).

-- The settle that the arguments ask for, from ARGV[at] on.
local function settle_as_asked(at, consumer, worker, park)
  local a = {}
  for k = 1, 22 do a[k] = ARGV[at + k - 1] or '' end
  if a[1] == 'ok' then
    for k = 14, 22 do a[k] = '' end
  end
  return settle({ kind = a[1], id = a[2], stream = a[3], entry = a[4], delivery = a[5], facts = a[6], result = a[7], result_size = a[8],
    result_flag = a[9], result_kept = a[10], delay_ms = a[14], spend = a[15], error_class = a[16], message = a[17], traceback = a[18],
    cause = a[19], max_attempts = a[20], first_unknown = a[21], outcome = a[22] }, consumer, worker, park)
end

-- answer: of a settle that is done already, or nil. flags_at: where the flags stand. first: {stream, queue, band, entry_id, flat} of an entry that
-- was just handed to us, or nil.
local function whole_turn(answer, flags_at, first)
  local consumer, worker, park = ARGV[3], ARGV[4], ARGV[5]
  local total = tonumber(ARGV[8])
  if not answer then
    answer = ARGV[9 + total] == '-' and 'none' or settle_as_asked(9 + total, consumer, worker, park)
  end
  local flags = ARGV[flags_at]
  if flags == '' then return { answer, false, {}, {}, '', {}, counted() } end
  unrefusable()
  local queues, waiting, skip = {}, {}, {}
  for i = 1, total do queues[i] = ARGV[8 + i] end
  for k = 1, 2 * tonumber(ARGV[flags_at + 2]), 2 do
    local stream, entry = ARGV[flags_at + 2 + k], ARGV[flags_at + 3 + k]
    waiting[k], waiting[k + 1] = stream, entry
    skip[stream .. ' ' .. entry] = true
  end
  local c = { consumer = consumer, worker = worker, park = park, lease = ARGV[6], prefetch = ARGV[7], queues = queues,
    rotation = tonumber(ARGV[flags_at + 1]), waiting = waiting, skip = skip, first_pause = 3 + total, held = {}, problems = {}, paused = {},
    paused_names = {}, tries = 0, own = string.find(flags, 'o', 1, true), parked = string.find(flags, 'p', 1, true),
    woken = string.find(flags, 'w', 1, true), everywhere = string.find(flags, 'e', 1, true) }
  c.bell_of = function(i) return KEYS[2 + i] end
  c.stream_of = function(i, band)
    if total > 10 then return P .. 'stream:' .. queues[i] .. ':p' .. band end
    return KEYS[2 + 2 * total + (9 - band) * total + i]
  end
  if first then take(c, first[1], first[2], first[3], { { first[4], first[5] } }) end
  claim(c)
  local seen = ((not c.begun and c.tries >= TRIES) and 'm' or '') .. (c.park_left and 'p' or '')
  return { answer, c.begun or false, c.held, c.paused_names, seen, c.problems, counted() }
end
