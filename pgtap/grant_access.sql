begin;
\ir fixtures.sql
select plan(38);

select is(pg_temp.arguments_of('pgsched.grant_access'), 'p_role text, p_kind text',
          'grant_access takes a role and a kind');
select is(pg_temp.result_of('pgsched.grant_access'), 'void', 'grant_access returns nothing');

-- All rights in the schema and on what is in it.
create function pg_temp.rights()
  returns table (object text, acl text)
  language sql
as $$
  select nspname::text, nspacl::text from pg_namespace where oid = 'pgsched'::regnamespace
   union all
  select proname::text, proacl::text from pg_proc where pronamespace = 'pgsched'::regnamespace
   union all
  select relname::text, relacl::text from pg_class where relnamespace = 'pgsched'::regnamespace
   union all
  select typname::text, typacl::text from pg_type where typnamespace = 'pgsched'::regnamespace
$$;

-- Errors
create temporary table before as select * from pg_temp.rights();
create temporary table bad_roles (name text, what text);
insert into bad_roles (name, what)
values (null, 'null'),
       ('', 'an empty text'),
       ('public', 'everybody'),
       ('PUBLIC', 'everybody in capitals'),
       ('none', 'no role'),
       ('current_user', 'a word for a role'),
       ('"' || current_user || '"', 'a name in quotes'),
       ('Pg_Monitor', 'a name in capitals'),
       (current_user || ', public', 'a list'),
       (current_user || ' ', 'a name and a blank'),
       (repeat('x', 64), '64 bytes'),
       (E'a\nb', 'a line feed');
select throws_ok(format('select pgsched.grant_access(%L, %L)', name, 'worker'),
                 'TS400', 'there is no role ' || coalesce(quote_literal(name), 'null'),
                 what || ' is no role')
  from bad_roles;
create temporary table bad_kinds (name text, what text);
insert into bad_kinds (name, what)
values (null, 'null'),
       ('', 'an empty text'),
       ('Worker', 'a capital'),
       ('owner', 'an owner'),
       ('worker ', 'a kind and a blank'),
       ('worker,observer', 'a list');
select throws_ok(format('select pgsched.grant_access(%L, %L)', current_user, name),
                 'TS400', 'p_kind is not a kind of access: '
                          || coalesce(quote_literal(name), 'null'),
                 what || ' is no kind')
  from bad_kinds;
select throws_ok(format('select pgsched.grant_access(repeat(%L, 100000), %L)', 'x', 'worker'),
                 'TS400', format('there is no role %L', repeat('x', 80)),
                 'a very long name is cut in the message');
select set_eq('table before', 'select * from pg_temp.rights()', 'a refused call grants nothing');

-- To whom it belongs
select lives_ok(format('select pgsched.grant_access(%L, %L)', proowner::regrole, kind),
                kind || ': the owner may be given it')
  from pg_proc cross join unnest(array['producer', 'admin']) as kind
 where oid = 'pgsched.grant_access'::regproc;
select set_eq('table before', 'select * from pg_temp.rights()', 'and has it already');

-- What others wait for
select results_eq(
  $$select mode from pg_locks
     where pid = pg_backend_pid() and locktype = 'advisory' and granted
       and (classid, objid, objsubid) = (1338, 1, 2)$$,
  array['ExclusiveLock'], 'installers, and others who change rights, wait');

select rolsuper or rolcreaterole as may_create_roles
  from pg_roles where rolname = current_user \gset
\if :may_create_roles

-- Names
create temporary table good_roles (name text, what text);
insert into good_roles (name, what)
values ('pgtap', 'letters'),
       ('PgTap', 'capitals'),
       ('pgtap, "public"', 'a comma and double quotes'),
       ('pgtap o''brien \ ; -- %s $$', 'quotes and other signs'),
       (E'pgtap\n', 'a line feed'),
       ('pgtap ' || repeat('x', 57), '63 bytes'),
       ('pgtap ' || repeat('é', 28), '62 bytes in 34 characters'),
       ('current_role', 'a word for a role');
do $$
declare
  v_name text;
begin
  for v_name in select name from good_roles where to_regrole(quote_ident(name)) is null loop
    execute format('create role %I', v_name);
  end loop;
end;
$$;
select pgsched.grant_access(name, 'producer') from good_roles \g /dev/null
select ok(has_function_privilege(name, 'pgsched.enqueue_tasks(jsonb)', 'execute')
            and has_schema_privilege(name, 'pgsched', 'usage'),
          what || ' may be the name of a role')
  from good_roles;
select set_eq(
  $$select distinct a.grantor from pg_namespace cross join aclexplode(nspacl) as a
     where oid = 'pgsched'::regnamespace and a.grantee = 'pgtap'::regrole
     union
    select a.grantor from pg_proc cross join aclexplode(proacl) as a
     where pronamespace = 'pgsched'::regnamespace and a.grantee = 'pgtap'::regrole$$,
  $$select nspowner from pg_namespace where oid = 'pgsched'::regnamespace$$,
  'all is granted by the owner of the schema');

-- Again, and more
create temporary table once as select * from pg_temp.rights();
select pgsched.grant_access('pgtap', 'producer') \g /dev/null
select set_eq('table once', 'select * from pg_temp.rights()', 'granted twice, it is as once');
select pgsched.grant_access('pgtap', 'observer') \g /dev/null
select ok(has_function_privilege('pgtap', 'pgsched.enqueue_tasks(jsonb)', 'execute')
            and has_function_privilege('pgtap', 'pgsched.get_task(bigint)', 'execute'),
          'a second kind comes to the first');

\else
select skip('roles of many names: ' || current_user || ' may not create roles', 11);
\endif

-- Rights
select pg_temp.may_call('pgsched.grant_access',
                        format($$select 'done' from pgsched.grant_access(%L, 'observer')$$,
                               proowner::regrole),
                        'done')
  from pg_proc where oid = 'pgsched.grant_access'::regproc;

select * from finish();
rollback;
