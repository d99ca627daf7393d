begin;
\ir fixtures.sql
select plan(46);

select pg_temp.keep_others() \g /dev/null

create function pg_temp.finished(
    p_queue text, p_finished_at timestamptz, p_status text default 'completed',
    p_id bigint default null)
  returns bigint
  language sql
as $$
  insert into pgsched.finished_tasks (
         id, queue, task_type, payload, status, priority, run_at, attempt, max_attempts,
         claim_token, created_at, finished_at, result)
  values (coalesce(p_id, nextval(pg_get_serial_sequence('pgsched.scheduled_tasks', 'id'))),
         p_queue, 'a', '{"n": 1}', p_status, 5, p_finished_at, 1, 1, gen_random_uuid(),
         '2020-01-01 00:00:00+00', p_finished_at, '"done"')
  returning id
$$;

-- What each call deleted, until one finds nothing: on a slow machine it may take more than one.
create function pg_temp.prune(p_limit integer default 10000)
  returns setof bigint
  language plpgsql
as $$
declare
  v_deleted bigint;
begin
  for v_call in 1..1000 loop
    v_deleted := pgsched.prune_finished(p_limit);
    exit when v_deleted = 0;
    return next v_deleted;
  end loop;
end;
$$;

-- One for this transaction, and one for each subtransaction that wrote.
create function pg_temp.transaction_ids()
  returns bigint
  language sql
as $$
  select count(*)
    from pg_locks as l
   where l.pid = pg_backend_pid() and l.locktype = 'transactionid' and l.mode = 'ExclusiveLock'
$$;

select is(pg_temp.arguments_of('pgsched.prune_finished'), 'p_limit integer DEFAULT 10000',
          'prune_finished takes, optionally, a limit');
select is(pg_temp.result_of('pgsched.prune_finished'), 'bigint',
          'prune_finished returns a number');

-- Nothing there
select pg_temp.finished('pgtap young', clock_timestamp(), status)
  from unnest(array['completed', 'failed', 'cancelled']) as status \g /dev/null
savepoint idle;
select pg_temp.transaction_ids() as before \gset
select pgsched.prune_finished() as deleted \gset
select pg_temp.transaction_ids() as after \gset
release savepoint idle;
select is(:deleted, 0, 'no task is deleted while none is old');
select is(:after, :before, 'such a call writes nothing and locks no row');

-- Happy path: each queue and status at its edge
select pgsched.configure_queue(queue, p_keep_completed => completed, p_keep_failed => failed)
  from (values ('pgtap no times', null::interval, null::interval),
               ('pgtap own times', '90 minutes', '2 days'),
               ('pgtap long and none', '100 years', '0'), ('pgtap none and long', '0', '100 years'),
               ('pgtap months', '1 mon', '1 year')) as settings (queue, completed, failed)
  \g /dev/null
select pgsched.pause_queue('pgtap own times') \g /dev/null
create temporary table keeps as
select k.queue, s.status,
       date_part('epoch', case s.status when 'completed' then completed else failed end)
         * interval '1 second' as keep
  from (values ('pgtap no settings', interval '1 day', interval '30 days'),
               ('pgtap no times', '1 day', '30 days'), ('pgtap own times', '90 minutes', '2 days'),
               ('pgtap long and none', '100 years', '0'), ('pgtap none and long', '0', '100 years'),
               ('pgtap months', '1 mon', '1 year')) as k (queue, completed, failed)
 cross join unnest(array['completed', 'failed', 'cancelled']) as s (status);
select clock_timestamp() as t0 \gset
create temporary table edges as
select k.*, e.finished_at, pg_temp.finished(queue, e.finished_at, status) as id
  from keeps as k
 cross join unnest(array['1 microsecond', '1 second', '30 years', '-1 second', '-1 minute']
                   ::interval[]) as too_old
 cross join lateral (values (timestamptz :'t0' - keep - too_old)) as e (finished_at);
create temporary table live as
select queue, pgsched.enqueue_task('a', p_queue => queue) as id from keeps
 union all
select queue, (pg_temp.claimed(queue, p_lease_left => '-1 hours')).id from keeps;
update pgsched.scheduled_tasks as t
   set run_at = '1900-01-01 00:00:00+00', created_at = '1900-01-01 00:00:00+00'
  from live as l
 where l.id = t.id;
create temporary table before as select * from pgsched.tasks where queue like 'pgtap %';

select sum(deleted) as deleted from pg_temp.prune() as deleted \gset
select clock_timestamp() as t1 \gset
select is_empty(
  format($$select finished_at, now_there
             from edges as e
            cross join lateral (select exists (
                    select from pgsched.finished_tasks as f where f.id = e.id)) as f (now_there)
            where (queue, status) = (%L, %L)
              and (finished_at < timestamptz %L - keep and now_there
                   or finished_at >= timestamptz %L - keep and not now_there)$$,
         queue, status, :'t0', :'t1'),
  format('%s: %s tasks are deleted when they are older than %s', queue, status, keep))
  from keeps order by queue, status;
select results_eq(
  $$select * from pgsched.tasks where queue like 'pgtap %' order by id$$,
  $$select b.*
      from before as b
     where b.id in (select t.id from pgsched.tasks as t)
     order by b.id$$,
  'what is left is as it was');
select is((select count(*) from before)
            - (select count(*) from pgsched.tasks where queue like 'pgtap %'),
          :'deleted', 'as many are gone as were counted');
select is_empty(
  'select id from live except select id from pgsched.scheduled_tasks',
  'queued and running tasks are never deleted, however old');
delete from pgsched.finished_tasks where queue like 'pgtap %';

-- A deleted task
select * from pg_temp.claimed('pgtap none and long') \gset
select pgsched.configure_queue('pgtap none and long', p_keep_completed => '1 day') \g /dev/null
select pgsched.complete_task(:id, :'token') \g /dev/null
select pgsched.configure_queue('pgtap none and long', p_keep_completed => '0') \g /dev/null
select is(pgsched.prune_finished(), 1::bigint,
          'tasks that were kept are deleted when their queue keeps them no longer');
select throws_ok(format('select pgsched.complete_task(%s, %L)', :id, :'token'),
                 'TS404', 'there is no task ' || :id, 'a deleted task is not known any more');

-- Edges: the limit
create temporary table seven as
select n, pg_temp.finished('pgtap seven', timestamptz '2001-01-08 00:00:00+00'
                                            - n * interval '1 day') as id
  from generate_series(1, 7) as n;
select is(pgsched.prune_finished(1), 1::bigint, 'one task is deleted if that is the limit');
select is(pgsched.prune_finished(3), 3::bigint, 'three if it is three');
select results_eq(
  $$select id from pgsched.finished_tasks where queue = 'pgtap seven' order by id$$,
  'select id from seven where n <= 3 order by id',
  'in a queue the oldest go first');
select is(pgsched.prune_finished(5), 3::bigint, 'no more are deleted than there are');
select is(pgsched.prune_finished(), 0::bigint, 'and then none');

select pg_temp.finished('pgtap spread ' || n % 3, '2001-01-01 00:00:00+00', status)
  from generate_series(1, 6) as n
 cross join unnest(array['completed', 'failed', 'cancelled']) as status \g /dev/null
select results_eq('select max(deleted) <= 5, sum(deleted) from pg_temp.prune(5) as deleted',
                  'values (true, 18::numeric)',
                  'the limit is for all queues and states together');

select pg_temp.finished('pgtap many', '2001-01-01 00:00:00+00'), n
  from generate_series(1, 350) as n \g /dev/null
select is((select sum(deleted) from pg_temp.prune(100000) as deleted), 350::numeric,
          'the limit may be 100000, and hundreds are deleted and counted');
select is_empty($$select id from pgsched.finished_tasks where queue = 'pgtap many'$$,
                'none of them is left');

-- Edges: ids
select pg_temp.finished('pgtap ids', '2001-01-01 00:00:00+00', p_id => id)
  from unnest(array[-9223372036854775808, -1, :huge, :huge_2_32, :huge_same_key,
                    9223372036854775807]) as id \g /dev/null
select pg_temp.finished('pgtap ids', clock_timestamp(), p_id => 9223372036854775806) \g /dev/null
select is(pgsched.prune_finished(), 6::bigint, 'ids far apart are deleted together');
select results_eq($$select id from pgsched.finished_tasks where queue = 'pgtap ids'$$,
                  array[9223372036854775806], 'and no other is');

-- Edges: names
select pg_temp.finished(name, '2001-01-01 00:00:00+00') from good_names \g /dev/null
select pg_temp.prune() \g /dev/null
select is_empty(
  'select id from pgsched.finished_tasks where queue in (select name from good_names)',
  'any name of a queue is found');

-- Errors
select pg_temp.finished('pgtap errors', '2001-01-01 00:00:00+00') as id \gset
select throws_ok(format('select pgsched.prune_finished(%L)', bad),
                 'TS400', 'p_limit is out of range: ' || coalesce(bad::text, 'null'),
                 format('%s is no limit', coalesce(bad::text, 'null')))
  from unnest(array[null, 0, -1, 100001, 2147483647, -2147483648]) as bad;
select isnt(pg_temp.task(:id), null, 'a refused call deletes nothing');

-- Rights
select pg_temp.may_call('pgsched.prune_finished', 'select pgsched.prune_finished()', '1');

select * from finish();
rollback;
