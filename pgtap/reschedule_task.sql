begin;
\ir fixtures.sql
select plan(43);

-- A queued task with an attempt behind it, due in an hour.
create function pg_temp.queued(p_queue text, p_id bigint default null)
  returns bigint
  language sql
as $$
  insert into pgsched.scheduled_tasks as t (
         id, queue, task_type, payload, priority, run_at, attempt, max_attempts, unique_key,
         concurrency_key, last_error, created_at)
  select i.id, p_queue, 'some work', '{"n": 1}', 3, c.now + interval '1 hour', 1, 7, i.id::text,
         'c', 'before', c.now - interval '3 hours'
    from (select clock_timestamp() as now) as c
   cross join coalesce(
         p_id, nextval(pg_get_serial_sequence('pgsched.scheduled_tasks', 'id'))) as i (id)
  returning t.id
$$;

select is(pg_temp.arguments_of('pgsched.reschedule_task'),
  'p_id bigint, p_run_at timestamp with time zone, p_priority integer DEFAULT NULL::integer',
  'reschedule_task takes an id, a time and, optionally, a priority');
select is(pg_temp.result_of('pgsched.reschedule_task'), 'void', 'reschedule_task returns nothing');

-- Nothing there
select throws_ok('select pgsched.reschedule_task(-5, null)',
                 'TS404', 'there is no task -5', 'there is no task to move');

-- Happy path: later
select pg_temp.queued('pgtap reschedule_task') as id,
       pg_temp.queued('pgtap reschedule_task') as other \gset
select pg_temp.task(:id) as before, pg_temp.task(:other) as other_before \gset
select pgsched.reschedule_task(:id, '2999-01-01 00:00:00.000001+00') \g /dev/null
select is(pg_temp.task(:id), :'before'::jsonb || jsonb_build_object(
            'run_at', timestamptz '2999-01-01 00:00:00.000001+00'),
          'a queued task is moved to a later time, and keeps all else');
select is(pg_temp.task(:other), :'other_before', 'another task is not moved');
select ok(not pg_temp.holds_lock(:id), 'rescheduling takes no lock of a task');

-- Happy path: now
select clock_timestamp() as t0 \gset
select pgsched.reschedule_task(:id, null) \g /dev/null
select is(pg_temp.task(:id), :'before'::jsonb || jsonb_build_object('run_at', run_at),
          'it is moved back to now by a null, and keeps all else')
  from pgsched.scheduled_tasks where id = :id;
select ok(run_at between :'t0' and clock_timestamp(), 'it is due at once, by the clock')
  from pgsched.scheduled_tasks where id = :id;
select results_eq($$select id, attempt from pgsched.claim_task('w', 'pgtap reschedule_task')$$,
                  format('values (%s::bigint, 2)', :id), 'and is claimed');

-- Happy path: the priority
select pg_temp.task(:other) as before \gset
select pgsched.reschedule_task(:other, '2999-01-01 00:00:00+00', 9) \g /dev/null
select is(pg_temp.task(:other), :'before'::jsonb || jsonb_build_object(
            'run_at', timestamptz '2999-01-01 00:00:00+00', 'priority', 9),
          'a task is given a time and a priority, and keeps all else');
select pgsched.reschedule_task(:other, '2999-01-01 00:00:00+00', p_priority => null) \g /dev/null
select is(pg_temp.task(:other), :'before'::jsonb || jsonb_build_object(
            'run_at', timestamptz '2999-01-01 00:00:00+00', 'priority', 9),
          'a priority that is null leaves it as it is');

create temporary table turns as
select turn, pg_temp.queued('pgtap turns') as id from generate_series(4, 1, -1) as turn;
select pgsched.reschedule_task(id, null, priority)
  from turns join (values (1, 0), (2, 3), (3, null), (4, 9)) as p (turn, priority) using (turn)
 where turn <> 3 order by turn \g /dev/null
select pgsched.reschedule_task(id, null) from turns where turn = 3 \g /dev/null
select results_eq($$select id from pgsched.claim_task('w', 'pgtap turns', p_limit => 100)$$,
                  'select id from turns order by turn',
                  'tasks are claimed in the order that they were moved to');

-- Edges: the time
create temporary table past as
select p.run_at, pg_temp.queued('pgtap past') as id
  from (values (clock_timestamp() - interval '1 microsecond'), ('1970-01-01 00:00:00+00'),
               ('4713-01-01 00:00:00+00 BC')) as p (run_at);
select clock_timestamp() as t0 \gset
select pgsched.reschedule_task(id, run_at) from past \g /dev/null
select results_eq(
  format('select run_at between %L and clock_timestamp() from pgsched.scheduled_tasks
           where queue = %L', :'t0', 'pgtap past'),
  array[true, true, true],
  'a time in the past becomes now, however far it is');
select pgsched.enqueue_task('a', p_queue => 'pgtap due') as id \gset
select run_at as due from pgsched.scheduled_tasks where id = :id \gset
select pgsched.reschedule_task(:id, :'due') \g /dev/null
select ok(run_at > :'due', 'also when it is the time that a due task had')
  from pgsched.scheduled_tasks where id = :id;
select pgsched.reschedule_task(:id, '9998-12-31 23:59:59.999999+00') \g /dev/null
select is(run_at, '9998-12-31 23:59:59.999999+00', 'the last time that may be is kept')
  from pgsched.scheduled_tasks where id = :id;
select is_empty($$select * from pgsched.claim_task('w', 'pgtap due')$$,
                'and the task is not claimed before it');

-- Edges: the state of the task
insert into pgsched.queues (name, paused) values ('pgtap paused', true);
select pg_temp.queued('pgtap paused') as id \gset
select pg_temp.task(:id) as before \gset
select pgsched.reschedule_task(:id, '2999-01-01 00:00:00+00', 0) \g /dev/null
select is(pg_temp.task(:id), :'before'::jsonb || jsonb_build_object(
            'run_at', timestamptz '2999-01-01 00:00:00+00', 'priority', 0),
          'a task of a paused queue is moved');
select * from pg_temp.claimed('pgtap states') \gset
select pgsched.fail_task(:id, :'token', 'x', '365 days') \g /dev/null
select pg_temp.task(:id) as before \gset
select pgsched.reschedule_task(:id, '2999-01-01 00:00:00+00') \g /dev/null
select is(pg_temp.task(:id), :'before'::jsonb || jsonb_build_object(
            'run_at', timestamptz '2999-01-01 00:00:00+00'),
          'a task that waits to be retried is moved');

-- Edges: ids
select pg_temp.queued('pgtap ids', id)
  from unnest(array[:huge, :huge_2_32, :huge_same_key]) as id \g /dev/null
select lives_ok(format('select pgsched.reschedule_task(%s, %L)', id, '2999-01-01 00:00:00+00'),
                format('task %s is moved', id))
  from unnest(array[:huge_2_32, :huge_same_key]) as id;
select results_eq(
  $$select id from pgsched.scheduled_tasks
     where queue = 'pgtap ids' and run_at = '2999-01-01 00:00:00+00' order by id$$,
  array[:huge_same_key, :huge_2_32], 'and no other');

-- Errors: the state of the task
create temporary table wrong as
select e.status, c.*
  from (values (1, 'processing'), (2, 'completed'), (3, 'failed'), (4, 'cancelled'))
       as e (n, status)
 cross join lateral pg_temp.claimed('pgtap wrong', p_cancel => n = 4) as c;
select pgsched.complete_task(id, token) from wrong where status = 'completed' \g /dev/null
select pgsched.fail_task(id, token, 'x', p_permanent => true)
  from wrong where status in ('failed', 'cancelled') \g /dev/null
create temporary table before as select * from pgsched.tasks where queue = 'pgtap wrong';
select throws_ok(format('select pgsched.reschedule_task(%s, %L, %L)', id, run_at, priority),
                 'TS423', format('task %s is %s', id, status),
                 format('a %s task is not moved %s', status, what))
  from wrong
 cross join (values (null, null, 'to now'), ('2999-01-01 00:00:00+00', 1, 'to later'))
            as given (run_at, priority, what);
select results_eq($$select * from pgsched.tasks where queue = 'pgtap wrong' order by id$$,
                  'select * from before order by id', 'and nothing of it changes');

-- Errors: arguments
select pg_temp.queued('pgtap errors') as id \gset
select pg_temp.task(:id) as before \gset
select throws_ok(format('select pgsched.reschedule_task(null, %L, %L)', run_at, priority),
                 'TS400', 'p_id must not be null', 'null is no id')
  from (values (null, null), ('2999-01-01 00:00:00+00', 1)) as given (run_at, priority);
select throws_ok(format('select pgsched.reschedule_task(%s, %L, 1)', :id, run_at),
                 'TS400', 'p_run_at is out of range: ' || run_at, run_at || ' is no time to run at')
  from bad_times;
select throws_ok(format('select pgsched.reschedule_task(%s, null, %s)', :id, bad),
                 'TS400', 'p_priority is out of range: ' || bad, format('%s is no priority', bad))
  from unnest(array[-1, 10, 65536, 2147483647, -2147483648]) as bad;
select is(pg_temp.task(:id), :'before', 'a refused call changes nothing');

-- Rights
select pg_temp.may_call(
  'pgsched.reschedule_task',
  format($$select 'moved' from pgsched.reschedule_task(%s, null)$$, :id), 'moved');

select * from finish();
rollback;
