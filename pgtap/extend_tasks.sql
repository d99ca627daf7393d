begin;
\ir fixtures.sql
select plan(48);

select is(pg_temp.arguments_of('pgsched.extend_tasks'),
  'p_ids bigint[], p_claim_tokens uuid[], p_lease interval DEFAULT ''00:05:00''::interval',
  'extend_tasks takes ids, their tokens and, optionally, a lease');
select is(pg_temp.result_of('pgsched.extend_tasks'),
  'TABLE(id bigint, outcome text, lease_expires_at timestamp with time zone)',
  'extend_tasks returns an outcome and the end of the lease for each id');

-- Nothing there
select is_empty($$select * from pgsched.extend_tasks('{}', '{}')$$, 'no ids have no outcomes');
select results_eq(
  format($$select * from pgsched.extend_tasks('{-5,4999999999999999999}', '{%1$s,%1$s}')$$,
         :'stale'),
  $$values (-5::bigint, 'lost', null::timestamptz), (4999999999999999999, 'lost', null)$$,
  'tasks that do not exist are lost');

-- Happy path
select * from pg_temp.claimed('pgtap extend_tasks') \gset a_
select * from pg_temp.claimed('pgtap extend_tasks') \gset b_
select pg_temp.task(:a_id) as a_before, pg_temp.task(:b_id) as b_before \gset
select clock_timestamp() as t0 \gset
create temporary table extended as
select * from pgsched.extend_tasks(
  array[:b_id, :a_id], array[:'b_token', :'a_token']::uuid[], '10 minutes');
select clock_timestamp() as t1 \gset
select results_eq('select id, outcome from extended',
                  format($$values (%s::bigint, 'extended'), (%s, 'extended')$$, :b_id, :a_id),
                  'current claims are extended, and answered in the order given');
select ok(bool_and(lease_expires_at between timestamptz :'t0' + interval '10 minutes'
                                        and timestamptz :'t1' + interval '10 minutes'),
          'the lease now runs from this call, by the clock')
  from extended;
select is(pg_temp.task(:a_id), :'a_before'::jsonb || jsonb_build_object(
            'lease_expires_at', (select lease_expires_at from extended where id = :a_id)),
          'the row has the end that was returned, and nothing else of it changes');
select is(pg_temp.task(:b_id), :'b_before'::jsonb || jsonb_build_object(
            'lease_expires_at', (select lease_expires_at from extended where id = :b_id)),
          'so has the other');
select ok(not pg_temp.holds_lock(:a_id) and not pg_temp.holds_lock(:b_id),
          'extending takes no lock of a task');

-- Edges: the lease
select pg_temp.task(:a_id) as before \gset
select results_eq(
  format($$select outcome, lease_expires_at from pgsched.extend_tasks('{%s}', '{%s}', '1 second')$$,
         :a_id, :'a_token'),
  $$select 'extended', lease_expires_at from extended order by id limit 1$$,
  'extending never shortens: the end that is later stays');
select is(pg_temp.task(:a_id), :'before', 'and the row is as it was');

select * from pg_temp.claimed('pgtap extend_tasks', p_lease_left => '-1 hours') \gset
select results_eq(
  format($$select outcome, lease_expires_at >= %L::timestamptz + interval '5 minutes'
                  and lease_expires_at <= clock_timestamp() + interval '5 minutes'
             from pgsched.extend_tasks('{%s}', '{%s}')$$, clock_timestamp(), :id, :'token'),
  $$values ('extended', true)$$,
  'a claim whose lease is over but that nobody took is extended, by 5 minutes if none are given');

create temporary table given as
select l.lease, l.seconds, c.id, c.token, clock_timestamp() as at
  from leases as l
 cross join lateral pg_temp.claimed('pgtap ' || l.lease, p_lease_left => '0') as c
 where l.seconds is not null;
select ok(e.outcome = 'extended'
          and e.lease_expires_at between at + seconds * interval '1 second'
                                     and clock_timestamp() + seconds * interval '1 second',
          format('a lease of %s is %s seconds long', lease, seconds))
  from given
 cross join lateral pgsched.extend_tasks(array[given.id], array[token], lease::interval) as e;

-- Edges: a cancel was requested
select * from pg_temp.claimed('pgtap extend_tasks', p_cancel => true) \gset
select pg_temp.task(:id) as before \gset
select results_eq(
  format($$select outcome, lease_expires_at > clock_timestamp() + interval '9 minutes'
             from pgsched.extend_tasks('{%s}', '{%s}', '10 minutes')$$, :id, :'token'),
  $$values ('cancel_requested', true)$$,
  'a worker that extends learns of a cancel request');
select is(pg_temp.task(:id) - 'lease_expires_at', :'before'::jsonb - 'lease_expires_at',
          'its task is extended and runs on');

-- Edges: claims that are not current
create temporary table stale as select * from pg_temp.stale_claims('pgtap stale');
select results_eq(
  format('select id, outcome, lease_expires_at from pgsched.extend_tasks(%L, %L, ''1 day'')',
         array_agg(id), array_agg(token)),
  format($$select id, 'lost', null::timestamptz from unnest(%L::bigint[]) as id$$, array_agg(id)),
  'claims that are not current are lost: ' || string_agg(what, ', '))
  from stale;
select results_eq($$select * from pgsched.tasks where queue = 'pgtap stale' order by id$$,
                  'select * from before order by id', 'a stale claim changes nothing');

-- Edges: duplicates
select results_eq(
  format('select id, outcome from pgsched.extend_tasks(%L, %L)',
         array[:a_id, :a_id, :a_id, :b_id], array[:'a_token', :'stale', :'a_token', :'b_token']),
  format($$values (%1$s::bigint, 'extended'), (%1$s, 'lost'), (%1$s, 'extended'),
                  (%2$s, 'extended')$$, :a_id, :b_id),
  'each place of a batch has the answer to its own token');

-- Edges: ids
select token as a from pg_temp.claimed('pgtap ids', :huge) \gset token_
select token as b from pg_temp.claimed('pgtap ids', :huge_2_32) \gset token_
select token as c from pg_temp.claimed('pgtap ids', -1) \gset token_
select results_eq(
  format($$select id, outcome from pgsched.extend_tasks('{%s,%s,-1}', '{%s,%s,%s}')$$,
         :huge_2_32, :huge, :'token_b', :'token_a', :'token_c'),
  format($$values (%s, 'extended'), (%s, 'extended'), (-1, 'extended')$$, :huge_2_32, :huge),
  'ids far apart are extended, each for itself');

-- Errors
select throws_ok(format('select * from pgsched.extend_tasks(%L, %L)', ids, tokens),
                 'TS400', 'p_ids and p_claim_tokens do not pair up', what || ' is no batch')
  from bad_batches;
select throws_ok(
         format('select * from pgsched.extend_tasks(%L, %L, %L)',
                array[:a_id], array[:'a_token'], lease),
         'TS400', pg_temp.lease_error(lease), coalesce(lease, 'null') || ' is no lease')
  from leases where seconds is null;

-- Rights
select pg_temp.may_call(
  'pgsched.extend_tasks',
  format($$select outcome from pgsched.extend_tasks('{%s}', '{%s}')$$, :a_id, :'a_token'),
  'extended');

select * from finish();
rollback;
