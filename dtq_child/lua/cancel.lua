--!include over
--!include audit
-- Cancels a task wherever it is. A waiting one is over at once; a running one is over at once too (the fence closes) and its process is
-- told within a second (R33); a finished one stays what it is.
-- KEYS: nil, record, schedule, claimed, cancelled.
-- ARGV: event base, task_id, actor, via, request_id, detail (an empty actor writes no audit).
-- Returns: cancelled | stopping | too_late | unknown, the status found.
-- Atomic because the reply must agree with what happens: no start between the look and the write. Runs under a full Redis.
unrefusable()
local id = ARGV[2]
local r = record(id, OVER_FIELDS)
local function note(word)
  if ARGV[3] ~= '' then
    audit({ actor = ARGV[3], action = 'cancel', task_id = id, via = ARGV[4], request_id = ARGV[5], detail = ARGV[6] .. (ARGV[6] ~= '' and ' ' or '') .. word,
      queue = r and r.queue or '' })
  end
end
if not r then
  try('SADD', KEYS[5], id)
  note('unknown')
  return { 'unknown', '' }
end
-- Asked again, perhaps because the first answer was lost: the same answer. One that ran has kept its consumer.
if r.status == 'cancelled' then return { r.consumer ~= '' and 'stopping' or 'cancelled', r.status } end
if r.status == 'succeeded' or r.status == 'dead_lettered' or r.status == 'expired' then
  note('too_late')
  return { 'too_late', r.status }
end
local running = r.status == 'running'
end_early(r, id, 'cancelled', 'TASK_CANCELLED')
note(running and 'stopping' or 'cancelled')
return { running and 'stopping' or 'cancelled', r.status }
