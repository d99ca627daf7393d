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
  v_now timestamptz;
  v_cancelled boolean;
begin
  p_run_at := pgsched._run_at(p_run_at);

  perform pg_advisory_xact_lock(1337, (p_id % 2147483647)::integer);
  select t.cancel_requested_at is not null
    into v_cancelled
    from pgsched.scheduled_tasks as t
   where t.id = p_id and t.claim_token = p_claim_token
     for update;
  if not found then
    perform pgsched._raise_not_current(p_id, p_claim_token);
  end if;

  v_now := clock_timestamp();
  if v_cancelled then
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
