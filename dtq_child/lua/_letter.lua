--!include record
--!include idempotency
--!include audit
-- Pure text surgery on a JSON object: cjson would alter numbers and empty arrays of the user's.
local function with_member(object, name, json)
  if object == '' or object == '{}' or string.sub(object, -1) ~= '}' then return '{"' .. name .. '":' .. json .. '}' end
  return string.sub(object, 1, -2) .. ',"' .. name .. '":' .. json .. '}'
end

-- A dead letter by its stream id: its fields, or nil.
local function read_letter(id)
  if id == '' then return nil end
  local found = try('XRANGE', DEAD_LETTERS, id, id)
  if failed(found) or not found[1] then return nil end
  return fields_of(found[1][2])
end
