begin;
\ir fixtures.sql
select plan(94);

select is(pg_temp.arguments_of('pgsched.enqueue_task'),
  'p_task_type text, p_payload jsonb DEFAULT ''{}''::jsonb, '
  'p_queue text DEFAULT ''default''::text, '
  'p_run_at timestamp with time zone DEFAULT NULL::timestamp with time zone, '
  'p_priority integer DEFAULT 5, p_max_attempts integer DEFAULT NULL::integer, '
  'p_unique_key text DEFAULT NULL::text, p_concurrency_key text DEFAULT NULL::text',
  'enqueue_task takes a type and, optionally, all else');
select is(pg_temp.result_of('pgsched.enqueue_task'), 'bigint', 'enqueue_task returns an id');

-- Happy path
select clock_timestamp() as t0 \gset
select pgsched.enqueue_task('mail', p_queue => 'pgtap enqueue_task') as id \gset
select clock_timestamp() as t1 \gset
select results_eq(
  format('select queue, task_type, payload, status, priority, attempt, max_attempts, claim_token,
                 claimed_by, claimed_at, lease_expires_at, unique_key, concurrency_key,
                 cancel_requested_at, last_error
            from pgsched.scheduled_tasks where id = %s', :id),
  $$values ('pgtap enqueue_task', 'mail', '{}'::jsonb, 'queued', 5::smallint, 0, 20, null::uuid,
            null, null::timestamptz, null::timestamptz, null, null, null::timestamptz, null)$$,
  'a task in a queue without settings is queued with the defaults');
select ok(created_at between :'t0' and :'t1' and run_at = created_at,
          'a task without a time is due at once, by the clock of the call')
  from pgsched.scheduled_tasks where id = :id;

select pgsched.enqueue_task('mail') as id \gset
select results_eq(
  format('select queue, task_type, payload, priority
            from pgsched.scheduled_tasks where id = %s', :id),
  $$values ('default', 'mail', '{}'::jsonb, 5::smallint)$$,
  'a task without a queue is in the queue default');

select pgsched.enqueue_task(
  'mail', '{"to": [1, null, "é"]}', 'pgtap enqueue_task', '9998-12-31 23:59:59.999999+00', 0, 7,
  'only one', 'customer 5') as id \gset
select results_eq(
  format('select queue, task_type, payload, status, priority, run_at, attempt, max_attempts,
                 unique_key, concurrency_key
            from pgsched.scheduled_tasks where id = %s', :id),
  $$values ('pgtap enqueue_task', 'mail', '{"to": [1, null, "é"]}'::jsonb, 'queued', 0::smallint,
            '9998-12-31 23:59:59.999999+00'::timestamptz, 0, 7, 'only one', 'customer 5')$$,
  'a task has all that it was given');

select is_empty($$select name from pgsched.queues where name = 'pgtap enqueue_task'$$,
                'enqueuing makes no settings for a queue');

-- Edges: the time
select clock_timestamp() as t0 \gset
select pgsched.enqueue_task('a', p_queue => 'pgtap past', p_run_at => past.run_at)
  from (values (clock_timestamp() - interval '1 microsecond'), ('1970-01-01 00:00:00+00'),
               ('4713-01-01 00:00:00+00 BC')) as past (run_at) \g /dev/null
select results_eq(
  format('select run_at >= %L and run_at <= clock_timestamp() and run_at = created_at
            from pgsched.scheduled_tasks where queue = %L', :'t0', 'pgtap past'),
  array[true, true, true],
  'a time in the past becomes now, however far it is');

select pgsched.enqueue_task('a', p_queue => 'pgtap later',
                            p_run_at => '2999-01-01 00:00:00.000001+00') as id \gset
select is(run_at, '2999-01-01 00:00:00.000001+00', 'a later time is kept')
  from pgsched.scheduled_tasks where id = :id;

-- Edges: priority and attempts
select pgsched.enqueue_task('a', p_queue => 'pgtap bounds', p_priority => p, p_max_attempts => m)
  from (values (0, 1), (9, 2147483647)) as bounds (p, m) \g /dev/null
select results_eq(
  'select priority, max_attempts from pgsched.scheduled_tasks where queue = ''pgtap bounds''
    order by priority',
  'values (0::smallint, 1), (9::smallint, 2147483647)',
  'priorities 0 and 9 and the smallest and largest number of attempts are taken');

select pgsched.enqueue_task('a', p_queue => 'pgtap attempts') \g /dev/null
insert into pgsched.queues (name, max_attempts) values ('pgtap attempts', 3);
select pgsched.enqueue_task('a', p_queue => 'pgtap attempts', p_max_attempts => m)
  from (values (null), (9)) as given (m) \g /dev/null
select results_eq(
  'select max_attempts from pgsched.scheduled_tasks where queue = ''pgtap attempts'' order by 1',
  'values (3), (9), (20)',
  'the queue says how many attempts a task added from then on has, unless the task does');

-- Edges: names
select is(pg_temp.task(pgsched.enqueue_task(
            name, p_queue => name, p_unique_key => name, p_concurrency_key => name))
            - array['id', 'run_at', 'created_at', 'max_attempts'],
          jsonb_build_object(
            'task_type', name, 'queue', name, 'unique_key', name, 'concurrency_key', name,
            'payload', '{}'::jsonb, 'status', 'queued', 'priority', 5, 'attempt', 0,
            'claim_token', null, 'claimed_by', null, 'claimed_at', null, 'lease_expires_at', null,
            'cancel_requested_at', null, 'last_error', null, 'finished_at', null, 'result', null),
          what || ' is a name')
  from good_names;

-- Edges: the payload
select is(pg_temp.task(pgsched.enqueue_task('a', payload, 'pgtap payload')) -> 'payload', payload,
          format('%s is a payload', left(payload::text, 20)))
  from (values (jsonb 'null'), ('""'), ('[]'), ('0.10'), (E'"\\n\\u0001 '' $$ %s"'),
               (to_jsonb(repeat('x', 1048574)))) as p (payload);

insert into pgsched.queues (name, max_payload_bytes)
values ('pgtap small', 10), ('pgtap big', 2000000);
select lives_ok($$select pgsched.enqueue_task('a', '"12345678"', 'pgtap small')$$,
                'a payload as long as the queue allows is taken');
select lives_ok($$select pgsched.enqueue_task('a', to_jsonb(repeat('x', 1999998)), 'pgtap big')$$,
                'a queue may allow more than 1 MiB');

-- Edges: a paused queue
insert into pgsched.queues (name, paused) values ('pgtap paused', true);
select is(pg_temp.task(pgsched.enqueue_task('a', p_queue => 'pgtap paused')) ->> 'status', 'queued',
          'a paused queue takes tasks');

-- Edges: the unique key
select pgsched.enqueue_task('a', '1', 'pgtap unique', p_unique_key => 'k') as id \gset
select pg_temp.task(:id) as before \gset
select is(
  pgsched.enqueue_task('b', '2', 'pgtap unique', '2999-01-01 00:00:00+00', 1, 2, 'k', 'c'), :'id',
  'a unique key that a queued task has gives the id of that task');
select is(pg_temp.task(:id), :'before', 'that task is not changed');
select results_eq($$select id from pgsched.tasks where queue = 'pgtap unique'$$,
                  array[:id::bigint], 'and no other is made');
select isnt(pgsched.enqueue_task('a', p_queue => 'pgtap unique', p_unique_key => 'K'), :'id',
            'another key makes another task');
select isnt(pgsched.enqueue_task('a', p_queue => 'pgtap unique'), :'id', 'so does no key');
select isnt(pgsched.enqueue_task('a', p_queue => 'pgtap unique'),
            pgsched.enqueue_task('a', p_queue => 'pgtap unique'),
            'tasks without a key are never the same');
select isnt(pgsched.enqueue_task('a', p_queue => 'pgtap unique 2', p_unique_key => 'k'), :'id',
            'the same key in another queue makes another task');

select * from pg_temp.claimed('pgtap unique') \gset running_
update pgsched.scheduled_tasks set unique_key = 'running' where id = :running_id;
select is(pgsched.enqueue_task('a', p_queue => 'pgtap unique', p_unique_key => 'running'),
          :'running_id', 'a unique key that a running task has gives the id of that task');

insert into pgsched.finished_tasks (
       id, queue, task_type, payload, status, priority, run_at, attempt, max_attempts, unique_key,
       created_at, finished_at)
select :huge + s.number, 'pgtap unique', 'a', '{}', s.status, 5, clock_timestamp(), 1, 1, s.status,
       clock_timestamp(), clock_timestamp()
  from (values (1, 'completed'), (2, 'failed'), (3, 'cancelled')) as s (number, status);
select results_eq(
  $$select 5000000000000000000
           > pgsched.enqueue_task('a', p_queue => 'pgtap unique', p_unique_key => k)
      from (values ('completed'), ('failed'), ('cancelled')) as ended (k)$$,
  array[true, true, true],
  'the unique key of a finished task is free');

-- Errors: names
select throws_ok(
         format('select pgsched.enqueue_task(%L, p_queue => %L)', name, 'pgtap errors'),
         'TS400', pg_temp.name_error('p_task_type', name), what || ' is no task type')
  from bad_names;
select throws_ok(
         format('select pgsched.enqueue_task(''a'', p_queue => %L)', name),
         'TS400', pg_temp.name_error('p_queue', name), what || ' is no queue')
  from bad_names;
select throws_ok(
         format('select pgsched.enqueue_task(''a'', p_queue => %L, p_unique_key => %L)',
                'pgtap errors', name),
         'TS400', pg_temp.name_error('p_unique_key', name), what || ' is no unique key')
  from bad_names where name is not null;
select throws_ok(
         format('select pgsched.enqueue_task(''a'', p_queue => %L, p_concurrency_key => %L)',
                'pgtap errors', name),
         'TS400', pg_temp.name_error('p_concurrency_key', name), what || ' is no concurrency key')
  from bad_names where name is not null;

-- Errors: numbers
select throws_ok(
         format('select pgsched.enqueue_task(''a'', p_queue => %L, p_priority => %L)',
                'pgtap errors', bad.priority),
         'TS400', 'p_priority is out of range: ' || coalesce(bad.priority::text, 'null'),
         format('%s is no priority', coalesce(bad.priority::text, 'null')))
  from (values (null), (-1), (10), (65536), (2147483647), (-2147483648)) as bad (priority);
select throws_ok(
         format('select pgsched.enqueue_task(''a'', p_queue => %L, p_max_attempts => %L)',
                'pgtap errors', bad.attempts),
         'TS400', 'p_max_attempts is out of range: ' || bad.attempts,
         format('%s is no number of attempts', bad.attempts))
  from (values (0), (-1), (-2147483648)) as bad (attempts);

-- Errors: the time
select throws_ok(
         format('select pgsched.enqueue_task(''a'', p_queue => %L, p_run_at => %L)',
                'pgtap errors', run_at),
         'TS400', 'p_run_at is out of range: ' || run_at, run_at || ' is no time to run at')
  from bad_times;

-- Errors: the payload
select throws_ok($$select pgsched.enqueue_task('a', null, 'pgtap errors')$$,
                 'TS400', 'p_payload must not be null', 'null is no payload');
select throws_ok(
  $$select pgsched.enqueue_task('a', to_jsonb(repeat('x', 1048575)), 'pgtap errors')$$,
  'TS400', 'p_payload is 1048577 bytes long, the limit of the queue is 1048576',
  'a payload of 1 MiB and a byte is refused');
select throws_ok(
  $$select pgsched.enqueue_task('a', to_jsonb(repeat('é', 524288)), 'pgtap errors')$$,
  'TS400', 'p_payload is 1048578 bytes long, the limit of the queue is 1048576',
  'a payload is measured in bytes');
select throws_ok(
  $$select pgsched.enqueue_task('a', '"123456789"', 'pgtap small')$$,
  'TS400', 'p_payload is 11 bytes long, the limit of the queue is 10',
  'a payload longer than the queue allows is refused');
select throws_ok(
  $$select pgsched.enqueue_task('a', to_jsonb(repeat('x', 1999999)), 'pgtap big')$$,
  'TS400', 'p_payload is 2000001 bytes long, the limit of the queue is 2000000',
  'also where the queue allows more than 1 MiB');

select is_empty($$select id from pgsched.tasks where queue = 'pgtap errors'$$,
                'a refused call adds nothing');

-- Rights
select pg_temp.may_call(
  'pgsched.enqueue_task',
  $$select pgsched.enqueue_task('a', p_queue => 'pgtap rights', p_unique_key => 'k') is not null$$,
  'true');

select * from finish();
rollback;
