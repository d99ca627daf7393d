-- What grant_access and revoke_access share. All run inside functions that pin search_path.

-- The one list of who may call what. An admin may call all of it, and nobody may change rights but
-- the owner of the schema.
create function pgsched._access(p_kind text)
  returns setof text
  language sql
  immutable
as $$
  select r.routine
    from (values
      ('enqueue_task', '{producer}'),
      ('enqueue_tasks', '{producer}'),
      ('claim_task', '{worker}'),
      ('hold_task', '{worker}'),
      ('extend_task', '{worker}'),
      ('extend_tasks', '{worker}'),
      ('complete_task', '{worker}'),
      ('complete_tasks', '{worker}'),
      ('fail_task', '{worker}'),
      ('fail_tasks', '{worker}'),
      ('release_task', '{worker}'),
      ('release_tasks', '{worker}'),
      ('register_worker', '{worker}'),
      ('hold_presence', '{worker}'),
      ('unregister_worker', '{worker}'),
      ('notify_channel', '{worker}'),
      ('register_listener', '{worker}'),
      ('reap_stale', '{worker}'),
      ('prune_finished', '{worker}'),
      ('maintain', '{worker}'),
      ('queue_stats', '{worker,observer}'),
      ('server_stats', '{worker,observer}'),
      ('diagnose', '{worker,observer}'),
      ('get_task', '{observer}'),
      ('list_workers', '{observer}'),
      ('recent_rates', '{observer}'),
      ('schema_version', '{producer,worker,observer}'),
      ('cancel_task', '{}'),
      ('retry_task', '{}'),
      ('reschedule_task', '{}'),
      ('configure_queue', '{}'),
      ('pause_queue', '{}'),
      ('resume_queue', '{}')) as r (routine, kinds)
   where p_kind = any (r.kinds::text[]) or p_kind = 'admin'
$$;

comment on function pgsched._access is
  'The functions and procedures that a kind of access is made of; none: there is no such kind.';

revoke all on function pgsched._access from public;

create function pgsched._granted(p_role text)
  returns setof text
  language sql
  stable
as $$
  select p.proname::text
    from pg_proc as p
   cross join aclexplode(p.proacl) as a
   where p.pronamespace = 'pgsched'::regnamespace
     and a.grantee = (select r.oid from pg_roles as r where r.rolname = p_role collate "C")
$$;

comment on function pgsched._granted is
  'The functions and procedures that the role itself was given, by whatever kind or by hand.';

revoke all on function pgsched._granted from public;

-- Of two who change the rights on one function at once PostgreSQL refuses one, and so it does when
-- an installer replaces the function: they wait for each other.
create function pgsched._lock_access(p_role text, p_kind text)
  returns void
  language plpgsql
as $$
begin
  if current_setting('transaction_read_only')::boolean then
    perform pgsched._raise_read_only();
  end if;
  if not exists (select from pg_roles as r where r.rolname = p_role collate "C") then
    raise exception using
      errcode = 'TS400',
      message = 'there is no role ' || coalesce(quote_literal(left(p_role, 80)), 'null'),
      hint = 'Give the name of a role as pg_roles has it: without quotes, and not PUBLIC.';
  end if;
  if not exists (select from pgsched._access(p_kind)) then
    raise exception using
      errcode = 'TS400',
      message = 'p_kind is not a kind of access: '
                || coalesce(quote_literal(left(p_kind, 80)), 'null'),
      hint = 'Give producer, worker, observer or admin.';
  end if;
  perform pg_advisory_xact_lock(1338, 1);
end;
$$;

comment on function pgsched._lock_access is
  'Keeps others from changing rights, and the schema, until the transaction ends; TS400 unless '
  'role and kind exist, 25006 in a read-only transaction.';

revoke all on function pgsched._lock_access from public;
