-- Status and lease are checked on the row as it is when it is locked; a row that somebody has
-- locked is passed by, and so is a task whose advisory lock cannot be had: somebody acts on it now.
-- The lock is re-entrant: what this very transaction holds has to be looked up, before any try.
-- The inner query locks row by row in id order, so the outer limit ends the work early, and tasks
-- that are held do not use up the limit; offset 0 keeps the try above it, on rows already locked.
create function pgsched.reap_stale(p_limit integer default 1000)
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
create function pgsched._gone_workers(p_now timestamptz)
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
create function pgsched._reap_tasks(p_ids bigint[], p_now timestamptz)
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
