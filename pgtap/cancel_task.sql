begin;
\ir fixtures.sql
select plan(49);

-- A queued task with an attempt behind it, due in an hour.
create function pg_temp.queued(p_queue text, p_id bigint default null)
  returns bigint
  language sql
as $$
  insert into pgsched.scheduled_tasks as t (
         id, queue, task_type, payload, priority, run_at, attempt, max_attempts, concurrency_key,
         last_error, created_at)
  select coalesce(p_id, nextval(pg_get_serial_sequence('pgsched.scheduled_tasks', 'id'))),
         p_queue, 'some work', '{"n": 1}', 3, c.now + interval '1 hour', 1, 7, 'c', 'before',
         c.now - interval '3 hours'
    from (select clock_timestamp() as now) as c
  returning t.id
$$;

select is(pg_temp.arguments_of('pgsched.cancel_task'), 'p_id bigint', 'cancel_task takes an id');
select is(pg_temp.result_of('pgsched.cancel_task'), 'text',
          'cancel_task says what it came to');

-- Nothing there
select throws_ok(format('select pgsched.cancel_task(%s)', unknown),
                 'TS404', 'there is no task ' || unknown, format('there is no task %s', unknown))
  from (values (-5::bigint), (4999999999999999999), (9223372036854775807),
               (-9223372036854775808), (0)) as ids (unknown);

-- Happy path: a queued task
select pg_temp.queued('pgtap cancel_task') as id \gset
update pgsched.scheduled_tasks set unique_key = 'k' where id = :id;
select pg_temp.task(:id) as before, clock_timestamp() as t0 \gset
select is(pgsched.cancel_task(:id), 'cancelled', 'a queued task is cancelled');
select is(pg_temp.task(:id), :'before'::jsonb || jsonb_build_object(
            'status', 'cancelled', 'finished_at', finished_at),
          'it is finished, and keeps all else')
  from pgsched.finished_tasks where id = :id;
select ok(finished_at between :'t0' and clock_timestamp(), 'it was finished now, by the clock')
  from pgsched.finished_tasks where id = :id;
select is_empty(format('select id from pgsched.scheduled_tasks where id = %s', :id),
                'it is not live any more');
select ok(not pg_temp.holds_lock(:id), 'a cancel takes no lock of a task');
select isnt(pgsched.enqueue_task('a', p_queue => 'pgtap cancel_task', p_unique_key => 'k'), :'id',
            'its unique key is free');
select pg_temp.task(:id) as before \gset
select is(pgsched.cancel_task(:id), 'finished', 'cancelled again it had ended already');
select is(pg_temp.task(:id), :'before', 'and nothing changes');

-- Happy path: a running task
select * from pg_temp.claimed('pgtap running') \gset
update pgsched.scheduled_tasks set unique_key = 'k' where id = :id;
select pg_temp.task(:id) as before, clock_timestamp() as t0 \gset
select is(pgsched.cancel_task(:id), 'requested', 'of a running task it is requested');
select is(pg_temp.task(:id), :'before'::jsonb || jsonb_build_object(
            'cancel_requested_at', cancel_requested_at),
          'its row says so, and it runs on')
  from pgsched.scheduled_tasks where id = :id;
select ok(cancel_requested_at between :'t0' and clock_timestamp(),
          'it was requested now, by the clock')
  from pgsched.scheduled_tasks where id = :id;
select ok(not pg_temp.holds_lock(:id), 'a request takes no lock of a task either');
select is(pgsched.enqueue_task('a', p_queue => 'pgtap running', p_unique_key => 'k'), :'id',
          'the task still has its unique key');
select is_empty($$select * from pgsched.claim_task('w', 'pgtap running')$$,
                'and nobody else gets it');

update pgsched.scheduled_tasks set cancel_requested_at = cancel_requested_at - interval '1 hour'
 where id = :id;
select pg_temp.task(:id) as before \gset
select is(pgsched.cancel_task(:id), 'requested', 'it may be requested again');
select is(pg_temp.task(:id), :'before', 'the time of the first request stays');

-- Happy path: how a task ends after a request, its token as good as before
create temporary table ends as
select e.*, c.*
  from (values (1, 'is completed', 'completed', '{"result": "done"}'::jsonb),
               (2, 'is completed in a batch', 'completed', '{"result": null}'),
               (3, 'fails', 'cancelled', '{"last_error": "x"}'),
               (4, 'is released', 'cancelled', '{}'),
               (5, 'is lost', 'cancelled', '{"last_error":
                   "worker pgtap worker was lost: its lease ended during attempt 5"}'))
       as e (n, what, status, changes)
 cross join lateral pg_temp.claimed('pgtap ends', -:huge + n, '-1 hours', p_attempt => n) as c;
select is(pgsched.cancel_task(id), 'requested',
          'a task whose lease is over runs until it is reaped')
  from ends where n = 5;
select pgsched.cancel_task(id) from ends where n < 5 \g /dev/null
select results_eq(
  $$select outcome from ends cross join lateral pgsched.extend_tasks(array[id], array[token])
     where n = 1$$,
  array['cancel_requested'], 'its worker learns of it when it extends the lease');
create temporary table requested as
select n, pg_temp.task(id) as before from ends;
select is(pgsched.complete_task(id, token, '"done"'), true, 'a completion is taken all the same')
  from ends where n = 1;
select results_eq(
  $$select outcome from ends cross join lateral pgsched.complete_tasks(array[id], array[token])
     where n = 2$$,
  array['completed'], 'also in a batch');
select results_eq(
  $$select f.status, f.run_at
      from ends cross join lateral pgsched.fail_task(id, token, 'x', '1 minute') as f
     where n = 3$$,
  $$values ('cancelled', null::timestamptz)$$, 'a failure cancels it');
select lives_ok(format('select pgsched.release_task(%s, %L)', id, token), 'and so does a release')
  from ends where n = 4;
select results_eq('select * from pgsched.reap_stale(1)',
                  $$select id, 'cancelled' from ends where n = 5$$,
                  'and the reaper, when its worker was lost');
select is(pg_temp.task(id), before || changes || jsonb_build_object(
            'status', status, 'finished_at', pg_temp.task(id) -> 'finished_at'),
          format('a task that %s after a request ends %s', what, status))
  from ends join requested using (n) order by n;
select results_eq($$select pgsched.cancel_task(id) from ends order by n$$,
                  array_fill('finished'::text, array[5]), 'after that it has ended already');

-- Edges: the state of the task
create temporary table ended as
select e.status, c.*
  from (values (1, 'completed'), (2, 'failed'), (3, 'cancelled')) as e (n, status)
 cross join lateral pg_temp.claimed('pgtap ended ' || n, p_cancel => n = 3) as c;
select pgsched.complete_task(id, token) from ended where status = 'completed' \g /dev/null
select pgsched.fail_task(id, token, 'x', p_permanent => true) from ended where status <> 'completed'
  \g /dev/null
create temporary table before as select * from pgsched.tasks where id in (select id from ended);
select is(pgsched.cancel_task(id), 'finished', format('a %s task had ended already', status))
  from ended;
select results_eq('select * from pgsched.tasks where id in (select id from ended) order by id',
                  'select * from before order by id', 'and stays as it was');

select is(pgsched.cancel_task(pgsched.enqueue_task('a', p_queue => 'pgtap states', p_run_at => at)),
          'cancelled', format('a task due at %s is cancelled', at))
  from (values (timestamptz '1970-01-01 00:00:00+00'), ('9998-12-31 23:59:59.999999+00')) as t (at);
select * from pg_temp.claimed('pgtap states') \gset
select pgsched.release_task(:id, :'token') \g /dev/null
select is(pgsched.cancel_task(:id), 'cancelled', 'a task that was released is cancelled');
select * from pg_temp.claimed('pgtap states') \gset
select pgsched.fail_task(:id, :'token', 'x') \g /dev/null
select is(pgsched.cancel_task(:id), 'cancelled', 'a task that waits to be retried is cancelled');

-- Edges: ids
select pg_temp.queued('pgtap ids', id) from unnest(array[:huge, :huge_same_key]) as id \g /dev/null
select pg_temp.claimed('pgtap ids', :huge_2_32) \g /dev/null
select is(pgsched.cancel_task(:huge_2_32), 'requested', format('task %s is cancelled', :huge_2_32));
select is(pgsched.cancel_task(:huge_same_key), 'cancelled',
          format('task %s is cancelled', :huge_same_key));
select results_eq(
  $$select id from pgsched.tasks
     where queue = 'pgtap ids' and (status = 'cancelled' or cancel_requested_at is not null)
     order by id$$,
  array[:huge_same_key, :huge_2_32], 'and no other');

-- Errors
select throws_ok('select pgsched.cancel_task(null)', 'TS400', 'p_id must not be null',
                 'null is no id');

-- Rights
select pg_temp.queued('pgtap rights') as id \gset
select pg_temp.may_call('pgsched.cancel_task', format('select pgsched.cancel_task(%s)', :id),
                        'cancelled');

select * from finish();
rollback;
