-- Rows are picked by the claim index, level after level, each locked in the moment it is picked: at
-- most p_limit, and no row that another session has locked. Only then the advisory lock of each is
-- tried, above the limit that no plan moves it through: below, it would lock rows nobody asked for.
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
  v_lease_seconds double precision := pgsched._lease_seconds(p_lease);
  v_counts boolean := random() < 1.0 / 16;
  v_now timestamptz;
  -- An argument may bring a collation, by which the indexes are not sorted.
  v_queue text collate "default";
begin
  p_worker := pgsched._name('p_worker', p_worker);
  v_queue := pgsched._name('p_queue', p_queue);
  if (p_limit between 1 and 100) is not true then
    raise exception using
      errcode = 'TS400',
      message = format('p_limit is out of range: %s', coalesce(p_limit::text, 'null')),
      hint = 'Give 1 to 100: each claimed task holds a slot of the shared lock table until commit.';
  end if;
  v_now := clock_timestamp();

  return query
  with claimed as (
    update pgsched.scheduled_tasks as t
       set status = 'processing',
           attempt = t.attempt + 1,
           claim_token = gen_random_uuid(),
           claimed_by = p_worker,
           claimed_at = v_now,
           lease_expires_at = v_now + v_lease_seconds * interval '1 second'
     where t.id = any (array(
             select picked.id
               from (select chosen.id
                       from (select p.level::smallint as priority
                               from generate_series(0, 9) as p (level)
                              where not exists (
                                    select
                                      from pgsched.queues as q
                                     where q.name = v_queue and q.paused)
                              order by p.level
                             offset 0) as levels
                      cross join lateral (
                            select s.id
                              from pgsched.scheduled_tasks as s
                             where s.queue = v_queue
                               and s.priority = levels.priority
                               and s.status = 'queued'
                               and s.run_at <= v_now
                             order by s.run_at, s.id
                             limit p_limit
                               for no key update skip locked) as chosen
                      limit p_limit) as picked
              where pg_try_advisory_xact_lock(1337, (picked.id % 2147483647)::integer)))
    returning t.*)
  select c.id, c.claim_token, c.task_type, c.payload, c.queue, c.priority::integer,
         c.attempt, c.max_attempts, c.run_at, c.created_at, c.lease_expires_at,
         case when v_counts then 16 * greatest(0, (
           select pgsched._due_up_to(v_queue, l.priority, l.run_at, l.id, v_now)
             from claimed as l
            order by l.priority desc, l.run_at desc, l.id desc
            limit 1) - (select count(*) from claimed))
         else 0 end
    from claimed as c
   order by c.priority, c.run_at, c.id;
end;
$$;

comment on function pgsched.claim_task is
  'Claims up to p_limit (1 to 100) due tasks of a queue for p_lease (1 second to 24 hours), lowest '
  'priority number first, and counts the attempt. Never waits for another session. No row: nothing '
  'is due, or the queue is paused; such a call writes nothing. contended: how many due tasks ahead '
  'of the last one returned other sessions held, counted in one call of 16 and scaled by 16, so '
  'that the sum over many calls is right. Raises TS400.';

revoke all on function pgsched.claim_task from public;

create function pgsched._due_up_to(
    p_queue text, p_priority smallint, p_run_at timestamptz, p_id bigint, p_now timestamptz)
  returns bigint
  language sql
  stable
  set enable_seqscan = off
as $$
  select sum(
           case when p.level < p_priority then (
                  select count(*)
                    from pgsched.scheduled_tasks as s
                   where s.queue = p_queue
                     and s.priority = p.level::smallint
                     and s.status = 'queued'
                     and s.run_at <= p_now)
                else (
                  select count(*)
                    from pgsched.scheduled_tasks as s
                   where s.queue = p_queue
                     and s.priority = p_priority
                     and s.status = 'queued'
                     and (s.run_at, s.id) <= (p_run_at, p_id))
           end)::bigint
    from generate_series(0, p_priority) as p (level)
$$;

comment on function pgsched._due_up_to is
  'Due tasks of a queue in claim order up to and with the given one, as the calling statement''s '
  'snapshot saw them: what it did not get of these, other sessions held.';

revoke all on function pgsched._due_up_to from public;
