-- How a claim ends other than by completion, which has its own statement for speed.

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

create function pgsched._raise_not_current(p_id bigint, p_claim_token uuid)
  returns void
  language plpgsql
  stable
as $$
begin
  if p_id is null or p_claim_token is null then
    raise exception using
      errcode = 'TS400',
      message = 'p_id and p_claim_token must not be null',
      hint = 'Give the id and the claim_token that claim_task returned.';
  end if;
  if exists (select from pgsched.scheduled_tasks as t where t.id = p_id)
     or exists (select from pgsched.finished_tasks as f where f.id = p_id) then
    raise exception using
      errcode = 'TS409',
      message = format('this claim of task %s is not current', p_id),
      hint = 'The claim was completed, failed or released, or its lease ended and the task was '
             'reaped. Drop the work: another worker may have the task.';
  end if;
  raise exception using
    errcode = 'TS404',
    message = format('there is no task %s', p_id),
    hint = 'The id is wrong, or the finished task has been deleted.';
end;
$$;

comment on function pgsched._raise_not_current is
  'Explains why no row matched an id and token: TS400 for a null, TS409 for a claim that is over, '
  'TS404 for an unknown task.';

revoke all on function pgsched._raise_not_current from public;

-- The task's lock first, waiting for it, then its row, if the claim is current.
create function pgsched._lock_claim(p_id bigint, p_claim_token uuid)
  returns pgsched.scheduled_tasks
  language plpgsql
as $$
declare
  v_task pgsched.scheduled_tasks;
begin
  perform pg_advisory_xact_lock(1337, (p_id % 2147483647)::integer);
  select t.*
    into v_task
    from pgsched.scheduled_tasks as t
   where t.id = p_id and t.claim_token = p_claim_token
     for update;
  if not found then
    perform pgsched._raise_not_current(p_id, p_claim_token);
  end if;
  return v_task;
end;
$$;

comment on function pgsched._lock_claim is
  'The task of a current claim, locked until the caller''s transaction ends; else TS400, TS404 or '
  'TS409.';

revoke all on function pgsched._lock_claim from public;
