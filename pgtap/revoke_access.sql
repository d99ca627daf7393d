begin;
\ir fixtures.sql
select plan(31);

select is(pg_temp.arguments_of('pgsched.revoke_access'), 'p_role text, p_kind text',
          'revoke_access takes a role and a kind');
select is(pg_temp.result_of('pgsched.revoke_access'), 'void', 'revoke_access returns nothing');

-- Errors
select throws_ok(format('select pgsched.revoke_access(%L, %L)', name, 'worker'),
                 'TS400', 'there is no role ' || coalesce(quote_literal(name), 'null'),
                 coalesce(name, 'null') || ' is no role')
  from unnest(array['public', 'pgtap nobody', null]) as name;
select throws_ok(format('select pgsched.revoke_access(%L, %L)', current_user, name),
                 'TS400', 'p_kind is not a kind of access: '
                          || coalesce(quote_literal(name), 'null'),
                 coalesce(name, 'null') || ' is no kind')
  from unnest(array['owner', null]) as name;
create temporary table before as
select oid, proacl::text as acl from pg_proc where pronamespace = 'pgsched'::regnamespace;
select throws_ok(format('select pgsched.revoke_access(%L, %L)', proowner::regrole, kind),
                 'TS400', format('role %L is the owner', pg_get_userbyid(proowner)),
                 kind || ': the owner keeps it')
  from pg_proc cross join unnest(array['worker', 'admin']) as kind
 where oid = 'pgsched.revoke_access'::regproc;
select set_eq(
  'table before',
  $$select oid, proacl::text from pg_proc where pronamespace = 'pgsched'::regnamespace$$,
  'a refused call takes nothing');

select rolsuper or rolcreaterole as may_create_roles
  from pg_roles where rolname = current_user \gset
\if :may_create_roles

create role "pgtap ""role""";
create role pgtap_other;

-- The rights of the role: what it may call, and the use of the schema.
create function pg_temp.rights(p_role text)
  returns setof text
  language sql
as $$
  select p.proname::text from pg_proc as p
   where p.pronamespace = 'pgsched'::regnamespace
     and has_function_privilege(p_role, p.oid, 'execute')
   union all
  select 'the schema' where has_schema_privilege(p_role, 'pgsched', 'usage')
$$;

-- Whether a role that was given some kinds, of which some were revoked, is as one that was given
-- others.
create function pg_temp.leaves(p_granted text[], p_revoked text[], p_left text[], p_test text)
  returns text
  language plpgsql
as $$
declare
  v_given text[];
begin
  perform pgsched.grant_access('pgtap_other', kind) from unnest(p_left) as kind;
  v_given := array(select pg_temp.rights('pgtap_other') order by 1);
  perform pgsched.revoke_access('pgtap_other', 'admin');
  perform pgsched.grant_access('pgtap "role"', kind) from unnest(p_granted) as kind;
  perform pgsched.revoke_access('pgtap "role"', kind) from unnest(p_revoked) as kind;
  return is(array(select pg_temp.rights('pgtap "role"') order by 1), v_given, p_test);
end;
$$;

-- Nothing there
select pg_temp.leaves('{}', array[kind], '{}', kind || ': who has none may lose it')
  from unnest(array['producer', 'worker', 'observer', 'admin']) as kind;

-- Happy path
select pg_temp.leaves(array[kind], array[kind], '{}',
                      kind || ': who had only that has nothing afterwards')
  from unnest(array['producer', 'worker', 'observer', 'admin']) as kind;

-- Several kinds
select pg_temp.leaves('{producer,worker,observer}', '{worker}', '{producer,observer}',
                      'what the other kinds need is kept');
select pg_temp.leaves('{}', '{observer}', '{producer}', 'so it is when the next one goes');
select pg_temp.leaves('{}', '{worker}', '{producer}', 'and when one goes again');
select pg_temp.leaves('{}', '{producer}', '{}', 'nothing is left after the last');
select pg_temp.leaves('{admin}', '{producer,worker,observer}', '{admin}',
                      'who has admin has all kinds, and loses none but by that');
select pg_temp.leaves('{worker}', '{admin}', '{}', 'then all of them');

-- A part of a kind is no kind
select pgsched.grant_access('pgtap "role"', 'observer') \g /dev/null
grant execute on function pgsched.claim_task, pgsched.diagnose to "pgtap ""role""";
select pgsched.revoke_access('pgtap "role"', 'observer') \g /dev/null
select set_eq($$select pg_temp.rights('pgtap "role"')$$, array['claim_task', 'the schema'],
              'what was granted by hand is kept where no kind revoked has it');
revoke execute on function pgsched.claim_task from "pgtap ""role""";
grant execute on function pgsched._name to "pgtap ""role""";
select pgsched.revoke_access('pgtap "role"', 'admin') \g /dev/null
select set_eq($$select pg_temp.rights('pgtap "role"')$$, array['_name', 'the schema'],
              'also that of a private function, and with it the use of the schema');
revoke execute on function pgsched._name from "pgtap ""role""";
select pgsched.revoke_access('pgtap "role"', 'admin') \g /dev/null

-- Others
select pgsched.grant_access(name, 'worker') from unnest(array['pgtap "role"', 'pgtap_other']) as name
  \g /dev/null
select pgsched.revoke_access('pgtap "role"', 'worker') \g /dev/null
select is(has_function_privilege('pgtap_other', 'pgsched.maintain()', 'execute'), true,
          'another role keeps what it has');
select pgsched.revoke_access('pgtap_other', 'worker') \g /dev/null
select set_eq(
  'table before',
  $$select oid, proacl::text from pg_proc where pronamespace = 'pgsched'::regnamespace$$,
  'when all is taken back, the rights are as they were');
select lives_ok('drop role pgtap_other', 'then the role may be dropped');

-- Passed on
grant execute on function pgsched.get_task to "pgtap ""role""" with grant option;
create role pgtap_other;
grant usage on schema pgsched to "pgtap ""role""";
grant "pgtap ""role""" to current_user;
set local role "pgtap ""role""";
grant execute on function pgsched.get_task to pgtap_other;
reset role;
select throws_ok($$select pgsched.revoke_access('pgtap "role"', 'observer')$$, '2BP01', null,
                 'what a role has passed on is not taken from it');

\else
select skip('roles that lose access: ' || current_user || ' may not create roles', 20);
\endif

-- Rights
select pg_temp.may_call(
         'pgsched.revoke_access',
         $$select 'done' from pgsched.revoke_access('pg_monitor', 'observer')$$, 'done');

select * from finish();
rollback;
