begin;
\ir fixtures.sql
select plan(12);

select is(pg_temp.arguments_of('pgsched.queue_stats'), '', 'queue_stats takes nothing');
select is(pg_temp.result_of('pgsched.queue_stats'),
  'TABLE(queue text, paused boolean, queued bigint, due bigint, processing bigint, failed bigint, '
  'oldest_due_age interval)',
  'queue_stats returns figures for each queue');

-- The figures of the queues of this file, in the order of the function.
create function pg_temp.stats()
  returns table (queue text, paused boolean, queued bigint, due bigint, processing bigint,
                 failed bigint, oldest_due_age interval)
  language sql
as $$
  select s.* from pgsched.queue_stats() as s where s.queue like 'pgtap %'
$$;

create function pg_temp.finished(p_queue text, p_status text, p_tasks integer default 1)
  returns void
  language sql
as $$
  insert into pgsched.finished_tasks (
         id, queue, task_type, payload, status, priority, run_at, attempt, max_attempts,
         created_at, finished_at)
  select nextval(pg_get_serial_sequence('pgsched.scheduled_tasks', 'id')), p_queue, 'a', '{}',
         p_status, 5, '2020-01-01 00:00:00+00', 1, 1, '2020-01-01 00:00:00+00', clock_timestamp()
    from generate_series(1, p_tasks)
$$;

-- Nothing there
select is_empty('select * from pg_temp.stats()', 'a queue that nobody used has no figures');
select pg_temp.finished('pgtap done', 'completed'), pg_temp.finished('pgtap done', 'cancelled')
  \g /dev/null
select is_empty('select * from pg_temp.stats()',
                'nor has one of which only completed and cancelled tasks are left');

-- Happy path: what makes a queue appear
insert into pgsched.queues (name, paused) values ('pgtap a', true), ('pgtap e', false);
select pg_temp.claimed('pgtap b') \g /dev/null
select pg_temp.finished('pgtap c', 'failed'), pg_temp.finished('pgtap c', 'completed') \g /dev/null
select pgsched.enqueue_task('a', p_queue => 'pgtap d', p_run_at => '2999-01-01 00:00:00+00')
  \g /dev/null
select results_eq(
  'select * from pg_temp.stats()',
  $$values ('pgtap a', true, 0::bigint, 0::bigint, 0::bigint, 0::bigint, interval '0'),
           ('pgtap b', false, 0, 0, 1, 0, '0'), ('pgtap c', false, 0, 0, 0, 1, '0'),
           ('pgtap d', false, 1, 0, 0, 0, '0'), ('pgtap e', false, 0, 0, 0, 0, '0')$$,
  'a queue has figures, in the order of names, if it has settings, a running task, '
  'a dead letter or a queued task');

-- Happy path: all figures of one queue
insert into pgsched.queues (name, paused) values ('pgtap all', true);
select pgsched.enqueue_task('a', p_queue => 'pgtap all', p_priority => p)
  from unnest(array[0, 0, 4, 5, 9]) as p \g /dev/null
select pgsched.enqueue_task('a', p_queue => 'pgtap all', p_priority => p,
                            p_run_at => clock_timestamp() + interval '1 hour')
  from unnest(array[0, 9]) as p \g /dev/null
select pg_temp.claimed('pgtap all', p_lease_left => left_over)
  from unnest(array['-1 hours', '1 hour', '2 hours']::interval[]) as left_over \g /dev/null
select pg_temp.finished('pgtap all', s, n)
  from (values ('failed', 4), ('completed', 2), ('cancelled', 1)) as f (s, n) \g /dev/null
select results_eq(
  $$select paused, queued, due, processing, failed from pg_temp.stats() where queue = 'pgtap all'$$,
  'values (true, 7::bigint, 5::bigint, 3::bigint, 4::bigint)',
  'queued tasks count in every priority, due or later; running ones whether or not their lease is '
  'over; of the finished ones the failed');

-- Edges: the oldest due task
update pgsched.scheduled_tasks set run_at = clock_timestamp() - interval '1 day'
 where queue = 'pgtap all' and status = 'queued' and priority = 9;
update pgsched.scheduled_tasks set run_at = clock_timestamp() - interval '2 days'
 where queue = 'pgtap all' and status = 'queued' and priority = 4;
select run_at as oldest from pgsched.scheduled_tasks
 where queue = 'pgtap all' and status = 'queued' and priority = 4 \gset
select clock_timestamp() as t0 \gset
select ok(oldest_due_age between timestamptz :'t0' - :'oldest' and clock_timestamp() - :'oldest',
          'the oldest due age is that of the task that is longest due, in whatever priority')
  from pg_temp.stats() where queue = 'pgtap all';
select is(oldest_due_age, '0', 'a running task is not due, however old')
  from pg_temp.stats() where queue = 'pgtap b';

-- Edges: names
select pgsched.enqueue_task('a', p_queue => name) from good_names \g /dev/null
select is_empty('select name from good_names except select queue from pgsched.queue_stats()',
                'any name of a queue is found');

-- Edges: counting stops
insert into pgsched.scheduled_tasks (
       queue, task_type, payload, priority, run_at, max_attempts, created_at)
select 'pgtap many', 'a', '{}', n % 2, '2020-01-01 00:00:00+00', 1, '2020-01-01 00:00:00+00'
  from generate_series(1, 10000) as n;
select pg_temp.finished('pgtap many', 'failed', 10000) \g /dev/null
insert into pgsched.scheduled_tasks (
       queue, task_type, payload, status, priority, run_at, max_attempts, claim_token,
       lease_expires_at, created_at)
select 'pgtap many', 'a', '{}', 'processing', 5, '2020-01-01 00:00:00+00', 1, gen_random_uuid(),
       '2020-01-01 00:00:00+00', '2020-01-01 00:00:00+00'
  from generate_series(1, 10000);
select results_eq(
  $$select queued, due, processing, failed from pg_temp.stats() where queue = 'pgtap many'$$,
  'values (10000::bigint, 10000::bigint, 10000::bigint, 10000::bigint)',
  'ten thousand of each are counted');
select pgsched.enqueue_task('a', p_queue => 'pgtap many', p_priority => 2),
       pg_temp.finished('pgtap many', 'failed'), pg_temp.claimed('pgtap many') \g /dev/null
select results_eq(
  $$select queued, due, processing, failed from pg_temp.stats() where queue = 'pgtap many'$$,
  'values (10000::bigint, 10000::bigint, 10000::bigint, 10000::bigint)',
  'but not one more');

-- Rights
select pg_temp.may_call('pgsched.queue_stats',
                        $$select paused from pgsched.queue_stats() where queue = 'pgtap a'$$,
                        'true');

select * from finish();
rollback;
