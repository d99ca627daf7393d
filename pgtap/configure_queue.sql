begin;
\ir fixtures.sql
select plan(136);

-- Calls configure_queue with one setting, and returns what that changed in the row of the queue.
create function pg_temp.change(p_queue text, p_argument text, p_value text)
  returns text
  language plpgsql
as $$
declare
  v_before jsonb := (select to_jsonb(q) from pgsched.queues as q where q.name = p_queue);
begin
  execute format('select pgsched.configure_queue(%L, %I => %L)', p_queue, p_argument, p_value);
  return (select string_agg(format('%s = %s', s.key, s.value), ', ')
            from pgsched.queues as q
           cross join lateral jsonb_each_text(to_jsonb(q)) as s
           where q.name = p_queue and s.value is distinct from v_before ->> s.key);
end;
$$;

select is(pg_temp.arguments_of('pgsched.configure_queue'),
  'p_queue text, p_max_attempts integer DEFAULT NULL::integer, '
  'p_retry_delay interval DEFAULT NULL::interval, '
  'p_retry_delay_max interval DEFAULT NULL::interval, '
  'p_max_payload_bytes integer DEFAULT NULL::integer, '
  'p_keep_completed interval DEFAULT NULL::interval, '
  'p_keep_failed interval DEFAULT NULL::interval, p_notify boolean DEFAULT NULL::boolean',
  'configure_queue takes a queue and, optionally, each setting');
select is(pg_temp.result_of('pgsched.configure_queue'), 'void', 'configure_queue returns nothing');

-- Nothing there
select pgsched.configure_queue('pgtap defaults') \g /dev/null
select results_eq(
  $$select * from pgsched.queues where name = 'pgtap defaults'$$,
  $$values ('pgtap defaults', false, null::integer, null::interval, null::interval, null::integer,
            null::interval, null::interval, true)$$,
  'a queue that was given no setting is not paused, notifies and has the defaults');

-- Happy path
select pgsched.configure_queue('pgtap all', 7, '2 seconds', '3 minutes', 400, '5 hours', '6 days',
                               false) \g /dev/null
select results_eq(
  $$select * from pgsched.queues where name = 'pgtap all'$$,
  $$values ('pgtap all', false, 7, interval '2 seconds', interval '3 minutes', 400,
            interval '5 hours', interval '6 days', false)$$,
  'a queue has all that it was given');
select pgsched.configure_queue('pgtap notify', p_notify => true) \g /dev/null
select results_eq($$select notify from pgsched.queues where name = 'pgtap notify'$$, array[true],
                  'a queue may be told to notify from the start');

-- Later calls
create temporary table others as
select * from pgsched.queues where name like 'pgtap %' and name <> 'pgtap all';
select is(pg_temp.change('pgtap all', argument, value), format('%s = %s', setting, stored),
          setting || ' is changed, and nothing else')
  from (values ('max_attempts', '8', '8'), ('retry_delay', '9 seconds', '00:00:09'),
               ('retry_delay_max', '10 minutes', '00:10:00'), ('max_payload_bytes', '11', '11'),
               ('keep_completed', '12 hours', '12:00:00'), ('keep_failed', '13 days', '13 days'),
               ('notify', 'true', 'true')) as given (setting, value, stored)
 cross join lateral (values ('p_' || setting)) as p (argument);
select is(pg_temp.change('pgtap all', 'p_' || setting, null), null,
          'null leaves ' || setting || ' as it is')
  from unnest(array['max_attempts', 'retry_delay', 'retry_delay_max', 'max_payload_bytes',
                    'keep_completed', 'keep_failed', 'notify']) as setting;
select pgsched.configure_queue('pgtap all', 8, p_keep_failed => '14 days', p_notify => false)
  \g /dev/null
select pgsched.configure_queue('pgtap all', 8, p_keep_failed => '14 days', p_notify => false)
  \g /dev/null
select results_eq(
  $$select * from pgsched.queues where name = 'pgtap all'$$,
  $$values ('pgtap all', false, 8, interval '9 seconds', interval '10 minutes', 11,
            interval '12 hours', interval '14 days', false)$$,
  'several are changed at once, and the call may be repeated');
select results_eq(
  $$select * from pgsched.queues where name like 'pgtap %' and name <> 'pgtap all' order by name$$,
  'select * from others order by name',
  'other queues keep their settings');

insert into pgsched.queues (name, paused) values ('pgtap paused', true);
select is(pg_temp.change('pgtap paused', 'p_max_attempts', '3'), 'max_attempts = 3',
          'a paused queue stays paused');

-- Edges: bounds
select pgsched.configure_queue('pgtap bounds') \g /dev/null
select is(pg_temp.change('pgtap bounds', argument, value::text),
          format('%s = %s', substr(argument, 3), value), format('%s may be %s', argument, value))
  from (values ('p_max_attempts', 2), ('p_max_attempts', 1), ('p_max_attempts', 2147483647),
               ('p_max_payload_bytes', 3), ('p_max_payload_bytes', 2),
               ('p_max_payload_bytes', 268435455)) as given (argument, value);
select is(pg_temp.change('pgtap bounds', argument, value),
          format('%s = %s', substr(argument, 3), value::interval),
          format('%s may be %s', argument, value))
  from unnest(array['p_retry_delay', 'p_retry_delay_max']) as argument
 cross join unnest(array['0', '1 microsecond', '-1 days 25 hours', '1 mon -30 days', '365 days',
                         '11 mons 35 days', '1 year -6 hours']) as value;
select is(pg_temp.change('pgtap bounds', argument, value),
          format('%s = %s', substr(argument, 3), value::interval),
          format('%s may be %s', argument, value))
  from unnest(array['p_keep_completed', 'p_keep_failed']) as argument
 cross join unnest(array['0', '1 microsecond', '-1 days 25 hours', '1 mon -30 days', '1 year',
                         '36525 days', '100 years']) as value;

-- Edges: names
select pgsched.configure_queue(name, 5) from good_names \g /dev/null
select is(max_attempts, 5, what || ' is the name of a queue')
  from good_names join pgsched.queues using (name);

-- What a setting does: completed tasks are not stored
select pgsched.configure_queue('pgtap keep', p_keep_completed => '0') \g /dev/null
select * from pg_temp.claimed('pgtap keep') \gset
update pgsched.scheduled_tasks set unique_key = 'u' where id = :id;
select is(pgsched.complete_task(:id, :'token', '"done"'), true,
          'a task that will not be kept is completed');
select is(pg_temp.task(:id), null, 'and is gone');
select throws_ok(format('select pgsched.complete_task(%s, %L)', :id, :'token'),
                 'TS404', 'there is no task ' || :id, 'to complete it again says so');
select results_eq(
  format('select * from pgsched.complete_tasks(array[%s], array[uuid %L])', :id, :'token'),
  format('values (%s::bigint, ''gone'')', :id), 'also in a batch');
select isnt(pgsched.enqueue_task('a', p_queue => 'pgtap keep later', p_unique_key => 'u'), :'id',
            'its unique key is free');

select * from pg_temp.claimed('pgtap keep') \gset a_
select * from pg_temp.claimed('pgtap keep') \gset b_
select results_eq(
  format('select * from pgsched.complete_tasks(%L, %L)',
         array[:a_id, :b_id, :a_id, :a_id, :b_id, :a_id],
         array[:'a_token', :'b_token', :'stale', :'a_token', :'a_token', :'a_token']),
  format($$values (%1$s::bigint, 'completed'), (%2$s, 'completed'), (%1$s, 'stale'),
                  (%1$s, 'already'), (%2$s, 'stale'), (%1$s, 'already')$$, :a_id, :b_id),
  'a batch completes each claim once, and knows which of its entries are the same claim');
select is_empty($$select id from pgsched.tasks where queue = 'pgtap keep'$$, 'and keeps none');
select results_eq(
  format('select * from pgsched.complete_tasks(%L, %L)',
         array[:a_id, :b_id], array[:'a_token', :'b_token']),
  format($$values (%s::bigint, 'gone'), (%s, 'gone')$$, :a_id, :b_id),
  'the next batch does not know them');

select pgsched.fail_task(id, token, 'x', p_permanent => true)
  from pg_temp.claimed('pgtap keep') \g /dev/null
select pgsched.release_task(id, token) from pg_temp.claimed('pgtap keep', p_cancel => true)
  \g /dev/null
select results_eq($$select status from pgsched.tasks where queue = 'pgtap keep' order by status$$,
                  array['cancelled', 'failed'], 'failed and cancelled tasks are kept');

select pgsched.configure_queue('pgtap ' || keep, p_keep_completed => keep::interval,
                               p_keep_failed => '0')
  from unnest(array['1 day -24 hours', '1 mon -30 days', '1 microsecond']) as keep \g /dev/null
select pgsched.complete_task(a.id, a.token), c.*
  from unnest(array['1 day -24 hours', '1 mon -30 days', '1 microsecond']) as keep
 cross join lateral pg_temp.claimed('pgtap ' || keep) as a
 cross join lateral pg_temp.claimed('pgtap ' || keep) as b
 cross join lateral pgsched.complete_tasks(array[b.id], array[b.token]) as c \g /dev/null
select results_eq(
  $$select queue, status from pgsched.tasks
     where queue in ('pgtap 1 day -24 hours', 'pgtap 1 mon -30 days', 'pgtap 1 microsecond')$$,
  $$values ('pgtap 1 microsecond', 'completed'), ('pgtap 1 microsecond', 'completed')$$,
  'whatever comes to nothing is 0, and no time is too short to be stored');

-- Errors
create temporary table before as select * from pgsched.queues where name like 'pgtap %';
select throws_ok(format('select pgsched.configure_queue(%L, 5)', name),
                 'TS400', pg_temp.name_error('p_queue', name), what || ' is no queue')
  from bad_names;
select throws_ok(format('select pgsched.configure_queue(''pgtap all'', %I => %s)', argument, bad),
                 'TS400', format('%s is out of range: %s', argument, bad),
                 format('%s must not be %s', argument, bad))
  from (values ('p_max_attempts', 0), ('p_max_attempts', -1), ('p_max_attempts', -2147483648),
               ('p_max_payload_bytes', 1), ('p_max_payload_bytes', 0),
               ('p_max_payload_bytes', -1), ('p_max_payload_bytes', -2147483648),
               ('p_max_payload_bytes', 268435456), ('p_max_payload_bytes', 2147483647))
       as given (argument, bad);
create temporary table bad_intervals as
select argument, bad
  from unnest(array['p_retry_delay', 'p_retry_delay_max', 'p_keep_completed', 'p_keep_failed'])
       as argument
 cross join (select unnest(array['-1 microsecond', '-1 days', '1 day -25 hours', '1 mon -31 days',
                                 '100000000 years', '-100000000 years'])
              union all
             select lease from leases where lease ~ 'inf|178000000') as b (bad)
 union all
select argument, bad
  from unnest(array['p_retry_delay', 'p_retry_delay_max']) as argument
 cross join unnest(array['365 days 1 microsecond', '1 year']) as bad
 union all
select argument, bad
  from unnest(array['p_keep_completed', 'p_keep_failed']) as argument
 cross join unnest(array['100 years 1 microsecond', '36525 days 1 microsecond']) as bad;
select throws_ok(format('select pgsched.configure_queue(''pgtap all'', %I => %L)', argument, bad),
                 'TS400', format('%s is out of range: %s', argument, bad::interval),
                 format('%s must not be %s', argument, bad))
  from bad_intervals;
select throws_ok(
  $$select pgsched.configure_queue('pgtap all', 5, '1 second', '1 second', 5, '1 day', '-1 day',
                                   true)$$,
  'TS400', 'p_keep_failed is out of range: -1 days', 'one bad setting refuses them all');
select throws_ok(
  $$select pgsched.configure_queue('pgtap new', 5, p_retry_delay_max => '-1 day')$$,
  'TS400', 'p_retry_delay_max is out of range: -1 days', 'also for a queue without settings');
select results_eq(
  $$select * from pgsched.queues where name like 'pgtap %' order by name$$,
  'select * from before order by name',
  'a refused call changes nothing');

-- Rights
select pg_temp.may_call('pgsched.configure_queue',
                        $$select 'done' from pgsched.configure_queue('pgtap rights', 5)$$, 'done');

select * from finish();
rollback;
