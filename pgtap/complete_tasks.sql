begin;
\ir fixtures.sql
select plan(39);

select is(pg_temp.arguments_of('pgsched.complete_tasks'),
  'p_ids bigint[], p_claim_tokens uuid[], p_results jsonb[] DEFAULT NULL::jsonb[]',
  'complete_tasks takes ids, their tokens and, optionally, results');
select is(pg_temp.result_of('pgsched.complete_tasks'), 'TABLE(id bigint, outcome text)',
          'complete_tasks returns an outcome for each id');

-- Nothing there
select is_empty($$select * from pgsched.complete_tasks('{}', '{}')$$, 'no ids have no outcomes');
select is_empty($$select * from pgsched.complete_tasks('{}', '{}', '{}')$$, 'nor have no results');
select results_eq(
  format($$select * from pgsched.complete_tasks('{-5,4999999999999999999}', '{%1$s,%1$s}')$$,
         :'stale'),
  $$values (-5::bigint, 'gone'), (4999999999999999999, 'gone')$$,
  'tasks that do not exist are gone');

-- Happy path
select * from pg_temp.claimed('pgtap complete_tasks') \gset a_
select * from pg_temp.claimed('pgtap complete_tasks', p_lease_left => '-1 hours') \gset b_
select * from pg_temp.claimed('pgtap complete_tasks', p_cancel => true) \gset c_
update pgsched.scheduled_tasks
   set unique_key = 'u', concurrency_key = 'c', last_error = 'before'
 where id = :a_id;
create temporary table given as
select * from pgsched.tasks where queue = 'pgtap complete_tasks';
select clock_timestamp() as t0 \gset
select results_eq(
  format($$select * from pgsched.complete_tasks(
             '{%s,%s,%s}', '{%s,%s,%s}', array['"c"', null, '{"a": 1}']::jsonb[])$$,
         :c_id, :b_id, :a_id, :'c_token', :'b_token', :'a_token'),
  format($$values (%s::bigint, 'completed'), (%s, 'completed'), (%s, 'completed')$$,
         :c_id, :b_id, :a_id),
  'current claims are completed, also when the lease is over or a cancel was requested, '
  'and answered in the order given');
select is(pg_temp.task(id), to_jsonb(given) || jsonb_build_object(
            'status', 'completed', 'finished_at', pg_temp.task(id) -> 'finished_at',
            'result', case id when :a_id then '{"a": 1}'::jsonb when :c_id then '"c"' end),
          'a completed task is finished with its own result, and keeps all else')
  from given;
select ok(bool_and(finished_at between :'t0' and clock_timestamp()),
          'they were finished now, by the clock')
  from pgsched.finished_tasks where queue = 'pgtap complete_tasks';
select is_empty($$select id from pgsched.scheduled_tasks where queue = 'pgtap complete_tasks'$$,
                'they are not live any more');
select ok(not pg_temp.holds_lock(:a_id) and not pg_temp.holds_lock(:b_id),
          'a batch takes no lock of a task');

-- Repeated
create temporary table completed as
select * from pgsched.tasks where queue = 'pgtap complete_tasks';
select results_eq(
  format($$select * from pgsched.complete_tasks('{%s,%s}', '{%s,%s}', '{1,2}')$$,
         :a_id, :b_id, :'a_token', :'b_token'),
  format($$values (%s::bigint, 'already'), (%s, 'already')$$, :a_id, :b_id),
  'the same claims completed again say that they were');
select results_eq(
  $$select * from pgsched.tasks where queue = 'pgtap complete_tasks' order by id$$,
  'select * from completed order by id',
  'a repeated completion changes nothing');

-- Edges: no results
select * from pg_temp.claimed('pgtap results') \gset
select pgsched.complete_tasks(array[:id], array[uuid :'token']) \g /dev/null
select * from pg_temp.claimed('pgtap results') \gset
select pgsched.complete_tasks(array[:id], array[uuid :'token'], null) \g /dev/null
select * from pg_temp.claimed('pgtap results') \gset
select pgsched.complete_tasks(array[:id], array[uuid :'token'], array[jsonb 'null']) \g /dev/null
select results_eq(
  $$select result from pgsched.finished_tasks where queue = 'pgtap results' order by id$$,
  array[null, null, jsonb 'null'],
  'without results there are none, and null in JSON is one');

-- Edges: claims that are not current
create temporary table stale as select * from pg_temp.stale_claims('pgtap stale');
select results_eq(
  format('select * from pgsched.complete_tasks(%L, %L, array_fill(jsonb ''"late"'', array[%s]))',
         array_agg(id), array_agg(token), count(*)),
  $$select id, case what when 'the token of a completed task' then 'already' else 'stale' end
      from stale$$,
  'claims that are not current are stale: ' || string_agg(what, ', '))
  from stale;
select results_eq($$select * from pgsched.tasks where queue = 'pgtap stale' order by id$$,
                  'select * from before order by id', 'a stale claim changes nothing');

-- Edges: all outcomes in one batch, and duplicates
select * from pg_temp.claimed('pgtap mixed') \gset a_
select * from pg_temp.claimed('pgtap mixed') \gset b_
select * from pg_temp.claimed('pgtap mixed') \gset c_
select pgsched.complete_task(:c_id, :'c_token', '"c"') \g /dev/null
select results_eq(
  format('select * from pgsched.complete_tasks(%L, %L, %L)',
         array[:b_id, :a_id, :c_id, :a_id, :a_id, :b_id, 4999999999999999999, :a_id],
         array[:'b_token', :'stale', :'c_token', :'a_token', :'a_token', :'a_token',
               :'a_token', :'stale'],
         array[1, 2, 3, 4, 5, 6, 7, 8]),
  format($$values (%2$s::bigint, 'completed'), (%1$s, 'stale'), (%3$s, 'already'),
                  (%1$s, 'completed'), (%1$s, 'already'), (%2$s, 'stale'),
                  (4999999999999999999, 'gone'), (%1$s, 'stale')$$, :a_id, :b_id, :c_id),
  'each place of a batch has the answer to its own token; the first of equal ones completes');
select results_eq(
  $$select id, status, result from pgsched.tasks where queue = 'pgtap mixed' order by id$$,
  format($$values (%s::bigint, 'completed', jsonb '4'), (%s, 'completed', '1'),
                  (%s, 'completed', '"c"')$$, :a_id, :b_id, :c_id),
  'and its result is the one that is kept');

-- Edges: a batch of many, some with more than one claim's results
create temporary table many as
select c.id, c.token, n
  from generate_series(1, 1000) as n
 cross join lateral pg_temp.claimed('pgtap many', :huge + 1001 - n) as c;
select results_eq(
  format('select id, outcome from pgsched.complete_tasks(%L, %L, %L)',
         array_agg(id order by n), array_agg(token order by n), array_agg(to_jsonb(n) order by n)),
  $$select id, 'completed' from many order by n$$,
  'a thousand are completed at once')
  from many;
select results_eq(
  $$select id, result from pgsched.finished_tasks where queue = 'pgtap many' order by id$$,
  'select id, to_jsonb(n) from many order by id',
  'each with its own result');

-- Edges: ids
select token as a from pg_temp.claimed('pgtap ids', :huge) \gset token_
select token as b from pg_temp.claimed('pgtap ids', :huge_2_32) \gset token_
select token as c from pg_temp.claimed('pgtap ids', -1) \gset token_
select results_eq(
  format($$select * from pgsched.complete_tasks('{%s,-1}', '{%s,%s}')$$,
         :huge_2_32, :'token_b', :'token_c'),
  format($$values (%s::bigint, 'completed'), (-1, 'completed')$$, :huge_2_32),
  'an id beyond 32 bits and one below zero are completed');
select is(pg_temp.task(:huge) ->> 'status', 'processing', 'no other task is');

-- Errors
select throws_ok(format('select * from pgsched.complete_tasks(%L, %L)', ids, tokens),
                 'TS400', 'p_ids and p_claim_tokens do not pair up', what || ' is no batch')
  from bad_batches;
select throws_ok(
         format('select * from pgsched.complete_tasks(%L, %L, %L)',
                array[:huge], array[:'token_a'], results),
         'TS400', 'p_ids and p_results do not pair up', what)
  from (values ('{}', 'no result is not null'), ('{1,2}', 'two results are too many for one id'),
               ('{{1}}', 'results have one dimension')) as bad (results, what);
select is(pg_temp.task(:huge) ->> 'status', 'processing', 'a refused call completes nothing');

-- Rights
select pg_temp.may_call(
  'pgsched.complete_tasks',
  format($$select outcome from pgsched.complete_tasks('{%s}', '{%s}')$$, :huge, :'token_a'),
  'completed');

select * from finish();
rollback;
