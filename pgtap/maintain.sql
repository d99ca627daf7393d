begin;
\ir fixtures.sql
select plan(31);

-- Nobody else is at a step meanwhile: of two callers one is told null.
select pg_advisory_xact_lock(1338, step) from unnest(array[2, 3, 4]) as step \g /dev/null

select pg_temp.keep_others() \g /dev/null
-- Of the stale tasks of others none is reaped: the thousand of a call are ours, with lower ids.
select pg_temp.others_are_stale() \gset

select is(pg_temp.arguments_of('pgsched.maintain'), '', 'maintain takes nothing');
select is(pg_temp.result_of('pgsched.maintain'), 'TABLE(step text, affected bigint)',
          'maintain says of each step how many tasks it changed');

-- Nothing there
\if :others_are_stale
  select skip('tasks of others are stale');
\else
  select results_eq('select * from pgsched.maintain()',
                    $$values ('move_claim_marks', 0::bigint), ('prune_finished', 0), ('reap_stale', 0)$$,
                    'each step is done and finds nothing');
\endif

-- Happy path: one more stale task than a call reaps, and tasks that their queue does not keep
select pgsched.configure_queue('pgtap maintain', p_keep_failed => '0') \g /dev/null
create temporary table stale as
select c.*, kind
  from generate_series(1, 1001) as n
 cross join lateral (select case n when 1 then 'used up' when 2 then 'to be cancelled'
                                   when 1001 then 'one too many' else 'lost' end) as k (kind)
 cross join lateral pg_temp.claimed(
       case kind when 'to be cancelled' then 'pgtap cancelled' else 'pgtap maintain' end,
       -9000000000000000000 + n, '0', case kind when 'used up' then 20 else 1 end,
       p_cancel => kind = 'to be cancelled') as c;
select pgsched.fail_task(id, token, 'x', p_permanent => true)
  from generate_series(1, 5) as n
 cross join lateral pg_temp.claimed('pgtap maintain', p_attempt => n) \g /dev/null
select pgsched.complete_task(id, token) from pg_temp.claimed('pgtap others') \g /dev/null
select pg_temp.claimed('pgtap others') \g /dev/null
create temporary table others as
select * from pgsched.tasks
 where queue = 'pgtap others' or id = (select id from stale where kind = 'one too many');
select results_eq('select * from pgsched.maintain()',
                  $$values ('move_claim_marks', 0::bigint), ('prune_finished', 5), ('reap_stale', 1000)$$,
                  'finished tasks are deleted, then stale ones reaped, and both are counted');
select results_eq(
  $$select kind, coalesce(t.status, 'deleted'), count(*)
      from stale left join pgsched.tasks as t using (id) group by 1, 2 order by 1$$,
  $$values ('lost', 'queued', 998::bigint), ('one too many', 'processing', 1),
           ('to be cancelled', 'cancelled', 1), ('used up', 'failed', 1)$$,
  'of the stale ones as many as one call of reap_stale takes');
select results_eq(
  $$select id from pgsched.finished_tasks where queue = 'pgtap maintain'$$,
  $$select id from stale where kind = 'used up'$$,
  'of the finished ones those that were old enough before');
select results_eq(
  'select * from pgsched.tasks where id in (select id from others) order by id',
  'select * from others order by id',
  'no other task is changed');

-- Repeated
create temporary table before as
select * from pgsched.tasks where queue = 'pgtap maintain' and status = 'queued';
\if :others_are_stale
  select skip('tasks of others are stale', 3);
\else
  select results_eq('select * from pgsched.maintain()',
                    $$values ('move_claim_marks', 0::bigint), ('prune_finished', 1), ('reap_stale', 1)$$,
                    'the next call does the rest');
  select results_eq('select * from pgsched.maintain()',
                    $$values ('move_claim_marks', 0::bigint), ('prune_finished', 0), ('reap_stale', 0)$$,
                    'and another finds nothing to do');
  select results_eq(
    'select * from pgsched.tasks where id in (select id from before) order by id',
    'select * from before order by id',
    'what was done once stays as it was');
\endif

-- Errors: a read-only transaction
select throws_ok(
  $$select set_config('transaction_read_only', 'on', true); select * from pgsched.maintain()$$,
  '25006', 'cannot change tasks in a read-only transaction',
  'a read-only transaction is told before anything is done');

-- Errors: a step that cannot run. Until the rollback the steps only say in a setting that they ran.
set local client_min_messages = 'error';

create or replace function pgsched.reap_stale(p_limit integer default 1000)
  returns table (id bigint, status text)
  language plpgsql
as $$
begin
  perform set_config('pgtap.done', current_setting('pgtap.done') || ' reap', true);
  if current_setting('pgtap.failing') = 'reap_stale' then
    raise exception using errcode = current_setting('pgtap.condition');
  end if;
  return query values (1::bigint, 'queued'), (2, 'failed');
end;
$$;

create or replace function pgsched._move_claim_marks(p_queues text[])
  returns bigint
  language plpgsql
as $$
begin
  perform set_config('pgtap.done', current_setting('pgtap.done') || ' move', true);
  if current_setting('pgtap.failing') = 'move_claim_marks' then
    raise exception using errcode = current_setting('pgtap.condition');
  end if;
  return 3;
end;
$$;

create or replace function pgsched.prune_finished(p_limit integer default 10000)
  returns bigint
  language plpgsql
as $$
begin
  perform set_config('pgtap.done', current_setting('pgtap.done') || ' prune', true);
  if current_setting('pgtap.failing') = 'prune_finished' then
    raise exception using errcode = current_setting('pgtap.condition');
  end if;
  return 7;
end;
$$;

create function pg_temp.maintain_when(p_failing text, p_condition text)
  returns text
  language plpgsql
as $$
begin
  perform set_config('pgtap.done', '', true), set_config('pgtap.failing', p_failing, true),
          set_config('pgtap.condition', p_condition, true);
  return (select string_agg(format('%s: %s', m.step, m.affected), ', ')
            from pgsched.maintain() as m)
         || ', done:' || current_setting('pgtap.done');
exception
  when query_canceled or division_by_zero then
    return sqlstate;
end;
$$;

select is(pg_temp.maintain_when('none', ''), 'move_claim_marks: 3, prune_finished: 7, reap_stale: 2, done: move prune reap',
          'each step runs once, one after the other');
select is(pg_temp.maintain_when('reap_stale', condition),
          'move_claim_marks: 3, prune_finished: 7, reap_stale: , done: move prune',
          format('reap_stale that ends with %s undoes only itself', condition))
  from unnest(array['55P03', '40P01', '40001', '53200']) as condition;
select is(pg_temp.maintain_when('prune_finished', condition),
          'move_claim_marks: 3, prune_finished: , reap_stale: 2, done: move reap',
          format('prune_finished that ends with %s undoes only itself', condition))
  from unnest(array['55P03', '40P01', '40001', '53200']) as condition;
select is(pg_temp.maintain_when('move_claim_marks', condition),
          'move_claim_marks: , prune_finished: 7, reap_stale: 2, done: prune reap',
          format('move_claim_marks that ends with %s undoes only itself', condition))
  from unnest(array['55P03', '40P01', '40001', '53200']) as condition;
select is(pg_temp.maintain_when(failing, condition), condition,
          format('%s that ends with %s ends the call', failing, condition))
  from unnest(array['move_claim_marks', 'reap_stale', 'prune_finished']) as failing
 cross join unnest(array['57014', '22012']) as condition;

-- Rights
select pg_temp.maintain_when('none', '') \g /dev/null
select pg_temp.may_call(
  'pgsched.maintain',
  $$select string_agg(step || ' ' || affected, ', ') from pgsched.maintain()$$,
  'move_claim_marks 3, prune_finished 7, reap_stale 2');

select * from finish();
rollback;
