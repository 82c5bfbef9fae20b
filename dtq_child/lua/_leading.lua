--!include base
-- Leading: every script of the leader compares the lock itself, so that one who lost it unnoticed changes nothing (R31).
-- KEYS[2] is the lock.
local function leading(worker) return try('GET', KEYS[2]) == worker end
