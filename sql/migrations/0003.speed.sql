-- Speed: claims begin at a mark, past what an old snapshot keeps dead; hot functions cost less.
-- depends: 0002.access

-- Both hold hints, and a claim is right without them: a row is never updated, but replaced by one
-- with a higher xid, so that an old snapshot does not put all former ones in the way.
create table pgsched.claim_marks (
  queue  text          not null,
  xid    xid8          not null,
  run_at timestamptz[] not null,
  id     bigint[]      not null,
  constraint claim_marks_pkey primary key (queue, xid)
);

comment on table pgsched.claim_marks is
  'Where claim_task begins to read: of each queue the row with the highest xid. A hint, which '
  'reap_stale, maintain and complete_tasks move; may be emptied at any time.';
comment on column pgsched.claim_marks.run_at is
  'Of each priority, 0 to 9: no task of it is queued, or can become so, that is due before.';
comment on column pgsched.claim_marks.id is
  'Nor any that is due at that very time and has a lower id.';

create table pgsched.claim_readings (
  xid        xid8        not null,
  written_at timestamptz not null,
  read_xid   xid8,
  read_at    timestamptz,
  proven_at  timestamptz,
  changes    bigint      not null,
  looked_to  timestamptz,
  look_at    timestamptz not null,
  sweep_at   timestamptz not null,
  constraint claim_readings_pkey primary key (xid)
);

comment on table pgsched.claim_readings is
  'How far marks may go: the row with the highest xid.';
comment on column pgsched.claim_readings.read_at is
  'A reading of the clock, taken before read_xid; proven when no transaction below that runs.';
comment on column pgsched.claim_readings.proven_at is
  'The newest reading that is proven: no task that is due before can become queued.';
comment on column pgsched.claim_readings.changes is
  'Updates and deletions of live tasks, as counted when all queues were last looked at.';
comment on column pgsched.claim_readings.looked_to is
  'What proven_at was then.';
comment on column pgsched.claim_readings.look_at is
  'Not before then are all queues looked at again.';
comment on column pgsched.claim_readings.sweep_at is
  'Not before then are tasks looked for below the marks.';

-- Default privileges may have given PUBLIC something.
revoke all on pgsched.claim_marks, pgsched.claim_readings from public;
revoke all on type pgsched.claim_marks, pgsched.claim_readings from public;

-- Functions, as in sql/schema/functions/: make migration writes what follows.

-- Checks that several functions share. A fault is an array of message and hint, or null; these are
-- single expressions, which the planner inlines. The others return the checked value, since
-- PL/pgSQL evaluates an assignment several times faster than a perform. All run inside functions
-- that pin search_path. Arguments may bring a collation that no regular expression takes.

create or replace function pgsched._is_name(p_value text)
  returns boolean
  language sql
  immutable
as $$
  select octet_length(p_value) between 1 and 63 and p_value collate "default" !~ '[[:cntrl:]]'
$$;

comment on function pgsched._is_name is
  'Whether the value is 1 to 63 bytes without control characters; a null is not, nor is it false.';

revoke all on function pgsched._is_name from public;

create or replace function pgsched._name_fault(p_argument text, p_value text)
  returns text[]
  language sql
  immutable
as $$
  select case
           when pgsched._is_name(p_value) is not true then array[
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

-- What a claim need not read: under an old snapshot the index keeps an entry of every task that was
-- queued since, and a claim would walk through all of them. Three steps make a mark safe.
--  1. The clock is read, and then a transaction id is taken. Whoever makes a task queued, or moves
--     it, takes its id first, then reads the clock, and stores no run_at below that: so a later id
--     means a later run_at.
--  2. When every transaction with a lower id has ended, whatever they did is visible, and no other
--     can bring anything below that reading.
--  3. Then a mark is the first task that is visible, or the reading if none is older.
-- Each row of both tables is written once and replaced by another with a higher xid: a row that is
-- updated would be found, under the same old snapshot, behind all that it ever was.
--
-- Whoever completes tasks moves the marks of their queues. Whoever reaps looks at all queues, and
-- sweeps: as seldom as that takes long, so that it costs a fiftieth of a processor at most.
create or replace function pgsched._move_claim_marks(p_queues text[])
  returns bigint
  language plpgsql
  set enable_seqscan = off
  set jit = off
as $$
declare
  v_last pgsched.claim_readings;
  v_newest xid8;
  v_snapshot pg_snapshot;
  v_now timestamptz;
  v_took interval;
  v_xid xid8;
  v_changes bigint;
  v_resets boolean;
  v_reads boolean;
  v_proves boolean;
  v_looks boolean := false;
  v_sweeps boolean := false;
  v_queue text;
  v_moved bigint := 0::bigint;
begin
  -- An id from before the reading of the clock would prove nothing.
  if pg_current_xact_id_if_assigned() is not null then
    return 0::bigint;
  end if;
  select r.* into v_last from pgsched.claim_readings as r order by r.xid desc limit 1;
  v_snapshot := pg_current_snapshot();
  v_now := clock_timestamp();

  -- The clock was set back, or this is a copy of another server's tables, or of some of them.
  v_resets := coalesce(v_last.xid >= pg_snapshot_xmax(v_snapshot), false)
              or v_last.xid is null and exists (select from pgsched.claim_marks)
              or v_now < greatest(v_last.read_at, v_last.proven_at, v_last.written_at);
  v_proves := coalesce(v_last.read_xid <= pg_snapshot_xmin(v_snapshot)
                       and v_now >= v_last.read_at + interval '0.01 seconds', false);
  v_changes := pg_stat_get_tuples_updated('pgsched.scheduled_tasks'::regclass)
               + pg_stat_get_tuples_deleted('pgsched.scheduled_tasks'::regclass);
  if p_queues is not null then
    v_reads := v_last.read_xid is null;
  else
    v_looks := abs(v_changes - coalesce(v_last.changes, 0)) >= 200;
    v_reads := v_looks and v_last.read_xid is null;
    v_looks := (v_proves or v_last.proven_at > v_last.looked_to
                or v_looks and v_last.proven_at is not null)
               and v_now >= v_last.look_at;
    v_sweeps := coalesce(v_now >= v_last.sweep_at, false)
                and exists (select from pgsched.claim_marks);
  end if;
  -- One does it at a time, and nobody who was faster meanwhile.
  if (v_resets or v_reads or v_proves or v_looks or v_sweeps) is not true
     or not pg_try_advisory_xact_lock(1338, 4) then
    return 0::bigint;
  end if;
  select r.xid into v_newest from pgsched.claim_readings as r order by r.xid desc limit 1;
  if v_newest is distinct from v_last.xid then
    return 0::bigint;
  end if;
  if v_resets then
    delete from pgsched.claim_marks;
    delete from pgsched.claim_readings;
    return 0::bigint;
  end if;

  v_xid := pg_current_xact_id();
  delete from pgsched.claim_readings as r where r.xid = v_last.xid;
  if v_proves then
    v_last.proven_at := v_last.read_at;
    v_last.read_xid := null;
    v_last.read_at := null;
  end if;
  if v_reads and v_last.read_xid is null then
    v_last.read_xid := v_xid;
    v_last.read_at := v_now;
  end if;
  if p_queues is not null and v_proves then
    foreach v_queue in array p_queues loop
      v_moved := v_moved + pgsched._move_claim_mark(v_queue, v_last.proven_at, false, v_xid);
    end loop;
  elsif v_looks or v_sweeps then
    begin
      for v_queue in select q.queue from pgsched._used_queues() as q loop
        v_moved := v_moved + pgsched._move_claim_mark(v_queue, v_last.proven_at, v_sweeps, v_xid);
      end loop;
    exception
      -- What a statement_timeout ends each time would end the reaping, too. So it is noted.
      when query_canceled then
        v_moved := 0::bigint;
    end;
    v_took := 50 * (clock_timestamp() - v_now);
    v_last.changes := v_changes;
    v_last.looked_to := v_last.proven_at;
    v_last.look_at := v_now + v_took;
    if v_sweeps then
      v_last.sweep_at := v_now + greatest(v_took, interval '1 minute');
    end if;
  end if;
  insert into pgsched.claim_readings (
         xid, written_at, read_xid, read_at, proven_at, changes, looked_to, look_at, sweep_at)
  values (v_xid, v_now, v_last.read_xid, v_last.read_at, v_last.proven_at,
         coalesce(v_last.changes, v_changes), v_last.looked_to, coalesce(v_last.look_at, v_now),
         coalesce(v_last.sweep_at, v_now + interval '1 minute'));
  return v_moved;
end;
$$;

comment on function pgsched._move_claim_marks is
  'Moves the marks that claims begin at up: of some queues, or, null, of all, when 200 rows of '
  'tasks or more have changed; then, once a minute, it looks below them, too. Both come less often '
  'where they take long. Does nothing in a transaction that has an id. Returns of how many queues '
  'it moved the marks.';

revoke all on function pgsched._move_claim_marks from public;

-- Counted is what the index gave, dead entries included: a mark that saves little is not written.
-- A sweep begins at the beginning: so it finds what is below the mark against the rules, such as
-- rows that were restored or replicated, and drops a mark that is not needed any more.
create or replace function pgsched._move_claim_mark(
    p_queue text, p_proven_at timestamptz, p_sweeps boolean, p_xid xid8)
  returns bigint
  language plpgsql
as $$
declare
  v_old pgsched.claim_marks;
  v_new pgsched.claim_marks;
  v_read bigint := pg_stat_get_xact_tuples_returned('pgsched.scheduled_tasks_claim_idx'::regclass);
  v_saves boolean;
begin
  select m.* into v_old
    from pgsched.claim_marks as m
   where m.queue = p_queue
   order by m.xid desc
   limit 1;
  select array_agg(case when f.run_at < p_proven_at then f.run_at else p_proven_at end
                   order by l.level),
         array_agg(case when f.run_at < p_proven_at then f.id else -9223372036854775808 end
                   order by l.level)
    into v_new.run_at, v_new.id
    from (select p.level::smallint as level,
                 case when p_sweeps then null else v_old.run_at[p.level + 1] end as run_at,
                 v_old.id[p.level + 1] as id
            from generate_series(0, 9) as p (level)
          offset 0) as l
    left join lateral (
         select s.run_at, s.id
           from pgsched.scheduled_tasks as s
          where s.queue = p_queue
            and s.priority = l.level
            and s.status = 'queued'
            and (s.run_at, s.id) >= (
                  coalesce(l.run_at, '-infinity'), coalesce(l.id, -9223372036854775808))
          order by s.run_at, s.id
          limit 1) as f
      on true;
  v_saves := v_read + 100 <= pg_stat_get_xact_tuples_returned(
    'pgsched.scheduled_tasks_claim_idx'::regclass);
  if not v_saves and (not p_sweeps or v_old.queue is null)
     or v_saves and (v_new.run_at, v_new.id) is not distinct from (v_old.run_at, v_old.id) then
    return 0::bigint;
  end if;
  delete from pgsched.claim_marks as m where m.queue = p_queue and m.xid = v_old.xid;
  if v_saves then
    insert into pgsched.claim_marks (queue, xid, run_at, id)
    values (p_queue, p_xid, v_new.run_at, v_new.id);
  end if;
  return 1::bigint;
end;
$$;

comment on function pgsched._move_claim_mark is
  'Moves the mark of a queue to its first queued task of each priority, or to the proven time, '
  'where claims are spared the reading of 100 entries or more. 1: it moved; 0: it did not.';

revoke all on function pgsched._move_claim_mark from public;

-- A task leaves a trace: its queue has a finished task, or a setting by which it keeps none. Found
-- backwards, since what is deleted first, and has to be passed by, is the oldest.
create or replace function pgsched._used_queues()
  returns table (queue text)
  language sql
  stable
as $$
  with recursive kinds as (
    (select f.status, f.queue
       from pgsched.finished_tasks as f
      order by f.status desc, f.queue desc
      limit 1)
     union all
    select n.status, n.queue
      from kinds as k
     cross join lateral (
           select f.status, f.queue
             from pgsched.finished_tasks as f
            where (f.status, f.queue) < (k.status, k.queue)
            order by f.status desc, f.queue desc
            limit 1) as n)
  select k.queue from kinds as k
   union
  select q.name from pgsched.queues as q
   union
  select m.queue from pgsched.claim_marks as m
$$;

comment on function pgsched._used_queues is
  'The queues that tasks have gone through.';

revoke all on function pgsched._used_queues from public;

create or replace function pgsched.enqueue_task(
    p_task_type text,
    p_payload jsonb default '{}',
    p_queue text default 'default',
    p_run_at timestamptz default null,
    p_priority integer default 5,
    p_max_attempts integer default null,
    p_unique_key text default null,
    p_concurrency_key text default null)
  returns bigint
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set enable_seqscan = off
as $$
declare
  v_settings record;
  v_fault text[];
  v_now timestamptz;
  v_id bigint;
  v_heard boolean;
begin
  -- An argument may bring a collation, by which the indexes are not sorted.
  select q.max_attempts, q.max_payload_bytes, q.notify
    into v_settings
    from pgsched.queues as q
   where q.name = p_queue collate "default";
  if (pgsched._is_name(p_task_type) and pgsched._is_name(p_queue)
      and coalesce(pgsched._is_name(p_unique_key), true)
      and coalesce(pgsched._is_name(p_concurrency_key), true)
      and coalesce(p_run_at > '-infinity' and p_run_at < '9999-01-01 00:00:00+00', true)
      and p_priority between 0 and 9
      and coalesce(p_max_attempts >= 1, true)
      and octet_length(p_payload::text)
            <= coalesce(v_settings.max_payload_bytes, 1048576)) is not true then
    v_fault := pgsched._task_fault(
      p_task_type, octet_length(p_payload::text), p_queue, p_run_at, p_priority, p_max_attempts,
      p_unique_key, p_concurrency_key, coalesce(v_settings.max_payload_bytes, 1048576));
    raise exception using errcode = 'TS400', message = 'p_' || v_fault[1], hint = v_fault[2];
  end if;

  -- The id of this transaction first, then the clock: a queued row is never older than its writer.
  v_now := case when pg_current_xact_id() is not null then clock_timestamp() end;
  p_run_at := greatest(p_run_at, v_now);
  p_max_attempts := coalesce(p_max_attempts, v_settings.max_attempts, 20);

  if p_unique_key is not null then
    v_id := pgsched._add_unique(
      nextval('pgsched.scheduled_tasks_id_seq'), p_task_type, p_payload, p_queue, p_run_at,
      p_priority, p_max_attempts, p_unique_key, p_concurrency_key, v_now);
    v_heard := exists (
      select
        from pgsched.listeners as l
       where l.queue = p_queue collate "default");
  else
    insert into pgsched.scheduled_tasks as t (
           queue, task_type, payload, priority, run_at, max_attempts, concurrency_key, created_at)
    values (p_queue, p_task_type, p_payload, p_priority, p_run_at, p_max_attempts,
           p_concurrency_key, v_now)
    returning t.id, exists (select from pgsched.listeners as l where l.queue = t.queue)
         into v_id, v_heard;
  end if;

  if v_heard and p_run_at = v_now and v_settings.notify is not false then
    perform pg_notify(pgsched.notify_channel(p_queue), '');
  end if;
  return v_id;
end;
$$;

comment on function pgsched.enqueue_task is
  'Adds a task and returns its id; with a unique key that a live task of the queue already has, '
  'returns the id of that task and changes nothing. Part of the caller''s transaction. '
  'p_run_at: null or a past time means now. Raises TS400.';

revoke all on function pgsched.enqueue_task from public;

create or replace function pgsched._add_unique(
    p_id bigint, p_task_type text, p_payload jsonb, p_queue text, p_run_at timestamptz,
    p_priority integer, p_max_attempts integer, p_unique_key text, p_concurrency_key text,
    p_now timestamptz)
  returns bigint
  language plpgsql
as $$
declare
  v_id bigint;
begin
  loop
    insert into pgsched.scheduled_tasks as t (
           id, queue, task_type, payload, priority, run_at, max_attempts, unique_key,
           concurrency_key, created_at)
    values (p_id, p_queue, p_task_type, p_payload, p_priority, p_run_at, p_max_attempts,
           p_unique_key, p_concurrency_key, p_now)
    on conflict (queue, unique_key) where unique_key is not null do nothing
    returning t.id into v_id;
    exit when found;

    -- Not found means that the task that had the key ended between the two statements.
    select t.id into v_id
      from pgsched.scheduled_tasks as t
     where t.queue = p_queue collate "default"
       and t.unique_key = p_unique_key collate "default";
    exit when found;
  end loop;
  return v_id;
end;
$$;

comment on function pgsched._add_unique is
  'Adds a checked task with a unique key, or finds the live task that has the key; returns its id.';

revoke all on function pgsched._add_unique from public;

-- Rows are picked by the claim index, level after level, each locked in the moment it is picked: at
-- most p_limit, and no row that another session has locked. Only then the advisory lock of each is
-- tried, above the limit that no plan moves it through: below, it would lock rows nobody asked for.
-- A picked row is found again by its place, which without a sequential scan only a nested loop can
-- do: so rows come in the order in which they were picked. One that was changed since the snapshot
-- has another place there, and is passed by as if it were locked.
-- The settings keep a plan from a small table, a sequential scan and JIT away from the hot path.
create or replace function pgsched.claim_task(
    p_worker text,
    p_queue text default 'default',
    p_lease interval default '5 minutes',
    p_limit integer default 1)
  returns table (
    id bigint, claim_token uuid, task_type text, payload jsonb, queue text, priority integer,
    attempt integer, max_attempts integer, run_at timestamptz, created_at timestamptz,
    lease_expires_at timestamptz, contended bigint)
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan
  set enable_seqscan = off
  set jit = off
as $$
#variable_conflict use_column
declare
  v_now timestamptz;
  -- An argument may bring a collation, by which the indexes are not sorted.
  v_queue text collate "default" := p_queue;
begin
  if (pgsched._is_name(p_worker) and date_part('epoch', p_lease) between 1 and 86400
      and p_limit between 1 and 100) is not true then
    perform pgsched._raise_claim_fault(p_worker, p_lease, p_limit);
  end if;

  v_now := clock_timestamp();
  -- The claim itself is this same call again, made by the statement that counts: so the snapshot of
  -- the count is from before the claim.
  if random() < 1.0 / 16 then
    return query
    with claimed as materialized (
      select c.*
        from pgsched.claim_task(p_worker, p_queue, p_lease, p_limit)
               with ordinality as c)
    select c.id, c.claim_token, c.task_type, c.payload, c.queue, c.priority, c.attempt,
           c.max_attempts, c.run_at, c.created_at, c.lease_expires_at,
           16 * greatest(0, (
             select pgsched._due_up_to(v_queue, l.priority::smallint, l.run_at, l.id, v_now)
               from claimed as l
              order by l.ordinality desc
              limit 1) - (select count(*) from claimed))
      from claimed as c
     order by c.ordinality;
    return;
  end if;

  return query
  update pgsched.scheduled_tasks as t
     set status = 'processing',
         attempt = t.attempt + 1,
         claim_token = gen_random_uuid(),
         claimed_by = p_worker,
         claimed_at = v_now,
         lease_expires_at = v_now + date_part('epoch', p_lease) * interval '1 second'
    from (select chosen.id, chosen.place
            from (values (0::smallint), (1), (2), (3), (4), (5), (6), (7), (8), (9))
                   as levels (priority)
            left join (
                 select r.run_at, r.id
                   from pgsched.claim_marks as r
                  where r.queue = v_queue
                  order by r.xid desc
                  limit 1) as m
              on true
           cross join lateral (
                 select s.id, s.ctid as place
                   from pgsched.scheduled_tasks as s
                  where s.queue = v_queue
                    and s.priority = levels.priority
                    and s.status = 'queued'
                    and s.run_at <= v_now
                    and (s.run_at, s.id) >= (
                          case when m.run_at[levels.priority + 1] <= v_now
                               then m.run_at[levels.priority + 1]
                               else '-infinity'
                          end,
                          coalesce(m.id[levels.priority + 1], -9223372036854775808))
                  order by s.run_at, s.id
                  limit p_limit
                    for no key update skip locked) as chosen
           where not exists (
                 select
                   from pgsched.queues as q
                  where q.name = v_queue and q.paused)
           limit p_limit) as picked
   where t.ctid = picked.place
     and pg_try_advisory_xact_lock(1337, (picked.id % 2147483647)::integer)
  returning t.id, t.claim_token, t.task_type, t.payload, t.queue, t.priority::integer, t.attempt,
            t.max_attempts, t.run_at, t.created_at, t.lease_expires_at, 0::bigint;

  -- What is no name of a queue has no tasks: that is looked at only when there were none.
  if not found then
    perform pgsched._name('p_queue', p_queue);
  end if;
end;
$$;

comment on function pgsched.claim_task is
  'Claims up to p_limit (1 to 100) due tasks of a queue for p_lease (1 second to 24 hours), lowest '
  'priority number first, and counts the attempt. Never waits for another session. No row: nothing '
  'is due, or the queue is paused; such a call writes nothing. contended: how many due tasks ahead '
  'of the last one returned other sessions held, counted in one call of 16 and scaled by 16, so '
  'that the sum over many calls is right. Raises TS400.';

revoke all on function pgsched.claim_task from public;

create or replace function pgsched._raise_claim_fault(p_worker text, p_lease interval, p_limit integer)
  returns void
  language plpgsql
as $$
begin
  perform pgsched._lease_seconds(p_lease);
  perform pgsched._name('p_worker', p_worker);
  raise exception using
    errcode = 'TS400',
    message = format('p_limit is out of range: %s', coalesce(p_limit::text, 'null')),
    hint = 'Give 1 to 100: each claimed task holds a slot of the shared lock table until commit.';
end;
$$;

comment on function pgsched._raise_claim_fault is
  'Raises TS400 for the first of a claim''s arguments that is not valid.';

revoke all on function pgsched._raise_claim_fault from public;

create or replace function pgsched._due_up_to(
    p_queue text, p_priority smallint, p_run_at timestamptz, p_id bigint, p_now timestamptz)
  returns bigint
  language sql
  stable
  set enable_seqscan = off
as $$
  select sum(
           case when l.level < p_priority then (
                  select count(*)
                    from pgsched.scheduled_tasks as s
                   where s.queue = p_queue
                     and s.priority = l.level
                     and s.status = 'queued'
                     and s.run_at <= p_now
                     and (s.run_at, s.id) >= (l.mark_at, l.mark_id))
                else (
                  select count(*)
                    from pgsched.scheduled_tasks as s
                   where s.queue = p_queue
                     and s.priority = p_priority
                     and s.status = 'queued'
                     and (s.run_at, s.id) <= (p_run_at, p_id)
                     and (s.run_at, s.id) >= (l.mark_at, l.mark_id))
           end)::bigint
    -- From the same marks as claim_task.
    from (select p.level::smallint as level,
                 case when m.run_at[p.level + 1] <= p_now
                      then m.run_at[p.level + 1]
                      else '-infinity'
                 end as mark_at,
                 coalesce(m.id[p.level + 1], -9223372036854775808) as mark_id
            from generate_series(0, p_priority) as p (level)
            left join (
                 select r.run_at, r.id
                   from pgsched.claim_marks as r
                  where r.queue = p_queue
                  order by r.xid desc
                  limit 1) as m
              on true
          offset 0) as l
$$;

comment on function pgsched._due_up_to is
  'Due tasks of a queue in claim order up to and with the given one, as the calling statement''s '
  'snapshot saw them: what it did not get of these, other sessions held.';

revoke all on function pgsched._due_up_to from public;

-- The task's advisory lock is taken first: completion may stand at the end of the caller's own long
-- transaction, and the reaper then passes by. Id and token are checked by the statement that moves
-- the row, so that a claim which ended while this call waited changes nothing.
create or replace function pgsched.complete_task(
    p_id bigint,
    p_claim_token uuid,
    p_result jsonb default null)
  returns boolean
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan
  set enable_seqscan = off
  set jit = off
as $$
declare
  v_task record;
  v_finished record;
begin
  p_id := pgsched._lock_task(p_id);

  delete from pgsched.scheduled_tasks as t
   where t.id = p_id and t.claim_token = p_claim_token
  returning t.*, (
            select date_part('epoch', q.keep_completed)
              from pgsched.queues as q
             where q.name = t.queue) is distinct from 0 as kept
    into v_task;
  if found then
    if v_task.kept then
      insert into pgsched.finished_tasks (
             id, queue, task_type, payload, status, priority, run_at, attempt, max_attempts,
             claim_token, claimed_by, claimed_at, lease_expires_at, unique_key, concurrency_key,
             cancel_requested_at, last_error, created_at, finished_at, result)
      values (v_task.id, v_task.queue, v_task.task_type, v_task.payload, 'completed',
             v_task.priority, v_task.run_at, v_task.attempt, v_task.max_attempts,
             v_task.claim_token, v_task.claimed_by, v_task.claimed_at, v_task.lease_expires_at,
             v_task.unique_key, v_task.concurrency_key, v_task.cancel_requested_at,
             v_task.last_error, v_task.created_at, clock_timestamp(), p_result);
    end if;
    return true;
  end if;

  -- Found by its id alone: whatever the statistics say, no other index is read.
  select f.claim_token, f.status into v_finished
    from pgsched.finished_tasks as f
   where f.id = p_id;
  if (v_finished.claim_token = p_claim_token and v_finished.status = 'completed') is not true then
    perform pgsched._raise_not_current(p_id, p_claim_token);
  end if;
  return false;
end;
$$;

comment on function pgsched.complete_task is
  'Ends a claim with success. True: completed now; false: this same claim had completed it '
  'already, where the queue keeps completed tasks. Part of the caller''s transaction; waits for '
  'another one that works on the same task. '
  'Raises TS400, TS404 (no such task), TS409 (claim not current: nothing was changed).';

revoke all on function pgsched.complete_task from public;

-- Takes no advisory lock and waits for no row: one handler's open transaction must not hold up the
-- completions of all other tasks of its process. A locked row is found again by its place; one that
-- was changed since the snapshot is not, and stays, as busy.
create or replace function pgsched.complete_tasks(
    p_ids bigint[],
    p_claim_tokens uuid[],
    p_results jsonb[] default null)
  returns table (id bigint, outcome text)
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan
  set enable_seqscan = off
  set jit = off
as $$
#variable_conflict use_column
declare
  -- Positions in p_ids.
  v_ended bigint[];
begin
  -- Between two calls of reap_stale more may die than claims should read past. An isolation level
  -- above could make a completion fail for it.
  if random() < 1.0 / 16 and current_setting('transaction_isolation') = 'read committed' then
    perform pgsched._move_claim_marks(array(
      select distinct t.queue from pgsched.scheduled_tasks as t where t.id = any (p_ids)));
  end if;
  perform pgsched._check_batch(p_ids, p_claim_tokens);
  perform pgsched._check_column('p_results', p_results, p_ids);

  with locked as materialized (
    select t.ctid as place, g.result, g.position
      from pgsched.scheduled_tasks as t
      join (select distinct on (u.id, u.claim_token) u.*
              from unnest(p_ids, p_claim_tokens, p_results)
                     with ordinality as u (id, claim_token, result, position)
             order by u.id, u.claim_token, u.position) as g
        on g.id = t.id and g.claim_token = t.claim_token
     where t.id = any (p_ids)
     order by t.id
       for update of t skip locked),
  ended as (
    delete from pgsched.scheduled_tasks as t
     using locked as l
     where t.ctid = l.place
    returning t.*, l.result, l.position),
  kept as (
    insert into pgsched.finished_tasks (
           id, queue, task_type, payload, status, priority, run_at, attempt, max_attempts,
           claim_token, claimed_by, claimed_at, lease_expires_at, unique_key, concurrency_key,
           cancel_requested_at, last_error, created_at, finished_at, result)
    select e.id, e.queue, e.task_type, e.payload, 'completed', e.priority, e.run_at, e.attempt,
           e.max_attempts, e.claim_token, e.claimed_by, e.claimed_at, e.lease_expires_at,
           e.unique_key, e.concurrency_key, e.cancel_requested_at, e.last_error, e.created_at,
           clock_timestamp(), e.result
      from ended as e
     where e.queue <> all (array(
           select q.name
             from pgsched.queues as q
            where q.name in (select n.queue from ended as n)
              and date_part('epoch', q.keep_completed) = 0)))
  select array(select e.position from ended as e) into v_ended;

  if cardinality(v_ended) = cardinality(p_ids) then
    return query select g.id, 'completed' from unnest(p_ids) as g (id);
    return;
  end if;

  -- What was not ended is looked up after it: a task that moves between the tables is seen in one.
  return query
  select g.id,
         case
           when g.position = any (v_ended) then 'completed'
           when e.claim_token = g.claim_token then 'already'
           when t.claim_token = g.claim_token then 'busy'
           when f.claim_token = g.claim_token and f.status = 'completed' then 'already'
           when e.id is not null or t.id is not null or f.id is not null then 'stale'
           else 'gone'
         end
    from unnest(p_ids, p_claim_tokens) with ordinality as g (id, claim_token, position)
    left join (
         select p_ids[n.position] as id, p_claim_tokens[n.position] as claim_token
           from unnest(v_ended) as n (position)) as e on e.id = g.id
    left join (
         select s.id, s.claim_token
           from pgsched.scheduled_tasks as s
          where s.id = any (p_ids)) as t on t.id = g.id
    left join (
         select s.id, s.claim_token, s.status
           from pgsched.finished_tasks as s
          where s.id = any (p_ids)) as f on f.id = g.id
   order by g.position;
end;
$$;

comment on function pgsched.complete_tasks is
  'Ends many claims with success and answers in the order given. completed; already: this same '
  'claim had completed it; stale: the claim is not current, nothing was changed; gone: no such '
  'task; busy: another transaction has the row locked, nothing was changed, try again. '
  'Raises TS400.';

revoke all on function pgsched.complete_tasks from public;

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

  perform pgsched._move_claim_marks(null);
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
  'Moves the marks that claims begin at, too. Passes by what another session is acting on; safe '
  'from any number of callers; writes nothing while all leases run, all workers are there and '
  'little is claimed. Raises TS400.';

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

-- A step that cannot run now undoes no other: each has a block of its own. Statement timeouts and
-- cancels are not among the conditions: who set them wants the call to end. Marks come first, as
-- they move only while the transaction has written nothing, and then what takes longest, so that
-- nothing that a worker may wait for is locked meanwhile.
create or replace function pgsched.maintain()
  returns table (step text, affected bigint)
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
as $$
declare
  v_lock integer;
begin
  if current_setting('transaction_read_only')::boolean then
    perform pgsched._raise_read_only();
  end if;
  for v_lock, step in values (4, 'move_claim_marks'), (3, 'prune_finished'), (2, 'reap_stale') loop
    affected := null;
    begin
      if pg_try_advisory_xact_lock(1338, v_lock) then
        affected := case step
          when 'move_claim_marks' then pgsched._move_claim_marks(null)
          when 'reap_stale' then (select count(*) from pgsched.reap_stale())
          when 'prune_finished' then pgsched.prune_finished()
        end;
      end if;
    exception
      when lock_not_available or deadlock_detected or serialization_failure or out_of_memory then
        raise warning using
          errcode = sqlstate,
          message = format('%s could not run now: %s', step, sqlerrm),
          hint = 'maintain tries it again when it is called next.';
    end;
    return next;
  end loop;
end;
$$;

comment on function pgsched.maintain is
  'Does every periodic duty once, each bounded: move_claim_marks, prune_finished, reap_stale. '
  'affected: tasks that the step changed, or queues whose marks moved; null: another session is at '
  'it, or a warning says why it could not run. Safe from any number of callers; call it every '
  'minute or so.';

revoke all on function pgsched.maintain from public;

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

create or replace function pgsched.schema_version()
  returns text
  language sql
  immutable
  security definer
  set search_path = pg_catalog, pg_temp
as $$
  select '0003'
$$;

comment on function pgsched.schema_version is
  'Number of the newest migration in this database.';

revoke all on function pgsched.schema_version from public;
