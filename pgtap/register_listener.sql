begin;
\ir fixtures.sql
select plan(61);

create function pg_temp.listens_for(p_worker_id bigint)
  returns text
  language sql
as $$
  select string_agg(l.queue, ',' order by l.queue)
    from pgsched.listeners as l
   where l.worker_id = p_worker_id
$$;

select is(pg_temp.arguments_of('pgsched.register_listener'), 'p_worker_id bigint, p_queues text[]',
          'register_listener takes the id of a worker and queues');
select is(pg_temp.result_of('pgsched.register_listener'), 'void',
          'register_listener returns nothing');

-- Nothing there
select throws_ok(format('select pgsched.register_listener(%L, %L)', unknown, queues),
                 'TS404', 'there is no worker ' || coalesce(unknown::text, 'null'),
                 format('there is no worker %s that listens for %s',
                        coalesce(unknown::text, 'null'), queues))
  from unnest(array[null, -1, 0, 9223372036854775807, -9223372036854775808]) as unknown
 cross join unnest(array['{a}', '{}']) as queues;

-- Happy path
select pgsched.register_worker('pgtap 1', '{a,b,c}', 1) as id \gset
select pgsched.register_worker('pgtap 2', '{a}', 1) as other \gset
select to_jsonb(w) as before from pgsched.workers as w where id = :id \gset
select is(pg_temp.listens_for(:id), null, 'a new worker does not listen');
select pgsched.register_listener(:id, '{pgtap b,pgtap a}') \g /dev/null
select pgsched.register_listener(:other, '{pgtap a}') \g /dev/null
select is(pg_temp.listens_for(:id), 'pgtap a,pgtap b', 'a worker listens for the queues it says');
select is(pg_temp.listens_for(:other), 'pgtap a', 'another may listen for the same');

-- Repeated
select ctid as version from pgsched.listeners
 where worker_id = :id and queue = 'pgtap a' \gset
select pgsched.register_listener(:id, '{pgtap b,pgtap a}') \g /dev/null
select is(pg_temp.listens_for(:id), 'pgtap a,pgtap b', 'to say it again changes nothing');
select pgsched.register_listener(:id, '{pgtap c,pgtap a}') \g /dev/null
select is(pg_temp.listens_for(:id), 'pgtap a,pgtap c',
          'a worker that names other queues listens for those alone');
select is(ctid, :'version', 'the row of a queue that it names again is not written again')
  from pgsched.listeners where worker_id = :id and queue = 'pgtap a';
select pgsched.register_listener(:id, '{pgtap d,pgtap c,pgtap d,pgtap d}') \g /dev/null
select is(pg_temp.listens_for(:id), 'pgtap c,pgtap d', 'a queue that is named twice counts once');
select pgsched.register_listener(:id, '{}') \g /dev/null
select is(pg_temp.listens_for(:id), null, 'a worker that names no queue listens no more');
select pgsched.register_listener(:id, '{}') \g /dev/null
select is(pg_temp.listens_for(:id), null, 'and may say so again');
select is(pg_temp.listens_for(:other), 'pgtap a', 'others listen as they did');
select is(to_jsonb(w), :'before', 'the row of the worker is not changed')
  from pgsched.workers as w where id = :id;

-- Edges: names and numbers
select pgsched.register_listener(:id, array_agg(name)) from good_names \g /dev/null
select is(count(l.queue), 1::bigint, what || ' is the name of a queue')
  from good_names left join pgsched.listeners as l on l.queue = name and l.worker_id = :id
 group by name, what;
select pgsched.register_listener(:id, array_agg(format('pgtap %s', n)))
  from generate_series(1, 1000) as n \g /dev/null
select is((select count(*) from pgsched.listeners where worker_id = :id), 1000::bigint,
          'a worker may listen for a thousand queues');
insert into pgsched.workers (id, name, queues, slots, started_at, seen_at)
select worker_id, format('pgtap %s', worker_id), '{a}', 1, clock_timestamp(), clock_timestamp()
  from unnest(array[9223372036854775807, :huge, -9223372036854775808]) as worker_id;
select pgsched.register_listener(9223372036854775807, '{pgtap a}'),
       pgsched.register_listener(-9223372036854775808, '{pgtap b}') \g /dev/null
select is(pg_temp.listens_for(worker_id), queue, format('%s may be the id of a worker', worker_id))
  from (values (9223372036854775807, 'pgtap a'), (-9223372036854775808, 'pgtap b'),
               (:huge, null)) as given (worker_id, queue);

-- Edges: how a listener ends
select pgsched.unregister_worker(:id) \g /dev/null
select is(pg_temp.listens_for(:id), null, 'a worker that signs off listens no more');
select is(pg_temp.listens_for(:other), 'pgtap a', 'others still do');
select throws_ok(format('select pgsched.register_listener(%s, ''{pgtap a}'')', :id),
                 'TS404', 'there is no worker ' || :id, 'it has to register again first');
select pgsched.register_worker('pgtap 1', '{a}', 1) as id \gset
select pgsched.register_listener(:id, '{pgtap a}') \g /dev/null
select pgsched.register_worker('pgtap 1', '{a,b}', 2) \g /dev/null
select is(pg_temp.listens_for(:id), 'pgtap a', 'a worker that is seen in time listens on');

create temporary table unseen as
select u.*, pgsched.register_worker('pgtap ' || what, '{a}', 1) as id
  from (values ('lost', interval '5 minutes 1 second', false, true),
               ('long lost', '23 hours', false, true), ('forgotten', '25 hours', false, false),
               ('late', '4 minutes', true, true)) as u (what, age, listens, is_there);
select pgsched.register_listener(id, '{pgtap a,pgtap b}') from unseen \g /dev/null
update pgsched.workers as w
   set seen_at = clock_timestamp() - age
  from unseen as u
 where u.id = w.id;
select pgsched.register_worker('pgtap 3', '{a}', 1) \g /dev/null
select is(pg_temp.listens_for(id), case when listens then 'pgtap a,pgtap b' end,
          format('when another worker registers, one not seen for %s %s', age,
                 case when listens then 'listens on' else 'listens no more' end))
  from unseen;
select results_eq(
  'select id from unseen join pgsched.workers using (id) order by id',
  'select id from unseen where is_there order by id',
  'its own row is kept for a day');
select id as late from unseen where what = 'late' \gset
update pgsched.workers set seen_at = clock_timestamp() - interval '10 minutes' where id = :late;
select pgsched.register_worker('pgtap late', '{a}', 1) \g /dev/null
select is(pg_temp.listens_for(:late), 'pgtap a,pgtap b',
          'a worker that comes back after that long listens on');
select pgsched.register_listener(:late, '{pgtap a}') \g /dev/null
select is(pg_temp.listens_for(:late), 'pgtap a', 'for what it says then');

-- Errors
create temporary table before as select * from pgsched.listeners where queue like 'pgtap %';
select throws_ok(format('select pgsched.register_listener(%s, null)', :id),
                 'TS400', 'p_queues is not a list of queues', 'null is no list of queues');
select throws_ok(format('select pgsched.register_listener(%s, %L)', :id, array['pgtap z', name]),
                 'TS400', pg_temp.name_error('p_queues', name), what || ' is no queue')
  from bad_names;
select throws_ok(format('select pgsched.register_listener(%s, %L)', :id, '{{pgtap a},{pgtap b}}'),
                 'TS400', 'p_queues is not a list of queues', 'nor is one of two dimensions');
select throws_ok('select pgsched.register_listener(null, null)',
                 'TS400', 'p_queues is not a list of queues', 'for no worker');
select results_eq(
  $$select * from pgsched.listeners where queue like 'pgtap %' order by queue, worker_id$$,
  'select * from before order by queue, worker_id',
  'a refused call changes nothing');

-- Rights
select pg_temp.may_call('pgsched.register_listener',
                        format($$select 'done' from pgsched.register_listener(%s, '{}')$$, :id),
                        'done');
select is(pg_temp.listens_for(:id), null, 'and to listen no more');

select * from finish();
rollback;
