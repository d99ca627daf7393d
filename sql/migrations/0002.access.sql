-- Rights by purpose: grant_access gives a role what a producer, worker, observer or admin calls.
-- depends: 0001.initial

-- Functions, as in sql/schema/functions/: make migration writes what follows.

create or replace function pgsched.schema_version()
  returns text
  language sql
  immutable
  security definer
  set search_path = pg_catalog, pg_temp
as $$
  select '0002'
$$;

comment on function pgsched.schema_version is
  'Number of the newest migration in this database.';

revoke all on function pgsched.schema_version from public;
