begin;
\ir fixtures.sql
select plan(42);

select is(pg_temp.arguments_of('pgsched.pause_queue'), 'p_queue text',
          'pause_queue takes a queue');
select is(pg_temp.result_of('pgsched.pause_queue'), 'void', 'pause_queue returns nothing');

-- Nothing there
select pgsched.pause_queue('pgtap nothing') \g /dev/null
select results_eq(
  $$select * from pgsched.queues where name = 'pgtap nothing'$$,
  $$values ('pgtap nothing', true, null::integer, null::interval, null::interval, null::integer,
            null::interval, null::interval, true)$$,
  'a queue without settings or tasks is paused, and has the defaults');
select pgsched.enqueue_task('a', p_queue => 'pgtap nothing') \g /dev/null
select is_empty($$select * from pgsched.claim_task('w', 'pgtap nothing')$$,
                'what is enqueued there later is not claimed');

-- Happy path
create temporary table running as
select *
  from generate_series(1, 9) as n
 cross join lateral pg_temp.claimed('pgtap pause_queue', p_attempt => n);
select pgsched.enqueue_task('a', p_queue => 'pgtap pause_queue'),
       pgsched.enqueue_task('a', p_queue => 'pgtap pause_queue') \g /dev/null
select pgsched.enqueue_task('a', p_queue => other)
  from unnest(array['pgtap Pause_queue', 'pgtap pause_queue ', 'pgtap pause']) as other \g /dev/null
create temporary table before as select * from pgsched.tasks where queue ilike 'pgtap pause%';
select pgsched.pause_queue('pgtap pause_queue') \g /dev/null
select is_empty($$select * from pgsched.claim_task('w', 'pgtap pause_queue', p_limit => 100)$$,
                'nothing is claimed from a paused queue');
select results_eq($$select * from pgsched.tasks where queue ilike 'pgtap pause%' order by id$$,
                  'select * from before order by id', 'no task is changed');
select results_eq(
  $$select queue from unnest(array['pgtap Pause_queue', 'pgtap pause_queue ', 'pgtap pause'])
                      with ordinality as other (name, n)
     cross join lateral pgsched.claim_task('w', name) order by n$$,
  array['pgtap Pause_queue', 'pgtap pause_queue ', 'pgtap pause'],
  'queues with other names are not paused');

-- What goes on
select is(pg_temp.task(pgsched.enqueue_task('a', p_queue => 'pgtap pause_queue')) ->> 'status',
          'queued', 'enqueuing goes on');
select results_eq(
  $$select pg_temp.task(id) ->> 'queue'
      from pgsched.enqueue_tasks(
             '[{"task_type": "a", "queue": "pgtap pause_queue"}]') as id$$,
  array['pgtap pause_queue'], 'also in a batch');
select results_eq(
  $$select pgsched.complete_task(id, token) from running where n = 1$$,
  array[true], 'a running task is completed');
select results_eq(
  $$select c.outcome
      from (select array_agg(id) as ids, array_agg(token) as tokens from running where n = 2) as r
     cross join lateral pgsched.complete_tasks(ids, tokens) as c$$,
  array['completed'], 'also in a batch');
select results_eq(
  $$select (pgsched.fail_task(id, token, 'x', '0', n = 4)).status
      from running where n in (3, 4) order by n$$,
  array['queued', 'failed'], 'a running task is failed, to be retried or for good');
select lives_ok(
  $$select pgsched.release_task(id, token) from running where n = 5$$,
  'a running task is released');
select results_eq(
  $$select pgsched.cancel_task(id) from running where n = 6$$,
  array['requested'], 'a running task is cancelled');
select is(pgsched.cancel_task(pgsched.enqueue_task('a', p_queue => 'pgtap pause_queue')),
          'cancelled', 'so is one that waits');
select lives_ok(
  $$select pgsched.hold_task(id, token) from running where n = 7$$,
  'a running task is held');
select results_eq(
  $$select pgsched.extend_task(id, token, '24 hours') > clock_timestamp() + interval '23 hours'
      from running where n = 8$$,
  array[true], 'a running task is extended');
select results_eq(
  $$select e.outcome
      from (select array_agg(id) as ids, array_agg(token) as tokens from running where n = 9) as r
     cross join lateral pgsched.extend_tasks(ids, tokens) as e$$,
  array['extended'], 'also in a batch');
select results_eq(
  'select n, status from running join pgsched.tasks as t using (id) order by n',
  $$values (1, 'completed'), (2, 'completed'), (3, 'queued'), (4, 'failed'), (5, 'queued'),
           (6, 'processing'), (7, 'processing'), (8, 'processing'), (9, 'processing')$$,
  'and the rows say so');
select is_empty($$select * from pgsched.claim_task('w', 'pgtap pause_queue', p_limit => 100)$$,
                'what came back is not claimed again');

-- Repeated, and settings
select pgsched.configure_queue('pgtap settings', 7, '2 seconds', '3 minutes', 400, '5 hours',
                               '6 days', false) \g /dev/null
select pgsched.configure_queue('pgtap other') \g /dev/null
select to_jsonb(q) as settings from pgsched.queues as q where name = 'pgtap settings' \gset
select pgsched.pause_queue('pgtap settings') \g /dev/null
select is(to_jsonb(q), :'settings'::jsonb || '{"paused": true}',
          'a paused queue keeps its settings')
  from pgsched.queues as q where name = 'pgtap settings';
select pgsched.pause_queue('pgtap settings') \g /dev/null
select is(to_jsonb(q), :'settings'::jsonb || '{"paused": true}',
          'to pause it again changes nothing')
  from pgsched.queues as q where name = 'pgtap settings';
select is(paused, false, 'another queue with settings is not paused')
  from pgsched.queues where name = 'pgtap other';

-- Edges: names
select pgsched.pause_queue(name) from good_names \g /dev/null
select is(paused, true, what || ' is the name of a queue')
  from good_names join pgsched.queues using (name);

-- Errors
select throws_ok(format('select pgsched.pause_queue(%L)', name),
                 'TS400', pg_temp.name_error('p_queue', name), what || ' is no queue')
  from bad_names;
select is_empty('select name from pgsched.queues join bad_names using (name)',
                'a refused call pauses nothing');

-- Rights
select pg_temp.may_call('pgsched.pause_queue',
                        $$select 'done' from pgsched.pause_queue('pgtap rights')$$, 'done');

select * from finish();
rollback;
