create function pgsched.grant_access(p_role text, p_kind text)
  returns void
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set lock_timeout = '10s'
as $$
begin
  perform pgsched._lock_access(p_role, p_kind);
  execute format('grant usage on schema pgsched to %I', p_role);
  execute format('grant execute on routine %s to %I',
                 (select string_agg('pgsched.' || a.routine, ', ')
                    from pgsched._access(p_kind) as a (routine)),
                 p_role);
end;
$$;

comment on function pgsched.grant_access is
  'Lets a role call what a producer, worker, observer or admin calls, and use the schema; no right '
  'on a table. A role may be given several kinds. For the owner of the schema, and whom it lets. '
  'Raises TS400, and 55P03 when another who changes rights or the schema does not end within 10 '
  'seconds.';

revoke all on function pgsched.grant_access from public;
