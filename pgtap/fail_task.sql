begin;
\ir fixtures.sql
select plan(92);

select is(pg_temp.arguments_of('pgsched.fail_task'),
  'p_id bigint, p_claim_token uuid, p_error text, p_retry_in interval DEFAULT NULL::interval, '
  'p_permanent boolean DEFAULT false',
  'fail_task takes an id, its token, an error and, optionally, when to retry or that it must not');
select is(pg_temp.result_of('pgsched.fail_task'),
  'TABLE(status text, run_at timestamp with time zone)', 'fail_task says what became of the task');

-- Nothing there
select throws_ok(format('select pgsched.fail_task(%s, %L, ''x'')', unknown, :'stale'),
                 'TS404', 'there is no task ' || unknown, format('there is no task %s', unknown))
  from (values (-5::bigint), (4999999999999999999), (-9223372036854775808), (0)) as ids (unknown);

-- Happy path: another attempt
select * from pg_temp.claimed('pgtap fail_task', p_attempt => 19) \gset
update pgsched.scheduled_tasks set last_error = 'before', unique_key = 'u' where id = :id;
select pg_temp.task(:id) as before, clock_timestamp() as t0 \gset
create temporary table outcome as
select * from pgsched.fail_task(:id, :'token', 'no é%s', '10 minutes');
select results_eq(
  format('select status, run_at - interval ''10 minutes'' between %L and clock_timestamp()
            from outcome', :'t0'),
  $$values ('queued', true)$$,
  'a failed task is queued again, due after the time that was asked for');
select is(pg_temp.task(:id), :'before'::jsonb || jsonb_build_object(
            'status', 'queued', 'run_at', run_at, 'claim_token', null, 'claimed_by', null,
            'claimed_at', null, 'lease_expires_at', null, 'last_error', 'no é%s'),
          'the row says so, and why it failed; it keeps all else')
  from outcome;
select ok(pg_temp.holds_lock(:id), 'a failure takes the lock of the task');
select is_empty($$select * from pgsched.claim_task('w', 'pgtap fail_task')$$,
                'it is not claimed before that time');
update pgsched.scheduled_tasks set run_at = clock_timestamp() where id = :id;
select results_eq($$select id, attempt from pgsched.claim_task('w', 'pgtap fail_task')$$,
                  format('values (%s::bigint, 20)', :id), 'its next attempt counts');

-- Happy path: the last attempt
select claim_token as token from pgsched.scheduled_tasks where id = :id \gset
select pg_temp.task(:id) as before, clock_timestamp() as t0 \gset
select results_eq(
  format('select * from pgsched.fail_task(%s, %L, ''again'', ''1 minute'')', :id, :'token'),
  $$values ('failed', null::timestamptz)$$,
  'a task that has used up its attempts has failed, whenever it should be retried');
select is(pg_temp.task(:id), :'before'::jsonb || jsonb_build_object(
            'status', 'failed', 'last_error', 'again', 'finished_at', finished_at),
          'it is finished, and keeps all else')
  from pgsched.finished_tasks where id = :id;
select ok(finished_at between :'t0' and clock_timestamp(), 'it was finished now, by the clock')
  from pgsched.finished_tasks where id = :id;
select is_empty(format('select id from pgsched.scheduled_tasks where id = %s', :id),
                'it is not live any more');

-- Edges: how a task ends
create temporary table ends as
select c.*, e.*
  from (values ('may be retried', 1, 20, false, false, 'queued'),
               ('is in its last attempt', 20, 20, false, false, 'failed'),
               ('has had more attempts than it may', 21, 20, false, false, 'failed'),
               ('has one attempt', 1, 1, false, false, 'failed'),
               ('failed for good', 1, 20, false, true, 'failed'),
               ('was to be cancelled', 1, 20, true, false, 'cancelled'),
               ('was to be cancelled in its last attempt', 20, 20, true, false, 'cancelled'),
               ('was to be cancelled and failed for good', 1, 20, true, true, 'cancelled'))
       as e (what, attempt, max_attempts, cancel, permanent, status)
 cross join lateral pg_temp.claimed(
       'pgtap ends', p_attempt => attempt, p_max_attempts => max_attempts, p_cancel => cancel) as c;
select is(f.status, e.status, format('a task that %s is %s', what, e.status))
  from ends as e
 cross join lateral pgsched.fail_task(id, token, 'x', p_permanent => permanent) as f;
select results_eq(
  $$select id, status, last_error from pgsched.tasks where queue = 'pgtap ends' order by id$$,
  $$select id, status, 'x' from ends order by id$$,
  'and its row says so');

select * from pg_temp.claimed('pgtap fail_task', p_lease_left => '-1 hours') \gset
select results_eq(format('select status from pgsched.fail_task(%s, %L, ''x'')', :id, :'token'),
                  array['queued'], 'a claim whose lease is over but that nobody took is failed');

insert into pgsched.queues (name, paused) values ('pgtap paused', true);
select * from pg_temp.claimed('pgtap paused') \gset
select results_eq(format('select status from pgsched.fail_task(%s, %L, ''x'')', :id, :'token'),
                  array['queued'], 'a task of a paused queue is failed');

-- Edges: when it is retried
create temporary table retries as
select r.*, c.*, clock_timestamp() as before
  from (values ('0', 0.0), ('1 microsecond', 0.000001), ('365 days', 31536000.0),
               ('1 mon -29 days -1 hours', 82800.0), ('-1 days 25 hours', 3600.0))
       as r (retry_in, seconds)
 cross join lateral pg_temp.claimed('pgtap retry ' || retry_in) as c;
select ok(f.status = 'queued' and run_at - seconds * interval '1 second' between before
                                                                         and clock_timestamp(),
          format('a retry in %s is due after %s seconds', retry_in, seconds))
  from retries
 cross join lateral pgsched.fail_task(id, token, 'x', retry_in::interval) as f;

insert into pgsched.queues (name, retry_delay, retry_delay_max)
values ('pgtap 1 s to 365 days', null, '365 days'),
       ('pgtap 365 days to 1 h', '365 days', null),
       ('pgtap 1 day to 365 days', '1 day', '365 days'),
       ('pgtap 0 to 365 days', '0', '365 days'),
       ('pgtap 1 min to 0', '1 minute', '0');
create temporary table waits as
select w.*, c.*, attempt
  from (values ('pgtap 1 s to 1 h', 1, 3600), ('pgtap 1 s to 365 days', 1, 31536000),
               ('pgtap 365 days to 1 h', 31536000, 3600), ('pgtap 1 day to 365 days', 86400, 31536000),
               ('pgtap 0 to 365 days', 0, 31536000), ('pgtap 1 min to 0', 60, 0))
       as w (queue, delay, longest)
 cross join unnest(array[1, 2, 3, 4, 8, 12, 13, 25, 26, 40, 41, 42, 63, 64, 65, 1000, 2147483646])
            as attempt
 cross join lateral pg_temp.claimed(queue, p_attempt => attempt, p_max_attempts => 2147483647) as c;
select clock_timestamp() as t0 \gset
create temporary table waited as
select queue, attempt, run_at,
       least(longest, delay * 2.0::float8 ^ least(attempt - 1, 100)) as shortest_wait,
       least(longest, delay * 2.0::float8 ^ least(attempt - 1, 100) * 1.5) as longest_wait
  from (select * from waits order by queue, attempt offset 0) as in_order
 cross join lateral pgsched.fail_task(id, token, 'x');
select clock_timestamp() as t1 \gset
select ok(bool_and(run_at between timestamptz :'t0' + shortest_wait * interval '1 second'
                              and timestamptz :'t1' + longest_wait * interval '1 second'),
          queue || ': the wait doubles with each attempt, and up to half as much is added, but '
          'never more than the limit')
  from waited group by queue order by queue;
select is_empty(
  $$select * from (select queue, attempt, run_at >= lag(run_at, 1, '-infinity')
                            over (partition by queue order by attempt) as later from waited) as w
     where not later$$,
  'the wait after an attempt is never shorter than the one before');

create temporary table together as
select n, c.*
  from generate_series(1, 20) as n
 cross join lateral pg_temp.claimed('pgtap 1 day to 365 days', :huge + n) as c;
select clock_timestamp() as t0 \gset
select ok(max(run_at) - min(run_at) > clock_timestamp() - timestamptz :'t0',
          'tasks that failed together are spread')
  from together cross join lateral pgsched.fail_task(id, token, 'x');

-- Edges: the error
create temporary table errors as
select e.*, c.*
  from (values ('nothing', ''),
               ('8192 bytes', repeat('x', 8192)),
               ('8192 bytes in 4096 characters', repeat('é', 4096)),
               ('8192 bytes in 2048 characters', repeat('🐘', 2048)),
               ('control characters and signs', E'\x01\x1b[31m %s $1 '' " \\ \n\t{}'),
               ('8193 bytes', repeat('x', 8193)),
               ('8193 bytes in 4097 characters', repeat('é', 4096) || 'x'),
               ('8193 bytes in 8192 characters', repeat('x', 8191) || 'é'),
               ('8196 bytes in 2049 characters', repeat('🐘', 2049)),
               ('a megabyte', repeat('0123456789abcde', 70000)),
               ('a megabyte in 4-byte characters', repeat('🐘', 262144)))
       as e (what, error)
 cross join lateral pg_temp.claimed('pgtap error ' || what,
                                    p_max_attempts => length(what) % 2 + 1) as c;
select pgsched.fail_task(id, token, error) from errors \g /dev/null
select ok(case when octet_length(error) <= 8192 then last_error = error
               else octet_length(last_error) <= 8192 and char_length(last_error) >= 2048
                    and starts_with(error, last_error) end,
          format(case when octet_length(error) <= 8192 then 'an error of %s is kept'
                      else 'an error of %s is cut to 8 KiB or less between two characters' end,
                 what))
  from errors join pgsched.tasks as t using (id);
select results_eq(
  $$select char_length(last_error) from pgsched.tasks
     where queue in ('pgtap error a megabyte', 'pgtap error 8193 bytes')$$,
  array[8192, 8192],
  'of an error in ASCII all 8 KiB are kept');

select * from pg_temp.claimed('pgtap fail_task') \gset
update pgsched.scheduled_tasks set last_error = 'before' where id = :id;
select pgsched.fail_task(:id, :'token', null) \g /dev/null
select is(last_error, 'before', 'a retry without an error keeps the last one')
  from pgsched.scheduled_tasks where id = :id;
select * from pg_temp.claimed('pgtap fail_task') \gset
update pgsched.scheduled_tasks set last_error = 'before' where id = :id;
select pgsched.fail_task(:id, :'token', null, p_permanent => true) \g /dev/null
select is(last_error, 'before', 'so does a failure for good')
  from pgsched.finished_tasks where id = :id;

-- Edges: ids
select token as a from pg_temp.claimed('pgtap ids', :huge) \gset token_
select token as b from pg_temp.claimed('pgtap ids', :huge_2_32) \gset token_
select token as c from pg_temp.claimed('pgtap ids', -1) \gset token_
select pgsched.fail_task(:huge_2_32, :'token_b', 'x'),
       pgsched.fail_task(-1, :'token_c', 'x', p_permanent => true) \g /dev/null
select results_eq(
  $$select id, status from pgsched.tasks where queue = 'pgtap ids' order by id$$,
  format($$values (-1::bigint, 'failed'), (%s, 'processing'), (%s, 'queued')$$, :huge, :huge_2_32),
  'an id beyond 32 bits and one below zero are failed, and no other');

-- Errors: claims that are not current
create temporary table stale as select * from pg_temp.stale_claims('pgtap stale');
select throws_ok(format('select pgsched.fail_task(%s, %L, ''late'', p_permanent => %L)',
                        id, token, permanent),
                 'TS409', format('this claim of task %s is not current', id),
                 what || case when permanent then ' is stale, also to fail for good'
                              else ' is stale' end)
  from stale cross join (values (false), (true)) as p (permanent);
select results_eq($$select * from pgsched.tasks where queue = 'pgtap stale' order by id$$,
                  'select * from before order by id', 'a stale claim changes nothing');

-- Errors: arguments
select throws_ok(format('select pgsched.fail_task(%L, %L, ''x'')', id, token),
                 'TS400', 'p_id and p_claim_token must not be null', what)
  from no_claims;
select throws_ok(
         format('select pgsched.fail_task(%s, %L, ''x'', %L, %L)',
                :huge, :'token_a', retry_in, permanent),
         'TS400', 'p_retry_in is out of range: ' || retry_in::interval,
         format('%s is no time to retry in', retry_in))
  from (values ('-1 microsecond', false), ('-1 hours', true), ('365 days 0.000001 seconds', false),
               ('1 year', false), ('1 mon -31 days', false), ('100000000 years', true),
               ('-100000000 years', false)) as bad (retry_in, permanent);
select throws_ok(format('select pgsched.fail_task(%s, %L, ''x'', %L)', :huge, :'token_a', lease),
                 'TS400', 'p_retry_in is out of range: ' || lease::interval,
                 format('%s is no time to retry in', lease))
  from leases where lease ~ 'inf|178000000';
select throws_ok(
  format('select pgsched.fail_task(%s, %L, ''x'', p_permanent => null)', :huge, :'token_a'),
  'TS400', 'p_permanent must not be null', 'a failure is for good or not');
select is(pg_temp.task(:huge) ->> 'status', 'processing', 'a refused call fails nothing');

-- Rights
select pg_temp.may_call(
  'pgsched.fail_task',
  format('select status from pgsched.fail_task(%s, %L, ''x'')', :huge, :'token_a'), 'queued');

select * from finish();
rollback;
