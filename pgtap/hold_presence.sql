begin;
\ir fixtures.sql
select plan(19);

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

create function pg_temp.lock_of(p_worker_id bigint)
  returns text
  language sql
as $$
  select format('1339 %s 2 ExclusiveLock', p_worker_id % 2147483647)
$$;

-- Which version of a worker's row is the newest, and who locked it.
create function pg_temp.version(p_id bigint)
  returns text
  language sql
as $$
  select format('%s %s %s %s', w.ctid, w.xmin, w.xmax, w.cmax)
    from pgsched.workers as w
   where w.id = p_id
$$;

-- A query that calls it.
create function pg_temp.lock_that_is_held(p_id bigint)
  returns text
  language plpgsql
as $$
begin
  call pgsched.hold_presence(p_id);
  return (select lock from pg_temp.advisory_locks() where lock = pg_temp.lock_of(p_id));
end;
$$;

select is(pg_temp.arguments_of('pgsched.hold_presence'), 'IN p_worker_id bigint',
          'hold_presence takes the id of a worker');
select is(prokind, 'p', 'it is a procedure')
  from pg_proc where oid = 'pgsched.hold_presence'::regproc;

-- Nothing there
create temporary table locks_before as select * from pg_temp.advisory_locks();
select throws_ok('call pgsched.hold_presence(null)', 'TS400', 'p_worker_id must not be null',
                 'null is no worker');
select results_eq('select lock from pg_temp.advisory_locks()', 'select lock from locks_before',
                  'then nothing is held');

-- Happy path
select set_config(name, '1234567', true)
  from unnest(array['idle_in_transaction_session_timeout', 'transaction_timeout', 'lock_timeout'])
       as name
 where current_setting(name, true) is not null \g /dev/null
select pgsched.register_worker('pgtap 1', '{a}', 1) as id \gset
select pg_temp.version(:id) as version \gset
call pgsched.hold_presence(:id);
select results_eq(
  'select lock from pg_temp.advisory_locks() except all select lock from locks_before',
  array[pg_temp.lock_of(:id)], 'the lock of the worker is held, and no other');
select is(pg_temp.version(:id), :'version', 'its row is neither locked nor changed');
select is(current_setting('idle_in_transaction_session_timeout'), '0',
          'the transaction may be idle for as long as it will');
select is(coalesce(current_setting('transaction_timeout', true), '0'), '0', 'and stay open');
select is(current_setting('lock_timeout')::interval, interval '1234.567 s',
          'other timeouts are left alone');
select lives_ok(format('call pgsched.hold_presence(%s)', :id), 'it may be held twice');
select is(pgsched.register_worker('pgtap 1', '{a}', 1, true), :'id', 'the worker says so');
select is(presence, true, 'and that is noted') from pgsched.workers where id = :id;

-- Edges: ids
insert into pgsched.workers (id, name, queues, slots, started_at, seen_at)
select id, 'pgtap ' || id, '{a}', 1, clock_timestamp(), clock_timestamp()
  from unnest(array[:huge, :huge_2_32, -:huge, 2147483647, 2147483648]) as id;
call pgsched.hold_presence(:huge);
call pgsched.hold_presence(:huge_2_32);
call pgsched.hold_presence(2147483647);
call pgsched.hold_presence(2147483648);
call pgsched.hold_presence(-:huge);
select bag_has(
  'select lock from pg_temp.advisory_locks()',
  format('select pg_temp.lock_of(id) from unnest(array[%s, %s, 2147483647, 2147483648]) as id',
         :huge, :huge_2_32),
  'ids beyond 32 bits are held under their own locks');
select pgsched.register_worker('pgtap ' || id, '{a}', 1, true)
  from unnest(array[:huge, :huge_2_32, -:huge, 2147483647, 2147483648]) as id \g /dev/null
select is(presence, true, format('the presence of worker %s is noted', id))
  from pgsched.workers where name like 'pgtap %' and id <> :id;

-- Rights
select pgsched.register_worker('pgtap 2', '{a}', 1) as id \gset
select pg_temp.may_call('pgsched.hold_presence',
                        format('select pg_temp.lock_that_is_held(%s)', :id), pg_temp.lock_of(:id));

select * from finish();
rollback;
