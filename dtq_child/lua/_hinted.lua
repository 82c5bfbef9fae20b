--!include base
--!exports hinted_bands
-- The bands that the hint index names, in the order of a claim (above ten queues); a hint at an empty band is taken back.
local function hinted_bands(queues, rotation, floor)
  local mine, bands, found = {}, {}, {}
  for i = 1, #queues do mine[queues[i]] = i end
  local hints = try('ZRANGE', HINT, 0, -1)
  for h = 1, failed(hints) and 0 or #hints do
    local queue, band = string.match(hints[h], '^(.*):p(%d)$')
    band = tonumber(band)
    if queue and mine[queue] and band > floor then
      if try('XLEN', key_stream(queue, band)) == 0 then
        try('ZREM', HINT, hints[h])
      else
        bands[band] = bands[band] or {}
        table.insert(bands[band], queue)
      end
    end
  end
  for band = 9, floor + 1, -1 do
    local names = bands[band] or {}
    for k = 0, #names - 1 do
      local queue = names[(rotation + k) % #names + 1]
      found[#found + 1] = { stream = key_stream(queue, band), queue = queue, band = band, i = mine[queue] }
    end
  end
  return found
end
