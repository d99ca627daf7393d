-- Every figure comes from an index. Queued tasks and dead letters, of which there may be millions,
-- are counted up to 10,000. The queues that have any are found by skipping through the index.
create function pgsched.queue_stats()
  returns table (
    queue text, paused boolean, queued bigint, due bigint, processing bigint, failed bigint,
    oldest_due_age interval)
  language sql
  stable
  security definer
  set search_path = pg_catalog, pg_temp
  set enable_seqscan = off
  set jit = off
as $$
  with recursive clock as materialized (
    select clock_timestamp() as now),
  queued_in as (
    (select t.queue
       from pgsched.scheduled_tasks as t
      where t.status = 'queued'
      order by t.queue
      limit 1)
     union all
    select (select t.queue
              from pgsched.scheduled_tasks as t
             where t.status = 'queued' and t.queue > p.queue
             order by t.queue
             limit 1)
      from queued_in as p
     where p.queue is not null),
  failed_in as (
    (select f.queue
       from pgsched.finished_tasks as f
      where f.status = 'failed'
      order by f.queue
      limit 1)
     union all
    select (select f.queue
              from pgsched.finished_tasks as f
             where f.status = 'failed' and f.queue > p.queue
             order by f.queue
             limit 1)
      from failed_in as p
     where p.queue is not null),
  running as materialized (
    select t.queue, least(count(*), 10000) as tasks
      from pgsched.scheduled_tasks as t
     where t.status = 'processing'
     group by t.queue),
  names as (
    select q.name as queue from pgsched.queues as q
     union
    select n.queue from queued_in as n where n.queue is not null
     union
    select n.queue from failed_in as n where n.queue is not null
     union
    select r.queue from running as r)
  select n.queue,
         coalesce((select q.paused from pgsched.queues as q where q.name = n.queue), false),
         (select count(*)
            from (select
                    from pgsched.scheduled_tasks as t
                   where t.queue = n.queue and t.status = 'queued'
                   limit 10000) as counted),
         (select least(sum(level.due), 10000)
            from (select (select count(*)
                            from (select
                                    from pgsched.scheduled_tasks as t
                                   where t.queue = n.queue and t.priority = p.level::smallint
                                     and t.status = 'queued' and t.run_at <= c.now
                                   limit 10000) as counted) as due
                    from generate_series(0, 9) as p (level)) as level)::bigint,
         coalesce((select r.tasks from running as r where r.queue = n.queue), 0),
         (select count(*)
            from (select
                    from pgsched.finished_tasks as f
                   where f.queue = n.queue and f.status = 'failed'
                   limit 10000) as counted),
         c.now - least(c.now, (
           select min((select t.run_at
                         from pgsched.scheduled_tasks as t
                        where t.queue = n.queue and t.priority = p.level::smallint
                          and t.status = 'queued'
                        order by t.run_at, t.id
                        limit 1))
             from generate_series(0, 9) as p (level)))
    from names as n
   cross join clock as c
   order by n.queue
$$;

comment on function pgsched.queue_stats is
  'One row for each queue that has settings, live tasks or dead letters: queued (due or later), '
  'due now, processing, failed (dead letters), and the age of the oldest due task (zero: none is '
  'due). Counting stops at 10000: that figure means 10000 or more.';

revoke all on function pgsched.queue_stats from public;
