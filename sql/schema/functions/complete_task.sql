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
  v_task record;
  v_finished record;
begin
  p_id := pgsched._lock_task(p_id);

  delete from pgsched.scheduled_tasks as t
   where t.id = p_id and t.claim_token = p_claim_token
  returning t.*, (
            select date_part('epoch', q.keep_completed)
              from pgsched.queues as q
             where q.name = t.queue) is distinct from 0 as kept
    into v_task;
  if found then
    if v_task.kept then
      insert into pgsched.finished_tasks (
             id, queue, task_type, payload, status, priority, run_at, attempt, max_attempts,
             claim_token, claimed_by, claimed_at, lease_expires_at, unique_key, concurrency_key,
             cancel_requested_at, last_error, created_at, finished_at, result)
      values (v_task.id, v_task.queue, v_task.task_type, v_task.payload, 'completed',
             v_task.priority, v_task.run_at, v_task.attempt, v_task.max_attempts,
             v_task.claim_token, v_task.claimed_by, v_task.claimed_at, v_task.lease_expires_at,
             v_task.unique_key, v_task.concurrency_key, v_task.cancel_requested_at,
             v_task.last_error, v_task.created_at, clock_timestamp(), p_result);
    end if;
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
