begin;
\ir fixtures.sql
select plan(9);

select is(pg_temp.arguments_of('pgsched.list_workers'), '', 'list_workers takes nothing');
select is(pg_temp.result_of('pgsched.list_workers'),
  'TABLE(id bigint, name text, queues text[], slots integer, started_at timestamp with time zone, '
  'seen_at timestamp with time zone, running bigint, presence boolean)',
  'list_workers returns workers with what they run');

create function pg_temp.workers()
  returns table (name text, queues text[], slots integer, running bigint)
  language sql
as $$
  select w.name, w.queues, w.slots, w.running
    from pgsched.list_workers() as w
   where w.name like 'pgtap %'
$$;

-- Nothing there
select is_empty('select * from pg_temp.workers()', 'who did not register is not there');
select pg_temp.claimed('pgtap list') \g /dev/null
select is_empty('select * from pg_temp.workers()', 'not even with a task claimed in its name');

-- Happy path
select pgsched.register_worker('pgtap worker', '{a,b}', 7),
       pgsched.register_worker('pgtap idle', '{b}', 1) \g /dev/null
select pg_temp.claimed('pgtap list', p_lease_left => '-1 hours') \g /dev/null
select results_eq(
  'select * from pg_temp.workers()',
  $$values ('pgtap worker', '{a,b}'::text[], 7, 2::bigint), ('pgtap idle', '{b}', 1, 0)$$,
  'workers are in the order in which they came, with the tasks that they hold, also past a lease');
select results_eq(
  $$select l.id, l.started_at, l.seen_at, l.presence from pgsched.list_workers() as l
     where l.name like 'pgtap %'$$,
  $$select w.id, w.started_at, w.seen_at, w.presence from pgsched.workers as w
     where w.name like 'pgtap %' order by w.id$$,
  'and with the times of their table, and whether they are present');

-- Edges
select pgsched.cancel_task(id), pgsched.complete_task(id, claim_token)
  from pgsched.tasks where queue = 'pgtap list' and lease_expires_at < clock_timestamp()
  \g /dev/null
update pgsched.workers
   set seen_at = clock_timestamp() - interval '23 hours'
 where name = 'pgtap worker';
select results_eq(
  'select name, running from pg_temp.workers()',
  $$values ('pgtap worker', 1::bigint), ('pgtap idle', 0)$$,
  'a worker that was not seen for long is there, and holds nothing that it completed');
select pgsched.unregister_worker(id) from pgsched.workers where name = 'pgtap worker' \g /dev/null
select results_eq('select name from pg_temp.workers()', array['pgtap idle'],
                  'a worker that signed off is not there');

-- Rights
select pg_temp.may_call('pgsched.list_workers',
                        $$select slots from pgsched.list_workers() where name = 'pgtap idle'$$,
                        '1');

select * from finish();
rollback;
