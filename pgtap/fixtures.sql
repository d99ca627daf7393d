-- Included first by every file, inside the transaction that the file rolls back at its end. The
-- database may be in use: tests have queues of their own, called pgtap something, and neither count
-- nor lock the tasks of others.
\set ON_ERROR_STOP on
\set QUIET on
\pset format unaligned
\pset tuples_only on
\pset pager off

-- By itself, outside a transaction, it is no test and does nothing.
select pg_current_xact_id() \g /dev/null
select pg_current_xact_id_if_assigned() is not null as included \gset
\if :included
\else
  \echo '1..0 # SKIP the tests include it'
  \q
\endif

-- Two runs would meet on ids, names and locks: a file waits for that of another run to end.
select pg_advisory_xact_lock(hashtext('pgtap of pgsched')) \g /dev/null

-- pgTAP finds itself by the search path; the helpers go to pg_temp.
select set_config('search_path', pronamespace::regnamespace::text, true)
  from pg_proc where proname = 'pgtap_version' \g /dev/null

-- These make texts the same everywhere.
set local client_encoding = 'UTF8';
set local client_min_messages = 'warning';
set local timezone = 'UTC';
set local datestyle = 'ISO';
set local intervalstyle = 'postgres';

-- No claim has this token.
\set stale 00000000-0000-4000-8000-000000000000

-- Ids next to each other in 32 bits, and two that share a lock key.
\set huge 5000000000000000000
\set huge_2_32 5000000004294967296
\set huge_same_key 5000000002147483647

-- Whether a role with no right but the use of the schema and EXECUTE on this function gets this
-- result, one value, from a query. pgTAP stays outside: the role may have no right on its schema.
-- Where no role can be created, the query is run for those that look at what it did.
create function pg_temp.may_call(p_function regproc, p_query text, p_result text)
  returns text
  language plpgsql
as $$
declare
  v_role text := current_setting('role');
  v_what text := format('EXECUTE on %s is enough to call it', p_function);
  v_result text;
begin
  if not (select r.rolsuper or r.rolcreaterole
            from pg_roles as r where r.rolname = current_user) then
    execute p_query;
    return skip(format('%s may not create a role: %s', current_user, v_what));
  end if;
  if to_regrole('pgtap_caller') is null then
    create role pgtap_caller;
    grant usage on schema pgsched to pgtap_caller;
    grant pgtap_caller to current_user;
  end if;
  execute format('grant execute on routine %s to pgtap_caller', p_function);
  perform set_config('role', 'pgtap_caller', true);
  execute p_query into v_result;
  perform set_config('role', v_role, true);
  return is(v_result, p_result, v_what);
end;
$$;

create function pg_temp.arguments_of(p_function regproc)
  returns text
  language sql
as $$
  select pg_get_function_arguments(p_function)
$$;

create function pg_temp.result_of(p_function regproc)
  returns text
  language sql
as $$
  select pg_get_function_result(p_function)
$$;

-- Makes the queues of others keep their finished tasks, of which some may be old enough to be
-- deleted, until the rollback.
create function pg_temp.keep_others()
  returns void
  language sql
as $$
  insert into pgsched.queues as q (name, keep_completed, keep_failed)
  select distinct f.queue, interval '100 years', interval '100 years'
    from pgsched.finished_tasks as f
      on conflict (name) do update
     set keep_completed = excluded.keep_completed, keep_failed = excluded.keep_failed
$$;

-- Whether others have tasks that are stale, or will be before the file has ended.
create function pg_temp.others_are_stale()
  returns boolean
  language sql
as $$
  select exists (
    select
      from pgsched.scheduled_tasks as t
     where t.status = 'processing' and t.lease_expires_at < clock_timestamp() + interval '1 hour')
$$;

-- The whole row of a task, live or finished; null when there is none.
create function pg_temp.task(p_id bigint)
  returns jsonb
  language sql
as $$
  select to_jsonb(t) from pgsched.tasks as t where t.id = p_id
$$;

-- A task as the committed claim of another session leaves it: no lock of it is held here.
create function pg_temp.claimed(
    p_queue text,
    p_id bigint default null,
    p_lease_left interval default '5 minutes',
    p_attempt integer default 1,
    p_max_attempts integer default 20,
    p_cancel boolean default false)
  returns table (id bigint, token uuid)
  language sql
as $$
  insert into pgsched.scheduled_tasks as t (
         id, queue, task_type, payload, status, priority, run_at, attempt, max_attempts,
         claim_token, claimed_by, claimed_at, lease_expires_at, cancel_requested_at, created_at)
  select coalesce(p_id, nextval(pg_get_serial_sequence('pgsched.scheduled_tasks', 'id'))),
         p_queue, 'some work', '{"n": 1}', 'processing', 5, c.now - interval '2 hours', p_attempt,
         p_max_attempts, gen_random_uuid(), 'pgtap worker', c.now - interval '1 hour',
         c.now + p_lease_left, case when p_cancel then c.now end, c.now - interval '3 hours'
    from (select clock_timestamp() as now) as c
  returning t.id, t.claim_token
$$;

-- What every function with p_id and p_claim_token has to refuse; stale_claims adds one.
create temporary table no_claims (id bigint, token uuid, what text);
insert into no_claims (id, token, what)
values (null, :'stale', 'null is no id'),
       (null, null, 'null and null are no claim'),
       (:huge, null, 'null is not the token of a claim'),
       (-5, null, 'nor that of a task that does not exist');

-- Claims that are not current, one of each kind; with the tasks of the queue before any use of them
-- in the temporary table before.
create function pg_temp.stale_claims(p_queue text)
  returns table (id bigint, token uuid, what text)
  language plpgsql
as $$
declare
  v_other uuid;
begin
  select c.id, c.token into id, token from pg_temp.claimed(p_queue) as c;
  perform pgsched.fail_task(id, token, 'failed', '0');
  perform pgsched.claim_task('another worker', p_queue);
  what := 'the token before the current one';
  return next;

  select c.token into v_other from pg_temp.claimed(p_queue) as c;
  select c.id, v_other into id, token from pg_temp.claimed(p_queue) as c;
  what := 'the token of another task';
  return next;

  token := '00000000-0000-4000-8000-000000000000';
  what := 'a token that no task has';
  return next;

  id := pgsched.enqueue_task('a', p_queue => p_queue);
  what := 'any token of a task never claimed';
  insert into no_claims (id, token, what) values (id, null, 'null is not ' || what);
  return next;

  select c.id, c.token into id, token from pg_temp.claimed(p_queue) as c;
  perform pgsched.release_task(id, token);
  what := 'the token of a released task';
  return next;

  select c.id, c.token into id, token from pg_temp.claimed(p_queue) as c;
  perform pgsched.fail_task(id, token, 'failed');
  what := 'the token of a task to be retried';
  return next;

  select c.id, c.token into id, token from pg_temp.claimed(p_queue) as c;
  perform pgsched.fail_task(id, token, 'failed', p_permanent => true);
  what := 'the token of a failed task';
  return next;

  select c.id, c.token into id, token from pg_temp.claimed(p_queue, p_cancel => true) as c;
  perform pgsched.release_task(id, token);
  what := 'the token of a cancelled task';
  return next;

  select c.id, c.token into id, token from pg_temp.claimed(p_queue) as c;
  perform pgsched.complete_task(id, token, '"done"');
  what := 'the token of a completed task';
  return next;

  token := '00000000-0000-4000-8000-000000000000';
  what := 'another token of a completed task';
  return next;

  create temporary table before as select * from pgsched.tasks as t where t.queue = p_queue;
end;
$$;

-- Whether this transaction holds the advisory lock of a task.
create function pg_temp.holds_lock(p_id bigint)
  returns boolean
  language sql
as $$
  select exists (
    select
      from pg_locks as l
     where l.pid = pg_backend_pid() and l.locktype = 'advisory' and l.granted
       and (l.classid, l.objid, l.objsubid) = (1337, (p_id % 2147483647)::integer::oid, 2))
$$;

create temporary table good_names (name text, what text);
insert into good_names (name, what)
values ('~', 'one sign'),
       (' ', 'a blank'),
       ('nULL', 'the word null'),
       (repeat('x', 63), '63 bytes'),
       (repeat('é', 31) || 'x', '63 bytes in 32 characters'),
       (repeat('🐘', 15), '60 bytes in 15 characters'),
       ('o''brien "x" \ ; -- %s {} $$', 'quotes and other signs');

create temporary table bad_names (name text, what text);
insert into bad_names (name, what)
values (null, 'null'),
       ('', 'an empty text'),
       (repeat('x', 64), '64 bytes'),
       (repeat('é', 32), '64 bytes in 32 characters'),
       (repeat('x', 100000), 'a very long text'),
       (E'a\nb', 'a line feed'),
       (E'\ta', 'a tab'),
       (E'a\x01', 'a control character'),
       (E'a\x7f', 'a delete character'),
       (E'a\n''\\', 'a line feed, a quote and a backslash');

create function pg_temp.name_error(p_argument text, p_name text)
  returns text
  language sql
as $$
  select p_argument || ' is not a valid name: '
         || coalesce(quote_literal(left(p_name, 80)), 'null')
$$;

-- Lengths of a lease: seconds is what it must give, null that it must be refused.
create temporary table leases (lease text, seconds integer);
insert into leases (lease, seconds)
values ('1 second', 1),
       ('1.5 minutes', 90),
       ('24 hours', 86400),
       ('1 day', 86400),
       ('1 mon -29 days -1 hours', 82800),
       ('1 year -364 days -12 hours', 64800),
       ('2 days -25 hours', 82800),
       (null, null),
       ('0', null),
       ('-5 minutes', null),
       ('0.999999 seconds', null),
       ('24:00:00.000001', null),
       ('1 mon -31 days', null),
       ('1 month', null),
       ('100000000 years', null),
       ('-100000000 years', null);
-- PostgreSQL 17 has infinite intervals; before that, the longest one.
insert into leases (lease, seconds)
select case when current_setting('server_version_num')::integer >= 170000
            then l.infinite else l.longest end, null
  from (values ('infinity', '178000000 years'), ('-infinity', '-178000000 years'))
       as l (infinite, longest);

create function pg_temp.lease_error(p_lease text)
  returns text
  language sql
as $$
  select 'p_lease is not a valid lease: ' || coalesce(p_lease::interval::text, 'null')
$$;

create temporary table bad_times (run_at text);
insert into bad_times (run_at)
values ('infinity'),
       ('-infinity'),
       ('9999-01-01 00:00:00+00'),
       ('294276-12-31 23:59:59.999999+00');

-- What every function with p_ids and p_claim_tokens has to refuse.
create temporary table bad_batches (ids text, tokens text, what text);
insert into bad_batches (ids, tokens, what)
values (null, null, 'null for both arrays'),
       (null, format('{%s}', :'stale'), 'null for the ids'),
       ('{1}', null, 'null for the tokens'),
       ('{1,2}', format('{%s}', :'stale'), 'more ids than tokens'),
       ('{1}', format('{%1$s,%1$s}', :'stale'), 'more tokens than ids'),
       ('{1}', '{}', 'no token'),
       ('{}', format('{%s}', :'stale'), 'no id'),
       ('{1,null}', format('{%1$s,%1$s}', :'stale'), 'an id that is null'),
       ('{1,2}', format('{%s,null}', :'stale'), 'a token that is null'),
       ('{{1},{2}}', format('{%1$s,%1$s}', :'stale'), 'ids in two dimensions'),
       ('{1,2}', format('{{%1$s},{%1$s}}', :'stale'), 'tokens in two dimensions');
