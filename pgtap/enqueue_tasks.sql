begin;
\ir fixtures.sql
select plan(213);

-- The row of a task that was just added, but for its id and times.
create function pg_temp.added(p_id bigint)
  returns jsonb
  language sql
as $$
  select pg_temp.task(p_id) - array['id', 'run_at', 'created_at']
$$;

create function pg_temp.new(p_changes jsonb)
  returns jsonb
  language sql
as $$
  select jsonb '{"task_type": "a", "payload": {}, "status": "queued", "priority": 5, "attempt": 0,
                 "max_attempts": 20, "claim_token": null, "claimed_by": null, "claimed_at": null,
                 "lease_expires_at": null, "unique_key": null, "concurrency_key": null,
                 "cancel_requested_at": null, "last_error": null, "finished_at": null,
                 "result": null}' || p_changes
$$;

-- Adds one task of type a.
create function pg_temp.enqueue(p_queue text, p_fields jsonb)
  returns bigint
  language sql
as $$
  select pgsched.enqueue_tasks(
    jsonb_build_array(jsonb_build_object('task_type', 'a', 'queue', p_queue) || p_fields))
$$;

-- A batch is refused because of its second task; the others are good.
create function pg_temp.refuses(p_task jsonb, p_fault text, p_what text)
  returns text
  language sql
as $$
  select throws_ok(
    format('select pgsched.enqueue_tasks(%L)', jsonb_build_array(
      '{"task_type": "a", "queue": "pgtap errors"}'::jsonb, p_task,
      '{"task_type": "a", "queue": "pgtap errors", "unique_key": "k"}'::jsonb)),
    'TS400', 'p_tasks[1]: ' || p_fault, p_what)
$$;

select is(pg_temp.arguments_of('pgsched.enqueue_tasks'), 'p_tasks jsonb',
          'enqueue_tasks takes tasks in JSON');
select is(pg_temp.result_of('pgsched.enqueue_tasks'), 'SETOF bigint', 'enqueue_tasks returns ids');

-- Nothing there
select is_empty($$select pgsched.enqueue_tasks('[]')$$, 'of no tasks there are no ids');

-- Happy path
select clock_timestamp() as t0 \gset
create temporary table batch as
select id, n
  from pgsched.enqueue_tasks('[
         {"task_type": "mail", "queue": "pgtap enqueue_tasks"},
         {"concurrency_key": "customer 5", "unique_key": "only one", "max_attempts": 7,
          "priority": 0, "run_at": "9998-12-31T23:59:59.999999Z", "queue": "pgtap enqueue_tasks 2",
          "payload": {"to": [1, null, "é"]}, "task_type": "print"},
         {"task_type": "mail", "queue": "pgtap enqueue_tasks", "run_at": null,
          "max_attempts": null, "unique_key": null, "concurrency_key": null}]')
       with ordinality as b (id, n);
select clock_timestamp() as t1 \gset
select is(pg_temp.added(id), pg_temp.new(fields), what)
  from batch
  join (values (1, jsonb '{"task_type": "mail", "queue": "pgtap enqueue_tasks"}',
                'a task in a queue without settings is queued with the defaults'),
               (2, '{"task_type": "print", "payload": {"to": [1, null, "é"]}, "priority": 0,
                     "queue": "pgtap enqueue_tasks 2", "max_attempts": 7, "unique_key": "only one",
                     "concurrency_key": "customer 5"}', 'a task has all that it was given'),
               (3, '{"task_type": "mail", "queue": "pgtap enqueue_tasks"}',
                'what is null has its default'))
       as e (n, fields, what) using (n)
 order by n;
select results_eq(
  format($$select created_at between %L and %L,
                  run_at = case n when 2 then '9998-12-31 23:59:59.999999+00' else created_at end
             from batch join pgsched.scheduled_tasks using (id) order by n$$, :'t0', :'t1'),
  'values (true, true), (true, true), (true, true)',
  'tasks are due at their time, or at once, by the clock of the call');
select is(count(distinct created_at), 1::bigint, 'all of a batch are of one time')
  from batch join pgsched.scheduled_tasks using (id);
select results_eq('select id from batch order by n', 'select id from batch order by id',
                  'ids are in the order of the tasks');
select is_empty($$select name from pgsched.queues where name like 'pgtap enqueue_tasks%'$$,
                'enqueuing makes no settings for a queue');

select pgsched.enqueue_tasks('[{"task_type": "mail"}]') as id \gset
select results_eq(
  format('select queue, task_type, payload, priority
            from pgsched.scheduled_tasks where id = %s', :id),
  $$values ('default', 'mail', '{}'::jsonb, 5::smallint)$$,
  'a task without a queue is in the queue default');

-- Happy path: the order, also of tasks with a unique key, which are added by their keys
create temporary table turns as
select id, n
  from pgsched.enqueue_tasks((
         select jsonb_agg(jsonb_build_object('task_type', 'a', 'queue', 'pgtap turns',
                                             'unique_key', key) order by n)
           from unnest(array['z', null, 'b', null, 'a', 'é', null, 'Z'])
                with ordinality as k (key, n)))
       with ordinality as t (id, n);
select results_eq('select id from turns order by n', 'select id from turns order by id',
                  'ids are in the order of the tasks, with and without a key');
select results_eq($$select id from pgsched.claim_task('w', 'pgtap turns', p_limit => 100)$$,
                  'select id from turns order by n', 'and in that order they are claimed');

create temporary table many as
select id, n
  from pgsched.enqueue_tasks((
         select jsonb_agg(jsonb_build_object(
                  'task_type', 'a', 'queue', 'pgtap many', 'payload', n,
                  'unique_key', case when n % 2 = 0 then md5(n::text) end) order by n)
           from generate_series(1, 2000) as n))
       with ordinality as m (id, n);
select results_eq($$select id, payload from pgsched.tasks where queue = 'pgtap many' order by id$$,
                  'select id, to_jsonb(n) from many order by n', 'two thousand tasks are added');
select results_eq(
  $$select id from pgsched.claim_task('w', 'pgtap many', p_limit => 100)$$,
  'select id from many order by n limit 100', 'and claimed from the first on');

-- Happy path: the same as one by one
insert into pgsched.queues (name, max_attempts) values ('pgtap batch', 3), ('pgtap single', 3);
create temporary table given as
select n, jsonb_build_object('task_type', 'type ' || n) || fields as task
  from (values (1, jsonb '{}'), (2, '{"payload": null}'), (3, '{"payload": [1.50, {"a": "é"}]}'),
               (4, '{"priority": 9, "max_attempts": 1}'), (5, '{"max_attempts": 2147483647}'),
               (6, '{"unique_key": "k"}'), (7, '{"unique_key": "K", "concurrency_key": "c"}'),
               (8, '{"unique_key": "k", "payload": "other", "priority": 0}'),
               (9, '{"run_at": "2999-01-01T00:00:00+02:00"}'),
               (10, '{"run_at": "1970-01-01T00:00:00Z", "concurrency_key": "c"}'))
       as t (n, fields);
create temporary table singly as
select n, pgsched.enqueue_task(
         task ->> 'task_type', coalesce(task -> 'payload', '{}'), 'pgtap single',
         (task ->> 'run_at')::timestamptz, coalesce((task ->> 'priority')::integer, 5),
         (task ->> 'max_attempts')::integer, task ->> 'unique_key', task ->> 'concurrency_key')
         as id
  from (select n, task from given order by n offset 0) as in_order;
create temporary table together as
select id, n
  from pgsched.enqueue_tasks((
         select jsonb_agg(task || '{"queue": "pgtap batch"}' order by n) from given))
       with ordinality as b (id, n);
select is(pg_temp.added(t.id), pg_temp.added(s.id) || '{"queue": "pgtap batch"}',
          format('task %s of a batch is as if added alone', n))
  from together as t join singly as s using (n) order by n;
create temporary view times as
select id, case when run_at <> created_at then run_at end as later
  from pgsched.scheduled_tasks where queue in ('pgtap batch', 'pgtap single');
select results_eq(
  'select rank() over (order by id), later from together join times using (id) order by n',
  'select rank() over (order by id), later from singly join times using (id) order by n',
  'and so are its time and its place');

-- Edges: the unique key
select pgsched.enqueue_task('a', '1', 'pgtap unique', p_unique_key => 'queued') as queued \gset
select * from pg_temp.claimed('pgtap unique') \gset running_
update pgsched.scheduled_tasks set unique_key = 'running' where id = :running_id;
select pgsched.enqueue_task('a', p_queue => 'pgtap unique', p_unique_key => 'ended') as ended \gset
select pgsched.cancel_task(:ended) \g /dev/null
create temporary table before as select * from pgsched.tasks where queue = 'pgtap unique';
create temporary table keys as
select id, n
  from pgsched.enqueue_tasks((
         select jsonb_agg(jsonb_build_object(
                  'task_type', 'b', 'queue', queue, 'unique_key', key, 'payload', n) order by n)
           from (values (1, 'pgtap unique', 'k'), (2, 'pgtap unique', 'K'),
                        (3, 'pgtap unique', 'running'), (4, 'pgtap unique', null),
                        (5, 'pgtap unique', 'k'), (6, 'pgtap unique 2', 'k'),
                        (7, 'pgtap unique', 'queued'), (8, 'pgtap unique', 'ended'),
                        (9, 'pgtap unique', null), (10, 'pgtap unique 2', 'running'),
                        (11, 'pgtap unique', 'k')) as t (n, queue, key)))
       with ordinality as k (id, n);
select is(id, :'queued', 'a unique key that a queued task has gives the id of that task')
  from keys where n = 7;
select is(id, :'running_id', 'a unique key that a running task has gives the id of that task')
  from keys where n = 3;
select results_eq(
  $$select t.queue, t.unique_key, t.payload, k.places
      from (select id, array_agg(n order by n) as places from keys group by id) as k
      join pgsched.tasks as t using (id)
     where k.places[1] not in (3, 7) order by k.places$$,
  $$values ('pgtap unique', 'k', jsonb '1', array[1, 5, 11]::bigint[]),
           ('pgtap unique', 'K', '2', '{2}'), ('pgtap unique', null, '4', '{4}'),
           ('pgtap unique 2', 'k', '6', '{6}'), ('pgtap unique', 'ended', '8', '{8}'),
           ('pgtap unique', null, '9', '{9}'), ('pgtap unique 2', 'running', '10', '{10}')$$,
  'of a key that comes again in a batch the first is added; all other tasks are added');
select results_eq(
  $$select * from pgsched.tasks where queue = 'pgtap unique' and task_type <> 'b' order by id$$,
  'select * from before order by id', 'the tasks that were there are not changed');
select results_eq(
  $$select id from pgsched.tasks where queue like 'pgtap unique%' order by id$$,
  'select id from keys union select id from before order by id', 'and no other is made');

-- Edges: names
select is(pg_temp.added(pgsched.enqueue_tasks(jsonb_build_array(names))), pg_temp.new(names),
          what || ' is a name')
  from (select what, jsonb_build_object('task_type', name, 'queue', name, 'unique_key', name,
                                        'concurrency_key', name) as names
          from good_names) as good;

-- Edges: numbers
select is(pg_temp.added(pg_temp.enqueue('pgtap numbers', given)),
          pg_temp.new('{"queue": "pgtap numbers"}' || stored), format('%s are numbers', given))
  from (values (jsonb '{"priority": 0, "max_attempts": 1}',
                jsonb '{"priority": 0, "max_attempts": 1}'),
               ('{"priority": 5.0, "max_attempts": 5.00}', '{"priority": 5, "max_attempts": 5}'),
               ('{"priority": 90e-1, "max_attempts": 2.147483647e9}',
                '{"priority": 9, "max_attempts": 2147483647}'),
               ('{"priority": -0.0, "max_attempts": 1e0}', '{"priority": 0, "max_attempts": 1}'))
       as numbers (given, stored);

insert into pgsched.queues (name, max_attempts) values ('pgtap attempts', 3), ('pgtap more', 4);
create temporary table attempts as
select id
  from pgsched.enqueue_tasks('[
         {"task_type": "a", "queue": "pgtap attempts"},
         {"task_type": "a", "queue": "pgtap attempts", "unique_key": "k"},
         {"task_type": "a", "queue": "pgtap more", "unique_key": "k"},
         {"task_type": "a", "queue": "pgtap more", "max_attempts": null},
         {"task_type": "a", "queue": "pgtap more", "max_attempts": 9, "unique_key": "l"},
         {"task_type": "a", "queue": "pgtap none"}]') as id;
select results_eq(
  'select max_attempts from attempts join pgsched.scheduled_tasks using (id) order by id',
  array[3, 3, 4, 4, 9, 20],
  'its queue says how many attempts a task has, unless the task does');

-- Edges: the time
select is((pg_temp.task(pg_temp.enqueue('pgtap later', jsonb_build_object('run_at', given)))
             ->> 'run_at')::timestamptz, moment, format('%s is a time', given))
  from (values ('2999-01-01T00:00:00Z', timestamptz '2999-01-01 00:00:00+00'),
               ('2999-01-01T05:30:00.000001+05:30', '2999-01-01 00:00:00.000001+00'),
               ('2999-01-01 00:00:00-08', '2999-01-01 08:00:00+00'),
               ('2999-07-01 00:00:00 Etc/GMT+1', '2999-07-01 01:00:00+00'),
               ('9998-12-31T23:59:59.999999Z', '9998-12-31 23:59:59.999999+00'))
       as times (given, moment);
select clock_timestamp() as t0 \gset
select pg_temp.enqueue('pgtap past', jsonb_build_object('run_at', run_at, 'unique_key', key))
  from (values (clock_timestamp() - interval '1 microsecond', null),
               ('1970-01-01 00:00:00+00', null), ('1970-01-01 00:00:00+00', 'k'),
               ('4713-01-01 00:00:00+00 BC', 'l')) as past (run_at, key) \g /dev/null
select results_eq(
  format('select run_at >= %L and run_at <= clock_timestamp() and run_at = created_at
            from pgsched.scheduled_tasks where queue = %L', :'t0', 'pgtap past'),
  array[true, true, true, true],
  'a time in the past becomes now, however far it is, with and without a key');

-- Edges: the payload
select is(pg_temp.task(pg_temp.enqueue('pgtap payload', jsonb_build_object('payload', payload)))
            -> 'payload', payload, format('%s is a payload', left(payload::text, 20)))
  from (values (jsonb 'null'), ('""'), ('"5"'), ('true'), ('{}'), ('[[1, [2, null]], {"a": {}}]'),
               ('0.10'), ('5.0'), ('1e400'), (E'"\\n\\u0001 '' $$ %s"'),
               (to_jsonb(repeat('x', 1048574)))) as p (payload);

insert into pgsched.queues (name, max_payload_bytes)
values ('pgtap small', 10), ('pgtap big', 2000000);
select lives_ok(
  format('select pgsched.enqueue_tasks(%L)', jsonb_build_array(
    '{"task_type": "a", "queue": "pgtap small", "payload": "12345678"}'::jsonb,
    jsonb_build_object('task_type', 'a', 'queue', 'pgtap big', 'payload', repeat('x', 1999998)),
    jsonb_build_object('task_type', 'a', 'queue', 'pgtap', 'payload', repeat('é', 524287)))),
  'payloads as long as the queue of each allows are taken');

-- Edges: a paused queue
insert into pgsched.queues (name, paused) values ('pgtap paused', true);
select is(pg_temp.task(pg_temp.enqueue('pgtap paused', '{}')) ->> 'status', 'queued',
          'a paused queue takes tasks');

-- Errors: no array
select throws_ok(format('select pgsched.enqueue_tasks(%L)', bad),
                 'TS400', 'p_tasks is not a JSON array',
                 coalesce(quote_literal(bad), 'null') || ' is no batch')
  from unnest(array[null, 'null', '{}', '{"task_type": "a", "queue": "pgtap errors"}', '"[]"', '5',
                    'true']) as bad;

-- Errors: no object with the fields of a task
select pg_temp.refuses(bad::jsonb, 'not an object', format('%s is no task', bad))
  from unnest(array['null', '[]', '[{"task_type": "a", "queue": "pgtap errors"}]', '"a"', '5',
                    'true']) as bad;
select pg_temp.refuses(
         jsonb_build_object('task_type', 'a', 'queue', 'pgtap errors', field, null),
         shown || ' is not a field of a task', format('%s is no field', shown))
  from (values ('p_task_type', 'p_task_type'), ('id', 'id'), ('status', 'status'),
               ('Queue', '"Queue"'), ('', '""'), (' queue', '" queue"'), ('select', '"select"'),
               ('o''brien "x" \ %s {} $$', '"o''brien ""x"" \ %s {} $$"'), ('é', '"é"'))
       as bad (field, shown);

-- Errors: wrong JSON types
select pg_temp.refuses(
         jsonb_build_object('task_type', 'a', 'queue', 'pgtap errors', field, value),
         format('%s is not %s: %s', field, expected, left(value::text, 80)),
         format('%s as %s is refused', left(value::text, 80), field))
  from (values ('task_type', 'a string', jsonb '[null, 5, true, [], ["a"], {}]'),
               ('queue', 'a string', '[null, 5, false, ["pgtap errors"], {}]'),
               ('priority', 'a number', '[null, "5", "", true, [5], {}]'),
               ('max_attempts', 'a number or null', '["5", false, [5], {}]'),
               ('run_at', 'a time as a string, or null', '[5, true, ["2999-01-01T00:00:00Z"], {}]'),
               ('unique_key', 'a string or null', '[5, 1e100, false, ["k"], {"k": "k"}]'),
               ('concurrency_key', 'a string or null', '[5, 1e100, false, ["k"], {"k": "k"}]'))
       as types (field, expected, bad)
 cross join lateral jsonb_array_elements(bad) as value;

-- Errors: names
select pg_temp.refuses('{}', 'task_type is not a valid name: null', 'a task has a type');
select pg_temp.refuses('{"queue": "pgtap errors", "payload": {"task_type": "a"}}',
                       'task_type is not a valid name: null', 'of its own');
select pg_temp.refuses(
         '{"task_type": "a", "queue": "pgtap errors"}'::jsonb || jsonb_build_object(field, name),
         pg_temp.name_error(field, name), format('%s is no %s', what, field))
  from unnest(array['task_type', 'queue', 'unique_key', 'concurrency_key']) as field
 cross join bad_names
 where name is not null;

-- Errors: numbers
select pg_temp.refuses(
         '{"task_type": "a", "queue": "pgtap errors"}'::jsonb || jsonb_build_object(field, value),
         format('%s is out of range: %s', field, left(value::text, 80)),
         format('%s is no %s', left(value::text, 80), field))
  from (values ('priority', jsonb '[-1, 10, 5.5, 9.0000000001, -1e-9, 1e-400, 65536, 2147483648,
                                    9223372036854775808, 1e400, -1e400]'),
               ('max_attempts', '[0, -1, 0.5, 1.5, 2147483646.5, 2147483648, 4294967297,
                                  9223372036854775808, 1e400, -1e400, 1e-400]'))
       as numbers (field, bad)
 cross join lateral jsonb_array_elements(bad) as value;

-- Errors: the time
select pg_temp.refuses(
         jsonb_build_object('task_type', 'a', 'queue', 'pgtap errors', 'run_at', bad),
         'run_at is not a time as a string, or null: ' || left(to_jsonb(bad)::text, 80),
         format('%s is no time', to_jsonb(left(bad, 80))))
  from unnest(array['', ' ', 'soon', 'null', '5', '2999-13-01T00:00:00Z', '2999-02-29T00:00:00Z',
                    '2999-01-01T25:00:00Z', '2999-01-01T00:00:00+99:00',
                    '2999-01-01T00:00:00 Nowhere/Land', '300000-01-01T00:00:00Z',
                    '4999-01-01T00:00:00Z BC', E'2999-01-01T00:00:00Z\x01',
                    '2999-01-01T00:00:00Z''); --', repeat('9', 100000)]) as bad;
select pg_temp.refuses(
         jsonb_build_object('task_type', 'a', 'queue', 'pgtap errors', 'run_at', run_at),
         'run_at is out of range: ' || run_at, run_at || ' is no time to run at')
  from bad_times;

-- Errors: the payload
select pg_temp.refuses(
         jsonb_build_object('task_type', 'a', 'queue', queue, 'payload', payload),
         format('payload is %s bytes long, the limit of the queue is %s', bytes, max), what)
  from (values ('pgtap errors', repeat('x', 1048575), 1048577, 1048576,
                'a payload of 1 MiB and a byte is refused'),
               ('pgtap errors', repeat('é', 524288), 1048578, 1048576,
                'a payload is measured in bytes'),
               ('pgtap small', '123456789', 11, 10,
                'a payload longer than the queue allows is refused'),
               ('pgtap big', repeat('x', 1999999), 2000001, 2000000,
                'also where the queue allows more than 1 MiB'))
       as long (queue, payload, bytes, max, what);

-- Errors: which task it is
select throws_ok(
         format('select pgsched.enqueue_tasks(%L)', (
           select jsonb_agg(case when n = any (bad) then wrong
                                 else '{"task_type": "a", "queue": "pgtap errors"}' end order by n)
             from generate_series(0, 1999) as n)),
         'TS400', format('p_tasks[%s]: %s', bad[1], fault), what)
  from (values (array[0], 'the first task has the number 0'),
               (array[1999], 'the last of two thousand is looked at'),
               (array[9, 10, 1000], 'the first of the bad ones is named')) as places (bad, what)
 cross join (values (jsonb '{"task_type": "a", "priority": 10}', 'priority is out of range: 10'),
                    ('{"task_type": "a", "priority": "10"}', 'priority is not a number: "10"'),
                    ('{"task_type": "a", "Priority": 1}', '"Priority" is not a field of a task'))
            as wrongs (wrong, fault);

select is_empty($$select id from pgsched.tasks where queue = 'pgtap errors'$$,
                'a batch with a bad task adds none');

-- Rights
select pg_temp.may_call(
  'pgsched.enqueue_tasks',
  $$select count(*) from pgsched.enqueue_tasks('[
      {"task_type": "a", "queue": "pgtap rights", "unique_key": "k"},
      {"task_type": "a", "queue": "pgtap rights", "run_at": "2999-01-01T00:00:00Z"}]')$$,
  '2');

select * from finish();
rollback;
