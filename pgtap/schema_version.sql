begin;
\ir fixtures.sql
select plan(4);

select is(pg_temp.arguments_of('pgsched.schema_version'), '', 'schema_version takes nothing');
select is(pg_temp.result_of('pgsched.schema_version'), 'text', 'schema_version returns a text');

-- Happy path
select is(pgsched.schema_version(), '0001', 'the newest migration is 0001');

-- Rights
grant execute on function pgsched.schema_version to pgtap_caller;
set local role pgtap_caller;
select is(pgsched.schema_version(), '0001', 'EXECUTE on schema_version is enough to call it');
reset role;

select * from finish();
rollback;
