-- How tasks end or come back, other than by completion, which has its own statement for speed.

create function pgsched._finish_tasks(
    p_ids bigint[], p_errors text[], p_status text, p_now timestamptz)
  returns void
  language sql
as $$
  with ended as (
    delete from pgsched.scheduled_tasks as t
     using unnest(p_ids, p_errors) as g (id, error)
     where t.id = g.id
    returning t.*, g.error)
  insert into pgsched.finished_tasks (
         id, queue, task_type, payload, status, priority, run_at, attempt, max_attempts,
         claim_token, claimed_by, claimed_at, lease_expires_at, unique_key, concurrency_key,
         cancel_requested_at, last_error, created_at, finished_at)
  select e.id, e.queue, e.task_type, e.payload, p_status, e.priority, e.run_at, e.attempt,
         e.max_attempts, e.claim_token, e.claimed_by, e.claimed_at, e.lease_expires_at,
         e.unique_key, e.concurrency_key, e.cancel_requested_at,
         coalesce(e.error, e.last_error), e.created_at, p_now
    from ended as e
$$;

comment on function pgsched._finish_tasks is
  'Moves tasks whose rows the caller has locked to finished_tasks as failed or cancelled; '
  'an error, one for each id, that is null keeps the last one.';

revoke all on function pgsched._finish_tasks from public;

create function pgsched._requeue_tasks(
    p_ids bigint[], p_errors text[], p_run_at timestamptz, p_uncount integer default 0)
  returns void
  language sql
as $$
  update pgsched.scheduled_tasks as t
     set status = 'queued', run_at = p_run_at, attempt = t.attempt - p_uncount,
         claim_token = null, claimed_by = null, claimed_at = null, lease_expires_at = null,
         last_error = coalesce(g.error, t.last_error)
    from unnest(p_ids, p_errors) as g (id, error)
   where t.id = g.id
$$;

comment on function pgsched._requeue_tasks is
  'Makes tasks whose rows the caller has locked queued again, their claim over; an error, one for '
  'each id, that is null keeps the last one; p_uncount 1 takes the claim back out of attempt.';

revoke all on function pgsched._requeue_tasks from public;
