begin;
\ir fixtures.sql
select plan(14);

select is(pg_temp.arguments_of('pgsched.get_task'), 'p_id bigint', 'get_task takes an id');
select is(
  pg_temp.result_of('pgsched.get_task'),
  (select format('TABLE(%s)', string_agg(
            attname || ' ' || format_type(atttypid, atttypmod), ', ' order by attnum))
     from pg_attribute
    where attrelid = 'pgsched.tasks'::regclass and attnum > 0 and attname <> 'claim_token'),
  'get_task returns what the view tasks has, without the token of the claim');

-- Nothing there
select throws_ok('select * from pgsched.get_task(-5)', 'TS404', 'there is no task -5',
                 'an id that no task has is refused');
select throws_ok('select * from pgsched.get_task(null)', 'TS400', 'p_id must not be null',
                 'so is null');

-- Happy path
create temporary table tasks (id bigint, what text);
with queued as (
  select pgsched.enqueue_task('a', '{"n": [1.10, null]}', p_queue => 'pgtap get',
                              p_run_at => '2999-01-01 00:00:00+00', p_unique_key => 'u',
                              p_concurrency_key => 'c') as id)
insert into tasks select id, 'a queued task' from queued;
insert into tasks select c.id, 'a running task' from pg_temp.claimed('pgtap get') as c;
insert into tasks
select c.id, 'a task that is to be cancelled'
  from pg_temp.claimed('pgtap get', p_cancel => true) as c;
select * from pg_temp.claimed('pgtap get') \gset done_
select pgsched.complete_task(:done_id, :'done_token', '{"sent": true}') \g /dev/null
select * from pg_temp.claimed('pgtap get') \gset failed_
select status from pgsched.fail_task(:failed_id, :'failed_token', 'boom', p_permanent => true)
  \g /dev/null
select * from pg_temp.claimed('pgtap get', p_id => :huge) \gset huge_
insert into tasks
values (:done_id, 'a completed task'), (:failed_id, 'a dead letter'),
       (:huge, 'a task with a large id');
select is(to_jsonb(g), pg_temp.task(t.id) - 'claim_token', what || ' is shown as the view shows it')
  from tasks as t cross join lateral pgsched.get_task(t.id) as g
 order by t.id;

-- Edges: one that is kept no longer, one that has moved back
select pgsched.retry_task(:failed_id) \g /dev/null
select results_eq(
  format('select status, attempt, last_error from pgsched.get_task(%s)', :failed_id),
  $$values ('queued', 0, 'boom')$$, 'a task that is retried is queued again');
select throws_ok(format('select * from pgsched.get_task(%s)', :'huge_same_key'), 'TS404',
                 format('there is no task %s', :'huge_same_key'),
                 'a task is not taken for one that shares its lock');

-- No lock of it is taken, by which a reader would hold up others
select is(pg_temp.holds_lock(:huge), false, 'the task is not locked');

-- Rights
select pg_temp.may_call('pgsched.get_task',
                        format('select status from pgsched.get_task(%s)', :huge), 'processing');

select * from finish();
rollback;
