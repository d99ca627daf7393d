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
create function pgsched._move_claim_marks(p_queues text[])
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
create function pgsched._move_claim_mark(
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
create function pgsched._used_queues()
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
