create function pgsched.schema_version()
  returns text
  language sql
  immutable
  security definer
  set search_path = pg_catalog, pg_temp
as $$
  select '0003'
$$;

comment on function pgsched.schema_version is
  'Number of the newest migration in this database.';

revoke all on function pgsched.schema_version from public;
