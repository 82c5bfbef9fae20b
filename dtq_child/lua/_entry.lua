--!include event
--!include bell
-- Entries: reading one, moving it, removing it. XACK and XDEL check no owner: callers have looked (R11).

-- The consumer under which an entry is pending, its idle time, or nil.
local function owner_of(stream, entry)
  local pending = try('XPENDING', stream, GROUP, entry, entry, 1)
  if failed(pending) or not pending[1] then return nil end
  return pending[1][2], pending[1][3]
end

local function remove_entry(stream, entry)
  try('XACK', stream, GROUP, entry)
  try('XDEL', stream, entry)
end

-- Into the park: idle 0, so for one visibility timeout it is this supervisor's to hand out.
local function park_entry(stream, entry, park)
  try('XCLAIM', stream, GROUP, park, 0, entry, 'IDLE', 0, 'JUSTID')
end

-- Into the park with idle time past every timeout: anybody may take it at once.
local function release_entry(stream, entry, park)
  try('XCLAIM', stream, GROUP, park, 0, entry, 'TIME', 0, 'JUSTID')
end

-- The body of an entry as a table, and as the flat list it came in; nil when it was deleted.
local function fields_of(flat)
  local entry = {}
  for i = 1, #flat, 2 do entry[flat[i]] = flat[i + 1] end
  return entry
end

local function read_entry(stream, id)
  local found = try('XRANGE', stream, id, id)
  if failed(found) or not found[1] then return nil end
  return fields_of(found[1][2]), found[1][2]
end

local function is_utf8(text)
  if not string.find(text, '[\128-\255]') then return true end
  for _, sequence in ipairs({ '[\194-\223][\128-\191]', '\224[\160-\191][\128-\191]', '\237[\128-\159][\128-\191]',
    '[\225-\236\238\239][\128-\191][\128-\191]', '\240[\144-\191][\128-\191][\128-\191]',
    '[\241-\243][\128-\191][\128-\191][\128-\191]', '\244[\128-\143][\128-\191][\128-\191]' }) do
    text = string.gsub(text, sequence, ' ')
  end
  return not string.find(text, '[\128-\255]')
end

-- Why an entry cannot be read as a task, or nil. The payload is judged where it is bound to a signature, in the child.
local function unreadable(entry, queue, band)
  local id = entry.task_id
  if not id or #id > 64 or not string.find(id, '^[%w_%-]+$') then return 'task_id is missing or outside its alphabet' end
  if entry.queue ~= queue then return 'queue is missing or not the queue of this stream' end
  local kind = entry.task_type
  if not kind or kind == '' or #kind > 200 or string.find(kind, '%c') or not is_utf8(kind) then
    return 'task_type is missing, too long or not printable'
  end
  if not entry.payload then return 'payload is missing' end
  if not whole(entry.attempt, 1, 2 ^ 31) then return 'attempt is not a whole number from 1' end
  if (entry.max_attempts or '') ~= '' and not whole(entry.max_attempts, 1, 2 ^ 31) then return 'max_attempts is not a whole number from 1' end
  if (entry.timeout_ms or '') ~= '' and not whole(entry.timeout_ms, 1, 604800000) then return 'timeout_ms is not a whole number up to 7 days' end
  if whole(entry.priority, 0, 9) ~= band then return 'priority is not the band of this stream' end
  local key = entry.idempotency_key or ''
  if #key > 256 or not is_utf8(key) then return 'idempotency_key is longer than 256 bytes or no UTF-8' end
  return nil
end
