begin;
\ir fixtures.sql
select plan(24);

select is(pg_temp.arguments_of('pgsched.notify_channel'), 'p_queue text',
          'notify_channel takes a queue');
select is(pg_temp.result_of('pgsched.notify_channel'), 'text', 'notify_channel returns a text');

-- Happy path
select is(pgsched.notify_channel('mail'), 'pgsched_b1edb595463f9502',
          'a queue has one channel, in every database');
select pgsched.notify_channel('pgtap a') as channel \gset
select pgsched.configure_queue('pgtap a', p_notify => false) \g /dev/null
select is(pgsched.notify_channel('pgtap a'), :'channel', 'whatever its settings');

-- Edges: names
select lives_ok('listen ' || pgsched.notify_channel(name),
                what || ' is the name of a queue, whose channel needs no quotes')
  from good_names;
select results_eq(
  $$select count(distinct channel), bool_and(channel ~ '^[a-z_][a-z0-9_]{0,62}$')
      from (select pgsched.notify_channel(format('pgtap %s', n)) as channel
              from generate_series(1, 10000) as n) as c$$,
  'values (10000::bigint, true)',
  'ten thousand queues have as many channels, and each is an identifier');
select is(count(distinct pgsched.notify_channel(name)), count(*),
          'so have queues whose names look alike')
  from unnest(array['pgtap a', 'pgtap A', 'pgtap a ', ' pgtap a', 'pgtap  a', 'pgtap á',
                    U&'pgtap a\0301', repeat('x', 62), repeat('x', 63)]) as name;

-- Errors
select throws_ok(format('select pgsched.notify_channel(%L)', name),
                 'TS400', pg_temp.name_error('p_queue', name), what || ' is no queue')
  from bad_names;

-- Rights
select pg_temp.may_call('pgsched.notify_channel', $$select pgsched.notify_channel('pgtap a')$$,
                        :'channel');

select * from finish();
rollback;
