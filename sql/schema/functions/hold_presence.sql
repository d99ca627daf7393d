-- The lock and nothing else: written here, a row would pin the vacuum horizon for as long as the
-- worker lives. A procedure, since a select with a bound parameter would pin it, too. It waits for
-- a session that still has the lock: the worker's own, that the server has not yet missed.
create procedure pgsched.hold_presence(p_worker_id bigint)
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
as $$
begin
  if not exists (select from pgsched.workers as w where w.id = p_worker_id) then
    raise exception using
      errcode = 'TS404',
      message = format('there is no worker %s', coalesce(p_worker_id::text, 'null')),
      hint = 'Call register_worker first, and again when its row was deleted.';
  end if;
  perform set_config(s.name, '0', true)
     from pg_settings as s
    where s.name in ('idle_in_transaction_session_timeout', 'transaction_timeout');
  perform pg_advisory_xact_lock(1339, (p_worker_id % 2147483647)::integer);
end;
$$;

comment on procedure pgsched.hold_presence is
  'Shows that a worker lives, until the caller''s transaction ends: begin isolation level read '
  'committed read only, this call, and then the session stays idle. No timeout ends it. The worker '
  'then registers with p_presence. When the transaction ends, by the worker''s death or otherwise, '
  'reap_stale needs not wait for its leases. Raises TS404 (no such worker).';

revoke all on procedure pgsched.hold_presence from public;
