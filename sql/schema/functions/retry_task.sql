create function pgsched.retry_task(p_id bigint)
  returns bigint
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set enable_seqscan = off
as $$
declare
  v_task pgsched.finished_tasks;
  v_status text;
begin
  loop
    select f.* into v_task
      from pgsched.finished_tasks as f
     where f.id = p_id
       for update;
    exit when v_task.status in ('failed', 'cancelled');

    -- Failed or cancelled, and yet not found above: it ended again between the two statements.
    v_status := pgsched._status(p_id);
    if v_status not in ('failed', 'cancelled') then
      perform pgsched._raise_wrong_state(
        p_id, v_status, 'Only a failed or cancelled task can be retried.');
    end if;
  end loop;

  -- The row lock has given this transaction its id: the clock is read after that.
  delete from pgsched.finished_tasks as f where f.id = p_id;
  insert into pgsched.scheduled_tasks (
         id, queue, task_type, payload, priority, run_at, max_attempts, unique_key,
         concurrency_key, last_error, created_at)
  values (v_task.id, v_task.queue, v_task.task_type, v_task.payload, v_task.priority,
         clock_timestamp(), v_task.max_attempts, v_task.unique_key, v_task.concurrency_key,
         v_task.last_error, v_task.created_at)
  on conflict (queue, unique_key) where unique_key is not null do nothing;
  if not found then
    raise exception using
      errcode = 'TS423',
      message = format('the unique key of task %s is taken: %L in queue %L',
                       p_id, v_task.unique_key, v_task.queue),
      hint = 'Another task of the queue has it; retry this one when that one has ended.';
  end if;
  return p_id;
end;
$$;

comment on function pgsched.retry_task is
  'Makes a failed or cancelled task queued again, due now, attempts counted from 0; it keeps its '
  'id, which is returned. Raises TS400, TS404 (no such task), TS423 (it is not failed or '
  'cancelled, or its unique key is taken).';

revoke all on function pgsched.retry_task from public;
