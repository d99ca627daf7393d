begin;
\ir fixtures.sql
select plan(53);

-- A task that ended some time ago, with all that a claim leaves behind.
create function pg_temp.ended(
    p_queue text, p_status text, p_id bigint default null, p_unique_key text default null)
  returns bigint
  language sql
as $$
  insert into pgsched.finished_tasks as f (
         id, queue, task_type, payload, status, priority, run_at, attempt, max_attempts,
         claim_token, claimed_by, claimed_at, lease_expires_at, unique_key, concurrency_key,
         cancel_requested_at, last_error, created_at, finished_at, result)
  select coalesce(p_id, nextval(pg_get_serial_sequence('pgsched.scheduled_tasks', 'id'))),
         p_queue, 'some work', '{"n": 1}', p_status, 3, c.now - interval '3 hours', 7, 7,
         gen_random_uuid(), 'pgtap worker', c.now - interval '2 hours', c.now + interval '1 hour',
         p_unique_key, 'c', case when p_status = 'cancelled' then c.now - interval '1 hour' end,
         'before', c.now - interval '4 hours', c.now - interval '1 minute',
         case when p_status = 'completed' then jsonb '"done"' end
    from (select clock_timestamp() as now) as c
  returning f.id
$$;

-- What retrying changes in the row of a task.
create function pg_temp.retried(p_before jsonb, p_run_at timestamptz)
  returns jsonb
  language sql
as $$
  select p_before || jsonb_build_object(
           'status', 'queued', 'attempt', 0, 'run_at', p_run_at, 'claim_token', null,
           'claimed_by', null, 'claimed_at', null, 'lease_expires_at', null,
           'cancel_requested_at', null, 'finished_at', null)
$$;

select is(pg_temp.arguments_of('pgsched.retry_task'), 'p_id bigint', 'retry_task takes an id');
select is(pg_temp.result_of('pgsched.retry_task'), 'bigint', 'retry_task returns it');

-- Nothing there
select throws_ok('select pgsched.retry_task(-5)',
                 'TS404', 'there is no task -5', 'there is no task to retry');

-- Happy path
create temporary table again as
select s.status, i.id, pg_temp.task(i.id) as before
  from (values (1, 'failed'), (2, 'cancelled')) as s (n, status)
 cross join lateral pg_temp.ended('pgtap ' || status, status, p_unique_key => 'k') as i (id);
select clock_timestamp() as t0 \gset
select is(pgsched.retry_task(id), id, format('a %s task is retried', status)) from again;
select is(pg_temp.task(id), pg_temp.retried(before, run_at),
          format('the row of a %s task says so, and keeps all that is not of a claim or its end',
                 again.status))
  from again join pgsched.scheduled_tasks using (id);
select ok(run_at between :'t0' and clock_timestamp(), 'it is due now, by the clock')
  from again join pgsched.scheduled_tasks using (id);
select is_empty('select id from pgsched.finished_tasks where id in (select id from again)',
                'and is not a finished task any more');
select ok(not bool_or(pg_temp.holds_lock(id)), 'retrying takes no lock of a task') from again;
select throws_ok(format('select pgsched.complete_task(%s, %L)', id, before ->> 'claim_token'),
                 'TS409', format('this claim of task %s is not current', id),
                 'the claim that it ended with is not current')
  from again;
select is(pgsched.enqueue_task('a', p_queue => 'pgtap ' || status, p_unique_key => 'k'), id,
          'its unique key is its own again')
  from again;
select results_eq(
  format('select id, attempt, max_attempts, task_type, payload, priority
            from pgsched.claim_task(''w'', %L)', 'pgtap ' || status),
  format($$values (%s::bigint, 1, 7, 'some work', '{"n": 1}'::jsonb, 3)$$, id),
  'and it is claimed, as its first attempt')
  from again;

-- Happy path: from end to end
select * from pg_temp.claimed('pgtap round', p_max_attempts => 1) \gset
select pgsched.fail_task(:id, :'token', 'first') \g /dev/null
select pgsched.retry_task(:id) \g /dev/null
select claim_token as token from pgsched.claim_task('w', 'pgtap round') \gset
select results_eq(format('select status from pgsched.fail_task(%s, %L, null)', :id, :'token'),
                  array['failed'], 'a task that was retried has as many attempts as at first');
select is(last_error, 'first', 'and tells its last error until there is another')
  from pgsched.finished_tasks where id = :id;
select is(pgsched.retry_task(:id), :'id', 'it is retried as often as it ended');
select is(pgsched.cancel_task(:id), 'cancelled', 'it can be cancelled');
select is(pgsched.retry_task(:id), :'id', 'and retried after that');
select claim_token as token from pgsched.claim_task('w', 'pgtap round') \gset
select is(pgsched.complete_task(:id, :'token', '"done"'), true, 'it can be completed');
select results_eq(
  format('select status, attempt, result from pgsched.tasks where id = %s', :id),
  $$values ('completed', 1, '"done"'::jsonb)$$, 'and is there once');

-- Edges: what its queue says
insert into pgsched.queues (name, paused, max_attempts, max_payload_bytes)
values ('pgtap paused', true, 2, 2);
select pg_temp.ended('pgtap paused', 'failed') as id \gset
select pg_temp.task(:id) as before \gset
select pgsched.retry_task(:id) \g /dev/null
select is(pg_temp.task(:id), pg_temp.retried(:'before', run_at),
          'a task of a paused queue is retried, with its own number of attempts and its payload')
  from pgsched.scheduled_tasks where id = :id;

-- Edges: the unique key
select pg_temp.ended('pgtap unique', 'failed', p_unique_key => 'k') as first,
       pg_temp.ended('pgtap unique', 'cancelled', p_unique_key => 'k') as second,
       pg_temp.ended('pgtap unique', 'failed', p_unique_key => 'K') as other,
       pg_temp.ended('pgtap unique 2', 'failed', p_unique_key => 'k') as elsewhere,
       pg_temp.ended('pgtap unique', 'failed') as none,
       pg_temp.ended('pgtap unique', 'failed') as none_too \gset
select pg_temp.ended('pgtap unique', 'completed', p_unique_key => 'k') \g /dev/null
select is(pgsched.retry_task(:first), :'first',
          'a unique key that only finished tasks have is free');
create temporary table before as select * from pgsched.tasks where queue = 'pgtap unique';
select throws_ok(format('select pgsched.retry_task(%s)', :second),
                 'TS423',
                 format('the unique key of task %s is taken: ''k'' in queue ''pgtap unique''',
                        :second),
                 'a task is not retried while a queued one has its unique key');
select results_eq($$select * from pgsched.tasks where queue = 'pgtap unique' order by id$$,
                  'select * from before order by id', 'both stay as they were');
select is(pgsched.retry_task(id), id, what)
  from (values (:other::bigint, 'another key may be used'),
               (:elsewhere, 'also the same in another queue'),
               (:none, 'a task without a key is retried'), (:none_too, 'and another one too'))
       as free (id, what);
update pgsched.scheduled_tasks
   set status = 'processing', claim_token = :'stale', lease_expires_at = clock_timestamp()
 where id = :first;
create temporary table before_running as select * from pgsched.tasks where queue = 'pgtap unique';
select throws_ok(format('select pgsched.retry_task(%s)', :second),
                 'TS423',
                 format('the unique key of task %s is taken: ''k'' in queue ''pgtap unique''',
                        :second),
                 'nor while a running one has it');
select results_eq($$select * from pgsched.tasks where queue = 'pgtap unique' order by id$$,
                  'select * from before_running order by id', 'both stay as they were then too');
select pgsched.complete_task(:first, :'stale') \g /dev/null
select is(pgsched.retry_task(:second), :'second', 'it is retried when that one has ended');

create temporary table named as
select name, what, pg_temp.ended(name, 'failed', p_unique_key => name) as id from good_names;
select pgsched.enqueue_task('a', p_queue => name, p_unique_key => name) from named \g /dev/null
select throws_ok(
         format('select pgsched.retry_task(%s)', id), 'TS423',
         format('the unique key of task %s is taken: %L in queue %L', id, name, name),
         'a key and a queue are named as they are: ' || what)
  from named;

-- Edges: ids
select pg_temp.ended('pgtap ids', 'cancelled', id)
  from unnest(array[:huge, :huge_2_32, :huge_same_key]) as id \g /dev/null
select is(pgsched.retry_task(id), id, format('task %s is retried', id))
  from unnest(array[:huge_2_32, :huge_same_key]) as id;
select results_eq($$select id from pgsched.scheduled_tasks where queue = 'pgtap ids' order by id$$,
                  array[:huge_same_key, :huge_2_32], 'and no other');

-- Errors: the state of the task
create temporary table wrong as
select 'completed' as status, pg_temp.ended('pgtap wrong', 'completed', p_unique_key => 'k') as id
 union all
select 'queued', pgsched.enqueue_task('a', p_queue => 'pgtap wrong')
 union all
select 'queued', pgsched.retry_task(pg_temp.ended('pgtap wrong', 'failed'))
 union all
select 'processing', id from pg_temp.claimed('pgtap wrong')
 union all
select 'processing', id from pg_temp.claimed('pgtap wrong', p_cancel => true);
create temporary table before_wrong as select * from pgsched.tasks where queue = 'pgtap wrong';
select throws_ok(format('select pgsched.retry_task(%s)', id),
                 'TS423', format('task %s is %s', id, status),
                 format('a %s task is not retried', status))
  from wrong;
select results_eq($$select * from pgsched.tasks where queue = 'pgtap wrong' order by id$$,
                  'select * from before_wrong order by id', 'a refused call changes nothing');

-- Errors: arguments
select throws_ok('select pgsched.retry_task(null)', 'TS400', 'p_id must not be null',
                 'null is no id');

-- Rights
select pg_temp.ended('pgtap rights', 'failed') as id \gset
select pg_temp.may_call('pgsched.retry_task', format('select pgsched.retry_task(%s)', :id), :'id');

select * from finish();
rollback;
