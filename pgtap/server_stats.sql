begin;
\ir fixtures.sql
select plan(6);

select is(pg_temp.arguments_of('pgsched.server_stats'), '', 'server_stats takes nothing');
select is(pg_temp.result_of('pgsched.server_stats'),
  'TABLE(workers bigint, slots bigint, oldest_snapshot_age interval, in_recovery boolean)',
  'server_stats returns figures of the server');
select results_eq('select count(*) from pgsched.server_stats()', array[1::bigint],
                  'it is one row, whatever there is');

-- Happy path, beside the workers of others
insert into pgsched.workers (name, queues, slots, started_at, seen_at)
select 'pgtap ' || slots, '{a}', slots, '2020-01-01 00:00:00+00', clock_timestamp() - age
  from (values (1, interval '0'), (2, '1 minute 50 seconds'), (4, '2 minutes'), (8, '1 day'))
       as seen (slots, age);
select results_eq(
  $$select s.workers - others.workers, s.slots - others.slots
      from pgsched.server_stats() as s
     cross join (select count(*) as workers, coalesce(sum(slots), 0)::bigint as slots
                   from pgsched.workers
                  where name not like 'pgtap %'
                    and seen_at > clock_timestamp() - interval '2 minutes') as others$$,
  'values (2::bigint, 3::bigint)',
  'workers that were seen within 2 minutes are counted, with their slots, and no others');
select results_eq(
  $$select oldest_snapshot_age >= '0', in_recovery from pgsched.server_stats()$$,
  'values (true, pg_is_in_recovery())',
  'the oldest snapshot has an age, if only zero; whether the server is a standby is said');

-- Rights
select pg_temp.may_call('pgsched.server_stats', 'select workers >= 2 from pgsched.server_stats()',
                        'true');

select * from finish();
rollback;
