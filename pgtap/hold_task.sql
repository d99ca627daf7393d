begin;
\ir fixtures.sql
select plan(44);

-- The advisory locks of this transaction.
create function pg_temp.advisory_locks()
  returns table (lock text)
  language sql
as $$
  select format('%s %s %s %s', l.classid, l.objid, l.objsubid, l.mode)
    from pg_locks as l
   where l.pid = pg_backend_pid() and l.locktype = 'advisory' and l.granted
   order by 1
$$;

-- Which version of a task's row is the newest, and who locked it: no lock of a row and no change of
-- it, not even one to the same values, leaves this as it was.
create function pg_temp.version(p_id bigint)
  returns text
  language sql
as $$
  select format('%s %s %s %s', t.ctid, t.xmin, t.xmax, t.cmax)
    from pgsched.scheduled_tasks as t
   where t.id = p_id
$$;

select is(pg_temp.arguments_of('pgsched.hold_task'), 'p_id bigint, p_claim_token uuid',
          'hold_task takes an id and its token');
select is(pg_temp.result_of('pgsched.hold_task'), 'void', 'hold_task returns nothing');

-- Nothing there
select throws_ok(format('select pgsched.hold_task(-5, %L)', :'stale'),
                 'TS404', 'there is no task -5', 'there is no task to hold');

-- Happy path
select * from pg_temp.claimed('pgtap hold_task') \gset
select pg_temp.task(:id) as before, pg_temp.version(:id) as version \gset
create temporary table locks_before as select * from pg_temp.advisory_locks();
select pgsched.hold_task(:id, :'token') \g /dev/null
select results_eq(
  'select lock from pg_temp.advisory_locks() except all select lock from locks_before',
  array[format('1337 %s 2 ExclusiveLock', :id % 2147483647)],
  'holding takes the lock of the task, and no other');
select is(pg_temp.version(:id), :'version', 'its row is neither locked nor changed');
select is(pg_temp.task(:id), :'before', 'and reads as before');
select lives_ok(format('select pgsched.hold_task(%s, %L)', :id, :'token'), 'it may be held twice');
select is(pgsched.complete_task(:id, :'token', '"done"'), true,
          'the transaction that holds a task completes it');
select is(pg_temp.task(:id), :'before'::jsonb || jsonb_build_object(
            'status', 'completed', 'result', 'done', 'finished_at', finished_at),
          'it is finished as without being held')
  from pgsched.finished_tasks where id = :id;
select throws_ok(format('select pgsched.hold_task(%s, %L)', :id, :'token'),
                 'TS409', format('this claim of task %s is not current', :id),
                 'what it has completed it cannot hold again');

-- Happy path: other ways on
select * from pg_temp.claimed('pgtap ways') \gset a_
select * from pg_temp.claimed('pgtap ways') \gset b_
select * from pg_temp.claimed('pgtap ways') \gset c_
select pgsched.hold_task(:a_id, :'a_token'), pgsched.hold_task(:b_id, :'b_token'),
       pgsched.hold_task(:c_id, :'c_token') \g /dev/null
select results_eq(
  format('select outcome from pgsched.extend_tasks(array[%s], array[uuid %L])', :a_id, :'a_token'),
  array['extended'], 'a held task can be extended');
select lives_ok(format('select pgsched.extend_task(%s, %L)', :a_id, :'a_token'), 'also by itself');
select results_eq(
  format('select status from pgsched.fail_task(%s, %L, ''x'')', :a_id, :'a_token'),
  array['queued'], 'it can be failed');
select lives_ok(format('select pgsched.release_task(%s, %L)', :b_id, :'b_token'),
                'it can be released');
select results_eq(
  format('select outcome from pgsched.complete_tasks(array[%s], array[uuid %L])',
         :c_id, :'c_token'),
  array['completed'], 'it can be completed in a batch');

-- Edges: the reaper takes the lowest id first; a limit shows which that was.
select * from pg_temp.claimed('pgtap reaper', -:huge, '-1 hours', 20) \gset
select lives_ok(format('select pgsched.hold_task(%s, %L)', :id, :'token'),
                'a claim whose lease is over but that nobody took is held');
select pg_temp.task(:id) as before \gset
select * from pg_temp.claimed('pgtap reaper', -:huge + 1, '-1 hours', p_cancel => true) \gset next_
select results_eq('select * from pgsched.reap_stale(1)',
                  format('values (%s, ''cancelled'')', :next_id),
                  'the reaper passes by a task that its own transaction holds');
select is(pg_temp.task(:id), :'before', 'it leaves that task alone');
select is(pgsched.complete_task(:id, :'token'), true, 'which is completed after that');

select * from pg_temp.claimed('pgtap reaper', -:huge - 1, '-1 hours') \gset
select pgsched.reap_stale(1) \g /dev/null
select throws_ok(format('select pgsched.hold_task(%s, %L)', :id, :'token'),
                 'TS409', format('this claim of task %s is not current', :id),
                 'a task that was reaped cannot be held');

-- Edges: the state of the claim
select * from pg_temp.claimed('pgtap state', p_attempt => 20, p_cancel => true) \gset
select pgsched.hold_task(:id, :'token') \g /dev/null
select is(pgsched.complete_task(:id, :'token'), true,
          'the last attempt of a task whose cancel was requested is held and completed');

-- Edges: ids
select token as a from pg_temp.claimed('pgtap ids', :huge) \gset token_
select token as b from pg_temp.claimed('pgtap ids', :huge_same_key) \gset token_
select token as c from pg_temp.claimed('pgtap ids', :huge_2_32) \gset token_
select lives_ok(format('select pgsched.hold_task(%s, %L)', :huge_2_32, :'token_c'),
                'an id beyond 32 bits is held');
select ok(pg_temp.holds_lock(:huge_2_32) and not pg_temp.holds_lock(:huge),
          'under its lock, which is not that of the id that shares its 32 bits');
select throws_ok(format('select pgsched.hold_task(%s, %L)', id, :'token_a'),
                 'TS409', format('this claim of task %s is not current', id),
                 format('the claim of task %s does not hold task %s', :huge, id))
  from unnest(array[:huge_2_32, :huge_same_key]) as id;
select pgsched.hold_task(:huge_same_key, :'token_b') \g /dev/null
select lives_ok(format('select pgsched.hold_task(%s, %L)', :huge, :'token_a'),
                'two tasks that share a lock are held together');

-- Errors: claims that are not current
create temporary table stale as select * from pg_temp.stale_claims('pgtap stale');
select throws_ok(format('select pgsched.hold_task(%s, %L)', id, token),
                 'TS409', format('this claim of task %s is not current', id), what || ' is stale')
  from stale;
select results_eq($$select * from pgsched.tasks where queue = 'pgtap stale' order by id$$,
                  'select * from before order by id', 'a stale claim changes nothing');

-- Errors: arguments
select throws_ok(format('select pgsched.hold_task(%L, %L)', id, token),
                 'TS400', 'p_id and p_claim_token must not be null', what)
  from no_claims;

-- Errors: a transaction that may not write
select throws_ok(
  format('select set_config(''transaction_read_only'', ''on'', true), pgsched.hold_task(%s, %L)',
         :huge, :'token_a'),
  '25006', 'cannot change tasks in a read-only transaction',
  'nothing is held where nothing can be completed');

-- Rights
select pg_temp.may_call('pgsched.hold_task',
                        format($$select 'held' from pgsched.hold_task(%s, %L)$$, :huge, :'token_a'),
                        'held');

select * from finish();
rollback;
