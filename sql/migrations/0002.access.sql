-- Rights by purpose: grant_access gives a role what a producer, worker, observer or admin calls.
-- depends: 0001.initial

-- Default privileges may have given PUBLIC something. Whoever may use the type of a row can make an
-- object that hinders changes of the table.
revoke all on schema pgsched from public;
revoke all on all tables in schema pgsched from public;
revoke all on all sequences in schema pgsched from public;
revoke all on type pgsched.queues, pgsched.scheduled_tasks, pgsched.finished_tasks, pgsched.workers,
  pgsched.listeners, pgsched.tasks from public;

-- Functions, as in sql/schema/functions/: make migration writes what follows.

-- Checks that several functions share. A fault is an array of message and hint, or null; these are
-- single expressions, which the planner inlines. The others return the checked value, since
-- PL/pgSQL evaluates an assignment several times faster than a perform. All run inside functions
-- that pin search_path. Arguments may bring a collation that no regular expression takes.

create or replace function pgsched._name_fault(p_argument text, p_value text)
  returns text[]
  language sql
  immutable
as $$
  select case
           when (octet_length(p_value) between 1 and 63
                 and p_value collate "default" !~ '[[:cntrl:]]') is not true
           then array[
                  p_argument || ' is not a valid name: '
                    || coalesce(quote_literal(left(p_value, 80)), 'null'),
                  'Give 1 to 63 bytes without control characters.']
         end
$$;

comment on function pgsched._name_fault is
  'Null if the value is 1 to 63 bytes without control characters; else what is wrong, and a hint.';

revoke all on function pgsched._name_fault from public;

create or replace function pgsched._name(p_argument text, p_value text)
  returns text
  language plpgsql
  immutable
as $$
declare
  v_fault text[] := pgsched._name_fault(p_argument, p_value);
begin
  if v_fault is not null then
    raise exception using errcode = 'TS400', message = v_fault[1], hint = v_fault[2];
  end if;
  return p_value;
end;
$$;

comment on function pgsched._name is
  'The value, if it is 1 to 63 bytes without control characters; else TS400 naming the argument.';

revoke all on function pgsched._name from public;

-- Seconds, not an interval, so that neither a month's length nor a clock change bends a lease.
create or replace function pgsched._lease_seconds(p_lease interval)
  returns double precision
  language plpgsql
  immutable
as $$
declare
  v_seconds double precision := date_part('epoch', p_lease);
begin
  if (v_seconds between 1 and 86400) is not true then
    raise exception using
      errcode = 'TS400',
      message = format('p_lease is not a valid lease: %s', coalesce(p_lease::text, 'null')),
      hint = 'Give 1 second to 24 hours.';
  end if;
  return v_seconds;
end;
$$;

comment on function pgsched._lease_seconds is
  'Length of a lease in seconds; TS400 unless it is 1 second to 24 hours.';

revoke all on function pgsched._lease_seconds from public;

create or replace function pgsched._delay_seconds(p_argument text, p_value interval)
  returns double precision
  language plpgsql
  immutable
as $$
declare
  v_seconds double precision := date_part('epoch', p_value);
begin
  if not v_seconds between 0 and 31536000 then
    raise exception using
      errcode = 'TS400',
      message = format('%s is out of range: %s', p_argument, p_value),
      hint = 'Give 0 seconds to 365 days, or null.';
  end if;
  return v_seconds;
end;
$$;

comment on function pgsched._delay_seconds is
  'A wait in seconds; TS400 naming the argument unless it is null or 0 to 365 days.';

revoke all on function pgsched._delay_seconds from public;

-- Years of five digits are where clients stop reading timestamps (Python's datetime ends at 9999).
create or replace function pgsched._run_at_fault(p_value timestamptz)
  returns text[]
  language sql
  stable
as $$
  select case
           when p_value = '-infinity' or p_value >= '9999-01-01 00:00:00+00'
           then array['run_at is out of range: ' || p_value::text,
                      'Give a time before the year 9999, or null for now.']
         end
$$;

comment on function pgsched._run_at_fault is
  'Null if the value is null or a time before the year 9999; else what is wrong, and a hint.';

revoke all on function pgsched._run_at_fault from public;

create or replace function pgsched._priority_fault(p_value numeric)
  returns text[]
  language sql
  immutable
as $$
  select case
           when (p_value between 0 and 9 and p_value % 1 = 0) is not true
           then array['priority is out of range: ' || coalesce(left(p_value::text, 80), 'null'),
                      'Give 0 (first) to 9 (last).']
         end
$$;

comment on function pgsched._priority_fault is
  'Null if the value is 0 to 9 without a fraction; else what is wrong, and a hint.';

revoke all on function pgsched._priority_fault from public;

-- Numbers are numeric since JSON's are.
create or replace function pgsched._task_fault(
    p_task_type text, p_payload_bytes integer, p_queue text, p_run_at timestamptz,
    p_priority numeric, p_max_attempts numeric, p_unique_key text, p_concurrency_key text,
    p_max_payload_bytes integer)
  returns text[]
  language sql
  stable
as $$
  select coalesce(
           pgsched._name_fault('task_type', p_task_type),
           pgsched._name_fault('queue', p_queue),
           case when p_unique_key is not null then
             pgsched._name_fault('unique_key', p_unique_key) end,
           case when p_concurrency_key is not null then
             pgsched._name_fault('concurrency_key', p_concurrency_key) end,
           pgsched._run_at_fault(p_run_at),
           pgsched._priority_fault(p_priority),
           case when p_max_attempts not between 1 and 2147483647 or p_max_attempts % 1 <> 0 then
             array['max_attempts is out of range: ' || left(p_max_attempts::text, 80),
                   'Give at least 1, or null for the default of the queue.'] end,
           case when p_payload_bytes is null then
             array['payload must not be null', 'Give JSON.'] end,
           case when p_payload_bytes > p_max_payload_bytes then
             array['payload is ' || p_payload_bytes || ' bytes long, the limit of the queue is '
                     || p_max_payload_bytes,
                   'Store large data elsewhere and enqueue a reference to it.'] end)
$$;

comment on function pgsched._task_fault is
  'Null for a task that may be added; else what is wrong, beginning with the field, and a hint.';

revoke all on function pgsched._task_fault from public;

create or replace function pgsched._check_batch(p_ids bigint[], p_claim_tokens uuid[])
  returns void
  language plpgsql
  immutable
as $$
begin
  if (cardinality(p_ids) = cardinality(p_claim_tokens)
      and coalesce(array_ndims(p_ids), 1) = 1
      and coalesce(array_ndims(p_claim_tokens), 1) = 1
      and array_position(p_ids, null) is null
      and array_position(p_claim_tokens, null) is null) is not true then
    raise exception using
      errcode = 'TS400',
      message = 'p_ids and p_claim_tokens do not pair up',
      hint = 'Give two arrays of one dimension and equal length without nulls.';
  end if;
end;
$$;

comment on function pgsched._check_batch is
  'Raises TS400 unless both arrays have one dimension, equal length and no null.';

revoke all on function pgsched._check_batch from public;

create or replace function pgsched._check_column(p_argument text, p_values anyarray, p_ids bigint[])
  returns void
  language plpgsql
  immutable
as $$
begin
  if cardinality(p_values) <> cardinality(p_ids) or array_ndims(p_values) > 1 then
    raise exception using
      errcode = 'TS400',
      message = format('p_ids and %s do not pair up', p_argument),
      hint = 'Give one value for each id, null for none, or null instead of the array.';
  end if;
end;
$$;

comment on function pgsched._check_column is
  'Raises TS400 unless the array is null or has one dimension and as many values as there are ids.';

revoke all on function pgsched._check_column from public;

create or replace function pgsched.notify_channel(p_queue text)
  returns text
  language sql
  immutable
  security definer
  set search_path = pg_catalog, pg_temp
as $$
  -- An argument may bring a collation by which other names have the same hash.
  select 'pgsched_'
         || to_hex(hashtextextended(pgsched._name('p_queue', p_queue) collate "default", 0))
$$;

comment on function pgsched.notify_channel is
  'The channel to LISTEN to for new tasks of a queue: a hash, since a name of 63 bytes leaves no '
  'room for a prefix. A listener says so by register_listener. Raises TS400.';

revoke all on function pgsched.notify_channel from public;

create or replace function pgsched._notify(p_queues text[])
  returns void
  language sql
as $$
  select pg_notify(pgsched.notify_channel(l.queue), '')
    from (select distinct s.queue
            from pgsched.listeners as s
           where s.queue = any (p_queues)) as l
    left join pgsched.queues as q on q.name = l.queue
   where coalesce(q.notify, true)
$$;

comment on function pgsched._notify is
  'Wakes the listeners of these queues when the caller''s transaction commits.';

revoke all on function pgsched._notify from public;

create or replace function pgsched.register_listener(p_worker_id bigint, p_queues text[])
  returns void
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set enable_seqscan = off
  set lock_timeout = '200 ms'
as $$
begin
  perform pgsched._name('p_queues', q.name) from unnest(p_queues) as q (name);
  if p_queues is null or array_ndims(p_queues) > 1 then
    raise exception using
      errcode = 'TS400',
      message = 'p_queues is not a list of queues',
      hint = 'Give the queues that the worker listens for, an empty array for none.';
  end if;
  perform from pgsched.workers as w where w.id = p_worker_id for key share;
  if not found then
    raise exception using
      errcode = 'TS404',
      message = format('there is no worker %s', coalesce(p_worker_id::text, 'null')),
      hint = 'Call register_worker first, and again when its row was deleted.';
  end if;

  delete from pgsched.listeners as l
   where l.worker_id = p_worker_id and l.queue <> all (p_queues collate "default");
  insert into pgsched.listeners (queue, worker_id)
  select distinct q.name, p_worker_id
    from unnest(p_queues collate "default") as q (name)
   order by q.name
      on conflict do nothing;
end;
$$;

comment on function pgsched.register_listener is
  'Says for which queues a registered worker listens now, on notify_channel of each; an empty '
  'array: for none. Enqueuing then sends a NOTIFY to these queues. A row ends with its worker''s. '
  'Raises TS400, TS404 (no such worker).';

revoke all on function pgsched.register_listener from public;

create or replace function pgsched.register_worker(
    p_name text, p_queues text[], p_slots integer, p_presence boolean default false)
  returns bigint
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
as $$
declare
  v_now timestamptz := clock_timestamp();
  v_id bigint;
begin
  p_name := pgsched._name('p_name', p_name);
  perform pgsched._name('p_queues', q.name) from unnest(p_queues) as q (name);
  if (array_ndims(p_queues) = 1 and p_slots >= 1 and p_presence is not null) is not true then
    raise exception using
      errcode = 'TS400',
      message = 'p_queues is not a list of queues, p_slots is below 1, or p_presence is null',
      hint = 'Give the queues that the worker serves, how many tasks it runs at once, and whether '
             'it holds its presence.';
  end if;

  -- Not by an upsert, which would wait for an open reap_stale that suspects this worker, and the
  -- worker's leases with it. A presence counts where it is to be seen: not that of another server
  -- or database, and not that of the id that the worker had before its row was deleted.
  select w.id into v_id
    from pgsched.workers as w
   where w.name = p_name collate "default"
     for no key update nowait;
  if found then
    update pgsched.workers as w
       set queues = p_queues, slots = p_slots, seen_at = v_now, suspect_since = null,
           presence = p_presence
                      and (w.id % 2147483647)::integer::oid in (select pgsched._presences())
     where w.id = v_id;
  else
    insert into pgsched.workers as w (name, queues, slots, started_at, seen_at)
    values (p_name, p_queues, p_slots, v_now, v_now)
    on conflict (name) do update set seen_at = excluded.seen_at
    returning w.id into v_id;
  end if;

  -- A killed worker cannot sign off: nobody needs its row after a day, and nobody waits for its
  -- NOTIFY after 5 minutes. In this order, own row first, calls at the same time cannot deadlock.
  delete from pgsched.workers as w
   where w.id in (
         select o.id
           from pgsched.workers as o
          where o.seen_at < v_now - interval '1 day'
          order by o.id
            for update skip locked);
  delete from pgsched.listeners as l
   where (l.queue, l.worker_id) in (
         select o.queue, o.worker_id
           from pgsched.listeners as o
           join pgsched.workers as w on w.id = o.worker_id
          where w.seen_at < v_now - interval '5 minutes'
          order by o.queue, o.worker_id
            for update of o skip locked);
  return v_id;
end;
$$;

comment on function pgsched.register_worker is
  'Says that a worker process is there and returns the id of its row; a worker repeats it about '
  'every minute. p_presence: it holds its presence now (hold_presence), which is noted if a '
  'session of this database does; to be said at once when that changes. Deletes on the way who was '
  'not seen for a day, and listeners not seen for 5 minutes. Raises TS400, and 55P03 while another '
  'session has the row locked.';

revoke all on function pgsched.register_worker from public;

-- Status and lease are checked on the row as it is when it is locked; a row that somebody has
-- locked is passed by, and so is a task whose advisory lock cannot be had: somebody acts on it now.
-- The lock is re-entrant: what this very transaction holds has to be looked up, before any try.
-- The inner query locks row by row in id order, so the outer limit ends the work early, and tasks
-- that are held do not use up the limit; offset 0 keeps the try above it, on rows already locked.
create or replace function pgsched.reap_stale(p_limit integer default 1000)
  returns table (id bigint, status text)
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set enable_seqscan = off
as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_gone text[];
  v_ids bigint[];
begin
  if (p_limit between 1 and 1000) is not true then
    raise exception using
      errcode = 'TS400',
      message = format('p_limit is out of range: %s', coalesce(p_limit::text, 'null')),
      hint = 'Give 1 to 1000: each reaped task holds a slot of the shared lock table until commit.';
  end if;
  if current_setting('transaction_read_only')::boolean then
    perform pgsched._raise_read_only();
  end if;

  v_gone := pgsched._gone_workers(v_now);
  v_ids := array(
    select s.id
      from (select t.id
              from pgsched.scheduled_tasks as t
             where t.status = 'processing'
               and (t.lease_expires_at <= v_now
                    or (t.claimed_by = any (v_gone) and t.claimed_at <= v_now))
               and (t.id % 2147483647)::integer::oid <> all (array(
                   select l.objid
                     from pg_locks as l
                    where l.pid = pg_backend_pid()
                      and l.locktype = 'advisory' and l.classid = 1337 and l.objsubid = 2))
             order by t.id
            offset 0
               for update of t skip locked) as s
     where pg_try_advisory_xact_lock(1337, (s.id % 2147483647)::integer)
     limit p_limit);
  if v_ids <> '{}' then
    return query select r.id, r.status from pgsched._reap_tasks(v_ids, v_now) as r;
    -- Not "= 'queued'": that would let the index of all that are queued be read for these few.
    perform pgsched._notify(array(
      select t.queue
        from pgsched.scheduled_tasks as t
       where t.id = any (v_ids) and t.status <> 'processing'));
  end if;

  -- Of who is gone nothing is left to find: no more need to look for it.
  if v_gone <> '{}' then
    update pgsched.workers as w
       set presence = false
     where w.id in (
           select o.id
             from pgsched.workers as o
            where o.name = any (v_gone)
              and not exists (
                  select
                    from pgsched.scheduled_tasks as t
                   where t.status = 'processing' and t.claimed_by = o.name)
            order by o.id
              for no key update skip locked);
  end if;
end;
$$;

comment on function pgsched.reap_stale is
  'Takes tasks from their holders whose lease ended, or that are gone: whose presence nobody held, '
  'as found twice, 5 seconds or more apart. At most p_limit (1 to 1000) a call; says what became '
  'of each: queued (due at once), failed (attempts used up), cancelled (a cancel was requested). '
  'Passes by what another session is acting on; safe from any number of callers; writes nothing '
  'while all leases run and all workers are there. Raises TS400.';

revoke all on function pgsched.reap_stale from public;

-- The lock is tried shared, so that two who look do not take each other for the worker. Whoever
-- holds a presence itself, or has looked before in the same transaction, gets it all the same: then
-- pg_locks tells, which would cost more for all. A hundred that are missed are enough for one look:
-- each takes a slot of the shared lock table. After a start of the server, a recovery from a crash
-- or a promotion nobody has come back yet: for 5 seconds, and from before it, nothing counts.
create or replace function pgsched._gone_workers(p_now timestamptz)
  returns text[]
  language plpgsql
  set enable_seqscan = off
as $$
declare
  v_start timestamptz := pg_postmaster_start_time();
  v_absent bigint[];
begin
  v_absent := array(
    select s.id
      from (select w.id
              from pgsched.workers as w
             where w.presence
             order by w.id
            offset 0) as s
     where pg_try_advisory_xact_lock_shared(1339, (s.id % 2147483647)::integer)
     limit 100);
  if v_absent <> '{}' then
    v_start := greatest(
      v_start, pg_stat_get_bgwriter_stat_reset_time(), pg_last_xact_replay_timestamp());
    v_absent := array(
      select a.id
        from unnest(v_absent) as a (id)
       where (a.id % 2147483647)::integer::oid not in (select pgsched._presences()));
  end if;
  if p_now < v_start + interval '5 seconds' then
    return '{}'::text[];
  end if;
  update pgsched.workers as w
     set suspect_since = case when w.id = any (v_absent) then p_now end
   where w.id in (
         select o.id
           from pgsched.workers as o
          where o.presence
            and (o.suspect_since >= v_start) is true <> (o.id = any (v_absent))
          order by o.id
            for no key update skip locked);
  return array(
    select w.name
      from pgsched.workers as w
     where w.id = any (v_absent)
       and w.presence
       and w.suspect_since between v_start and p_now - interval '5 seconds'
     order by w.name);
end;
$$;

comment on function pgsched._gone_workers is
  'Notes whose presence nobody holds, and since when; the names of those of whom that was noted at '
  'least 5 seconds ago.';

revoke all on function pgsched._gone_workers from public;

-- A task that cannot be changed, because its row is damaged or a constraint is in the way, keeps no
-- other from being reaped: then each is tried alone.
create or replace function pgsched._reap_tasks(p_ids bigint[], p_now timestamptz)
  returns table (id bigint, status text)
  language plpgsql
as $$
#variable_conflict use_column
begin
  return query
  select e.id, e.status
    from pgsched._end_attempts(
           p_ids,
           array(
             select format(
                      case
                        when t.lease_expires_at <= p_now
                        then 'worker %s was lost: its lease ended during attempt %s'
                        else 'worker %s was lost: its presence ended during attempt %s'
                      end,
                      t.claimed_by, t.attempt)
               from unnest(p_ids) with ordinality as i (id, position)
               join pgsched.scheduled_tasks as t on t.id = i.id
              where t.id = any (p_ids)
              order by i.position),
           array_fill(0::double precision, array[cardinality(p_ids)]),
           null) as e;
exception
  when integrity_constraint_violation or data_exception or raise_exception
       or program_limit_exceeded or syntax_error_or_access_rule_violation or internal_error then
    if cardinality(p_ids) > 1 then
      return query
      select r.id, r.status
        from unnest(p_ids) as i (id)
       cross join lateral pgsched._reap_tasks(array[i.id], p_now) as r;
    else
      raise warning using
        errcode = sqlstate,
        message = format('task %s cannot be reaped: %s', p_ids[1], sqlerrm),
        hint = 'Its row is damaged, or another with its id is among the finished tasks.';
    end if;
end;
$$;

comment on function pgsched._reap_tasks is
  'Ends the attempts of tasks whose rows the caller has locked and says what became of each; of '
  'one that cannot be changed only a warning tells.';

revoke all on function pgsched._reap_tasks from public;

-- Bounded by rows and by time, since a row may have a large payload to delete: the steps grow while
-- they are fast. Finding what is old is not counted: it takes longer while a snapshot keeps deleted
-- rows, and each call has to get further. Each pair of status and queue is found by skipping
-- through the index, and they are taken in random order, so that one that never ends does not keep
-- the others waiting.
create or replace function pgsched.prune_finished(p_limit integer default 10000)
  returns bigint
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set enable_seqscan = off
  set jit = off
as $$
declare
  v_now timestamptz := clock_timestamp();
  v_time_left interval := interval '0.5 seconds';
  v_start timestamptz;
  v_kind record;
  v_ids bigint[];
  v_from integer;
  v_step integer := 1;
  v_deleted bigint := 0::bigint;
begin
  if (p_limit between 1 and 100000) is not true then
    raise exception using
      errcode = 'TS400',
      message = format('p_limit is out of range: %s', coalesce(p_limit::text, 'null')),
      hint = 'Give 1 to 100000.';
  end if;
  if current_setting('transaction_read_only')::boolean then
    perform pgsched._raise_read_only();
  end if;

  for v_kind in
    with recursive kinds as (
      (select f.status, f.queue
         from pgsched.finished_tasks as f
        order by f.status, f.queue
        limit 1)
       union all
      select n.status, n.queue
        from kinds as k
       cross join lateral (
             select f.status, f.queue
               from pgsched.finished_tasks as f
              where (f.status, f.queue) > (k.status, k.queue)
              order by f.status, f.queue
              limit 1) as n)
    select k.status, k.queue,
           v_now - interval '1 second' * date_part(
             'epoch',
             case when k.status = 'completed' then coalesce(q.keep_completed, '1 day')
                  else coalesce(q.keep_failed, '30 days')
             end) as finished_before
      from kinds as k
      left join pgsched.queues as q on q.name = k.queue
     order by random()
  loop
    v_ids := array(
      select f.id
        from pgsched.finished_tasks as f
       where f.status = v_kind.status and f.queue = v_kind.queue
         and f.finished_at < v_kind.finished_before
       order by f.finished_at, f.id
       limit p_limit - v_deleted
         for update skip locked);
    v_start := clock_timestamp();
    v_from := 1;
    while v_from <= cardinality(v_ids) loop
      delete from pgsched.finished_tasks as f
       where f.id = any (v_ids[v_from : v_from + v_step - 1]);
      v_deleted := v_deleted + least(v_step, cardinality(v_ids) - v_from + 1);
      if clock_timestamp() > v_start + v_time_left then
        return v_deleted;
      end if;
      v_from := v_from + v_step;
      v_step := least(2 * v_step, 100);
    end loop;
    v_time_left := v_time_left - (clock_timestamp() - v_start);
    exit when v_deleted = p_limit or clock_timestamp() > v_now + interval '1 second';
  end loop;
  return v_deleted;
end;
$$;

comment on function pgsched.prune_finished is
  'Deletes finished tasks that are older than their queue keeps them, at most p_limit (1 to '
  '100000) and for about half a second, and says how many. Call it again while it returns more '
  'than 0. Passes by rows that another session has locked. Raises TS400.';

revoke all on function pgsched.prune_finished from public;

-- What diagnose finds, by subject; a check that finds nothing has no row. All run inside functions
-- that pin search_path, and only read.

create or replace function pgsched._spelled(p_age interval)
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

create or replace function pgsched._tasks(p_tasks bigint)
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

create or replace function pgsched._find_damage()
  returns table (check_name text, level text, finding text, advice text)
  language sql
  stable
as $$
  select 'objects', 'error', format('Index %s is missing.', n.name),
         'Create it again, as what pgsched sql prints has it: without it calls are slow or wrong.'
    from unnest(array[
           'queues_pkey', 'scheduled_tasks_pkey', 'scheduled_tasks_claim_idx',
           'scheduled_tasks_processing_idx', 'scheduled_tasks_unique_key_idx',
           'finished_tasks_pkey', 'finished_tasks_finished_at_idx', 'workers_pkey',
           'workers_name_key', 'listeners_pkey', 'listeners_worker_id_idx']) as n (name)
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
         format('scheduled_tasks has %s dead rows, which claims read past; autovacuum %s.',
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
create or replace function pgsched._find_rights()
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

create or replace function pgsched._find_snapshots()
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
create or replace function pgsched._find_settings()
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

create or replace function pgsched._find_limits()
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

create or replace function pgsched._find_queues()
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

create or replace function pgsched._find_workers()
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

create or replace function pgsched.diagnose()
  returns table (check_name text, level text, finding text, advice text)
  language sql
  stable
  security definer
  set search_path = pg_catalog, pg_temp
  set enable_seqscan = off
  set jit = off
as $$
  with found as materialized (
    select f.* from pgsched._find_damage() as f
     union all
    select f.* from pgsched._find_rights() as f
     union all
    select f.* from pgsched._find_snapshots() as f
     union all
    select f.* from pgsched._find_settings() as f
     union all
    select f.* from pgsched._find_limits() as f
     union all
    select f.* from pgsched._find_queues() as f
     union all
    select f.* from pgsched._find_workers() as f)
  select c.name, coalesce(f.level, 'ok'), coalesce(f.finding, c.nothing_found), f.advice
    from (values
      (1, 'objects', 'Every index is there and valid, and no id is given again.'),
      (2, 'public', 'PUBLIC may do nothing here.'),
      (3, 'settings', 'No setting of the server endangers tasks or hinders calls.'),
      (4, 'limits', 'There is room for connections and locks.'),
      (5, 'standby', 'The server may be written to.'),
      (6, 'vacuum', 'Dead rows are removed.'),
      (7, 'snapshots', 'No old transaction keeps vacuum away.'),
      (8, 'workers', 'Every registered worker was seen within 2 minutes.'),
      (9, 'leases', 'Tasks whose lease ended are taken back.'),
      (10, 'queues', 'No task has been due for long.'),
      (11, 'dead letters', 'No task failed for good.')) as c (position, name, nothing_found)
    left join found as f on f.check_name = c.name
   order by c.position, array_position(array['error', 'warning', 'note'], f.level), f.finding
$$;

comment on function pgsched.diagnose is
  'Looks for what keeps tasks from running, or will: damaged objects, old snapshots, settings, '
  'limits, queues without workers, lost workers, dead letters. One row a finding, with its level '
  '(ok, note, warning, error) and advice what to do; a check that finds nothing is one row ok.';

revoke all on function pgsched.diagnose from public;

create or replace function pgsched.schema_version()
  returns text
  language sql
  immutable
  security definer
  set search_path = pg_catalog, pg_temp
as $$
  select '0002'
$$;

comment on function pgsched.schema_version is
  'Number of the newest migration in this database.';

revoke all on function pgsched.schema_version from public;

-- What grant_access and revoke_access share. All run inside functions that pin search_path.

-- The one list of who may call what. An admin may call all of it, and nobody may change rights but
-- the owner of the schema.
create or replace function pgsched._access(p_kind text)
  returns setof text
  language sql
  immutable
as $$
  select r.routine
    from (values
      ('enqueue_task', '{producer}'),
      ('enqueue_tasks', '{producer}'),
      ('claim_task', '{worker}'),
      ('hold_task', '{worker}'),
      ('extend_task', '{worker}'),
      ('extend_tasks', '{worker}'),
      ('complete_task', '{worker}'),
      ('complete_tasks', '{worker}'),
      ('fail_task', '{worker}'),
      ('fail_tasks', '{worker}'),
      ('release_task', '{worker}'),
      ('release_tasks', '{worker}'),
      ('register_worker', '{worker}'),
      ('hold_presence', '{worker}'),
      ('unregister_worker', '{worker}'),
      ('notify_channel', '{worker}'),
      ('register_listener', '{worker}'),
      ('reap_stale', '{worker}'),
      ('prune_finished', '{worker}'),
      ('maintain', '{worker}'),
      ('queue_stats', '{worker,observer}'),
      ('server_stats', '{worker,observer}'),
      ('diagnose', '{worker,observer}'),
      ('get_task', '{observer}'),
      ('list_workers', '{observer}'),
      ('recent_rates', '{observer}'),
      ('schema_version', '{producer,worker,observer}'),
      ('cancel_task', '{}'),
      ('retry_task', '{}'),
      ('reschedule_task', '{}'),
      ('configure_queue', '{}'),
      ('pause_queue', '{}'),
      ('resume_queue', '{}')) as r (routine, kinds)
   where p_kind = any (r.kinds::text[]) or p_kind = 'admin'
$$;

comment on function pgsched._access is
  'The functions and procedures that a kind of access is made of; none: there is no such kind.';

revoke all on function pgsched._access from public;

create or replace function pgsched._granted(p_role text)
  returns setof text
  language sql
  stable
as $$
  select p.proname::text
    from pg_proc as p
   cross join aclexplode(p.proacl) as a
   where p.pronamespace = 'pgsched'::regnamespace
     and a.grantee = (select r.oid from pg_roles as r where r.rolname = p_role collate "C")
$$;

comment on function pgsched._granted is
  'The functions and procedures that the role itself was given, by whatever kind or by hand.';

revoke all on function pgsched._granted from public;

-- Of two who change the rights on one function at once PostgreSQL refuses one, and so it does when
-- an installer replaces the function: they wait for each other.
create or replace function pgsched._lock_access(p_role text, p_kind text)
  returns void
  language plpgsql
as $$
begin
  if current_setting('transaction_read_only')::boolean then
    perform pgsched._raise_read_only();
  end if;
  if not exists (select from pg_roles as r where r.rolname = p_role collate "C") then
    raise exception using
      errcode = 'TS400',
      message = 'there is no role ' || coalesce(quote_literal(left(p_role, 80)), 'null'),
      hint = 'Give the name of a role as pg_roles has it: without quotes, and not PUBLIC.';
  end if;
  if not exists (select from pgsched._access(p_kind)) then
    raise exception using
      errcode = 'TS400',
      message = 'p_kind is not a kind of access: '
                || coalesce(quote_literal(left(p_kind, 80)), 'null'),
      hint = 'Give producer, worker, observer or admin.';
  end if;
  perform pg_advisory_xact_lock(1338, 1);
end;
$$;

comment on function pgsched._lock_access is
  'Keeps others from changing rights, and the schema, until the transaction ends; TS400 unless '
  'role and kind exist, 25006 in a read-only transaction.';

revoke all on function pgsched._lock_access from public;

create or replace function pgsched.grant_access(p_role text, p_kind text)
  returns void
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set lock_timeout = '10s'
as $$
begin
  perform pgsched._lock_access(p_role, p_kind);
  execute format('grant usage on schema pgsched to %I', p_role);
  execute format('grant execute on routine %s to %I',
                 (select string_agg('pgsched.' || a.routine, ', ')
                    from pgsched._access(p_kind) as a (routine)),
                 p_role);
end;
$$;

comment on function pgsched.grant_access is
  'Lets a role call what a producer, worker, observer or admin calls, and use the schema; no right '
  'on a table. A role may be given several kinds. For the owner of the schema, and whom it lets. '
  'Raises TS400, and 55P03 when another who changes rights or the schema does not end within 10 '
  'seconds.';

revoke all on function pgsched.grant_access from public;

-- What was granted is known by the rights that are there: a role has a kind when it was given all
-- of it. Who has admin has all kinds, so without it nothing is kept.
create or replace function pgsched.revoke_access(p_role text, p_kind text)
  returns void
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set lock_timeout = '10s'
as $$
declare
  v_granted text[];
  v_routines text[];
begin
  perform pgsched._lock_access(p_role, p_kind);
  if p_role collate "C" = current_user then
    raise exception using
      errcode = 'TS400',
      message = format('role %L is the owner', p_role),
      hint = 'The functions run with its rights.';
  end if;

  v_granted := array(select pgsched._granted(p_role));
  v_routines := array(
    select 'pgsched.' || a.routine
      from pgsched._access(p_kind) as a (routine)
     where not exists (
           select
             from unnest(array['producer', 'worker', 'observer', 'admin']) as k (kind)
            where p_kind not in (k.kind, 'admin')
              and a.routine in (select pgsched._access(k.kind))
              and v_granted @> array(select pgsched._access(k.kind))));
  if v_routines <> '{}' then
    execute format('revoke execute on routine %s from %I',
                   array_to_string(v_routines, ', '), p_role);
  end if;
  if not exists (select from pgsched._granted(p_role)) then
    execute format('revoke usage on schema pgsched from %I', p_role);
  end if;
end;
$$;

comment on function pgsched.revoke_access is
  'Takes back what grant_access gave, but what another kind needs that the role has in full; admin '
  'takes all kinds with it. The use of the schema goes with the last function. Raises TS400, and '
  '55P03 when another who changes rights or the schema does not end within 10 seconds.';

revoke all on function pgsched.revoke_access from public;
