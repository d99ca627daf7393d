create function pgsched.get_task(p_id bigint)
  returns table (
    id bigint, queue text, task_type text, payload jsonb, status text, priority smallint,
    run_at timestamptz, attempt integer, max_attempts integer, claimed_by text,
    claimed_at timestamptz, lease_expires_at timestamptz, unique_key text, concurrency_key text,
    cancel_requested_at timestamptz, last_error text, created_at timestamptz,
    finished_at timestamptz, result jsonb)
  language plpgsql
  stable
  security definer
  set search_path = pg_catalog, pg_temp
  set enable_seqscan = off
as $$
begin
  return query
  select t.id, t.queue, t.task_type, t.payload, t.status, t.priority, t.run_at, t.attempt,
         t.max_attempts, t.claimed_by, t.claimed_at, t.lease_expires_at, t.unique_key,
         t.concurrency_key, t.cancel_requested_at, t.last_error, t.created_at, t.finished_at,
         t.result
    from pgsched.tasks as t
   where t.id = p_id;
  if not found then
    perform pgsched._raise_no_task(p_id);
  end if;
end;
$$;

comment on function pgsched.get_task is
  'One task, live or finished, with all that the view tasks shows but the claim_token, which would '
  'give power over the claim. Raises TS400, TS404 (no such task).';

revoke all on function pgsched.get_task from public;
