-- Takes the advisory lock and nothing else: a row lock would make leases of the process wait, and a
-- change of the row would give the caller's own completion a serialization failure.
create function pgsched.hold_task(p_id bigint, p_claim_token uuid)
  returns void
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set enable_seqscan = off
as $$
begin
  p_id := pgsched._lock_task(p_id);
  if not exists (
    select from pgsched.scheduled_tasks as t
     where t.id = p_id and t.claim_token = p_claim_token) then
    perform pgsched._raise_not_current(p_id, p_claim_token);
  end if;
  -- A client whose network is gone would keep the task for hours otherwise; now 25 seconds.
  perform set_config('tcp_keepalives_idle', '10', true),
          set_config('tcp_keepalives_interval', '5', true),
          set_config('tcp_keepalives_count', '3', true),
          set_config('tcp_user_timeout', '25000', true);
end;
$$;

comment on function pgsched.hold_task is
  'Keeps a claim, also past its lease, until the caller''s transaction ends: the first statement '
  'of a transaction that does the work and calls complete_task at its end. Waits for another '
  'transaction that works on the same task. '
  'Raises TS400, TS404 (no such task), TS409 (claim not current).';

revoke all on function pgsched.hold_task from public;
