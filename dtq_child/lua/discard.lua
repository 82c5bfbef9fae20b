--!include letter
-- Takes a dead letter out of the stream; the record keeps its status and says metadata.discarded.
-- KEYS: nil, record, dead letters, audit.
-- ARGV: event base, task_id, dead letter's stream id ('' = the record's), actor, via, request_id, detail.
-- Returns: discarded | not_dead, status | not_found.
-- Atomic with its audit, which comes first and may be refused by maxmemory: refused whole (R13).
local id = ARGV[2]
local r = record(id, { 'status', 'queue', 'dead_letter_id', 'metadata' })
if r and r.status ~= 'dead_lettered' then return { 'not_dead', r.status } end
local letter_id = ARGV[3] ~= '' and ARGV[3] or (r and r.dead_letter_id or '')
local letter = read_letter(letter_id)
if not letter or letter.task_id ~= id then return { 'not_found' } end
audit({ actor = ARGV[4], action = 'discard', task_id = id, queue = letter.queue or '', via = ARGV[5], request_id = ARGV[6], detail = ARGV[7] })
call('XDEL', KEYS[3], letter_id)
if r then
  call('HSET', KEYS[2], 'metadata', with_member(r.metadata, 'discarded', 'true'), 'updated_at_ms', NOWS)
  call('EXPIRE', KEYS[2], RETENTION_S)
end
return { 'discarded' }
