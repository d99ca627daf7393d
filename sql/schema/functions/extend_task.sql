create function pgsched.extend_task(
    p_id bigint,
    p_claim_token uuid,
    p_lease interval default '5 minutes')
  returns timestamptz
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set enable_seqscan = off
as $$
declare
  v_lease_seconds double precision := pgsched._lease_seconds(p_lease);
  v_lease_expires_at timestamptz;
begin
  -- The row first, which may have to wait, and then the clock.
  perform from pgsched.scheduled_tasks as t
    where t.id = p_id and t.claim_token = p_claim_token
      for no key update;
  if not found then
    perform pgsched._raise_not_current(p_id, p_claim_token);
  end if;

  update pgsched.scheduled_tasks as t
     set lease_expires_at =
           greatest(t.lease_expires_at,
                    clock_timestamp() + v_lease_seconds * interval '1 second')
   where t.id = p_id
  returning t.lease_expires_at into v_lease_expires_at;
  return v_lease_expires_at;
end;
$$;

comment on function pgsched.extend_task is
  'Moves the end of a lease to p_lease from now, never to an earlier time, and returns it. Waits '
  'for another transaction that changes the task; extend_tasks does not, and also tells when a '
  'cancel was requested. Raises TS400, TS404 (no such task), TS409 (claim not current).';

revoke all on function pgsched.extend_task from public;
