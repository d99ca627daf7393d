begin;
\ir fixtures.sql
select plan(90);

select is(pg_temp.arguments_of('pgsched.fail_tasks'),
  'p_ids bigint[], p_claim_tokens uuid[], p_errors text[], '
  'p_retry_in interval[] DEFAULT NULL::interval[], p_permanent boolean[] DEFAULT NULL::boolean[]',
  'fail_tasks takes ids, their tokens, errors and, optionally, when to retry or that it must not');
select is(pg_temp.result_of('pgsched.fail_tasks'),
  'TABLE(id bigint, outcome text, run_at timestamp with time zone)',
  'fail_tasks says what became of each id');

-- Nothing there
select is_empty($$select * from pgsched.fail_tasks('{}', '{}', '{}')$$, 'no ids have no outcomes');
select is_empty($$select * from pgsched.fail_tasks('{}', '{}', '{}', '{}', '{}')$$,
                'nor if there are no times either');
select results_eq(
  format($$select * from pgsched.fail_tasks('{-5,4999999999999999999}', '{%1$s,%1$s}', '{x,x}')$$,
         :'stale'),
  $$values (-5::bigint, 'gone', null::timestamptz), (4999999999999999999, 'gone', null)$$,
  'tasks that do not exist are gone');

-- Happy path: all outcomes in one batch, in an order of its own
insert into pgsched.queues (name, retry_delay, retry_delay_max)
values ('pgtap fail_tasks', '2 hours', '1 day');
create temporary table given as
select g.*, c.*
  from (values (9, 'may be retried', 3, 20, false, '5 minutes', '10 minutes', null, 'queued'),
               (2, 'has its lease over', 3, 20, false, '-1 hours', '10 minutes', false, 'queued'),
               (4, 'waits as its queue says', 1, 20, false, '5 minutes', null, false, 'queued'),
               (8, 'is in its last attempt', 20, 20, false, '5 minutes', '1 minute', null,
                'failed'),
               (1, 'has had more attempts than it may', 21, 20, false, '5 minutes', null, false,
                'failed'),
               (6, 'failed for good', 1, 20, false, '5 minutes', '1 minute', true, 'failed'),
               (3, 'was to be cancelled', 1, 20, true, '5 minutes', '1 minute', null, 'cancelled'),
               (7, 'was to be cancelled in its last attempt', 20, 20, true, '-1 hours', null, false,
                'cancelled'),
               (5, 'was to be cancelled and failed for good', 1, 20, true, '5 minutes', null, true,
                'cancelled'))
       as g (position, what, attempt, max_attempts, cancel, lease_left, retry_in, permanent,
             outcome)
 cross join lateral pg_temp.claimed(
       'pgtap fail_tasks', p_lease_left => lease_left::interval, p_attempt => attempt,
       p_max_attempts => max_attempts, p_cancel => cancel) as c;
update pgsched.scheduled_tasks
   set unique_key = id, concurrency_key = 'c', last_error = 'before'
 where queue = 'pgtap fail_tasks';
create temporary table claimed as
select * from pgsched.tasks where queue = 'pgtap fail_tasks';
select array_agg(id order by position) as ids, array_agg(token order by position) as tokens,
       array_agg('it ' || what order by position) as errors,
       array_agg(retry_in order by position) as retry_in,
       array_agg(permanent order by position) as permanent
  from given \gset
select clock_timestamp() as t0 \gset
create temporary table answers as
select *
  from pgsched.fail_tasks(:'ids', :'tokens', :'errors', :'retry_in', :'permanent')
       with ordinality as a (id, outcome, run_at, position);
select clock_timestamp() as t1 \gset
select results_eq(
  'select id, outcome, run_at is not null from answers order by position',
  $$select id, outcome, outcome = 'queued' from given order by position$$,
  'each claim ends as it has to, and is answered in the order given');
select is(pg_temp.task(id), to_jsonb(claimed) || jsonb_build_object(
            'status', outcome, 'last_error', 'it ' || what) || case outcome
              when 'queued' then jsonb_build_object(
                'run_at', answers.run_at, 'claim_token', null, 'claimed_by', null,
                'claimed_at', null, 'lease_expires_at', null)
              else jsonb_build_object('finished_at', pg_temp.task(id) -> 'finished_at') end,
          format('the row of one that %s says so, and keeps all else', what))
  from given join answers using (id, position, outcome) join claimed using (id);
select ok(bool_and(run_at between timestamptz :'t0' + coalesce(retry_in, '2 hours')::interval
                              and timestamptz :'t1' + coalesce(retry_in, '3 hours')::interval),
          'the next attempt is due after the time given, or the backoff of the queue, by the clock')
  from given join answers using (id, position) where given.outcome = 'queued';
select ok(bool_and(finished_at between :'t0' and :'t1'), 'the others were finished now')
  from pgsched.finished_tasks where queue = 'pgtap fail_tasks';
select results_eq(
  $$select id from pgsched.scheduled_tasks where queue = 'pgtap fail_tasks' order by id$$,
  $$select id from given where outcome = 'queued' order by id$$,
  'those are not live any more');
select ok(not bool_or(pg_temp.holds_lock(id)), 'a batch takes no lock of a task') from given;
select is_empty($$select * from pgsched.claim_task('w', 'pgtap fail_tasks', p_limit => 9)$$,
                'none is claimed before it is due');

-- Repeated
create temporary table failed as select * from pgsched.tasks where queue = 'pgtap fail_tasks';
select results_eq(
  format('select * from pgsched.fail_tasks(%L, %L, array_fill(text ''again'', array[9]))',
         :'ids', :'tokens'),
  $$select id, 'stale', null::timestamptz from given order by position$$,
  'the same claims failed again are stale');
select results_eq($$select * from pgsched.tasks where queue = 'pgtap fail_tasks' order by id$$,
                  'select * from failed order by id', 'a repeated failure changes nothing');
update pgsched.scheduled_tasks set run_at = clock_timestamp() where queue = 'pgtap fail_tasks';
select results_eq(
  $$select id, attempt from pgsched.claim_task('w', 'pgtap fail_tasks', p_limit => 9) order by id$$,
  $$select id, attempt + 1 from given where outcome = 'queued' order by id$$,
  'the next attempt counts');

insert into pgsched.queues (name, paused) values ('pgtap paused', true);
select * from pg_temp.claimed('pgtap paused') \gset
select results_eq(
  format($$select outcome from pgsched.fail_tasks('{%s}', '{%s}', '{x}')$$, :id, :'token'),
  array['queued'], 'a task of a paused queue is failed');

-- Edges: when it is retried
create temporary table retries as
select r.*, c.*
  from (values ('0', 0.0), ('1 microsecond', 0.000001), ('365 days', 31536000.0),
               ('1 mon -29 days -1 hours', 82800.0), ('-1 days 25 hours', 3600.0))
       as r (retry_in, seconds)
 cross join lateral pg_temp.claimed('pgtap retry ' || retry_in) as c;
select clock_timestamp() as t0 \gset
create temporary table retried as
select f.*
  from (select array_agg(id) as ids, array_agg(token) as tokens, array_agg(retry_in) as errors,
               array_agg(retry_in::interval) as retry_in
          from retries) as r
 cross join lateral pgsched.fail_tasks(ids, tokens, errors, retry_in) as f;
select clock_timestamp() as t1 \gset
select ok(outcome = 'queued' and t.run_at = r.run_at
          and t.run_at - seconds * interval '1 second' between :'t0' and :'t1',
          format('a retry in %s is due after %s seconds', retry_in, seconds))
  from retries
  join retried as r using (id)
  join pgsched.scheduled_tasks as t using (id);

insert into pgsched.queues (name, retry_delay, retry_delay_max)
values ('pgtap 1 day to 365 days', '1 day', '365 days'),
       ('pgtap 1 min to 0', '1 minute', '0');
create temporary table waits as
select w.*, c.*, attempt, least(longest, delay * 2.0 ^ least(attempt - 1, 100)) as shortest_wait
  from (values ('pgtap 1 s to 1 h', 1, 3600), ('pgtap 1 day to 365 days', 86400, 31536000),
               ('pgtap 1 min to 0', 60, 0)) as w (queue, delay, longest)
 cross join unnest(array[1, 2, 3, 8, 12, 13, 41, 2147483646]) as attempt
 cross join lateral pg_temp.claimed(queue, p_attempt => attempt, p_max_attempts => 2147483647) as c;
select clock_timestamp() as t0 \gset
create temporary table waited as
select f.*
  from (select array_agg(id) as ids, array_agg(token) as tokens, array_agg(queue) as errors
          from waits) as w
 cross join lateral pgsched.fail_tasks(ids, tokens, errors) as f;
select clock_timestamp() as t1 \gset
select ok(bool_and(run_at between timestamptz :'t0' + shortest_wait * interval '1 second'
                              and timestamptz :'t1' + least(longest, shortest_wait * 1.5)
                                                      * interval '1 second'),
          queue || ': without a time each waits as its queue and its attempt say')
  from waits join waited using (id) group by queue order by queue;

create temporary table together as
select c.*
  from generate_series(1, 20) as n
 cross join lateral pg_temp.claimed('pgtap together ' || n) as c;
select isnt(min(run_at), max(run_at), 'tasks that failed in one batch are spread')
  from (select array_agg(id) as ids, array_agg(token) as tokens from together) as t
 cross join lateral pgsched.fail_tasks(ids, tokens, null) as f;

-- Edges: the error
create temporary table errors as
select e.*, c.*
  from (values ('nothing', ''),
               ('8192 bytes', repeat('x', 8192)),
               ('8192 bytes in 4096 characters', repeat('é', 4096)),
               ('8192 bytes in 2048 characters', repeat('🐘', 2048)),
               ('control characters and signs', E'\x01\x1b[31m %s $1 '' " \\ \n\t{}'),
               ('the word null', 'NULL'),
               ('8193 bytes', repeat('x', 8193)),
               ('8193 bytes in 4097 characters', repeat('é', 4096) || 'x'),
               ('8193 bytes in 8192 characters', repeat('x', 8191) || 'é'),
               ('8196 bytes in 2049 characters', repeat('🐘', 2049)),
               ('a megabyte', repeat('0123456789abcde', 70000)),
               ('a megabyte in 4-byte characters', repeat('🐘', 262144)))
       as e (what, error)
 cross join lateral pg_temp.claimed('pgtap error ' || what,
                                    p_max_attempts => length(what) % 2 + 1) as c;
select f.id
  from (select array_agg(id) as ids, array_agg(token) as tokens, array_agg(error) as errors
          from errors) as e
 cross join lateral pgsched.fail_tasks(ids, tokens, errors) as f \g /dev/null
select ok(case when octet_length(error) <= 8192 then last_error = error
               else octet_length(last_error) <= 8192 and char_length(last_error) >= 2048
                    and starts_with(error, last_error) end,
          format(case when octet_length(error) <= 8192 then 'an error of %s is kept'
                      else 'an error of %s is cut to 8 KiB or less between two characters' end,
                 what))
  from errors join pgsched.tasks as t using (id);

create temporary table mute as
select c.*, n
  from generate_series(1, 4) as n
 cross join lateral pg_temp.claimed('pgtap no error', p_attempt => n % 2 + 1,
                                    p_max_attempts => 2) as c;
update pgsched.scheduled_tasks set last_error = 'before' where queue = 'pgtap no error';
select f.id
  from (select array_agg(id) as ids, array_agg(token) as tokens,
               case when n < 3 then array_agg(null::text) end as errors
          from mute group by n < 3) as m
 cross join lateral pgsched.fail_tasks(ids, tokens, errors) as f \g /dev/null
select results_eq(
  $$select status, last_error from pgsched.tasks where queue = 'pgtap no error' order by id$$,
  $$values ('failed', 'before'), ('queued', 'before'), ('failed', 'before'), ('queued', 'before')$$,
  'without an error, or without any, the last one is kept');

-- Edges: claims that are not current
create temporary table stale as select * from pg_temp.stale_claims('pgtap stale');
select results_eq(
  format('select * from pgsched.fail_tasks(%L, %L, %L, null, %L)', array_agg(id), array_agg(token),
         array_agg('late'::text), array_agg(permanent)),
  $$select id, 'stale', null::timestamptz from stale$$,
  case when permanent then 'also to fail for good'
       else 'claims that are not current are stale: ' || string_agg(what, ', ') end)
  from stale cross join (values (false), (true)) as p (permanent)
 group by permanent order by permanent;
select results_eq($$select * from pgsched.tasks where queue = 'pgtap stale' order by id$$,
                  'select * from before order by id', 'a stale claim changes nothing');

-- Edges: duplicates among others
select * from pg_temp.claimed('pgtap mixed') \gset a_
select * from pg_temp.claimed('pgtap mixed') \gset b_
select * from pg_temp.claimed('pgtap mixed') \gset c_
select * from pg_temp.claimed('pgtap mixed') \gset d_
select pgsched.complete_task(:c_id, :'c_token') \g /dev/null
select clock_timestamp() as t0 \gset
create temporary table mixed as
select *
  from pgsched.fail_tasks(
         array[:b_id, :a_id, :c_id, :a_id, :a_id, :b_id, 4999999999999999999, :a_id, :b_id],
         array[:'b_token', :'stale', :'c_token', :'a_token', :'a_token', :'a_token', :'a_token',
               :'stale', :'b_token']::uuid[],
         array['1', '2', '3', '4', '5', '6', '7', '8', '9'],
         array[null, '2 h', '3 h', '4 h', '5 h', '6 h', '7 h', '8 h', '9 h']::interval[],
         array[true, false, true, null, true, false, true, true, false])
       with ordinality as m (id, outcome, run_at, position);
select clock_timestamp() as t1 \gset
select results_eq(
  'select id, outcome from mixed order by position',
  format($$values (%2$s::bigint, 'failed'), (%1$s, 'stale'), (%3$s, 'stale'), (%1$s, 'queued'),
                  (%1$s, 'stale'), (%2$s, 'stale'), (4999999999999999999, 'gone'), (%1$s, 'stale'),
                  (%2$s, 'stale')$$, :a_id, :b_id, :c_id),
  'each place of a batch has the answer to its own token; the first of equal ones counts');
select results_eq(
  format($$select id, status, last_error, run_at - interval '4 hours' between %L and %L
             from pgsched.tasks where queue = 'pgtap mixed' order by id$$, :'t0', :'t1'),
  format($$values (%s::bigint, 'queued', '4', true), (%s, 'failed', '1', false),
                  (%s, 'completed', null, false), (%s, 'processing', null, false)$$,
         :a_id, :b_id, :c_id, :d_id),
  'with its own error and time; no other task is touched');

-- Edges: locks
select * from pg_temp.claimed('pgtap locks') \gset a_
select * from pg_temp.claimed('pgtap locks') \gset b_
select * from pg_temp.claimed('pgtap locks') \gset c_
select pgsched.fail_tasks(array[:a_id, :b_id, :c_id],
                          array[:'a_token', :'stale', :'a_token']::uuid[], null) \g /dev/null
select is_empty(format('select id from pgsched.scheduled_tasks
                         where queue = ''pgtap locks'' and xmax <> 0 and id <> %s', :a_id),
                'no row of a claim that is not current is locked');

-- Edges: a batch of many
create temporary table many as
select c.id, c.token, n
  from generate_series(1, 1000) as n
 cross join lateral pg_temp.claimed('pgtap many', :huge + 1001 - n) as c;
select clock_timestamp() as t0 \gset
create temporary table many_answers as
select f.*
  from (select array_agg(id order by n) as ids, array_agg(token order by n) as tokens,
               array_agg('error ' || n order by n) as errors,
               array_agg(n * interval '1 hour' order by n) as retry_in,
               array_agg(n % 3 = 0 order by n) as permanent
          from many) as m
 cross join lateral pgsched.fail_tasks(ids, tokens, errors, retry_in, permanent)
            with ordinality as f (id, outcome, run_at, n);
select clock_timestamp() as t1 \gset
select results_eq(
  'select id, outcome from many_answers order by n',
  $$select id, case when n % 3 = 0 then 'failed' else 'queued' end from many order by n$$,
  'a thousand are failed at once');
select results_eq(
  format($$select t.id, t.status, t.last_error,
                  t.status = 'failed' or t.run_at = a.run_at
                    and t.run_at - a.n * interval '1 hour' between %L and %L
             from pgsched.tasks as t join many_answers as a using (id)
            where t.queue = 'pgtap many' order by t.id$$, :'t0', :'t1'),
  $$select id, case when n % 3 = 0 then 'failed' else 'queued' end, 'error ' || n, true
      from many order by id$$,
  'each with its own error and time');

-- Edges: ids
create temporary table ids as
select c.*, n
  from unnest(array[9223372036854775807, 9223372036854775806, 9223372034707292160, :huge_2_32,
                    :huge, :huge_same_key, -1, -9223372036854775807, -9223372036854775808])
       with ordinality as i (given_id, n)
 cross join lateral pg_temp.claimed('pgtap ids', given_id) as c;
select results_eq(
  format('select id, outcome from pgsched.fail_tasks(%L, %L, null, null, %L)', array_agg(id),
         array_agg(token), array_agg(n % 4 = 3)),
  $$select id, case when n % 4 = 3 then 'failed' else 'queued' end from ids where n % 2 = 1$$,
  'ids at both ends, beyond 32 bits and below zero are failed')
  from ids where n % 2 = 1;
select results_eq(
  $$select id, status from pgsched.tasks where queue = 'pgtap ids' order by id$$,
  $$select id, case n % 4 when 1 then 'queued' when 3 then 'failed' else 'processing' end
      from ids order by id$$,
  'and none that is next to them, or shares their low 32 bits or their lock');

-- Errors
select * from pg_temp.claimed('pgtap refused') \gset a_
select * from pg_temp.claimed('pgtap refused') \gset b_
create temporary table refused as select * from pgsched.tasks where queue = 'pgtap refused';
select throws_ok(format('select * from pgsched.fail_tasks(%L, %L, null)', ids, tokens),
                 'TS400', 'p_ids and p_claim_tokens do not pair up', what || ' is no batch')
  from bad_batches;
select throws_ok(
         format('select * from pgsched.fail_tasks(''{%s}'', ''{%s}'', null, %s => %L)',
                :a_id, :'a_token', argument, given),
         'TS400', format('p_ids and %s do not pair up', argument),
         format('%s of %s is none for one id', argument, given))
  from (values ('p_retry_in', '{0,0}'), ('p_permanent', '{f,f}')) as a (argument, two)
 cross join lateral unnest(array['{}', two, '{' || two || '}', '{{null}}']) as given;
select throws_ok(
         format('select * from pgsched.fail_tasks(''{%s}'', ''{%s}'', %L)',
                :a_id, :'a_token', given),
         'TS400', 'p_ids and p_errors do not pair up', format('p_errors of %s is none for one id',
                                                              given))
  from unnest(array['{}', '{x,x}', '{{x}}', '{{x,x}}']) as given;
create temporary table bad_waits as
select wait, n % 2 = 0 as permanent
  from unnest(array['-1 microsecond', '-1 hours', '365 days 0.000001 seconds', '1 year',
                    '1 mon -31 days', '100000000 years', '-100000000 years'])
       with ordinality as w (wait, n)
 union all
select lease, false from leases where lease ~ 'inf|178000000';
select throws_ok(
         format('select * from pgsched.fail_tasks(%L, %L, ''{x,x}'', %L, %L)', array[:a_id, :b_id],
                array[:'a_token', :'b_token'], array['0', wait]::interval[],
                array[false, permanent]),
         'TS400', 'p_retry_in is out of range: ' || wait::interval,
         format('%s is no time to retry in', wait))
  from bad_waits;
select results_eq($$select * from pgsched.tasks where queue = 'pgtap refused' order by id$$,
                  'select * from refused order by id', 'a refused call fails nothing');

-- Rights
select pg_temp.may_call(
  'pgsched.fail_tasks',
  format($$select outcome from pgsched.fail_tasks('{%s}', '{%s}', '{x}')$$, :a_id, :'a_token'),
  'queued');

select * from finish();
rollback;
