-- For people; the functions do not use it.

create view pgsched.tasks as
  select t.id, t.queue, t.task_type, t.payload, t.status, t.priority, t.run_at, t.attempt,
         t.max_attempts, t.claim_token, t.claimed_by, t.claimed_at, t.lease_expires_at,
         t.unique_key, t.concurrency_key, t.cancel_requested_at, t.last_error, t.created_at,
         null::timestamptz as finished_at, null::jsonb as result
    from pgsched.scheduled_tasks as t
   union all
  select f.id, f.queue, f.task_type, f.payload, f.status, f.priority, f.run_at, f.attempt,
         f.max_attempts, f.claim_token, f.claimed_by, f.claimed_at, f.lease_expires_at,
         f.unique_key, f.concurrency_key, f.cancel_requested_at, f.last_error, f.created_at,
         f.finished_at, f.result
    from pgsched.finished_tasks as f;

comment on view pgsched.tasks is 'Every task, live and finished; a task is in exactly one of both.';

revoke all on pgsched.tasks from public;
revoke all on type pgsched.tasks from public;
