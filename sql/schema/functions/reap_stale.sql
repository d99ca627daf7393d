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
  v_ids bigint[];
begin
  if (p_limit between 1 and 1000) is not true then
    raise exception using
      errcode = 'TS400',
      message = format('p_limit is out of range: %s', coalesce(p_limit::text, 'null')),
      hint = 'Give 1 to 1000: each reaped task holds a slot of the shared lock table until commit.';
  end if;

  v_ids := array(
    select s.id
      from (select t.id
              from pgsched.scheduled_tasks as t
             where t.status = 'processing'
               and t.lease_expires_at <= v_now
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

  return query
  select e.id, e.status
    from pgsched._end_attempts(
           v_ids,
           array(
             select format('worker %s was lost: its lease ended during attempt %s',
                           t.claimed_by, t.attempt)
               from unnest(v_ids) with ordinality as i (id, position)
               join pgsched.scheduled_tasks as t on t.id = i.id
              order by i.position),
           array_fill(0::double precision, array[cardinality(v_ids)]),
           null) as e;
end;
$$;

comment on function pgsched.reap_stale is
  'Takes tasks whose lease ended from their holders, at most p_limit (1 to 1000) a call, and says '
  'what became of each: queued (due at once), failed (attempts used up), cancelled (a cancel was '
  'requested). Passes by what another session is acting on; safe from any number of callers; '
  'writes nothing when no lease ended. Raises TS400.';

revoke all on function pgsched.reap_stale from public;
