begin;
\ir fixtures.sql
select plan(74);

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

-- Presence. Nothing counts that was before a start of the server.
select pg_sleep(date_part('epoch', pg_postmaster_start_time() + interval '7 seconds'
                                   - clock_timestamp())) \g /dev/null

-- A worker that said that it holds its presence, suspected for so long.
create function pg_temp.worker(p_name text, p_suspect interval default null)
  returns bigint
  language sql
as $$
  insert into pgsched.workers as w (
         id, name, queues, slots, started_at, seen_at, presence, suspect_since)
  values (nextval(pg_get_serial_sequence('pgsched.workers', 'id')), p_name, '{a}', 1,
          clock_timestamp(), clock_timestamp(), true, clock_timestamp() - p_suspect)
  returning w.id
$$;

-- A task that it claimed.
create function pg_temp.claimed_by(
    p_worker text, p_lease_left interval default '5 minutes', p_attempt integer default 1,
    p_cancel boolean default false)
  returns bigint
  language plpgsql
as $$
declare
  v_id bigint;
begin
  v_id := c.id from pg_temp.claimed('pgtap presence', nextval('lowest'), p_lease_left, p_attempt,
                                    p_cancel => p_cancel) as c;
  update pgsched.scheduled_tasks as t set claimed_by = p_worker where t.id = v_id;
  return v_id;
end;
$$;

-- What became of them is said of the lowest ids: those of the tests.
create function pg_temp.reaped(p_limit integer default 1)
  returns table (id bigint, status text)
  language sql
as $$
  select * from pgsched.reap_stale(p_limit) order by 1
$$;

create function pg_temp.presence(p_id bigint)
  returns text
  language sql
as $$
  select case when w.presence then 'true' else 'false' end
         || case when w.suspect_since < clock_timestamp() - interval '3 seconds' then ', suspect'
                 when w.suspect_since <= clock_timestamp() then ', suspect now' else '' end
    from pgsched.workers as w
   where w.id = p_id
$$;

-- Presence: two looks
select pg_temp.worker('pgtap absent') as worker, pg_temp.claimed_by('pgtap absent') as id \gset
select pg_temp.task(:id) as before \gset
select id as next from pg_temp.stale('pgtap next') \gset
select results_eq('select * from pg_temp.reaped()', format('values (%s, ''queued'')', :next),
                  'a worker whose presence nobody holds keeps its tasks at the first look');
select is(pg_temp.presence(:worker), 'true, suspect now', 'but it is suspected from then on');
update pgsched.workers set suspect_since = clock_timestamp() - interval '4 seconds'
 where id = :worker;
select suspect_since as since from pgsched.workers where id = :worker \gset
select id as next from pg_temp.stale('pgtap next') \gset
select results_eq('select * from pg_temp.reaped()', format('values (%s, ''queued'')', :next),
                  'and at another less than 5 seconds later');
select is(suspect_since, :'since', 'which does not begin anew')
  from pgsched.workers where id = :worker;
select is(pg_temp.task(:id), :'before', 'the task is left alone');
update pgsched.workers set suspect_since = clock_timestamp() - interval '5 seconds'
 where id = :worker;
select results_eq('select * from pg_temp.reaped()', format('values (%s, ''queued'')', :id),
                  'at one after 5 seconds it is gone, and its task queued');
select is(last_error, 'worker pgtap absent was lost: its presence ended during attempt 1',
          'which says why')
  from pgsched.scheduled_tasks where id = :id;
select is(pg_temp.presence(:worker), 'false, suspect', 'there is no more need to look for it');

-- Presence: what becomes of each, whatever the worker is called
select pg_temp.worker('%s o''brien \ 100 %', '6 seconds') as worker \gset
create temporary table gone as
select pg_temp.claimed_by('%s o''brien \ 100 %', lease::interval, attempt, cancel) as id, what,
       status, error
  from (values ('with attempts left runs again', '1 hour', 1, false, 'queued',
                'its presence ended during attempt 1'),
               ('without has failed', '1 hour', 20, false, 'failed',
                'its presence ended during attempt 20'),
               ('to be cancelled is cancelled', '1 hour', 2, true, 'cancelled',
                'its presence ended during attempt 2'),
               ('whose lease is over, too, runs again', '0', 1, false, 'queued',
                'its lease ended during attempt 1'))
       as s (what, lease, attempt, cancel, status, error);
select results_eq('select * from pg_temp.reaped(4)', 'select id, status from gone order by id',
                  'of a worker that is gone all tasks are reaped');
select is(pg_temp.task(id) ->> 'last_error', format('worker %s was lost: %s',
                                                    '%s o''brien \ 100 %', error),
          'one ' || what)
  from gone;

-- Presence: who is there, or never said so
select pg_temp.worker('pgtap there', '6 seconds') as there,
       pg_temp.worker('pgtap off', '6 seconds') as off,
       pg_temp.worker('pgtap back', '6 seconds') as back \gset
update pgsched.workers set presence = false where id = :off;
call pgsched.hold_presence(:there);
call pgsched.hold_presence(:back);
select pgsched.register_worker('pgtap back', '{a}', 1, true) \g /dev/null
create temporary table kept as
select pg_temp.task(pg_temp.claimed_by(worker)) as before, what
  from (values ('pgtap there', 'a worker that holds its presence'),
               ('pgtap back', 'a worker that is back'),
               ('pgtap off', 'a worker that said that it does not hold it'),
               ('pgtap nobody', 'who is no worker')) as s (worker, what);
select id as next from pg_temp.stale('pgtap next') \gset
select results_eq('select * from pg_temp.reaped()', format('values (%s, ''queued'')', :next),
                  'of these no task is reaped before its lease ends');
select is(pg_temp.task((before ->> 'id')::bigint), before, 'none of ' || what) from kept;
select is(pg_temp.presence(:there), 'true', 'who is there is suspected no more, without a word');
select is(pg_temp.presence(:back), 'true', 'nor is who said so');

-- Presence: nothing counts from before a start of the server
select pg_temp.worker('pgtap old') as worker, pg_temp.claimed_by('pgtap old') as id \gset
update pgsched.workers set suspect_since = pg_postmaster_start_time() - interval '1 microsecond'
 where id = :worker;
select pg_temp.task(:id) as before from pg_temp.stale('pgtap next') \gset
select pgsched.reap_stale(1) \g /dev/null
select is(pg_temp.task(:id), :'before', 'who was suspected before such a start is not gone');
select is(pg_temp.presence(:worker), 'true, suspect now', 'but suspected anew');
select pgsched.unregister_worker(:worker) \g /dev/null

-- Presence: the limit, and what is held
select pg_temp.worker('pgtap many', '6 seconds') as worker \gset
create temporary table rest as
select pg_temp.claimed_by('pgtap many') as id from generate_series(1, 5);
select results_eq('select id from pg_temp.reaped(3)', 'select id from rest order by id limit 3',
                  'of more tasks than the limit the first are reaped');
select is(pg_temp.presence(:worker), 'true, suspect', 'the worker stays suspected');
select max(id) as held from rest \gset
select claim_token as token from pgsched.scheduled_tasks where id = :held \gset
select pgsched.hold_task(:held, :'token') \g /dev/null
select id as next from pg_temp.stale('pgtap next') \gset
select results_eq('select id from pg_temp.reaped(2)',
                  format('(select id from rest where id < %s order by id offset 3) union all
                          select %s', :held, :next),
                  'the next call passes by what is held');
select is(pg_temp.presence(:worker), 'true, suspect', 'for which the worker stays suspected');
select pgsched.complete_task(:held, :'token') from pg_temp.stale('pgtap next') \g /dev/null
select pgsched.reap_stale(1) \g /dev/null
select is(pg_temp.presence(:worker), 'false, suspect', 'until nothing of it is left');

-- Presence: ids of workers
insert into pgsched.workers (id, name, queues, slots, started_at, seen_at, presence, suspect_since)
select id, 'pgtap ' || id, '{a}', 1, clock_timestamp(), clock_timestamp(), true,
       clock_timestamp() - interval '6 seconds'
  from unnest(array[:huge, :huge_2_32, -:huge]) as id;
call pgsched.hold_presence(:huge);
create temporary table huge as
select pg_temp.claimed_by('pgtap ' || id) as id from unnest(array[:huge_2_32, -:huge]) as id;
select pg_temp.claimed_by('pgtap ' || :huge) as kept \gset
select id as next from pg_temp.stale('pgtap next') \gset
select results_eq('select id from pg_temp.reaped(3)',
                  format('select id from huge union all select %s order by 1', :next),
                  'workers with ids beyond 32 bits are told apart');

-- A task that cannot be reaped
select * from pg_temp.stale('pgtap twice') \gset bad_
select pg_temp.task(:bad_id) as before \gset
update pgsched.scheduled_tasks set max_attempts = 1 where id = :bad_id;
insert into pgsched.finished_tasks (
       id, queue, task_type, payload, status, priority, run_at, attempt, max_attempts, created_at,
       finished_at)
select id, 'pgtap twice', 'a', '{}', 'failed', 5, run_at, 1, 1, created_at, created_at
  from pgsched.scheduled_tasks where id = :bad_id;
create temporary table good as
select id from generate_series(1, 3) as n cross join lateral pg_temp.stale('pgtap twice ' || n);
set local client_min_messages = 'error';
select results_eq('select id from pg_temp.reaped(4)', 'select id from good order by id',
                  'a task whose id has ended already keeps no other from being reaped');
set local client_min_messages = 'warning';
select is(to_jsonb(t), :'before'::jsonb - 'finished_at' - 'result' || '{"max_attempts": 1}',
          'and stays as it is')
  from pgsched.scheduled_tasks as t where t.id = :bad_id;

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
