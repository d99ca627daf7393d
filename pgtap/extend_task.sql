begin;
\ir fixtures.sql
select plan(56);

select is(pg_temp.arguments_of('pgsched.extend_task'),
  'p_id bigint, p_claim_token uuid, p_lease interval DEFAULT ''00:05:00''::interval',
  'extend_task takes an id, its token and, optionally, a lease');
select is(pg_temp.result_of('pgsched.extend_task'), 'timestamp with time zone',
          'extend_task returns the end of the lease');

-- Nothing there
select throws_ok(format('select pgsched.extend_task(-5, %L)', :'stale'),
                 'TS404', 'there is no task -5', 'there is no task to extend');

-- Happy path
select * from pg_temp.claimed('pgtap extend_task') \gset
update pgsched.scheduled_tasks set unique_key = 'u', last_error = 'before' where id = :id;
select pg_temp.task(:id) as before, clock_timestamp() as t0 \gset
select pgsched.extend_task(:id, :'token', '10 minutes') as until \gset
select ok(timestamptz :'until' between timestamptz :'t0' + interval '10 minutes'
                                   and clock_timestamp() + interval '10 minutes',
          'the lease of a current claim now runs from this call, by the clock');
select is(pg_temp.task(:id),
          :'before'::jsonb || jsonb_build_object('lease_expires_at', timestamptz :'until'),
          'the row has the end that was returned, and nothing else of it changes');
select ok(not pg_temp.holds_lock(:id), 'extending takes no lock of a task');
select is(pgsched.complete_task(:id, :'token'), true, 'the claim is as good as before');

-- Edges: the lease
select * from pg_temp.claimed('pgtap extend_task', p_lease_left => '10 minutes') \gset
select pg_temp.task(:id) as before \gset
select is(pgsched.extend_task(:id, :'token', lease), lease_expires_at,
          format('a lease of %s does not shorten one of 10 minutes', lease))
  from pgsched.scheduled_tasks
 cross join unnest(array['1 second', '9 minutes']::interval[]) as lease
 where id = :id;
select is(pgsched.extend_task(:id, :'token'), lease_expires_at, 'nor does one that is not given')
  from pgsched.scheduled_tasks where id = :id;
select is(pg_temp.task(:id), :'before', 'and the row is as it was');

select * from pg_temp.claimed('pgtap extend_task', -:huge, '-1 hours') \gset
select clock_timestamp() as t0 \gset
select pgsched.extend_task(:id, :'token') as until \gset
select ok(timestamptz :'until' between timestamptz :'t0' + interval '5 minutes'
                                   and clock_timestamp() + interval '5 minutes',
          'a claim whose lease is over but that nobody took is extended, by 5 minutes if none are '
          'given');
select id as next from pg_temp.claimed('pgtap next', -:huge + 1, '-1 hours') \gset
select results_eq('select * from pgsched.reap_stale(1)', format('values (%s, ''queued'')', :next),
                  'and is not reaped any more');

create temporary table given as
select l.lease, l.seconds, c.id, c.token, clock_timestamp() as at
  from leases as l
 cross join lateral pg_temp.claimed('pgtap ' || l.lease, p_lease_left => '0') as c
 where l.seconds is not null;
select ok(until between at + seconds * interval '1 second'
                    and clock_timestamp() + seconds * interval '1 second',
          format('a lease of %s is %s seconds long', lease, seconds))
  from given
 cross join lateral pgsched.extend_task(given.id, token, lease::interval) as until;

-- Edges: the state of the claim
select * from pg_temp.claimed('pgtap extend_task', p_cancel => true) \gset
select pg_temp.task(:id) as before \gset
select pgsched.extend_task(:id, :'token', '10 minutes') as until \gset
select is(pg_temp.task(:id),
          :'before'::jsonb || jsonb_build_object('lease_expires_at', timestamptz :'until'),
          'a task whose cancel was requested is extended, and stays to be cancelled');
select ok(timestamptz :'until' > clock_timestamp() + interval '9 minutes', 'as long as any other');

select * from pg_temp.claimed('pgtap extend_task', p_attempt => 20, p_lease_left => '0') \gset
select ok(pgsched.extend_task(:id, :'token') > clock_timestamp(), 'a last attempt is extended');

-- Edges: ids
select pg_temp.claimed('pgtap ids', id, '1 second')
  from unnest(array[:huge, :huge_2_32, :huge_same_key]) as id \g /dev/null
select claim_token as token from pgsched.scheduled_tasks where id = :huge \gset
select throws_ok(format('select pgsched.extend_task(%s, %L)', id, :'token'),
                 'TS409', format('this claim of task %s is not current', id),
                 format('the claim of task %s does not extend task %s', :huge, id))
  from unnest(array[:huge_2_32, :huge_same_key]) as id;
select ok(pgsched.extend_task(:huge, :'token', '1 hour') > clock_timestamp(),
          format('task %s is extended', :huge));
select results_eq(
  format('select id from pgsched.scheduled_tasks
           where queue = ''pgtap ids'' and lease_expires_at > %L order by id',
         clock_timestamp() + interval '1 minute'),
  array[:huge], 'and no other');

-- Errors: claims that are not current
create temporary table stale as select * from pg_temp.stale_claims('pgtap stale');
select throws_ok(format('select pgsched.extend_task(%s, %L, ''1 day'')', id, token),
                 'TS409', format('this claim of task %s is not current', id), what || ' is stale')
  from stale;
select results_eq($$select * from pgsched.tasks where queue = 'pgtap stale' order by id$$,
                  'select * from before order by id', 'a stale claim changes nothing');

-- Errors: arguments
select throws_ok(format('select pgsched.extend_task(%L, %L)', id, token),
                 'TS400', 'p_id and p_claim_token must not be null', what)
  from no_claims;
select pg_temp.task(:huge) as before \gset
select throws_ok(format('select pgsched.extend_task(%s, %L, %L)', :huge, :'token', lease),
                 'TS400', pg_temp.lease_error(lease), coalesce(lease, 'null') || ' is no lease')
  from leases where seconds is null;
select is(pg_temp.task(:huge), :'before', 'a refused call extends nothing');

-- Rights
select pg_temp.may_call(
  'pgsched.extend_task',
  format($$select pgsched.extend_task(%s, %L) > clock_timestamp()$$, :huge, :'token'), 'true');

select * from finish();
rollback;
