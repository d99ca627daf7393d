begin;
\ir fixtures.sql
select plan(19);

select is(pg_temp.arguments_of('pgsched.recent_rates'), 'p_seconds integer DEFAULT 60',
          'recent_rates takes, optionally, a number of seconds');
select is(pg_temp.result_of('pgsched.recent_rates'),
  'TABLE(queue text, completed bigint, failed bigint, cancelled bigint)',
  'recent_rates returns figures for each queue');

-- The figures of the queues of this file, in the order of the function.
create function pg_temp.rates(p_seconds integer default 60)
  returns table (queue text, completed bigint, failed bigint, cancelled bigint)
  language sql
as $$
  select r.* from pgsched.recent_rates(p_seconds) as r where r.queue like 'pgtap %'
$$;

create function pg_temp.finished(
    p_queue text, p_status text, p_age interval default '0', p_tasks integer default 1)
  returns void
  language sql
as $$
  insert into pgsched.finished_tasks (
         id, queue, task_type, payload, status, priority, run_at, attempt, max_attempts,
         created_at, finished_at)
  select nextval(pg_get_serial_sequence('pgsched.scheduled_tasks', 'id')), p_queue, 'a', '{}',
         p_status, 5, '2020-01-01 00:00:00+00', 1, 1, '2020-01-01 00:00:00+00',
         clock_timestamp() - p_age
    from generate_series(1, p_tasks)
$$;

-- Nothing there
select is_empty('select * from pg_temp.rates()', 'a queue that nobody used has no figures');
select pg_temp.finished('pgtap old', status, '2 minutes')
  from unnest(array['completed', 'failed', 'cancelled']) as status \g /dev/null
select pgsched.enqueue_task('a', p_queue => 'pgtap live'), pg_temp.claimed('pgtap live')
  \g /dev/null
select is_empty('select * from pg_temp.rates()', 'nor has one of which nothing ended lately');

-- Happy path
select pg_temp.finished(queue, status, '0', tasks)
  from (values ('pgtap b', 'completed', 3), ('pgtap b', 'failed', 2), ('pgtap b', 'cancelled', 1),
               ('pgtap a', 'cancelled', 1), ('pgtap c', 'failed', 4), ('pgtap old', 'completed', 1))
       as f (queue, status, tasks) \g /dev/null
select results_eq(
  'select * from pg_temp.rates()',
  $$values ('pgtap a', 0::bigint, 0::bigint, 1::bigint), ('pgtap b', 3, 2, 1), ('pgtap c', 0, 4, 0),
           ('pgtap old', 1, 0, 0)$$,
  'what ended lately is counted by queue, in the order of names, and by how it ended');

-- Edges: the time
select results_eq($$select * from pg_temp.rates(3600) where queue = 'pgtap old'$$,
                  $$values ('pgtap old', 2::bigint, 1::bigint, 1::bigint)$$,
                  'in a longer time more has ended');
select pg_temp.finished('pgtap edge', 'completed', age)
  from unnest(array['0', '9 minutes 50 seconds', '10 minutes', '1 day']::interval[]) as age
  \g /dev/null
select results_eq($$select completed from pg_temp.rates(600) where queue = 'pgtap edge'$$,
                  array[2::bigint], 'what is as old as p_seconds or older does not count');
select lives_ok(format('select * from pgsched.recent_rates(%s)', seconds),
                format('%s seconds can be asked for', seconds))
  from unnest(array[1, 86400]) as seconds;

-- Edges: names
select pg_temp.finished(name, status)
  from good_names, unnest(array['completed', 'failed']) as status \g /dev/null
select is_empty('select name from good_names except select queue from pgsched.recent_rates()',
                'any name of a queue is found');

-- Edges: counting stops
select pg_temp.finished('pgtap many', status, '0', 10000)
  from unnest(array['completed', 'failed', 'cancelled']) as status \g /dev/null
select results_eq($$select * from pg_temp.rates() where queue = 'pgtap many'$$,
                  $$values ('pgtap many', 10000::bigint, 10000::bigint, 10000::bigint)$$,
                  'ten thousand of each are counted');
select pg_temp.finished('pgtap many', status)
  from unnest(array['completed', 'failed', 'cancelled']) as status \g /dev/null
select results_eq($$select * from pg_temp.rates() where queue = 'pgtap many'$$,
                  $$values ('pgtap many', 10000::bigint, 10000::bigint, 10000::bigint)$$,
                  'but not one more');

-- Errors
select throws_ok(format('select * from pgsched.recent_rates(%s)', coalesce(seconds::text, 'null')),
                 'TS400', 'p_seconds is out of range: ' || coalesce(seconds::text, 'null'),
                 coalesce(seconds::text, 'null') || ' seconds cannot be asked for')
  from unnest(array[null, -1, 0, 86401, 2147483647, -2147483648]) as seconds;

-- Rights
select pg_temp.may_call('pgsched.recent_rates',
                        $$select failed from pgsched.recent_rates() where queue = 'pgtap c'$$, '4');

select * from finish();
rollback;
