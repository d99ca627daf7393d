begin;
\ir fixtures.sql
select plan(62);

select is(pg_temp.arguments_of('pgsched.release_tasks'),
  'p_ids bigint[], p_claim_tokens uuid[], p_delay interval[] DEFAULT NULL::interval[]',
  'release_tasks takes ids, their tokens and, optionally, delays');
select is(pg_temp.result_of('pgsched.release_tasks'), 'TABLE(id bigint, outcome text)',
          'release_tasks returns an outcome for each id');

-- Nothing there
select is_empty($$select * from pgsched.release_tasks('{}', '{}')$$, 'no ids have no outcomes');
select is_empty($$select * from pgsched.release_tasks('{}', '{}', '{}')$$, 'nor have no delays');
select results_eq(
  format($$select * from pgsched.release_tasks('{-5,4999999999999999999}', '{%1$s,%1$s}')$$,
         :'stale'),
  $$values (-5::bigint, 'gone'), (4999999999999999999, 'gone')$$,
  'tasks that do not exist are gone');

-- Happy path: all outcomes in one batch, in an order of its own
create temporary table given as
select g.*, c.*
  from (values (5, 'goes back at once', 3, false, '5 minutes', null, 'queued'),
               (2, 'goes back for a while', 3, false, '5 minutes', '10 minutes', 'queued'),
               (4, 'has its lease over', 1, false, '-1 hours', '0', 'queued'),
               (1, 'is in its last attempt', 20, false, '5 minutes', null, 'queued'),
               (6, 'was to be cancelled', 1, true, '5 minutes', '10 minutes', 'cancelled'),
               (3, 'was to be cancelled in its last attempt', 20, true, '-1 hours', null,
                'cancelled'))
       as g (position, what, attempt, cancel, lease_left, delay, outcome)
 cross join lateral pg_temp.claimed(
       'pgtap release_tasks', p_lease_left => lease_left::interval, p_attempt => attempt,
       p_cancel => cancel) as c;
update pgsched.scheduled_tasks
   set unique_key = id, concurrency_key = 'c', last_error = 'before'
 where queue = 'pgtap release_tasks';
create temporary table claimed as
select * from pgsched.tasks where queue = 'pgtap release_tasks';
select array_agg(id order by position) as ids, array_agg(token order by position) as tokens,
       array_agg(delay order by position) as delays
  from given \gset
select clock_timestamp() as t0 \gset
select results_eq(
  format('select * from pgsched.release_tasks(%L, %L, %L)', :'ids', :'tokens', :'delays'),
  'select id, outcome from given order by position',
  'each claim ends as it has to, and is answered in the order given');
select clock_timestamp() as t1 \gset
select is(pg_temp.task(id), to_jsonb(claimed) || jsonb_build_object('status', outcome)
            || case outcome
                 when 'queued' then jsonb_build_object(
                   'attempt', given.attempt - 1, 'run_at', pg_temp.task(id) -> 'run_at',
                   'claim_token', null, 'claimed_by', null, 'claimed_at', null,
                   'lease_expires_at', null)
                 else jsonb_build_object('finished_at', pg_temp.task(id) -> 'finished_at') end,
          format('the row of one that %s says so, and keeps all else', what))
  from given join claimed using (id);
select ok(bool_and(run_at - coalesce(delay, '0')::interval between :'t0' and :'t1'),
          'what is queued again is due now, or after a delay of its own, by the clock')
  from given join pgsched.scheduled_tasks using (id);
select ok(bool_and(finished_at between :'t0' and :'t1'), 'the others were finished now')
  from pgsched.finished_tasks where queue = 'pgtap release_tasks';
select results_eq(
  $$select id from pgsched.scheduled_tasks where queue = 'pgtap release_tasks' order by id$$,
  $$select id from given where outcome = 'queued' order by id$$,
  'those are not live any more');
select ok(not bool_or(pg_temp.holds_lock(id)), 'a batch takes no lock of a task') from given;

-- Repeated
create temporary table released as
select * from pgsched.tasks where queue = 'pgtap release_tasks';
select results_eq(
  format('select * from pgsched.release_tasks(%L, %L)', :'ids', :'tokens'),
  $$select id, 'stale' from given order by position$$,
  'the same claims released again are stale');
select results_eq($$select * from pgsched.tasks where queue = 'pgtap release_tasks' order by id$$,
                  'select * from released order by id', 'a repeated release changes nothing');
select results_eq(
  $$select id, attempt from pgsched.claim_task('w', 'pgtap release_tasks', p_limit => 9)
     order by id$$,
  $$select id, attempt from given
     where outcome = 'queued' and coalesce(delay, '0') = '0' order by id$$,
  'what is due is claimed again as the same attempt, also the last one');

insert into pgsched.queues (name, paused) values ('pgtap paused', true);
select * from pg_temp.claimed('pgtap paused') \gset
select results_eq(
  format($$select outcome from pgsched.release_tasks('{%s}', '{%s}')$$, :id, :'token'),
  array['queued'], 'a task of a paused queue is released');

-- Edges: the delay
create temporary table delays as
select d.*, c.*
  from (values ('0', 0.0), ('1 microsecond', 0.000001), ('365 days', 31536000.0),
               ('1 mon -29 days -1 hours', 82800.0), ('-1 days 25 hours', 3600.0))
       as d (delay, seconds)
 cross join lateral pg_temp.claimed('pgtap delay ' || delay) as c;
select clock_timestamp() as t0 \gset
select r.id
  from (select array_agg(id) as ids, array_agg(token) as tokens,
               array_agg(delay::interval) as delays
          from delays) as d
 cross join lateral pgsched.release_tasks(ids, tokens, delays) as r \g /dev/null
select clock_timestamp() as t1 \gset
select ok(status = 'queued' and run_at - seconds * interval '1 second' between :'t0' and :'t1',
          format('a delay of %s is %s seconds long', delay, seconds))
  from delays join pgsched.scheduled_tasks using (id);

create temporary table undelayed as
select c.* from generate_series(1, 2) as n
 cross join lateral pg_temp.claimed('pgtap undelayed ' || n) as c;
select clock_timestamp() as t0 \gset
select r.id
  from (select array_agg(id) as ids, array_agg(token) as tokens from undelayed) as u
 cross join lateral pgsched.release_tasks(ids, tokens, null) as r \g /dev/null
select ok(bool_and(run_at between :'t0' and clock_timestamp()), 'without delays all are due now')
  from undelayed join pgsched.scheduled_tasks using (id);

-- Edges: claims that are not current
create temporary table stale as select * from pg_temp.stale_claims('pgtap stale');
select results_eq(
  format('select * from pgsched.release_tasks(%L, %L)', array_agg(id), array_agg(token)),
  $$select id, 'stale' from stale$$,
  'claims that are not current are stale: ' || string_agg(what, ', '))
  from stale;
select results_eq($$select * from pgsched.tasks where queue = 'pgtap stale' order by id$$,
                  'select * from before order by id', 'a stale claim changes nothing');

-- Edges: duplicates among others
select * from pg_temp.claimed('pgtap mixed', p_attempt => 3) \gset a_
select * from pg_temp.claimed('pgtap mixed', p_attempt => 3, p_cancel => true) \gset b_
select * from pg_temp.claimed('pgtap mixed', p_attempt => 3) \gset c_
select * from pg_temp.claimed('pgtap mixed', p_attempt => 3) \gset d_
select pgsched.complete_task(:c_id, :'c_token') \g /dev/null
select clock_timestamp() as t0 \gset
select results_eq(
  format('select * from pgsched.release_tasks(%L, %L, %L)',
         array[:b_id, :a_id, :c_id, :a_id, :a_id, :b_id, 4999999999999999999, :a_id, :b_id],
         array[:'b_token', :'stale', :'c_token', :'a_token', :'a_token', :'a_token', :'a_token',
               :'stale', :'b_token'],
         array['1 h', '2 h', '3 h', '4 h', '5 h', '6 h', '7 h', null, '9 h']::interval[]),
  format($$values (%2$s::bigint, 'cancelled'), (%1$s, 'stale'), (%3$s, 'stale'), (%1$s, 'queued'),
                  (%1$s, 'stale'), (%2$s, 'stale'), (4999999999999999999, 'gone'), (%1$s, 'stale'),
                  (%2$s, 'stale')$$, :a_id, :b_id, :c_id),
  'each place of a batch has the answer to its own token; the first of equal ones counts');
select clock_timestamp() as t1 \gset
select results_eq(
  format($$select id, status, attempt, run_at - interval '4 hours' between %L and %L
             from pgsched.tasks where queue = 'pgtap mixed' order by id$$, :'t0', :'t1'),
  format($$values (%s::bigint, 'queued', 2, true), (%s, 'cancelled', 3, false),
                  (%s, 'completed', 3, false), (%s, 'processing', 3, false)$$,
         :a_id, :b_id, :c_id, :d_id),
  'with its own delay and once; no other task is touched');

-- Edges: locks
select * from pg_temp.claimed('pgtap locks') \gset a_
select * from pg_temp.claimed('pgtap locks') \gset b_
select * from pg_temp.claimed('pgtap locks') \gset c_
select pgsched.release_tasks(array[:a_id, :b_id, :c_id],
                             array[:'a_token', :'stale', :'a_token']::uuid[]) \g /dev/null
select is_empty(format('select id from pgsched.scheduled_tasks
                         where queue = ''pgtap locks'' and xmax <> 0 and id <> %s', :a_id),
                'no row of a claim that is not current is locked');

-- Edges: a batch of many
create temporary table many as
select c.id, c.token, n
  from generate_series(1, 1000) as n
 cross join lateral pg_temp.claimed('pgtap many', :huge + 1001 - n, p_cancel => n % 3 = 0) as c;
select clock_timestamp() as t0 \gset
select results_eq(
  format('select * from pgsched.release_tasks(%L, %L, %L)', array_agg(id order by n),
         array_agg(token order by n), array_agg(n * interval '1 hour' order by n)),
  $$select id, case when n % 3 = 0 then 'cancelled' else 'queued' end from many order by n$$,
  'a thousand are released at once')
  from many;
select clock_timestamp() as t1 \gset
select results_eq(
  format($$select id, status, status = 'cancelled'
                              or run_at - n * interval '1 hour' between %L and %L
             from pgsched.tasks join many using (id) order by id$$, :'t0', :'t1'),
  $$select id, case when n % 3 = 0 then 'cancelled' else 'queued' end, true
      from many order by id$$,
  'each with its own delay');

-- Edges: ids
create temporary table ids as
select c.*, n
  from unnest(array[9223372036854775807, 9223372036854775806, 9223372034707292160, :huge_2_32,
                    :huge, :huge_same_key, -1, -9223372036854775807, -9223372036854775808])
       with ordinality as i (given_id, n)
 cross join lateral pg_temp.claimed('pgtap ids', given_id, p_cancel => n % 4 = 3) as c;
select results_eq(
  format('select * from pgsched.release_tasks(%L, %L)', array_agg(id), array_agg(token)),
  $$select id, case when n % 4 = 3 then 'cancelled' else 'queued' end from ids where n % 2 = 1$$,
  'ids at both ends, beyond 32 bits and below zero are released')
  from ids where n % 2 = 1;
select results_eq(
  $$select id, status from pgsched.tasks where queue = 'pgtap ids' order by id$$,
  $$select id, case n % 4 when 1 then 'queued' when 3 then 'cancelled' else 'processing' end
      from ids order by id$$,
  'and none that is next to them, or shares their low 32 bits or their lock');

-- Errors
select * from pg_temp.claimed('pgtap refused') \gset a_
select * from pg_temp.claimed('pgtap refused') \gset b_
create temporary table refused as select * from pgsched.tasks where queue = 'pgtap refused';
select throws_ok(format('select * from pgsched.release_tasks(%L, %L)', ids, tokens),
                 'TS400', 'p_ids and p_claim_tokens do not pair up', what || ' is no batch')
  from bad_batches;
select throws_ok(
         format('select * from pgsched.release_tasks(''{%s}'', ''{%s}'', %L)',
                :a_id, :'a_token', delays),
         'TS400', 'p_ids and p_delay do not pair up',
         format('p_delay of %s is none for one id', delays))
  from unnest(array['{}', '{0,0}', '{{0}}', '{{0,0}}', '{{null}}']) as delays;
create temporary table bad_delays as
select unnest(array['-1 microsecond', '-1 hours', '365 days 0.000001 seconds', '1 year',
                    '1 mon -31 days', '100000000 years', '-100000000 years']) as delay
 union all
select lease from leases where lease ~ 'inf|178000000';
select throws_ok(
         format('select * from pgsched.release_tasks(%L, %L, %L)', array[:a_id, :b_id],
                array[:'a_token', :'b_token'], array['0', delay]::interval[]),
         'TS400', 'p_delay is out of range: ' || delay::interval, format('%s is no delay', delay))
  from bad_delays;
select results_eq($$select * from pgsched.tasks where queue = 'pgtap refused' order by id$$,
                  'select * from refused order by id', 'a refused call releases nothing');

-- Rights
select pg_temp.may_call(
  'pgsched.release_tasks',
  format($$select outcome from pgsched.release_tasks('{%s}', '{%s}')$$, :a_id, :'a_token'),
  'queued');

select * from finish();
rollback;
