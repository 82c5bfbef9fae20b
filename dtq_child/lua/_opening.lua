--!include lean
-- Opening: what lies in a park becomes idle past every timeout, so any reaper may take it at once.

-- Returns how many entries of the stream were not so already.
local function open_park(stream, park)
  local start, opened, DAY = '-', 0, 86400000
  while true do
    local pending = try('XPENDING', stream, GROUP, start, '+', 100, park)
    if failed(pending) or #pending == 0 then return opened end
    for i = 1, #pending do
      if pending[i][3] < DAY then
        try('XCLAIM', stream, GROUP, park, 0, pending[i][1], 'TIME', 0, 'JUSTID')
        opened = opened + 1
      end
      start = '(' .. pending[i][1]
    end
  end
end
