--!include bell
--!include audit
-- Resumes a queue and wakes its idle children.
-- KEYS: nil, pause flag, audit, queue bell. ARGV: event base, queue, actor, via, request_id, detail.
-- Returns: 1, or 0 when it was not paused.
-- Atomic with its audit; the audit comes first and may be refused by maxmemory: refused whole (R13).
audit({ actor = ARGV[3], action = 'resume', queue = ARGV[2], via = ARGV[4], request_id = ARGV[5], detail = ARGV[6] })
local was = call('DEL', KEYS[2])
ring(KEYS[4], BELL_MAX)
emit('CONFIGURATION_CHANGED', '', ARGV[2], '', '0', '', '{"paused":false}')
return was
