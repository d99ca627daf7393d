-- Takes no advisory lock: it must not wait for a handler that holds its task.
create function pgsched.cancel_task(p_id bigint)
  returns text
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set enable_seqscan = off
as $$
declare
  v_status text;
begin
  loop
    select t.status into v_status
      from pgsched.scheduled_tasks as t
     where t.id = p_id
       for update;
    exit when found;

    -- Live, and yet not found above: retry_task brought it back between the two statements.
    v_status := pgsched._status(p_id);
    if v_status not in ('queued', 'processing') then
      return 'finished';
    end if;
  end loop;

  if v_status = 'queued' then
    perform pgsched._finish_tasks(array[p_id], array[null], 'cancelled', clock_timestamp());
    return 'cancelled';
  end if;
  update pgsched.scheduled_tasks as t
     set cancel_requested_at = clock_timestamp()
   where t.id = p_id and t.cancel_requested_at is null;
  return 'requested';
end;
$$;

comment on function pgsched.cancel_task is
  'cancelled: the task was queued, and is finished now. requested: it is running; its worker '
  'learns of it when it extends the lease, a fail, release or reap then ends it cancelled, a '
  'completion still completed. finished: it had ended already. Waits for a transaction that '
  'changes the task. Raises TS400, TS404 (no such task).';

revoke all on function pgsched.cancel_task from public;
