-- What was granted is known by the rights that are there: a role has a kind when it was given all
-- of it. Who has admin has all kinds, so without it nothing is kept.
create function pgsched.revoke_access(p_role text, p_kind text)
  returns void
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set lock_timeout = '10s'
as $$
declare
  v_granted text[];
  v_routines text[];
begin
  perform pgsched._lock_access(p_role, p_kind);
  if p_role collate "C" = current_user then
    raise exception using
      errcode = 'TS400',
      message = format('role %L is the owner', p_role),
      hint = 'The functions run with its rights.';
  end if;

  v_granted := array(select pgsched._granted(p_role));
  v_routines := array(
    select 'pgsched.' || a.routine
      from pgsched._access(p_kind) as a (routine)
     where not exists (
           select
             from unnest(array['producer', 'worker', 'observer', 'admin']) as k (kind)
            where p_kind not in (k.kind, 'admin')
              and a.routine in (select pgsched._access(k.kind))
              and v_granted @> array(select pgsched._access(k.kind))));
  if v_routines <> '{}' then
    execute format('revoke execute on routine %s from %I',
                   array_to_string(v_routines, ', '), p_role);
  end if;
  if not exists (select from pgsched._granted(p_role)) then
    execute format('revoke usage on schema pgsched from %I', p_role);
  end if;
end;
$$;

comment on function pgsched.revoke_access is
  'Takes back what grant_access gave, but what another kind needs that the role has in full; admin '
  'takes all kinds with it. The use of the schema goes with the last function. Raises TS400, and '
  '55P03 when another who changes rights or the schema does not end within 10 seconds.';

revoke all on function pgsched.revoke_access from public;
