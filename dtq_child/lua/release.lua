--!include ending
-- Hands entries of one consumer back, spending nothing: begun ones become queued again, held ones stay so (R28, R36).
-- KEYS: nil, the supervisor's bell.
-- ARGV: event base, consumer, worker_id, park, to_anyone ('1': idle past every timeout; '0': parked), n, then n times stream, entry_id,
--   task_id and delivery ('' for a held entry).
-- Returns: the number handed back, counts.
-- Atomic because owner, record and the entry's new place are judged and written as one.
unrefusable()
local consumer, worker, park, to_anyone = ARGV[2], ARGV[3], ARGV[4], ARGV[5] == '1'
local done = 0
for k = 0, tonumber(ARGV[6]) - 1 do
  local stream, entry, id, delivery = ARGV[7 + 4 * k], ARGV[8 + 4 * k], ARGV[9 + 4 * k], ARGV[10 + 4 * k]
  if id == '' then id = (read_entry(stream, entry) or {}).task_id or '' end
  local r = id ~= '' and record(id, ENDING_FIELDS) or nil
  -- A held one, too, may have begun: by a claim whose reply was lost.
  local begun = r and r.status == 'running' and r.consumer == consumer and r.entry_id == entry and r.stream == stream
  -- Begun once more since the caller looked: somebody executes it.
  local stale = begun and delivery ~= '' and r.delivery ~= delivery
  if not stale and owner_of(stream, entry) == consumer then
    if begun then
      back_to_park(r, id, worker, consumer, park, to_anyone, nil, '', '{"released":true}')
    elseif to_anyone then
      release_entry(stream, entry, park)
    else
      park_entry(stream, entry, park)
    end
    done = done + 1
    ring(key_bell((split_stream(stream))))
  end
end
if done > 0 then ring(KEYS[2], done) end
return { done, counted() }
