create function pgsched.reschedule_task(
    p_id bigint,
    p_run_at timestamptz,
    p_priority integer default null)
  returns void
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set enable_seqscan = off
as $$
declare
  v_fault text[] := coalesce(
    pgsched._run_at_fault(p_run_at),
    case when p_priority is not null then pgsched._priority_fault(p_priority) end);
  v_status text;
begin
  if v_fault is not null then
    raise exception using errcode = 'TS400', message = 'p_' || v_fault[1], hint = v_fault[2];
  end if;

  -- The row first, which may have to wait and gives this transaction its id; then the clock.
  loop
    select t.status into v_status
      from pgsched.scheduled_tasks as t
     where t.id = p_id
       for no key update;
    exit when v_status = 'queued';

    -- Queued, and yet not found above: it came back between the two statements.
    v_status := pgsched._status(p_id);
    if v_status <> 'queued' then
      perform pgsched._raise_wrong_state(
        p_id, v_status, 'Only a queued task can be rescheduled.');
    end if;
  end loop;

  update pgsched.scheduled_tasks as t
     set run_at = greatest(p_run_at, clock_timestamp()),
         priority = coalesce(p_priority, t.priority)
   where t.id = p_id;
end;
$$;

comment on function pgsched.reschedule_task is
  'Moves a queued task to p_run_at (null or past: now) and to p_priority (null: as it is). Waits '
  'for a transaction that changes the task. Raises TS400, TS404 (no such task), TS423 (it is not '
  'queued).';

revoke all on function pgsched.reschedule_task from public;
