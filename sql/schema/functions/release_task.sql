create function pgsched.release_task(
    p_id bigint,
    p_claim_token uuid,
    p_run_at timestamptz default null)
  returns void
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set enable_seqscan = off
as $$
declare
  v_task pgsched.scheduled_tasks;
  v_now timestamptz;
begin
  p_run_at := pgsched._run_at(p_run_at);
  v_task := pgsched._lock_claim(p_id, p_claim_token);
  v_now := clock_timestamp();
  if v_task.cancel_requested_at is not null then
    perform pgsched._finish_tasks(array[p_id], array[null], 'cancelled', v_now);
  else
    perform pgsched._requeue_tasks(array[p_id], array[null], greatest(p_run_at, v_now), 1);
  end if;
end;
$$;

comment on function pgsched.release_task is
  'Gives a claim back: the task is queued again, due at p_run_at (null or past: now), and the '
  'attempt is not counted. If a cancel was requested it ends cancelled instead. '
  'Raises TS400, TS404 (no such task), TS409 (claim not current: nothing was changed).';

revoke all on function pgsched.release_task from public;
