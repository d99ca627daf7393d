-- The task's advisory lock is taken first: completion may stand at the end of the caller's own long
-- transaction, and the reaper then passes by. Id and token are checked by the statement that moves
-- the row, so that a claim which ended while this call waited changes nothing.
create function pgsched.complete_task(
    p_id bigint,
    p_claim_token uuid,
    p_result jsonb default null)
  returns boolean
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan
  set enable_seqscan = off
  set jit = off
as $$
declare
  v_completed boolean;
  v_finished record;
begin
  p_id := pgsched._lock_task(p_id);

  with ended as (
    delete from pgsched.scheduled_tasks as t
     where t.id = p_id and t.claim_token = p_claim_token
    returning t.*),
  kept as (
    insert into pgsched.finished_tasks (
           id, queue, task_type, payload, status, priority, run_at, attempt, max_attempts,
           claim_token, claimed_by, claimed_at, lease_expires_at, unique_key, concurrency_key,
           cancel_requested_at, last_error, created_at, finished_at, result)
    select e.id, e.queue, e.task_type, e.payload, 'completed', e.priority, e.run_at, e.attempt,
           e.max_attempts, e.claim_token, e.claimed_by, e.claimed_at, e.lease_expires_at,
           e.unique_key, e.concurrency_key, e.cancel_requested_at, e.last_error, e.created_at,
           clock_timestamp(), p_result
      from ended as e
     where not exists (
           select
             from pgsched.queues as q
            where q.name = e.queue and date_part('epoch', q.keep_completed) = 0))
  select exists (select from ended) into v_completed;
  if v_completed then
    return true;
  end if;

  -- Found by its id alone: whatever the statistics say, no other index is read.
  select f.claim_token, f.status into v_finished
    from pgsched.finished_tasks as f
   where f.id = p_id;
  if (v_finished.claim_token = p_claim_token and v_finished.status = 'completed') is not true then
    perform pgsched._raise_not_current(p_id, p_claim_token);
  end if;
  return false;
end;
$$;

comment on function pgsched.complete_task is
  'Ends a claim with success. True: completed now; false: this same claim had completed it '
  'already, where the queue keeps completed tasks. Part of the caller''s transaction; waits for '
  'another one that works on the same task. '
  'Raises TS400, TS404 (no such task), TS409 (claim not current: nothing was changed).';

revoke all on function pgsched.complete_task from public;
