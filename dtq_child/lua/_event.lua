--!include lean
-- Events: one line of JSON on <prefix>events. Best effort: a failing PUBLISH changes no outcome.
local event_number, event_date = 0, nil

-- ISO 8601 UTC of NOW; civil date from days by the proleptic Gregorian rule (era of 400 years from 0000-03-01).
local function iso()
  if event_date then return event_date end
  local seconds = math.floor(NOW / 1000)
  local z = math.floor(seconds / 86400) + 719468
  local rest = seconds % 86400
  local era = math.floor(z / 146097)
  local doe = z - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524) - math.floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  local mp = math.floor((5 * doy + 2) / 153)
  local month = mp < 10 and mp + 3 or mp - 9
  local year = yoe + era * 400 + (month <= 2 and 1 or 0)
  event_date = string.format('%04d-%02d-%02dT%02d:%02d:%02d.%03dZ', year, month, doy - math.floor((153 * mp + 2) / 5) + 1,
    math.floor(rest / 3600), math.floor(rest / 60) % 60, rest % 60, NOW % 1000)
  return event_date
end

-- metadata: a JSON object as text, or nil.
local function emit(kind, id, queue, task_type, attempt, worker, metadata)
  event_number = event_number + 1
  try('PUBLISH', EVENTS, '{"event_id":"' .. ARGV[1] .. string.format('%08x', event_number) .. '","ts":"' .. iso()
    .. '","type":"' .. kind .. '","task_id":"' .. id .. '","queue":"' .. queue .. '","task_type":' .. quoted(task_type)
    .. ',"attempt":' .. (attempt ~= '' and attempt or '0') .. ',"worker_id":"' .. worker .. '"'
    .. (metadata and (',"metadata":' .. metadata) or '') .. '}')
end
