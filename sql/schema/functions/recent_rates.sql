-- The pairs of status and queue are found by skipping through the index backwards: so each begins
-- with its newest task, and not with what was deleted and an old snapshot keeps. What ended since
-- then is a range, of which no more than 10,000 are counted.
create function pgsched.recent_rates(p_seconds integer default 60)
  returns table (queue text, completed bigint, failed bigint, cancelled bigint)
  language plpgsql
  stable
  security definer
  set search_path = pg_catalog, pg_temp
  set enable_seqscan = off
  set jit = off
as $$
declare
  v_since timestamptz := clock_timestamp() - p_seconds * interval '1 second';
begin
  if (p_seconds between 1 and 86400) is not true then
    raise exception using
      errcode = 'TS400',
      message = format('p_seconds is out of range: %s', coalesce(p_seconds::text, 'null')),
      hint = 'Give 1 to 86400.';
  end if;
  return query
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
            limit 1) as n),
  ended as (
    select k.status, k.queue,
           (select count(*)
              from (select
                      from pgsched.finished_tasks as f
                     where f.status = k.status and f.queue = k.queue and f.finished_at >= v_since
                     limit 10000) as counted) as tasks
      from kinds as k)
  select e.queue,
         coalesce(max(e.tasks) filter (where e.status = 'completed'), 0),
         coalesce(max(e.tasks) filter (where e.status = 'failed'), 0),
         coalesce(max(e.tasks) filter (where e.status = 'cancelled'), 0)
    from ended as e
   where e.tasks > 0
   group by e.queue
   order by e.queue;
end;
$$;

comment on function pgsched.recent_rates is
  'How many tasks of each queue were completed, failed for good or were cancelled in the last '
  'p_seconds (1 to 86400); a queue without any is not there, nor is what is kept no longer. '
  'Counting stops at 10000: that figure means 10000 or more. Raises TS400.';

revoke all on function pgsched.recent_rates from public;
