-- What observers look at. All run inside functions that pin search_path.

create function pgsched._live_workers()
  returns setof pgsched.workers
  language sql
  stable
as $$
  with clock as materialized (
    select clock_timestamp() as now)
  select w.*
    from pgsched.workers as w
    join clock as c on w.seen_at > c.now - interval '2 minutes'
$$;

comment on function pgsched._live_workers is
  'Workers that called register_worker within 2 minutes; they do so about every minute.';

revoke all on function pgsched._live_workers from public;

create function pgsched._running()
  returns table (claimed_by text, tasks bigint, overdue bigint)
  language sql
  stable
  set enable_seqscan = off
  set jit = off
as $$
  with clock as materialized (
    select clock_timestamp() as now)
  select t.claimed_by, count(*),
         count(*) filter (where t.lease_expires_at < c.now - interval '1 minute')
    from pgsched.scheduled_tasks as t
   cross join clock as c
   where t.status = 'processing'
   group by t.claimed_by
$$;

comment on function pgsched._running is
  'How many tasks are claimed in each worker''s name now, and of how many the lease ended more '
  'than a minute ago, so that they should have been reaped.';

revoke all on function pgsched._running from public;

-- A session that only vacuums holds back no other vacuum. Prepared transactions have no session,
-- and replication slots keep a snapshot for a standby that may be gone; of a slot, of a walsender
-- and of sessions that the owner of the schema may not look into, the age in seconds is unknown.
create function pgsched._snapshots()
  returns table (holder text, cure text, age interval, transactions integer)
  language sql
  stable
as $$
  select format('%s %s (role %L, application %L)',
                case when a.datid is null then 'Walsender' else 'Session' end,
                a.pid, a.usename, a.application_name),
         case when a.datid is null then 'The standby that it serves has an old transaction: end it.'
              else format('End its transaction; if need be: select pg_terminate_backend(%s)', a.pid)
         end,
         clock_timestamp() - a.xact_start,
         greatest(age(a.backend_xid), age(a.backend_xmin))
    from pg_stat_activity as a
   where (a.backend_xid is not null or a.backend_xmin is not null)
     and (a.datname = current_database() or a.datid is null)
     and a.pid <> pg_backend_pid()
     and a.leader_pid is null
     and not exists (select from pg_stat_progress_vacuum as v where v.pid = a.pid)
   union all
  select format('Prepared transaction %L (role %L)', p.gid, p.owner),
         format('Commit it, or roll it back: rollback prepared %L', p.gid),
         clock_timestamp() - p.prepared,
         age(p.transaction)
    from pg_prepared_xacts as p
   where p.database = current_database()
   union all
  select format('Replication slot %L (%s)', s.slot_name,
                case when s.active then 'in use' else 'not in use' end),
         case when s.active then 'The standby that uses it has an old transaction: end it.'
              else format('If it is forgotten: select pg_drop_replication_slot(%L)', s.slot_name)
         end,
         null,
         age(s.xmin)
    from pg_replication_slots as s
   where s.xmin is not null
$$;

comment on function pgsched._snapshots is
  'Who keeps vacuum from removing rows of this database that died since; age: for how long, null '
  'where that is unknown; transactions: how many have begun since.';

revoke all on function pgsched._snapshots from public;
