-- The lock and nothing else. A row that is written here would pin the vacuum horizon for as long as
-- the worker lives, and one that is read would keep its table locked against migrations. A
-- procedure, since a select with a bound parameter would pin the horizon, too. It waits for a
-- session that still has the lock: the worker's own, that the server has not yet missed. Not for
-- ever, since the horizon is pinned meanwhile.
create procedure pgsched.hold_presence(p_worker_id bigint)
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set lock_timeout = '1 min'
as $$
begin
  if p_worker_id is null then
    raise exception using
      errcode = 'TS400',
      message = 'p_worker_id must not be null',
      hint = 'Give the id that register_worker returned.';
  end if;
  if pg_is_in_recovery() then
    perform pgsched._raise_read_only();
  end if;
  perform set_config(s.name, '0', true)
     from unnest(array['idle_in_transaction_session_timeout', 'transaction_timeout']) as s (name)
    where current_setting(s.name, true) is not null;
  perform pg_advisory_xact_lock(1339, (p_worker_id % 2147483647)::integer);
end;
$$;

comment on procedure pgsched.hold_presence is
  'Shows that a worker lives, until the caller''s transaction ends: begin isolation level read '
  'committed read only, this call, and then the session stays idle. No timeout ends it. The worker '
  'then registers with p_presence. When the transaction ends, by the worker''s death or otherwise, '
  'reap_stale needs not wait for its leases. Waits, for a minute at most, for a session that holds '
  'it. Raises TS400.';

revoke all on procedure pgsched.hold_presence from public;

-- Whoever waits for it lives, too: an open reap_stale may have it for a look.
create function pgsched._presences()
  returns setof oid
  language sql
  stable
as $$
  select l.objid
    from pg_locks as l
   where l.locktype = 'advisory' and l.classid = 1339 and l.objsubid = 2
     and l.mode = 'ExclusiveLock'
     and l.database = (select d.oid from pg_database as d where d.datname = current_database())
$$;

comment on function pgsched._presences is
  'The second lock keys of the workers whose presence a session of this database holds or waits '
  'for.';

revoke all on function pgsched._presences from public;
