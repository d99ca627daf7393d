-- What diagnose finds, by subject; a check that finds nothing has no row. All run inside functions
-- that pin search_path, and only read.

create function pgsched._spelled(p_age interval)
  returns text
  language sql
  immutable
  strict
as $$
  select case when a.seconds < 120 then floor(a.seconds) || ' seconds'
              when a.seconds < 7200 then floor(a.seconds / 60) || ' minutes'
              when a.seconds < 172800 then floor(a.seconds / 3600) || ' hours'
              else floor(a.seconds / 86400) || ' days'
         end
    from (select greatest(date_part('epoch', p_age), 0) as seconds) as a
$$;

comment on function pgsched._spelled is
  'A length of time in words, in one unit.';

revoke all on function pgsched._spelled from public;

create function pgsched._tasks(p_tasks bigint)
  returns text
  language sql
  immutable
as $$
  select case when p_tasks = 1 then '1 task'
              when p_tasks >= 10000 then '10000 or more tasks'
              else p_tasks || ' tasks'
         end
$$;

comment on function pgsched._tasks is
  'So many tasks, in words; counts of queue_stats stop at 10000.';

revoke all on function pgsched._tasks from public;

create function pgsched._find_damage()
  returns table (check_name text, level text, finding text, advice text)
  language sql
  stable
as $$
  select 'objects', 'error', format('Index %s is missing.', n.name),
         'Create it again, with its statement from pgsched sql: without it calls are slow or wrong.'
    from unnest(array[
           'queues_pkey', 'scheduled_tasks_pkey', 'scheduled_tasks_claim_idx',
           'scheduled_tasks_processing_idx', 'scheduled_tasks_unique_key_idx',
           'finished_tasks_pkey', 'finished_tasks_finished_at_idx', 'workers_pkey',
           'workers_name_key', 'listeners_pkey', 'listeners_worker_id_idx', 'claim_marks_pkey',
           'claim_readings_pkey']) as n (name)
   where to_regclass('pgsched.' || n.name) is null
   union all
  select 'objects', 'error', format('Index %s is not valid.', c.relname),
         format(case when c.relname ~ '_cc(new|old)[0-9]*$'
                     then 'A reindex was broken off: drop index concurrently pgsched.%I'
                     else 'Build it again: reindex index concurrently pgsched.%I'
                end, c.relname)
    from pg_index as i
    join pg_class as c on c.oid = i.indexrelid
   where c.relnamespace = 'pgsched'::regnamespace and not (i.indisvalid and i.indisready)
   union all
  select 'objects', 'error',
         format('Table %s is unlogged: a crash of the server empties it.', c.relname),
         format('alter table pgsched.%I set logged', c.relname)
    from pg_class as c
   where c.relnamespace = 'pgsched'::regnamespace and c.relkind = 'r' and c.relpersistence = 'u'
   union all
  select 'objects', 'error',
         format('%s of %s, not of %s, who owns the schema: %s.',
                case count(*) when 1 then '1 object is' else count(*) || ' objects are' end,
                o.owner::regrole, n.nspowner::regrole,
                array_to_string((array_agg(o.name order by o.name))[:3], ', ')),
         format('alter %s owner to %s%s', min(o.name), n.nspowner::regrole,
                case when count(*) > 1 then '; and so on' else '' end)
    from (select 'table ' || c.oid::regclass, c.relowner, c.relnamespace
            from pg_class as c
           where c.relkind in ('r', 'v')
           union all
          select 'routine ' || p.oid::regprocedure, p.proowner, p.pronamespace
            from pg_proc as p) as o (name, owner, namespace)
    join pg_namespace as n on n.oid = o.namespace and n.nspowner <> o.owner
   where n.nspname = 'pgsched'
   group by o.owner, n.nspowner
   union all
  select 'objects', 'error',
         format('Ids of %s are given again: %s is there, and the next one is %s.',
                h.name, h.id, coalesce(q.last_value, 0) + 1),
         -- Those that were deleted may have been higher.
         format('select setval(%L, %s)', 'pgsched.' || h.sequence,
                least(h.id::numeric + 1000000, 9223372036854775807))
    from (values
      ('tasks', 'scheduled_tasks_id_seq', greatest(
         (select max(t.id) from pgsched.scheduled_tasks as t),
         (select max(f.id) from pgsched.finished_tasks as f))),
      ('workers', 'workers_id_seq', (select max(w.id) from pgsched.workers as w))
      ) as h (name, sequence, id)
    join pg_sequences as q on q.schemaname = 'pgsched' and q.sequencename = h.sequence
   where h.id > coalesce(q.last_value, 0)
   union all
  select 'vacuum', 'error', format('Autovacuum is switched off for table %s.', c.relname),
         format('alter table pgsched.%I reset (autovacuum_enabled)', c.relname)
    from pg_class as c
   cross join pg_options_to_table(c.reloptions) as o
   where c.relnamespace = 'pgsched'::regnamespace
     and o.option_name = 'autovacuum_enabled' and not o.option_value::boolean
   union all
  select 'vacuum', 'warning',
         format('scheduled_tasks has %s dead rows, which take room and time; autovacuum %s.',
                s.n_dead_tup,
                coalesce('came ' || pgsched._spelled(clock_timestamp() - s.last_autovacuum)
                         || ' ago', 'has not come yet')),
         'End what the check snapshots shows, if anything; then vacuum pgsched.scheduled_tasks. '
         'If it comes back, give autovacuum more workers or a lower autovacuum_vacuum_cost_delay.'
    from pg_stat_all_tables as s
   where s.relid = 'pgsched.scheduled_tasks'::regclass and s.n_dead_tup > 50000
$$;

comment on function pgsched._find_damage is
  'What is wrong with the tables, indexes and sequences, and whether vacuum keeps up.';

revoke all on function pgsched._find_damage from public;

-- A restore without privileges leaves PUBLIC what PostgreSQL gives it, EXECUTE; default privileges
-- of the role that restores may give more. Rights on the types of rows no dump keeps.
create function pgsched._find_rights()
  returns table (check_name text, level text, finding text, advice text)
  language sql
  stable
as $$
  select 'public', r.level,
         format('PUBLIC has rights on %s (%s), and so has every role that may use the schema.',
                r.kind, r.objects),
         format('revoke all on %s from public', r.what)
    from (
      select 'warning', 'functions', count(*), 'all routines in schema pgsched'
        from pg_proc as p
       where p.pronamespace = 'pgsched'::regnamespace
         and has_function_privilege('public', p.oid, 'execute')
       union all
      select 'warning', 'tables', count(*), 'all tables in schema pgsched'
        from pg_class as c
       where c.relnamespace = 'pgsched'::regnamespace and c.relkind in ('r', 'v')
         and has_table_privilege(
               'public', c.oid,
               'select, insert, update, delete, truncate, references, trigger')
       union all
      select 'warning', 'sequences', count(*), 'all sequences in schema pgsched'
        from pg_class as c
       where c.relnamespace = 'pgsched'::regnamespace
         and case when c.relkind = 'S'
                  then has_sequence_privilege('public', c.oid, 'usage, select, update')
             end
       union all
      select 'note', 'row types', count(*),
             'type ' || string_agg(format('pgsched.%I', c.relname), ', ' order by c.relname)
        from pg_class as c
       where c.relnamespace = 'pgsched'::regnamespace and c.relkind in ('r', 'v')
         and has_type_privilege('public', c.reltype, 'usage')) as r (level, kind, objects, what)
   where r.objects > 0
$$;

comment on function pgsched._find_rights is
  'What PUBLIC may do, and should not.';

revoke all on function pgsched._find_rights from public;

create function pgsched._find_snapshots()
  returns table (check_name text, level text, finding text, advice text)
  language sql
  stable
as $$
  select 'snapshots',
         case when s.age > interval '10 minutes' or s.transactions > 1000000 then 'warning'
              else 'note' end,
         format('%s has kept vacuum from removing dead rows for %s and %s transactions.',
                s.holder, coalesce(pgsched._spelled(s.age), 'a time that cannot be seen'),
                s.transactions),
         s.cure
    from pgsched._snapshots() as s
   where s.age > interval '1 minute' or s.transactions > 100000
   union all
  select 'snapshots', 'note',
         'How long transactions of other roles have been open cannot be seen: an old one is found '
         'when 100000 have begun since.',
         format('grant pg_read_all_stats to %I', current_user)
   where not pg_has_role('pg_read_all_stats', 'usage')
$$;

comment on function pgsched._find_snapshots is
  'Who has kept vacuum from removing dead rows for more than a minute, or 100000 transactions, and '
  'whether the owner of the schema can see that.';

revoke all on function pgsched._find_snapshots from public;

-- As they are in the session of the caller: a role and a database may have values of their own.
create function pgsched._find_settings()
  returns table (check_name text, level text, finding text, advice text)
  language sql
  stable
as $$
  select 'settings', s.level, s.finding, s.advice
    from (values
      (current_setting('fsync') = 'off', 'error',
       'fsync is off: a crash of the machine may destroy the database.',
       'Set fsync = on in postgresql.conf and reload.'),
      (current_setting('full_page_writes') = 'off', 'error',
       'full_page_writes is off: a crash of the machine may destroy the database.',
       'Set full_page_writes = on in postgresql.conf and reload.'),
      (current_setting('synchronous_commit') = 'off', 'warning',
       'synchronous_commit is off: a crash of the server loses the last commits, so tasks are lost '
       'or run again.',
       'Set synchronous_commit = on, or live with it.'),
      (current_setting('autovacuum') = 'off', 'error',
       'autovacuum is off: dead rows pile up, and claims get slower and slower.',
       'Set autovacuum = on and reload.'),
      (current_setting('track_counts') = 'off', 'error',
       'track_counts is off: autovacuum never learns that there is work.',
       'Set track_counts = on and reload.'),
      (current_setting('default_transaction_read_only') = 'on', 'warning',
       'default_transaction_read_only is on: nothing can be added, claimed or completed.',
       'Connect to the server, or as the role, that may write.'),
      (current_setting('default_transaction_isolation') <> 'read committed', 'warning',
       format('default_transaction_isolation is %s: calls may end with 40001, to be tried again.',
              current_setting('default_transaction_isolation')),
       'Leave it at read committed for the roles of workers and producers.'),
      (current_setting('statement_timeout')::interval between '1 ms' and '1999 ms', 'warning',
       format('statement_timeout is %s: retention and long claims are cut off.',
              current_setting('statement_timeout')),
       'Give the roles of workers 5 seconds or more.'),
      (current_setting('lock_timeout')::interval between '1 ms' and '99 ms', 'warning',
       format('lock_timeout is %s: calls fail that would wait for a moment only.',
              current_setting('lock_timeout')),
       'Give the roles of workers and producers 1 second or more.'),
      (current_setting('idle_in_transaction_session_timeout')::interval
         between '1 ms' and '4999 ms', 'warning',
       format('idle_in_transaction_session_timeout is %s: handlers in a transaction are ended.',
              current_setting('idle_in_transaction_session_timeout')),
       'Give the roles of workers more than a handler goes without a statement.'),
      (current_setting('idle_in_transaction_session_timeout')::interval = '0', 'note',
       'idle_in_transaction_session_timeout is 0: nothing ends a forgotten transaction.',
       'Set it, to 10 minutes for example, for all roles whose transactions are short.'),
      (current_setting('transaction_timeout', true)::interval between '1 ms' and '59999 ms',
       'warning',
       format('transaction_timeout is %s: handlers in a transaction are ended.',
              current_setting('transaction_timeout', true)),
       'Give the roles of workers more than a handler takes.'),
      -- diagnose itself has switched jit off.
      (current_setting('jit_above_cost')::float between 0 and 9999
         and (select p.reset_val = 'on' from pg_settings as p where p.name = 'jit'),
       'note',
       format('jit_above_cost is %s: small statements are compiled, which takes longer than they '
              'do.', current_setting('jit_above_cost')),
       'Leave it at 100000, or set jit = off.')
    ) as s (is_so, level, finding, advice)
   where s.is_so
$$;

comment on function pgsched._find_settings is
  'Settings that lose tasks, or that make calls fail or slow.';

revoke all on function pgsched._find_settings from public;

create function pgsched._find_limits()
  returns table (check_name text, level text, finding text, advice text)
  language sql
  stable
as $$
  select 'limits', l.level, l.finding, l.advice
    from (select (select count(*)
                    from pg_stat_activity as a
                   where a.datid is not null and a.usesysid is not null) as sessions,
                 current_setting('max_connections')::integer
                   - current_setting('superuser_reserved_connections')::integer
                   - coalesce(current_setting('reserved_connections', true)::integer, 0) as places,
                 (select count(*) from pgsched._live_workers()) as workers,
                 current_setting('max_locks_per_transaction')::bigint
                   * (current_setting('max_connections')::integer
                      + current_setting('max_prepared_transactions')::integer) as locks) as c
   cross join lateral (values
      (c.sessions >= 0.9 * c.places, 'warning',
       format('%s of %s connections are in use: soon nobody else can connect.',
              c.sessions, c.places),
       'Put a pooler in front, run fewer processes, or increase max_connections and restart.'),
      (c.workers * 100 > c.locks, 'warning',
       format('%s workers may want %s locks at once, 100 each, and the server has room for %s: '
              'claims fail with out of shared memory.', c.workers, c.workers * 100, c.locks),
       format('Set max_locks_per_transaction to %s or more and restart.',
              ceil(c.workers * 100.0 * current_setting('max_locks_per_transaction')::integer
                   / c.locks)))
    ) as l (is_so, level, finding, advice)
   where l.is_so
   union all
  select 'standby', 'warning', 'This server is a standby: it can only be read.',
         'Connect to the primary server to add, run or change tasks.'
   where pg_is_in_recovery()
$$;

comment on function pgsched._find_limits is
  'Whether the server has room for more connections and locks, and may be written to.';

revoke all on function pgsched._find_limits from public;

create function pgsched._find_queues()
  returns table (check_name text, level text, finding text, advice text)
  language sql
  stable
as $$
  with stats as materialized (
    select s.*, pgsched._spelled(s.oldest_due_age) as since,
           exists (
             select from pgsched._live_workers() as w where s.queue = any (w.queues)) as served
      from pgsched.queue_stats() as s),
  served as materialized (
    select string_agg(distinct quote_literal(q.name), ', ') as queues
      from pgsched._live_workers() as w
     cross join unnest(w.queues) as q (name))
  select 'queues', 'warning',
         format('Queue %L has %s due, the oldest for %s, and no worker serves it.',
                s.queue, pgsched._tasks(s.due), s.since),
         format('Start a worker for this queue, or correct the queue''s name where tasks are '
                'added%s. If it is worked on from SQL, without register_worker, that has stopped '
                'or cannot keep up.', '; workers serve: ' || v.queues)
    from stats as s
   cross join served as v
   where not s.paused and not s.served and s.oldest_due_age > interval '1 minute'
   union all
  select 'queues', 'warning',
         format('Queue %L has %s due, the oldest for %s: its workers cannot keep up.',
                s.queue, pgsched._tasks(s.due), s.since),
         'Look at what runs and how long that takes; add workers, or let each do more at once.'
    from stats as s
   where not s.paused and s.served and s.oldest_due_age > interval '5 minutes'
   union all
  select 'queues', case when s.due > 0 then 'warning' else 'note' end,
         format('Queue %L is paused%s.', s.queue,
                case when s.due > 0 then format(', with %s due, the oldest for %s',
                                                pgsched._tasks(s.due), s.since) else '' end),
         format('When it may go on: select pgsched.resume_queue(%L)', s.queue)
    from stats as s
   where s.paused
   union all
  select 'dead letters', 'note',
         format('Queue %L has %s that failed for good; the last one, %s, %s ago.',
                s.queue, pgsched._tasks(s.failed), f.id,
                pgsched._spelled(clock_timestamp() - f.finished_at)),
         format('See why: select last_error from pgsched.get_task(%s). Then: '
                'select pgsched.retry_task(%1$s)', f.id)
    from stats as s
   cross join lateral (
         select f.id, f.finished_at
           from pgsched.finished_tasks as f
          where f.status = 'failed' and f.queue = s.queue
          order by f.status desc, f.queue desc, f.finished_at desc
          limit 1) as f
$$;

comment on function pgsched._find_queues is
  'Queues whose tasks wait for long or for ever, and those with dead letters.';

revoke all on function pgsched._find_queues from public;

create function pgsched._find_workers()
  returns table (check_name text, level text, finding text, advice text)
  language sql
  stable
as $$
  with lost as materialized (
    select w.name, w.running, pgsched._spelled(clock_timestamp() - w.seen_at) as since
      from pgsched.list_workers() as w
     where not exists (select from pgsched._live_workers() as l where l.id = w.id)),
  overdue as materialized (
    select sum(r.overdue)::bigint as tasks from pgsched._running() as r)
  select 'workers', 'warning',
         format('Worker %L was last seen %s ago, and holds %s.',
                l.name, l.since, pgsched._tasks(l.running)),
         'If it is frozen or cut off, restart it. Its tasks run again when their leases have ended.'
    from lost as l
   where l.running > 0
   union all
  select 'workers', 'note',
         format('%s went away without signing off, holding nothing.',
                case count(*) when 1 then '1 worker' else count(*) || ' workers' end),
         'They were killed, or crashed; after a day they are forgotten.'
    from lost as l
   where l.running = 0
  having count(*) > 0
   union all
  -- One that was found to be gone has none either, and stays suspect.
  select 'workers', 'note',
         case count(*) when 1 then '1 worker has no presence: if it dies, its tasks wait for their '
                                   'leases.'
                       else format('%s workers have no presence: if they die, their tasks wait for '
                                   'their leases.', count(*)) end,
         'Let their role call the procedure pgsched.hold_presence; behind a pooler, give them a '
         'listen_dsn that leads past it.'
    from pgsched._live_workers() as w
   where not w.presence and w.suspect_since is null
  having count(*) > 0
   union all
  select 'leases', 'warning',
         format('Nobody took back %s whose lease ended more than a minute ago: nobody reaps, or '
                'handlers hold them in open transactions.', pgsched._tasks(o.tasks)),
         'Where no Python worker runs, call every minute: select * from pgsched.maintain()'
    from overdue as o
   where o.tasks > 0
$$;

comment on function pgsched._find_workers is
  'Workers that are not seen any more or have no presence, and tasks that nobody takes back.';

revoke all on function pgsched._find_workers from public;
