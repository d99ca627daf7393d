begin;
\ir fixtures.sql
select plan(30);

select is(pg_temp.arguments_of('pgsched.resume_queue'), 'p_queue text',
          'resume_queue takes a queue');
select is(pg_temp.result_of('pgsched.resume_queue'), 'void', 'resume_queue returns nothing');

-- Nothing there
select pgsched.resume_queue('pgtap nothing') \g /dev/null
select is_empty($$select * from pgsched.queues where name = 'pgtap nothing'$$,
                'a queue without settings is not paused, and gets none');

-- Happy path
select pgsched.configure_queue('pgtap resume_queue', 7, '2 seconds', '3 minutes', 400, '5 hours',
                               '6 days', false) \g /dev/null
select to_jsonb(q) as settings from pgsched.queues as q where name = 'pgtap resume_queue' \gset
select pgsched.enqueue_task('a', p_queue => 'pgtap resume_queue') as first \gset
select pgsched.pause_queue(name)
  from unnest(array['pgtap resume_queue', 'pgtap Resume_queue', 'pgtap resume']) as name
  \g /dev/null
select pgsched.enqueue_task('a', p_queue => 'pgtap resume_queue') as second \gset
select pgsched.resume_queue('pgtap resume_queue') \g /dev/null
select results_eq(
  $$select id from pgsched.claim_task('w', 'pgtap resume_queue', p_limit => 100)$$,
  array[:first, :second]::bigint[],
  'what was enqueued before and during the pause is claimed again');
select is(to_jsonb(q), :'settings', 'the queue keeps its other settings')
  from pgsched.queues as q where name = 'pgtap resume_queue';
select results_eq(
  $$select name from pgsched.queues where name ilike 'pgtap resume%' and paused order by name$$,
  array['pgtap Resume_queue', 'pgtap resume'],
  'other queues stay paused');

-- Repeated
select ctid as version from pgsched.queues where name = 'pgtap resume_queue' \gset
select pgsched.resume_queue('pgtap resume_queue') \g /dev/null
select is(to_jsonb(q), :'settings', 'to resume it again changes nothing')
  from pgsched.queues as q where name = 'pgtap resume_queue';
select is(ctid, :'version', 'and writes nothing')
  from pgsched.queues as q where name = 'pgtap resume_queue';
select pgsched.pause_queue('pgtap resume_queue') \g /dev/null
select pgsched.enqueue_task('a', p_queue => 'pgtap resume_queue') as third \gset
select is_empty($$select * from pgsched.claim_task('w', 'pgtap resume_queue')$$,
                'it can be paused again');
select pgsched.resume_queue('pgtap resume_queue') \g /dev/null
select results_eq($$select id from pgsched.claim_task('w', 'pgtap resume_queue')$$,
                  array[:third]::bigint[], 'and resumed again');

-- Edges: names
select pgsched.pause_queue(name) from good_names \g /dev/null
select pgsched.resume_queue(name) from good_names \g /dev/null
select is(paused, false, what || ' is the name of a queue')
  from good_names join pgsched.queues using (name);

-- Errors
create temporary table settings as select * from pgsched.queues where name like 'pgtap %';
select throws_ok(format('select pgsched.resume_queue(%L)', name),
                 'TS400', pg_temp.name_error('p_queue', name), what || ' is no queue')
  from bad_names;
select results_eq($$select * from pgsched.queues where name like 'pgtap %' order by name$$,
                  'select * from settings order by name', 'a refused call changes nothing');

-- Rights
select pg_temp.may_call('pgsched.resume_queue',
                        $$select 'done' from pgsched.resume_queue('pgtap resume')$$, 'done');
select is(paused, false, 'and to resume the queue')
  from pgsched.queues where name = 'pgtap resume';

select * from finish();
rollback;
