begin;
\ir fixtures.sql
select plan(48);

select is(pg_temp.arguments_of('pgsched.complete_task'),
  'p_id bigint, p_claim_token uuid, p_result jsonb DEFAULT NULL::jsonb',
  'complete_task takes an id, its token and, optionally, a result');
select is(pg_temp.result_of('pgsched.complete_task'), 'boolean',
          'complete_task says true or false');

-- Nothing there
select throws_ok(
         format('select pgsched.complete_task(%s, %L)', unknown, :'stale'),
         'TS404', 'there is no task ' || unknown, format('there is no task %s', unknown))
  from (values (-5::bigint), (4999999999999999999), (-9223372036854775808), (0)) as ids (unknown);

-- Happy path
select pgsched.enqueue_task('mail', p_queue => 'pgtap complete_task', p_unique_key => 'u',
                            p_concurrency_key => 'c') as id \gset
select claim_token as token from pgsched.claim_task('w', 'pgtap complete_task') \gset
update pgsched.scheduled_tasks set last_error = 'before' where id = :id;
select pg_temp.task(:id) as before, clock_timestamp() as t0 \gset
select is(pgsched.complete_task(:id, :'token', '{"sent": true}'), true,
          'a current claim is completed');
select is(pg_temp.task(:id), :'before'::jsonb || jsonb_build_object(
            'status', 'completed', 'result', '{"sent": true}'::jsonb, 'finished_at', finished_at),
          'the task is finished with its result, and keeps all else')
  from pgsched.finished_tasks where id = :id;
select ok(finished_at between :'t0' and clock_timestamp(), 'it was finished now, by the clock')
  from pgsched.finished_tasks where id = :id;
select is_empty(format('select id from pgsched.scheduled_tasks where id = %s', :id),
                'it is not live any more');
select is_empty($$select * from pgsched.claim_task('w', 'pgtap complete_task')$$,
                'nobody can claim it again');

-- Repeated
select pg_temp.task(:id) as before \gset
select is(pgsched.complete_task(:id, :'token', '{"sent": true}'), false,
          'the same claim completed again says that it was');
select is(pgsched.complete_task(:id, :'token', '"another"'), false, 'also with another result');
select is(pgsched.complete_task(:id, :'token'), false, 'and with none');
select is(pg_temp.task(:id), :'before', 'a repeated completion changes nothing');

-- Edges: results
select is(pgsched.complete_task(c.id, c.token, result), true,
          format('%s may be a result', coalesce(result::text, 'null')))
  from (values (1, null::jsonb), (2, 'null'), (3, '[]'), (4, '"é"'), (5, '{"a": [1.50]}'))
       as given (n, result)
 cross join lateral pg_temp.claimed('pgtap results', :huge + n) as c;
select results_eq(
  $$select result from pgsched.finished_tasks where queue = 'pgtap results' order by id$$,
  $$values (null::jsonb), ('null'), ('[]'), ('"é"'), ('{"a": [1.50]}')$$,
  'and is kept as it is');
select * from pg_temp.claimed('pgtap results') \gset
select pgsched.complete_task(:id, :'token') \g /dev/null
select is((select result from pgsched.finished_tasks where id = :id), null,
          'a completion without a result has none');

-- Edges: the state of the claim
select * from pg_temp.claimed('pgtap complete_task', p_lease_left => '-1 hours') \gset
select is(pgsched.complete_task(:id, :'token'), true,
          'a claim whose lease is over but that nobody took is completed');
select ok(pg_temp.holds_lock(:id), 'a completion takes the lock of the task');

select * from pg_temp.claimed('pgtap complete_task', p_cancel => true) \gset
select is(pgsched.complete_task(:id, :'token'), true,
          'a task whose cancel was requested can be completed');
select is(pg_temp.task(:id) ->> 'status', 'completed', 'and then counts as completed');

insert into pgsched.queues (name, paused) values ('pgtap paused', true);
select * from pg_temp.claimed('pgtap paused', p_attempt => 3, p_max_attempts => 3) \gset
select is(pgsched.complete_task(:id, :'token'), true,
          'the last attempt of a task in a paused queue is completed');

-- Edges: ids
select token as a from pg_temp.claimed('pgtap ids', :huge) \gset token_
select token as b from pg_temp.claimed('pgtap ids', :huge_2_32) \gset token_
select token as c from pg_temp.claimed('pgtap ids', 9223372036854775807) \gset token_
select token as d from pg_temp.claimed('pgtap ids', -1) \gset token_
select is(pgsched.complete_task(:huge_2_32, :'token_b'), true, 'an id beyond 32 bits is completed');
select ok(pg_temp.holds_lock(:huge_2_32) and not pg_temp.holds_lock(:huge),
          'under its lock, which is not that of the id that shares its 32 bits');
select results_eq(
  $$select id, status from pgsched.tasks where queue = 'pgtap ids' order by id$$,
  format($$values (-1::bigint, 'processing'), (%s, 'processing'), (%s, 'completed'),
                  (9223372036854775807, 'processing')$$, :huge, :huge_2_32),
  'no other task is');
select is(pgsched.complete_task(9223372036854775807, :'token_c'), true,
          'the largest id is completed');
select is(pgsched.complete_task(-1, :'token_d'), true, 'an id below zero is completed');

-- Errors: claims that are not current
create temporary table stale as select * from pg_temp.stale_claims('pgtap stale');
select throws_ok(format('select pgsched.complete_task(%s, %L, ''"late"'')', id, token),
                 'TS409', format('this claim of task %s is not current', id), what || ' is stale')
  from stale where what <> 'the token of a completed task';
select results_eq($$select * from pgsched.tasks where queue = 'pgtap stale' order by id$$,
                  'select * from before order by id', 'a stale claim changes nothing');

-- Errors: nulls
select throws_ok(format('select pgsched.complete_task(%L, %L)', id, token),
                 'TS400', 'p_id and p_claim_token must not be null', what)
  from no_claims;

-- Rights
select * from pg_temp.claimed('pgtap rights') \gset
select pg_temp.may_call('pgsched.complete_task',
                        format('select pgsched.complete_task(%s, %L)', :id, :'token'), 'true');

select * from finish();
rollback;
