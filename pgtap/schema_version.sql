begin;
\ir fixtures.sql
select plan(4);

select is(pg_temp.arguments_of('pgsched.schema_version'), '', 'schema_version takes nothing');
select is(pg_temp.result_of('pgsched.schema_version'), 'text', 'schema_version returns a text');

-- Happy path
select is(pgsched.schema_version(), '0003', 'the newest migration is 0003');

-- Rights
select pg_temp.may_call('pgsched.schema_version', 'select pgsched.schema_version()', '0003');

select * from finish();
rollback;
