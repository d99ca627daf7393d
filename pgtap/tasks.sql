begin;
\ir fixtures.sql
select plan(72);

-- A row of each table, as good as any; the tests below change one column of it.
create function pg_temp.put(p_table text, p_change jsonb)
  returns void
  language plpgsql
as $$
declare
  v_row jsonb := case p_table
    when 'queues' then '{"name": "pgtap tasks", "paused": false, "notify": true}'
    when 'workers' then '{"id": 5000000000000000000, "name": "pgtap", "queues": ["a"], "slots": 1,
                          "started_at": "2020-01-01T00:00:00Z", "seen_at": "2020-01-01T00:00:00Z",
                          "presence": false}'
    else '{"id": 5000000000000000000, "queue": "pgtap tasks", "task_type": "a", "payload": {},
           "status": "queued", "priority": 5, "run_at": "2020-01-01T00:00:00Z", "attempt": 0,
           "max_attempts": 1, "created_at": "2020-01-01T00:00:00Z",
           "finished_at": "2020-01-01T00:00:00Z"}'
  end;
begin
  execute format('insert into pgsched.%1$I
                  select * from jsonb_populate_record(null::pgsched.%1$I, $1)', p_table)
    using v_row || p_change;
end;
$$;

-- The SQLSTATE, and the constraint or column, by which a row is refused; null when it is taken. The
-- message may be in any language.
create function pg_temp.refusal(p_table text, p_change jsonb)
  returns text
  language plpgsql
as $$
declare
  v_table text;
  v_column text;
  v_constraint text;
begin
  perform pg_temp.put(p_table, p_change);
  return null;
exception
  when integrity_constraint_violation then
    get stacked diagnostics
      v_table = table_name, v_column = column_name, v_constraint = constraint_name;
    return sqlstate || ' ' || case sqlstate when '23502' then v_table || '.' || v_column
                                            else v_constraint end;
end;
$$;

-- Live tasks
select is(pg_temp.refusal('scheduled_tasks', jsonb_build_object('status', bad)),
          '23514 scheduled_tasks_status_check', format('a live task is not %s', bad))
  from unnest(array['completed', 'failed', 'cancelled', 'waiting', '']) as bad;
select is(pg_temp.refusal('scheduled_tasks', row), '23514 scheduled_tasks_claim_check', what)
  from (values (jsonb '{"status": "processing"}', 'a running task has a token and a lease'),
               ('{"status": "processing", "claim_token": "00000000-0000-4000-8000-000000000000"}',
                'not only a token'),
               ('{"status": "processing", "lease_expires_at": "2999-01-01"}', 'nor only a lease'),
               ('{"claim_token": "00000000-0000-4000-8000-000000000000",
                  "lease_expires_at": "2999-01-01"}', 'a queued task has not both'))
       as bad (row, what);
select is(pg_temp.refusal('scheduled_tasks', jsonb_build_object(attname, null)),
          '23502 scheduled_tasks.' || attname, format('a live task has its %s', attname))
  from pg_attribute
 where attrelid = 'pgsched.scheduled_tasks'::regclass
   and attname in ('id', 'queue', 'task_type', 'payload', 'status', 'priority', 'run_at', 'attempt',
                   'max_attempts', 'created_at');
select lives_ok($$select pg_temp.put('scheduled_tasks', '{"unique_key": "k"}')$$,
                'a task needs no more than that');
select is(pg_temp.refusal('scheduled_tasks', '{"unique_key": "l"}'), '23505 scheduled_tasks_pkey',
          'an id is there once');
select is(pg_temp.refusal('scheduled_tasks', '{"id": 5000000000000000001, "unique_key": "k"}'),
          '23505 scheduled_tasks_unique_key_idx', 'a unique key is there once in a queue');
select lives_ok(
         format('select pg_temp.put(''scheduled_tasks'', %L)',
                row || jsonb_build_object('id', 5000000000000000010 + n)), what)
  from (values (1, jsonb '{"unique_key": "k", "queue": "pgtap other"}', 'but in others too'),
               (2, '{"unique_key": "K"}', 'and differs in case'),
               (3, '{"unique_key": null}', 'a task may have none'),
               (4, '{"unique_key": null}', 'and so may others')) as good (n, row, what);

insert into pgsched.scheduled_tasks (
       queue, task_type, payload, priority, run_at, max_attempts, created_at)
values ('pgtap defaults', 'a', '{}', 5, '2020-01-01 00:00:00+00', 1, '2020-01-01 00:00:00+00');
select results_eq(
  $$select id between 1 and 4999999999999999999, status, attempt
      from pgsched.scheduled_tasks where queue = 'pgtap defaults'$$,
  $$values (true, 'queued', 0)$$,
  'a task without more has an id of its own, is queued and has had no attempt');

-- Finished tasks
select is(pg_temp.refusal('finished_tasks', jsonb_build_object('status', bad)),
          '23514 finished_tasks_status_check', format('a finished task is not %s', bad))
  from unnest(array['queued', 'processing', 'waiting', '']) as bad;
select lives_ok(
         format('select pg_temp.put(''finished_tasks'', ''{"id": %s, "status": "%s"}'')',
                5000000000000000020 + n, status),
         format('a finished task may be %s', status))
  from (values (1, 'completed'), (2, 'failed'), (3, 'cancelled')) as good (n, status);
select is(pg_temp.refusal('finished_tasks', '{"id": 5000000000000000021, "status": "failed"}'),
          '23505 finished_tasks_pkey', 'a task is finished once');
select is(pg_temp.refusal('finished_tasks', '{"status": "failed", "finished_at": null}'),
          '23502 finished_tasks.finished_at', 'a finished task has its finished_at');

-- Settings of a queue
select is(pg_temp.refusal('queues', jsonb_build_object(setting, bad::jsonb)),
          format('23514 queues_%s_check', setting), format('%s cannot be %s', setting, bad))
  from (values ('max_attempts', '0'), ('max_attempts', '-1'),
               ('retry_delay', '"-1 microseconds"'), ('retry_delay', '"2 years"'),
               ('retry_delay', '"-1 year 360 days"'),
               ('retry_delay_max', '"-1 microseconds"'), ('retry_delay_max', '"2 years"'),
               ('retry_delay_max', '"-1 year 360 days"'),
               ('max_payload_bytes', '1'), ('max_payload_bytes', '268435456'),
               ('keep_completed', '"-1 microseconds"'), ('keep_completed', '"101 years"'),
               ('keep_failed', '"-1 microseconds"'), ('keep_failed', '"101 years"'))
       as refused (setting, bad);
select lives_ok(format('select pg_temp.put(''queues'', ''{"name": "pgtap %s%s", "%1$s": %2$s}'')',
                       setting, good),
                format('%s can be %s', setting, good))
  from (values ('max_attempts', '1'), ('max_attempts', '2147483647'), ('max_attempts', 'null'),
               ('max_payload_bytes', '2'), ('max_payload_bytes', '268435455'))
       as taken (setting, good);
select lives_ok(format('select pg_temp.put(''queues'', ''{"name": "pgtap %s%s", "%1$s": "%2$s"}'')',
                       setting, good),
                format('%s can be %s', setting, good))
  from unnest(array['retry_delay', 'retry_delay_max']) as setting
 cross join unnest(array['0', '1 microsecond', '365 days']) as good;
select lives_ok(format('select pg_temp.put(''queues'', ''{"name": "pgtap %s%s", "%1$s": "%2$s"}'')',
                       setting, good),
                format('%s can be %s', setting, good))
  from unnest(array['keep_completed', 'keep_failed']) as setting
 cross join unnest(array['0', '1 microsecond', '100 years']) as good;
select pg_temp.put('queues', '{}') \g /dev/null
select is(pg_temp.refusal('queues', '{}'), '23505 queues_pkey', 'a queue has its settings once');

-- Workers
select pg_temp.put('workers', '{}') \g /dev/null
select is(pg_temp.refusal('workers', '{"id": 5000000000000000001}'), '23505 workers_name_key',
          'a worker''s name is there once');

-- The view
select results_eq(
  $$select attname::text, format_type(atttypid, atttypmod) from pg_attribute
     where attrelid = 'pgsched.tasks'::regclass and attnum > 0 order by attnum$$,
  $$select attname::text, format_type(atttypid, atttypmod) from pg_attribute
     where attrelid = 'pgsched.finished_tasks'::regclass and attnum > 0 and not attisdropped
     order by attnum$$,
  'the view has the columns of a finished task');
select results_eq(
  $$select attname::text, format_type(atttypid, atttypmod) from pg_attribute
     where attrelid = 'pgsched.tasks'::regclass and attnum > 0
       and attname not in ('finished_at', 'result') order by attnum$$,
  $$select attname::text, format_type(atttypid, atttypmod) from pg_attribute
     where attrelid = 'pgsched.scheduled_tasks'::regclass and attnum > 0 and not attisdropped
     order by attnum$$,
  'of which a live task has all but the end and the result');

select * from pg_temp.claimed('pgtap view', p_cancel => true) \gset live_
select * from pg_temp.claimed('pgtap view', p_cancel => true) \gset done_
update pgsched.scheduled_tasks
   set unique_key = 'u' || id, concurrency_key = 'c', last_error = 'e'
 where queue = 'pgtap view';
select pgsched.complete_task(:done_id, :'done_token', '"done"') \g /dev/null
select results_eq(
  $$select * from pgsched.tasks where queue = 'pgtap view' order by id$$,
  $$select t.*, null::timestamptz, null::jsonb from pgsched.scheduled_tasks as t
     where t.queue = 'pgtap view'
     union all
    select f.* from pgsched.finished_tasks as f where f.queue = 'pgtap view'$$,
  'the view shows live and finished tasks as they are, each once');

select * from finish();
rollback;
