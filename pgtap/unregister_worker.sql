begin;
\ir fixtures.sql
select plan(7);

select is(pg_temp.arguments_of('pgsched.unregister_worker'), 'p_id bigint',
          'unregister_worker takes an id');
select is(pg_temp.result_of('pgsched.unregister_worker'), 'void',
          'unregister_worker returns nothing');

select pgsched.register_worker('pgtap 1', '{a}', 1) as id \gset
select pgsched.register_worker('pgtap 2', '{a}', 1) as other \gset

-- Nothing there
select pgsched.unregister_worker(unknown)
  from unnest(array[null, -1, 0, 9223372036854775807]) as unknown \g /dev/null
select results_eq($$select id from pgsched.workers where name like 'pgtap _' order by id$$,
                  array[:id, :other]::bigint[], 'an unknown id changes nothing');

-- Happy path
select pgsched.unregister_worker(:id) \g /dev/null
select results_eq($$select id from pgsched.workers where name like 'pgtap _' order by id$$,
                  array[:other]::bigint[], 'a worker that signs off is gone, and no other');
select lives_ok(format('select pgsched.unregister_worker(%s)', :id), 'it may do so again');

-- Edges
select * from pg_temp.claimed('pgtap unregister_worker') \gset task_
update pgsched.scheduled_tasks set claimed_by = 'pgtap 2' where id = :task_id;
select pg_temp.task(:task_id) as before \gset
select pgsched.unregister_worker(:other) \g /dev/null
select is(pg_temp.task(:task_id), :'before', 'its tasks stay claimed until their leases end');

-- Rights
select pgsched.register_worker('pgtap 3', '{a}', 1) as id \gset
select pg_temp.may_call('pgsched.unregister_worker',
                        format($$select 'done' from pgsched.unregister_worker(%s)$$, :id), 'done');

select * from finish();
rollback;
