begin;
\ir fixtures.sql
select plan(44);

-- Tasks of others may be stale too. Ours have lower ids: the reaper comes to them first, and a
-- limit keeps it there. What it must leave alone, it passes by to a stale task right behind.
create temporary sequence lowest minvalue -9000000000000000000 start with -9000000000000000000;

create function pg_temp.stale(
    p_queue text, p_attempt integer default 1, p_cancel boolean default false)
  returns table (id bigint, token uuid)
  language sql
as $$
  select * from pg_temp.claimed(p_queue, nextval('lowest'), '0', p_attempt, p_cancel => p_cancel)
$$;

select is(pg_temp.arguments_of('pgsched.reap_stale'), 'p_limit integer DEFAULT 1000',
          'reap_stale takes, optionally, a limit');
select is(pg_temp.result_of('pgsched.reap_stale'), 'TABLE(id bigint, status text)',
          'reap_stale says what became of each task');

-- Nothing there
select * from pg_temp.claimed('pgtap holds', nextval('lowest'), '1 second', p_attempt => 20,
                              p_cancel => true) \gset held_
update pgsched.scheduled_tasks set lease_expires_at = clock_timestamp() + interval '1 hour'
 where id = :held_id;
select pgsched.enqueue_task('a', p_queue => 'pgtap holds') as queued \gset
create temporary table before as select * from pgsched.tasks where queue = 'pgtap holds';
select id as next from pg_temp.stale('pgtap next') \gset
select results_eq('select * from pgsched.reap_stale(1)', format('values (%s, ''queued'')', :next),
                  'a task is not reaped before its lease ends');
select results_eq($$select * from pgsched.tasks where queue = 'pgtap holds' order by id$$,
                  'select * from before order by id', 'its row is left alone');
select ok(not pg_temp.holds_lock(:held_id), 'and so is its lock');

-- Happy path
insert into pgsched.queues (name, paused) values ('pgtap paused', true);
create temporary table stale as
select c.*, s.*, pg_temp.task(id) as before
  from (values ('runs again', 'pgtap reap 1', 1, false, 'queued'),
               ('with an attempt left runs again', 'pgtap reap 2', 19, false, 'queued'),
               ('of a paused queue is queued again', 'pgtap paused', 1, false, 'queued'),
               ('without an attempt left has failed', 'pgtap reap 3', 20, false, 'failed'),
               ('with too many attempts has failed', 'pgtap reap 4', 21, false, 'failed'),
               ('to be cancelled is cancelled', 'pgtap reap 5', 1, true, 'cancelled'),
               ('to be cancelled is cancelled in its last attempt', 'pgtap reap 6', 20, true,
                'cancelled')) as s (what, queue, attempt, cancel, status)
 cross join lateral pg_temp.stale(queue, attempt, cancel) as c;
select clock_timestamp() as t0 \gset
select results_eq('select * from pgsched.reap_stale(7) order by id',
                  'select id, status from stale order by id',
                  'tasks whose lease has ended are reaped, and it is said what became of each');
select clock_timestamp() as t1 \gset
select is(pg_temp.task(id),
          before || jsonb_build_object(
            'status', status,
            'last_error',
            format('worker pgtap worker was lost: its lease ended during attempt %s', attempt))
          || case status
               when 'queued' then jsonb_build_object(
                 'run_at', pg_temp.task(id) -> 'run_at', 'claim_token', null, 'claimed_by', null,
                 'claimed_at', null, 'lease_expires_at', null)
               else jsonb_build_object('finished_at', pg_temp.task(id) -> 'finished_at')
             end,
          format('a lost task %s; its row says why and keeps all else', what))
  from stale;
select is((pg_temp.task(id) ->> case status when 'queued' then 'run_at' else 'finished_at' end)
          ::timestamptz between :'t0' and :'t1', true,
          case status when 'queued' then 'it is due at once' else 'it is finished now' end)
  from stale;
select ok(bool_and(pg_temp.holds_lock(id)), 'a task is reaped under its lock') from stale;
select id as next from pg_temp.stale('pgtap next') \gset
select results_eq('select * from pgsched.reap_stale(1)', format('values (%s, ''queued'')', :next),
                  'a task is reaped once');

-- The worker that was lost comes back
select id, token from stale where what = 'runs again' \gset
select pg_temp.task(:id) as before \gset
select throws_ok(format('select pgsched.complete_task(%s, %L)', :id, :'token'),
                 'TS409', format('this claim of task %s is not current', :id),
                 'the lost worker cannot complete the task');
select throws_ok(format('select pgsched.fail_task(%s, %L, ''x'')', :id, :'token'),
                 'TS409', format('this claim of task %s is not current', :id), 'nor fail it');
select throws_ok(format('select pgsched.release_task(%s, %L)', :id, :'token'),
                 'TS409', format('this claim of task %s is not current', :id), 'nor release it');
select results_eq(
  format('select outcome from pgsched.extend_tasks(array[%s], array[uuid %L]) union all
          select outcome from pgsched.complete_tasks(array[%1$s], array[uuid %2$L])',
         :id, :'token'),
  array['lost', 'stale'], 'nor extend it, nor complete it in a batch');
select is(pg_temp.task(:id), :'before', 'and changes nothing');
select results_eq($$select id, attempt from pgsched.claim_task('w', 'pgtap reap 1')$$,
                  format('values (%s::bigint, 2)', :id), 'another worker claims it, which counts');

-- Edges: what the worker was called
select * from pg_temp.stale('pgtap names') \gset
update pgsched.scheduled_tasks set claimed_by = '%s o''brien \ 100 %', last_error = 'before'
 where id = :id;
select pgsched.reap_stale(1) \g /dev/null
select is(last_error, 'worker %s o''brien \ 100 % was lost: its lease ended during attempt 1',
          'the name of a lost worker is only text')
  from pgsched.scheduled_tasks where id = :id;

-- Edges: what this transaction holds itself, although its own lock can always be had
insert into pgsched.scheduled_tasks (
       id, queue, task_type, payload, priority, run_at, max_attempts, created_at)
values (nextval('lowest'), 'pgtap own', 'a', '{}', 5, '2020-01-01 00:00:00+00', 20,
        '2020-01-01 00:00:00+00');
select id from pgsched.claim_task('w', 'pgtap own', '1 second') \gset own_
update pgsched.scheduled_tasks set lease_expires_at = clock_timestamp() where id = :own_id;
select pg_temp.task(:own_id) as before \gset
select id as next from pg_temp.stale('pgtap next') \gset
select results_eq('select * from pgsched.reap_stale(1)', format('values (%s, ''queued'')', :next),
                  'a task that the calling transaction holds is not reaped');
select is(pg_temp.task(:own_id), :'before', 'its row is left alone');

-- Edges: the limit. A plan that sorts all stale tasks must not lock them all.
set local enable_indexscan = off;
discard plans;
select setval('lowest', nextval('lowest') + 1003) as top \gset
create temporary table many as
select c.id
  from generate_series(1, 1003) as n
 cross join lateral pg_temp.claimed('pgtap many', :top - n, '0') as c;
select results_eq('select * from pgsched.reap_stale(1)',
                  $$select id, 'queued' from many order by id limit 1$$,
                  'one task is reaped if that is the limit');
select results_eq('select * from pgsched.reap_stale(2) order by id',
                  $$select id, 'queued' from many order by id limit 2 offset 1$$,
                  'the lowest ids go first');
select results_eq('select min(id), max(id) from many where pg_temp.holds_lock(id)',
                  'select min(id), min(id) + 2 from many', 'the others are not locked');
select results_eq('select * from pgsched.reap_stale() order by id',
                  $$select id, 'queued' from many order by id offset 3$$,
                  'a thousand are reaped at once');

-- Edges: ids
select pg_temp.claimed('pgtap ids', id, '0')
  from unnest(array[-1, -:huge, -:huge_2_32, -:huge_same_key, -9223372036854775808]) as id
  \g /dev/null
select results_eq(
  'select * from pgsched.reap_stale(5) order by id',
  $$select id, 'queued' from pgsched.tasks where queue = 'pgtap ids' order by id$$,
  'ids far apart are reaped together, also when they share 32 bits or a lock');

-- Errors
select * from pg_temp.stale('pgtap errors') \gset
select throws_ok(format('select * from pgsched.reap_stale(%L)', bad),
                 'TS400', 'p_limit is out of range: ' || coalesce(bad::text, 'null'),
                 format('%s is no limit', coalesce(bad::text, 'null')))
  from unnest(array[null, 0, -1, 1001, 2147483647, -2147483648]) as bad;
select is(pg_temp.task(:id) ->> 'status', 'processing', 'a refused call reaps nothing');

-- Rights
select pg_temp.may_call('pgsched.reap_stale',
                        $$select id || ' ' || status from pgsched.reap_stale(1)$$,
                        format('%s queued', :id));

select * from finish();
rollback;
