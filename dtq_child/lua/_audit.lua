--!include event
-- The audit: who did what, written in the action's own atomic step. a: actor, action, task_id, request_id, queue, via, detail.
local function audit(a)
  call('XADD', AUDIT, 'MAXLEN', '~', AUDIT_MAXLEN, '*', 'actor', a.actor, 'action', a.action, 'task_id', a.task_id or '', 'ts', NOWS,
    'request_id', a.request_id, 'queue', a.queue or '', 'via', a.via, 'detail', a.detail)
end
