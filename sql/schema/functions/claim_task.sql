-- Rows are picked by the claim index, level after level, each locked in the moment it is picked: at
-- most p_limit, and no row that another session has locked. Only then the advisory lock of each is
-- tried, above the limit that no plan moves it through: below, it would lock rows nobody asked for.
-- A picked row is found again by its place, which without a sequential scan only a nested loop can
-- do: so rows come in the order in which they were picked. One that was changed since the snapshot
-- has another place there, and is passed by as if it were locked.
-- The settings keep a plan from a small table, a sequential scan and JIT away from the hot path.
create function pgsched.claim_task(
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

create function pgsched._raise_claim_fault(p_worker text, p_lease interval, p_limit integer)
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

create function pgsched._due_up_to(
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
