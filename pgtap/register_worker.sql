begin;
\ir fixtures.sql
select plan(52);

select is(pg_temp.arguments_of('pgsched.register_worker'),
  'p_name text, p_queues text[], p_slots integer, p_presence boolean DEFAULT false',
  'register_worker takes a name, queues, a number of slots and, optionally, whether the worker '
  'holds its presence');
select is(pg_temp.result_of('pgsched.register_worker'), 'bigint', 'register_worker returns an id');

-- Happy path
select clock_timestamp() as t0 \gset
select pgsched.register_worker('pgtap 1', '{b,a}', 10) as id \gset
select results_eq(
  format('select name, queues, slots, started_at = seen_at,
                 started_at between %L and clock_timestamp()
            from pgsched.workers where id = %s', :'t0', :id),
  $$values ('pgtap 1', '{b,a}'::text[], 10, true, true)$$,
  'a worker is there from now on, with its queues and slots');

-- Repeated
update pgsched.workers
   set started_at = '2020-01-01 00:00:00+00', seen_at = seen_at - interval '23 hours'
 where id = :id;
select clock_timestamp() as t0 \gset
select is(pgsched.register_worker('pgtap 1', '{c}', 20), :'id', 'registering again keeps the id');
select results_eq(
  format('select queues, slots, started_at, seen_at between %L and clock_timestamp()
            from pgsched.workers where name = ''pgtap 1''', :'t0'),
  $$values ('{c}'::text[], 20, timestamptz '2020-01-01 00:00:00+00', true)$$,
  'the worker is seen now with its new queues and slots, and started when it did');

-- Its presence
select is(presence, false, 'a worker that says nothing of its presence has none')
  from pgsched.workers where id = :id;
select pgsched.register_worker('pgtap 1', '{a}', 1, true) \g /dev/null
select is(presence, false, 'what nobody holds is not noted') from pgsched.workers where id = :id;
call pgsched.hold_presence(:id);
update pgsched.workers set suspect_since = clock_timestamp() - interval '1 hour' where id = :id;
select pgsched.register_worker('pgtap 1', '{a}', 1, true) \g /dev/null
select results_eq(format('select presence, suspect_since from pgsched.workers where id = %s', :id),
                  'values (true, null::timestamptz)',
                  'who holds its presence has it, and is not suspected');
select pgsched.register_worker('pgtap other', '{a}', 1, true) as other \gset
select pgsched.register_worker('pgtap other', '{a}', 1, true) \g /dev/null
select is(presence, false, 'the presence of another is not its own')
  from pgsched.workers where id = :other;
select pgsched.unregister_worker(:other) \g /dev/null
select pgsched.register_worker('pgtap 1', '{a}', 1, false) \g /dev/null
select is(presence, false, 'who says that it has none has none')
  from pgsched.workers where id = :id;
select pgsched.register_worker('pgtap 1', '{a}', 1, true) \g /dev/null
select is(presence, true, 'and may have it again') from pgsched.workers where id = :id;
update pgsched.workers set suspect_since = clock_timestamp() where id = :id;
select pgsched.register_worker('pgtap 1', '{a}', 1) \g /dev/null
select results_eq(format('select presence, suspect_since from pgsched.workers where id = %s', :id),
                  'values (false, null::timestamptz)', 'by default it is not there');

-- Edges: workers that did not sign off
insert into pgsched.workers (name, queues, slots, started_at, seen_at)
select 'pgtap ' || name, '{a}', 1, '2020-01-01 00:00:00+00', clock_timestamp() - age
  from (values ('lost', interval '24 hours 1 second'), ('quiet', interval '23 hours 59 minutes'))
       as old (name, age);
select pgsched.register_worker('pgtap 2', '{a}', 1) \g /dev/null
select results_eq($$select name from pgsched.workers where name like 'pgtap %' order by id$$,
                  array['pgtap 1', 'pgtap quiet', 'pgtap 2'],
                  'a worker that nobody saw for a day is forgotten, and no other');
update pgsched.workers set seen_at = '2020-01-01 00:00:00+00' where id = :id;
select lives_ok($$select pgsched.register_worker('pgtap 1', '{a}', 1)$$,
                'a worker that was away for longer can come back');
select results_eq($$select count(*) from pgsched.workers where name = 'pgtap 1'$$, array[1::bigint],
                  'and is there once');

-- Edges: names and numbers
select results_eq(
         format('select name, queues from pgsched.workers where id = %s',
                pgsched.register_worker(name, array['a', name], 2147483647)),
         format('values (%L, %L::text[])', name, array['a', name]),
         what || ' is the name of a worker and of a queue')
  from good_names;

-- Errors
select throws_ok(format('select pgsched.register_worker(%L, ''{a}'', 1)', name),
                 'TS400', pg_temp.name_error('p_name', name), what || ' is no worker')
  from bad_names;
select throws_ok(format('select pgsched.register_worker(''pgtap 3'', %L, 1)', array['a', name]),
                 'TS400', pg_temp.name_error('p_queues', name), what || ' is no queue')
  from bad_names;
select throws_ok(format('select pgsched.register_worker(''pgtap 3'', %L, %L, %L)',
                        queues, slots, presence),
                 'TS400',
                 'p_queues is not a list of queues, p_slots is below 1, or p_presence is null',
                 what)
  from (values (null, 1, true, 'null is no list of queues'),
               ('{}', 1, true, 'a worker serves a queue'),
               ('{{a},{b}}', 1, true, 'in a plain list'),
               ('{a}', null, true, 'null is no number of slots'),
               ('{a}', 0, true, 'a worker has a slot'),
               ('{a}', -1, true, 'or more'),
               ('{a}', 1, null, 'it is known whether it holds its presence'),
               (null, null, null, 'and nothing is nothing'))
       as bad (queues, slots, presence, what);
select is_empty($$select id from pgsched.workers where name = 'pgtap 3'$$,
                'a refused call registers nobody');

-- Rights
select pg_temp.may_call('pgsched.register_worker',
                        $$select pgsched.register_worker('pgtap 4', '{a}', 1) is not null$$,
                        'true');

select * from finish();
rollback;
