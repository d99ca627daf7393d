begin;
\ir fixtures.sql
select plan(42);

select is(pg_temp.arguments_of('pgsched.release_task'),
  'p_id bigint, p_claim_token uuid, '
  'p_run_at timestamp with time zone DEFAULT NULL::timestamp with time zone',
  'release_task takes an id, its token and, optionally, a time');
select is(pg_temp.result_of('pgsched.release_task'), 'void', 'release_task returns nothing');

-- Nothing there
select throws_ok(format('select pgsched.release_task(%s, %L)', unknown, :'stale'),
                 'TS404', 'there is no task ' || unknown, format('there is no task %s', unknown))
  from (values (-5::bigint), (4999999999999999999), (-9223372036854775808), (0)) as ids (unknown);

-- Happy path
select * from pg_temp.claimed('pgtap release_task', p_attempt => 3) \gset
update pgsched.scheduled_tasks set last_error = 'before', unique_key = 'u' where id = :id;
select pg_temp.task(:id) as before, clock_timestamp() as t0 \gset
select pgsched.release_task(:id, :'token') \g /dev/null
select is(pg_temp.task(:id), :'before'::jsonb || jsonb_build_object(
            'status', 'queued', 'attempt', 2, 'run_at', run_at, 'claim_token', null,
            'claimed_by', null, 'claimed_at', null, 'lease_expires_at', null),
          'a released task is queued, its attempt not counted, and keeps all else')
  from pgsched.scheduled_tasks where id = :id;
select ok(run_at between :'t0' and clock_timestamp(), 'it is due at once, by the clock')
  from pgsched.scheduled_tasks where id = :id;
select ok(pg_temp.holds_lock(:id), 'a release takes the lock of the task');
select results_eq($$select id, attempt from pgsched.claim_task('w', 'pgtap release_task')$$,
                  format('values (%s::bigint, 3)', :id), 'it is claimed again as the same attempt');

-- Edges: the time
select clock_timestamp() as t0 \gset
select pgsched.release_task(c.id, c.token, clock_timestamp() - age::interval)
  from (values ('1 microsecond'), ('10 years'), ('4000 years')) as past (age)
 cross join lateral pg_temp.claimed('pgtap past ' || age) as c \g /dev/null
select results_eq(
  format('select run_at between %L and clock_timestamp() from pgsched.scheduled_tasks
           where queue like ''pgtap past %%'' and status = ''queued''', :'t0'),
  array[true, true, true],
  'a time in the past becomes now, however far it is');
select * from pg_temp.claimed('pgtap later') \gset
select pgsched.release_task(:id, :'token', '9998-12-31 23:59:59.999999+00') \g /dev/null
select results_eq(
  format('select status, attempt, run_at from pgsched.scheduled_tasks where id = %s', :id),
  $$values ('queued', 0, timestamptz '9998-12-31 23:59:59.999999+00')$$,
  'a later time is kept');

-- Edges: the state of the claim
select * from pg_temp.claimed('pgtap release_task', p_lease_left => '-1 hours',
                              p_attempt => 20) \gset
select lives_ok(format('select pgsched.release_task(%s, %L)', :id, :'token'),
                'a claim whose lease is over but that nobody took is released');
select results_eq(
  format('select status, attempt, max_attempts from pgsched.scheduled_tasks where id = %s', :id),
  $$values ('queued', 19, 20)$$,
  'a last attempt that is released can be made again');

select * from pg_temp.claimed('pgtap release_task', p_cancel => true) \gset
select pg_temp.task(:id) as before, clock_timestamp() as t0 \gset
select pgsched.release_task(:id, :'token', '2999-01-01 00:00:00+00') \g /dev/null
select is(pg_temp.task(:id), :'before'::jsonb || jsonb_build_object(
            'status', 'cancelled', 'finished_at', finished_at),
          'a task whose cancel was requested ends cancelled when it is released')
  from pgsched.finished_tasks where id = :id;
select ok(finished_at between :'t0' and clock_timestamp(), 'and that is now, by the clock')
  from pgsched.finished_tasks where id = :id;
select is_empty(format('select id from pgsched.scheduled_tasks where id = %s', :id),
                'it is not live any more');

insert into pgsched.queues (name, paused) values ('pgtap paused', true);
select * from pg_temp.claimed('pgtap paused') \gset
select pgsched.release_task(:id, :'token') \g /dev/null
select is(pg_temp.task(:id) ->> 'status', 'queued', 'a task of a paused queue is released');

-- Edges: ids
select token as a from pg_temp.claimed('pgtap ids', :huge) \gset token_
select token as b from pg_temp.claimed('pgtap ids', :huge_2_32) \gset token_
select token as c from pg_temp.claimed('pgtap ids', -1) \gset token_
select pgsched.release_task(:huge_2_32, :'token_b'),
       pgsched.release_task(-1, :'token_c') \g /dev/null
select results_eq(
  $$select id, status from pgsched.tasks where queue = 'pgtap ids' order by id$$,
  format($$values (-1::bigint, 'queued'), (%s, 'processing'), (%s, 'queued')$$, :huge, :huge_2_32),
  'an id beyond 32 bits and one below zero are released, and no other');
select ok(pg_temp.holds_lock(:huge_2_32) and not pg_temp.holds_lock(:huge),
          'under its lock, which is not that of the id that shares its 32 bits');

-- Errors: claims that are not current
create temporary table stale as select * from pg_temp.stale_claims('pgtap stale');
select throws_ok(format('select pgsched.release_task(%s, %L)', id, token),
                 'TS409', format('this claim of task %s is not current', id), what || ' is stale')
  from stale;
select results_eq($$select * from pgsched.tasks where queue = 'pgtap stale' order by id$$,
                  'select * from before order by id', 'a stale claim changes nothing');

-- Errors: arguments
select throws_ok(format('select pgsched.release_task(%L, %L)', id, token),
                 'TS400', 'p_id and p_claim_token must not be null', what)
  from no_claims;
select throws_ok(format('select pgsched.release_task(%s, %L, %L)', :huge, :'token_a', run_at),
                 'TS400', 'p_run_at is out of range: ' || run_at, run_at || ' is no time to run at')
  from bad_times;
select is(pg_temp.task(:huge) ->> 'status', 'processing', 'a refused call releases nothing');

-- Rights
select pg_temp.may_call(
  'pgsched.release_task',
  format($$select 'done' from pgsched.release_task(%s, %L)$$, :huge, :'token_a'), 'done');

select * from finish();
rollback;
