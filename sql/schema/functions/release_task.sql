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
  v_fault text[] := pgsched._run_at_fault(p_run_at);
begin
  if v_fault is not null then
    raise exception using errcode = 'TS400', message = 'p_' || v_fault[1], hint = v_fault[2];
  end if;
  perform pgsched._lock_claim(p_id, p_claim_token);
  perform pgsched._release_claims(array[p_id], array[p_run_at]);
end;
$$;

comment on function pgsched.release_task is
  'Gives a claim back: the task is queued again, due at p_run_at (null or past: now), and the '
  'attempt is not counted. If a cancel was requested it ends cancelled instead. '
  'Raises TS400, TS404 (no such task), TS409 (claim not current: nothing was changed).';

revoke all on function pgsched.release_task from public;
