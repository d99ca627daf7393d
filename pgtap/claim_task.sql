begin;
\ir fixtures.sql
select plan(80);

select is(pg_temp.arguments_of('pgsched.claim_task'),
  'p_worker text, p_queue text DEFAULT ''default''::text, '
  'p_lease interval DEFAULT ''00:05:00''::interval, p_limit integer DEFAULT 1',
  'claim_task takes a worker and, optionally, a queue, a lease and a limit');
select is(pg_temp.result_of('pgsched.claim_task'),
  'TABLE(id bigint, claim_token uuid, task_type text, payload jsonb, queue text, priority integer, '
  'attempt integer, max_attempts integer, run_at timestamp with time zone, '
  'created_at timestamp with time zone, lease_expires_at timestamp with time zone, '
  'contended bigint)',
  'claim_task returns the claimed tasks');

-- Nothing there
select is_empty($$select * from pgsched.claim_task('w', 'pgtap nothing')$$,
                'nothing is claimed where nothing was enqueued');

select pgsched.enqueue_task('a', p_queue => 'pgtap later',
                            p_run_at => clock_timestamp() + interval '1 hour') as later \gset
select is_empty($$select * from pgsched.claim_task('w', 'pgtap later', p_limit => 100)$$,
                'a task is not claimed before its time');
update pgsched.scheduled_tasks set run_at = clock_timestamp() where id = :later;
select results_eq($$select id from pgsched.claim_task('w', 'pgtap later')$$,
                  array[:'later'::bigint], 'it is claimed when its time has come');

select pgsched.enqueue_task('a', p_queue => 'pgtap paused') as paused \gset
insert into pgsched.queues (name, paused) values ('pgtap paused', true), ('pgtap too', true);
select is_empty($$select * from pgsched.claim_task('w', 'pgtap paused', p_limit => 100)$$,
                'nothing is claimed from a paused queue');
update pgsched.queues set paused = false where name = 'pgtap paused';
select results_eq($$select id from pgsched.claim_task('w', 'pgtap paused')$$,
                  array[:'paused'::bigint], 'it is claimed when the queue is not paused any more');

-- Happy path
select pgsched.enqueue_task('mail', '{"to": "é"}', 'pgtap claim_task', p_priority => 3,
                            p_max_attempts => 7, p_unique_key => 'u',
                            p_concurrency_key => 'c') as id \gset
select pg_temp.task(:id) as before \gset
select clock_timestamp() as t0 \gset
create temporary table claim as
select * from pgsched.claim_task('worker 1', 'pgtap claim_task', '10 minutes');
select clock_timestamp() as t1 \gset
select results_eq(
  'select id, task_type, payload, queue, priority, attempt, max_attempts, contended from claim',
  format($$values (%s::bigint, 'mail', '{"to": "é"}'::jsonb, 'pgtap claim_task', 3, 1, 7,
                   0::bigint)$$, :id),
  'a due task is claimed, its first attempt counted');
select is(pg_temp.task(:id), :'before'::jsonb || jsonb_build_object(
            'status', 'processing', 'attempt', 1, 'claim_token', c.claim_token,
            'claimed_by', 'worker 1', 'claimed_at', t.claimed_at,
            'lease_expires_at', t.claimed_at + interval '10 minutes'),
          'the row says so, and who has it until when; nothing else of it changes')
  from claim as c join pgsched.scheduled_tasks as t on t.id = c.id;
select results_eq(
  'select run_at, created_at, lease_expires_at, claim_token from claim',
  format('select run_at, created_at, lease_expires_at, claim_token
            from pgsched.scheduled_tasks where id = %s', :id),
  'the claim is told the row''s times and token');
select ok(claimed_at between :'t0' and :'t1',
          'the lease runs from the call, not from the begin of the transaction')
  from pgsched.scheduled_tasks where id = :id;
select ok(pg_temp.holds_lock(:id), 'the lock of a claimed task is held until the transaction ends');
select is_empty($$select * from pgsched.claim_task('w', 'pgtap claim_task', p_limit => 100)$$,
                'a running task is not claimed twice');

-- A later claim of the same task
update pgsched.scheduled_tasks
   set status = 'queued', claim_token = null, lease_expires_at = null, last_error = 'why'
 where id = :id;
select results_eq(
  $$select id, attempt from pgsched.claim_task('worker 2', 'pgtap claim_task')$$,
  format('values (%s::bigint, 2)', :id),
  'a task that was given back is claimed again, the attempt counted');
select results_eq(
  format('select t.claimed_by, t.claim_token <> c.claim_token, t.last_error
            from pgsched.scheduled_tasks as t join claim as c using (id) where id = %s', :id),
  $$values ('worker 2', true, 'why')$$,
  'the new claim has a new token, and the last error stays');

-- Edges: what is not claimed
select * from pg_temp.claimed('pgtap others', p_lease_left => '-1 hours') \gset
select pgsched.enqueue_task('a', p_queue => other)
  from (values ('pgtap Others'), ('pgtap others '), ('pgtap other'), ('default')) as q (other)
  \g /dev/null
select is_empty($$select * from pgsched.claim_task('w', 'pgtap others', p_limit => 100)$$,
                'neither a task whose lease is over nor one of another queue is claimed');

-- Edges: the order, of one claim and of many
insert into pgsched.scheduled_tasks (
       id, queue, task_type, payload, priority, run_at, max_attempts, created_at)
select :huge + 100 * queue.number + given.id, 'pgtap order ' || queue.number, given.place, '{}',
       given.priority, given.run_at, 20, '2020-01-01 00:00:00+00'
  from (values (1, '10th', 9, timestamptz '2020-01-01 00:00:00+00'),
               (2, '4th', 1, '2020-01-03 00:00:00+00'), (3, '9th', 5, '2020-01-09 00:00:00+00'),
               (4, '1st', 0, '2020-01-09 00:00:00+00'), (5, '7th', 5, '2020-01-02 00:00:00+00'),
               (6, '5th', 4, '2020-01-05 00:00:00+00'), (7, '8th', 5, '2020-01-02 00:00:00+00'),
               (8, '3rd', 1, '2020-01-02 00:00:00.000001+00'),
               (9, '6th', 5, '2020-01-01 00:00:00+00'), (0, '2nd', 1, '2020-01-02 00:00:00+00')
       ) as given (id, place, priority, run_at)
 cross join generate_series(1, 3) as queue (number);
create temporary table place as
select array['1st', '2nd', '3rd', '4th', '5th', '6th', '7th', '8th', '9th', '10th'] as names;

select results_eq(
  $$select task_type from pgsched.claim_task('w', 'pgtap order 1', p_limit => 100)$$,
  'select unnest(names) from place',
  'one claim returns priority 0 first, then the oldest, then the lowest id');
select results_eq(
  $$select c.task_type
      from generate_series(1, 11) as turn
     cross join lateral pgsched.claim_task('w' || turn, 'pgtap order 2') as c$$,
  'select unnest(names) from place',
  'claims of one task each come in the same order');
select results_eq(
  $$select task_type from pgsched.claim_task('w', 'pgtap order 3', p_limit => 4)$$,
  'select unnest(names[:4]) from place',
  'a claim of less than there is takes the first of them');
select results_eq(
  $$select id, pg_temp.holds_lock(id) from pgsched.scheduled_tasks
     where queue = 'pgtap order 3' and status = 'queued' order by priority, run_at, id$$,
  'select 5000000000000000300 + n, false from unnest(array[6, 9, 5, 7, 3, 1]) as n',
  'and leaves the others alone, with their locks');

-- A plan that sorts all due tasks must not lock them all.
set local enable_indexscan = off;
discard plans;
select pgsched.enqueue_task('a', p_queue => 'pgtap sorted') from generate_series(1, 20) \g /dev/null
select results_eq(
  $$select id from pgsched.claim_task('w', 'pgtap sorted', p_limit => 3)$$,
  $$select id from pgsched.scheduled_tasks
     where queue = 'pgtap sorted' and pg_temp.holds_lock(id) order by id$$,
  'under whatever plan, a claim locks what it takes');
set local enable_indexscan = on;
discard plans;

-- Edges: the limit
select pgsched.enqueue_task('a', p_queue => 'pgtap limit', p_priority => n % 3)
  from generate_series(1, 103) as n \g /dev/null
select is((select count(distinct id) from pgsched.claim_task('w', 'pgtap limit')), 1::bigint,
          'a claim without a limit takes one task');
select is((select count(distinct claim_token)
             from pgsched.claim_task('w', 'pgtap limit', p_limit => 100)), 100::bigint,
          'the limit may be 100, and each task has a token of its own');
select is((select count(distinct id) from pgsched.claim_task('w', 'pgtap limit', p_limit => 100)),
          2::bigint, 'a claim of more than there is takes what there is');

-- Edges: the lease
select pgsched.enqueue_task('a', p_queue => 'pgtap lease ' || lease)
  from leases where seconds is not null \g /dev/null
select is(c.lease_expires_at - (pg_temp.task(c.id) ->> 'claimed_at')::timestamptz,
          seconds * interval '1 second', format('a lease of %s is %s seconds long', lease, seconds))
  from leases
 cross join lateral pgsched.claim_task('w', 'pgtap lease ' || lease, lease::interval) as c
 where seconds is not null;
select pgsched.enqueue_task('a', p_queue => 'pgtap lease') as id \gset
select results_eq(
  $$select lease_expires_at - (pg_temp.task(id) ->> 'claimed_at')::timestamptz
      from pgsched.claim_task('w', 'pgtap lease')$$,
  array[interval '5 minutes'],
  'a claim without a lease has one of 5 minutes');

-- Edges: ids
insert into pgsched.scheduled_tasks (
       id, queue, task_type, payload, priority, run_at, max_attempts, created_at)
select id, 'pgtap ids', 'a', '{}', 5, '2020-01-01 00:00:00+00', 20, '2020-01-01 00:00:00+00'
  from unnest(array[:huge, :huge_2_32, :huge_same_key, -1, 9223372036854775807]) as given (id);
select results_eq(
  $$select id from pgsched.claim_task('w', 'pgtap ids', p_limit => 100)$$,
  array[-1, :huge, :huge_same_key, :huge_2_32, 9223372036854775807],
  'ids far apart are claimed together, also when they share 32 bits or a lock');
select ok(pg_temp.holds_lock(:huge) and pg_temp.holds_lock(:huge_2_32)
          and pg_temp.holds_lock(9223372036854775807),
          'each under its lock');

-- Edges: names
select pgsched.enqueue_task('a', p_queue => name) from good_names \g /dev/null
select results_eq(
         format('select queue, pg_temp.task(id) ->> ''claimed_by''
                   from pgsched.claim_task(%1$L, %1$L)', name),
         format('values (%1$L, %1$L)', name),
         what || ' is the name of a queue and of a worker')
  from good_names;

-- Edges: contention. The seed makes several of these calls count.
select setseed(0.5) \g /dev/null
select pgsched.enqueue_task('a', p_queue => 'pgtap alone', p_priority => n % 10)
  from generate_series(1, 300) as n \g /dev/null
select results_eq(
  $$select c.contended, count(*)
      from generate_series(1, 100) as turn
     cross join lateral pgsched.claim_task('w' || turn, 'pgtap alone', p_limit => 3) as c
     group by c.contended$$,
  'values (0::bigint, 300::bigint)',
  'no task is contended while nobody else is there');

-- Errors
select throws_ok(format('select * from pgsched.claim_task(%L, ''pgtap errors'')', name),
                 'TS400', pg_temp.name_error('p_worker', name), what || ' is no worker')
  from bad_names;
select throws_ok(format('select * from pgsched.claim_task(''w'', %L)', name),
                 'TS400', pg_temp.name_error('p_queue', name), what || ' is no queue')
  from bad_names;
select throws_ok(format('select * from pgsched.claim_task(''w'', ''pgtap errors'', %L)', lease),
                 'TS400', pg_temp.lease_error(lease), coalesce(lease, 'null') || ' is no lease')
  from leases where seconds is null;
select throws_ok(
         format('select * from pgsched.claim_task(''w'', ''pgtap errors'', p_limit => %L)', bad),
         'TS400', 'p_limit is out of range: ' || coalesce(bad::text, 'null'),
         format('%s is no limit', coalesce(bad::text, 'null')))
  from unnest(array[null, 0, -1, 101, 2147483647, -2147483648]) as bad;

-- Rights
select pgsched.enqueue_task('a', p_queue => 'pgtap rights') as id \gset
select pg_temp.may_call('pgsched.claim_task',
                        $$select id from pgsched.claim_task('w', 'pgtap rights')$$, :'id');

select * from finish();
rollback;
