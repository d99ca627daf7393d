-- Asked once a scrape: a look at shared memory and at a table of a few rows.
create function pgsched.server_stats()
  returns table (
    workers bigint, slots bigint, oldest_snapshot_age interval, in_recovery boolean)
  language sql
  stable
  security definer
  set search_path = pg_catalog, pg_temp
as $$
  select count(*), coalesce(sum(w.slots), 0)::bigint,
         coalesce((select max(s.age) from pgsched._snapshots() as s), '0'),
         pg_is_in_recovery()
    from pgsched._live_workers() as w
$$;

comment on function pgsched.server_stats is
  'One row about all of the server: workers that were seen within 2 minutes, and their slots; the '
  'age of the oldest transaction that keeps vacuum from removing dead rows of this database (zero: '
  'none that the owner of this function may see); whether the server is a standby.';

revoke all on function pgsched.server_stats from public;
