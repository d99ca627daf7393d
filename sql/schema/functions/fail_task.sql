create function pgsched.fail_task(
    p_id bigint,
    p_claim_token uuid,
    p_error text,
    p_retry_in interval default null,
    p_permanent boolean default false)
  returns table (status text, run_at timestamptz)
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set enable_seqscan = off
as $$
#variable_conflict use_column
declare
  v_retry_seconds double precision := pgsched._delay_seconds('p_retry_in', p_retry_in);
begin
  if p_permanent is null then
    raise exception using
      errcode = 'TS400',
      message = 'p_permanent must not be null',
      hint = 'Give true or false.';
  end if;
  perform pgsched._lock_claim(p_id, p_claim_token);
  return query
  select e.status, e.run_at
    from pgsched._end_attempts(
           array[p_id], array[p_error], array[v_retry_seconds], array[p_permanent]) as e;
end;
$$;

comment on function pgsched.fail_task is
  'Ends a claim without success. queued: the next attempt is at run_at, after p_retry_in (0 to '
  '365 days) or the backoff of the queue; failed: attempts used up, or p_permanent; cancelled: a '
  'cancel was requested; run_at is null for these two. p_error is kept to 8 KiB. '
  'Raises TS400, TS404 (no such task), TS409 (claim not current: nothing was changed).';

revoke all on function pgsched.fail_task from public;
