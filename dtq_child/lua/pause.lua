--!include audit
-- Pauses a queue: from the reply on nothing of it starts until it is resumed (R24: nothing is delivered by a blocking read).
-- KEYS: nil, pause flag, audit. ARGV: event base, queue, actor, via, request_id, detail.
-- Returns: 1, or 0 when it was paused already.
-- Atomic with its audit; the first write is refusable by maxmemory: refused whole (R13).
local was = redis.call('GET', KEYS[2])
call('SET', KEYS[2], '1')
audit({ actor = ARGV[3], action = 'pause', queue = ARGV[2], via = ARGV[4], request_id = ARGV[5], detail = ARGV[6] })
emit('CONFIGURATION_CHANGED', '', ARGV[2], '', '0', '', '{"paused":true}')
return was and 0 or 1
