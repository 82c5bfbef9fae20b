--!include event
--!lazily idempotency
--!exports succeed
-- Success, the common ending: a delivery that is known to be ours. Lean, because every task pays for it.

-- v: stream, entry_id, queue, task_type, attempt, started_at_ms, idempotency_key, created_at_ms, due_at_ms. Storing the result comes
-- first and may be refused by a full Redis: the task succeeds all the same (R13, R20).
local function succeed(id, delivery, v, worker, consumer, facts, result, size, flag, kept)
  local rec = P .. 'task:' .. id
  local unavailable = flag ~= 'truncated' and flag or ''
  if kept == '1' then
    local reply = try('SET', P .. 'result:' .. id, result, 'EX', RESULT_RETENTION_S)
    if type(reply) == 'table' and reply.err then
      unavailable, size = 'Redis refused to store it: ' .. string.match(reply.err, '^(.-)%s*$'), ''
    end
  end
  call('DEL', KEYS[1])
  local execution = '{"worker_id":"' .. worker .. '","consumer":"' .. consumer .. '","attempt":' .. (v[5] or '0') .. ',"started_at_ms":' .. (v[6] or 'null')
    .. ',"finished_at_ms":' .. NOWS .. ',"outcome":"succeeded"' .. ((facts == '' or facts == '{}') and '}' or ',' .. string.sub(facts, 2))
  if flag == '' and unavailable == '' then
    call('HSET', rec, 'status', 'succeeded', 'updated_at_ms', NOWS, 'finished_at_ms', NOWS, 'result_size', size, 'execution:' .. delivery, execution)
  else
    call('HSET', rec, 'status', 'succeeded', 'updated_at_ms', NOWS, 'finished_at_ms', NOWS, 'result_size', size, 'execution:' .. delivery, execution,
      unavailable ~= '' and 'result_unavailable' or 'result_truncated', unavailable ~= '' and unavailable or '1')
  end
  call('EXPIRE', rec, SUCCEEDED_RETENTION_S)
  try('XACK', v[1], GROUP, v[2])
  try('XDEL', v[1], v[2])
  if v[7] and v[7] ~= '' then
    end_idempotency({ queue = v[3], idempotency_key = v[7], created_at_ms = v[8] or '', due_at_ms = v[9] or '' }, id, 'completed')
  end
  emit('TASK_SUCCEEDED', id, v[3], v[4] or '', v[5] or '', worker)
end
