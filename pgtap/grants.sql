-- Who may call what: every kind of access against every function, and what no kind may do.
begin;
\ir fixtures.sql
select plan(29);

create temporary table matrix (routine text, kinds text[]);
insert into matrix (routine, kinds)
values ('cancel_task', '{admin}'),
       ('claim_task', '{admin,worker}'),
       ('complete_task', '{admin,worker}'),
       ('complete_tasks', '{admin,worker}'),
       ('configure_queue', '{admin}'),
       ('diagnose', '{admin,observer,worker}'),
       ('enqueue_task', '{admin,producer}'),
       ('enqueue_tasks', '{admin,producer}'),
       ('extend_task', '{admin,worker}'),
       ('extend_tasks', '{admin,worker}'),
       ('fail_task', '{admin,worker}'),
       ('fail_tasks', '{admin,worker}'),
       ('get_task', '{admin,observer}'),
       ('grant_access', '{}'),
       ('hold_presence', '{admin,worker}'),
       ('hold_task', '{admin,worker}'),
       ('list_workers', '{admin,observer}'),
       ('maintain', '{admin,worker}'),
       ('notify_channel', '{admin,worker}'),
       ('pause_queue', '{admin}'),
       ('prune_finished', '{admin,worker}'),
       ('queue_stats', '{admin,observer,worker}'),
       ('reap_stale', '{admin,worker}'),
       ('recent_rates', '{admin,observer}'),
       ('register_listener', '{admin,worker}'),
       ('register_worker', '{admin,worker}'),
       ('release_task', '{admin,worker}'),
       ('release_tasks', '{admin,worker}'),
       ('reschedule_task', '{admin}'),
       ('resume_queue', '{admin}'),
       ('retry_task', '{admin}'),
       ('revoke_access', '{}'),
       ('schema_version', '{admin,observer,producer,worker}'),
       ('server_stats', '{admin,observer,worker}'),
       ('unregister_worker', '{admin,worker}');

-- What a role gets from a query: null when it has no right to it.
create function pg_temp.answer(p_role text, p_query text)
  returns text
  language plpgsql
as $$
declare
  v_role text := current_setting('role');
  v_answer text;
begin
  perform set_config('role', p_role, true);
  execute p_query into v_answer;
  perform set_config('role', v_role, true);
  return v_answer;
exception when insufficient_privilege then
  return null;
end;
$$;

select set_eq(
  $$select proname::text from pg_proc
     where pronamespace = 'pgsched'::regnamespace and proname not like '\_%'$$,
  'select routine from matrix', 'the matrix has every public function');

select rolsuper or rolcreaterole as may_create_roles
  from pg_roles where rolname = current_user \gset
\if :may_create_roles

create role pgtap_producer;
create role pgtap_worker;
create role pgtap_observer;
create role pgtap_admin;
grant pgtap_producer, pgtap_worker, pgtap_observer, pgtap_admin to current_user;
create temporary table roles as
select kind, 'pgtap_' || kind as name
  from unnest(array['producer', 'worker', 'observer', 'admin']) as kind;
select pgsched.grant_access(name, kind) from roles \g /dev/null

select set_eq(
  format($$select p.proname::text from pg_proc as p
            where p.pronamespace = 'pgsched'::regnamespace
              and has_function_privilege(%L, p.oid, 'execute')$$, name),
  format('select routine from matrix where %L = any (kinds)', kind),
  kind || ': may call what the matrix says, and nothing else')
  from roles;
select ok(has_schema_privilege(name, 'pgsched', 'usage'), kind || ': may use the schema')
  from roles;
select ok(not has_schema_privilege(name, 'pgsched', 'create'), kind || ': and not create there')
  from roles;
select is_empty(
  format($$select c.relname from pg_class as c
            where c.relnamespace = 'pgsched'::regnamespace
              and case when c.relkind in ('r', 'v')
                       then has_table_privilege(%1$L, c.oid,
                              'select, insert, update, delete, truncate, references, trigger')
                         or has_any_column_privilege(%1$L, c.oid,
                              'select, insert, update, references')
                       when c.relkind = 'S'
                       then has_sequence_privilege(%1$L, c.oid, 'usage, select, update')
                  end$$, name),
  kind || ': has no right on a table, view or sequence')
  from roles;
-- Rights that PUBLIC has are not among these: see conventions.sql.
select is_empty(
  format($$select classid::regclass, objid from pg_shdepend
            where refclassid = 'pg_authid'::regclass and refobjid = %L::regrole and deptype = 'a'
              and classid not in ('pg_proc'::regclass, 'pg_namespace'::regclass)$$, name),
  kind || ': nor was it given any on a type')
  from roles;
select is_empty(
  format($$select p.proname from pg_proc as p
            where p.pronamespace = 'pgsched'::regnamespace
              and has_function_privilege(%L, p.oid, 'execute with grant option')$$, name),
  kind || ': and may pass nothing on')
  from roles;

-- Really called
create temporary table queries (what text, query text);
insert into queries (what, query)
values ('enqueue_task',
        $$select count(*) from pgsched.enqueue_task('a', p_queue => 'pgtap grants')$$),
       ('claim_task', $$select count(*) from pgsched.claim_task('w', 'pgtap grants')$$),
       ('list_workers', 'select count(*) > -1 from pgsched.list_workers()'),
       ('pause_queue', $$select count(*) from pgsched.pause_queue('pgtap grants')$$),
       ('grant_access', $$select pgsched.grant_access('pgtap_worker', 'admin')$$),
       ('a private function', $$select pgsched._name('p_queue', 'a')$$),
       ('the view tasks', 'select count(*) from pgsched.tasks'),
       ('a table', 'select count(*) from pgsched.queues');
select set_eq(
  format('select what from queries where pg_temp.answer(%L, query) is not null', name),
  string_to_array(works, ', '), name || ' gets an answer from ' || works || ' only')
  from (values ('pgtap_producer', 'enqueue_task'), ('pgtap_worker', 'claim_task'),
               ('pgtap_observer', 'list_workers'),
               ('pgtap_admin', 'enqueue_task, claim_task, list_workers, pause_queue'))
       as expected (name, works);

\else
select skip('a role with each kind of access: ' || current_user || ' may not create roles', 28);
\endif

select * from finish();
rollback;
