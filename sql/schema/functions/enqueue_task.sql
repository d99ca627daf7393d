create function pgsched.enqueue_task(
    p_task_type text,
    p_payload jsonb default '{}',
    p_queue text default 'default',
    p_run_at timestamptz default null,
    p_priority integer default 5,
    p_max_attempts integer default null,
    p_unique_key text default null,
    p_concurrency_key text default null)
  returns bigint
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set enable_seqscan = off
as $$
declare
  v_default_attempts integer;
  v_max_payload integer;
  v_now timestamptz;
  v_id bigint;
begin
  p_task_type := pgsched._name('p_task_type', p_task_type);
  p_queue := pgsched._name('p_queue', p_queue);
  if p_unique_key is not null then
    p_unique_key := pgsched._name('p_unique_key', p_unique_key);
  end if;
  if p_concurrency_key is not null then
    p_concurrency_key := pgsched._name('p_concurrency_key', p_concurrency_key);
  end if;
  p_run_at := pgsched._run_at(p_run_at);
  if (p_priority between 0 and 9) is not true then
    raise exception using
      errcode = 'TS400',
      message = format('p_priority is out of range: %s', coalesce(p_priority::text, 'null')),
      hint = 'Give 0 (first) to 9 (last).';
  end if;
  if p_max_attempts < 1 then
    raise exception using
      errcode = 'TS400',
      message = format('p_max_attempts is out of range: %s', p_max_attempts),
      hint = 'Give at least 1, or null for the default of the queue.';
  end if;

  select q.max_attempts, q.max_payload_bytes
    into v_default_attempts, v_max_payload
    from pgsched.queues as q
   where q.name = p_queue;
  if (octet_length(p_payload::text) <= coalesce(v_max_payload, 1048576)) is not true then
    raise exception using
      errcode = 'TS400',
      message = case
                  when p_payload is null then 'p_payload must not be null'
                  else format('p_payload is %s bytes long, the limit of the queue is %s',
                              octet_length(p_payload::text), coalesce(v_max_payload, 1048576))
                end,
      hint = 'Give JSON; store large data elsewhere and enqueue a reference to it.';
  end if;

  -- The id of this transaction first, then the clock: a queued row is never older than its writer.
  perform pg_current_xact_id();
  v_now := clock_timestamp();

  loop
    insert into pgsched.scheduled_tasks as t (
           queue, task_type, payload, priority, run_at, max_attempts, unique_key,
           concurrency_key, created_at)
    values (p_queue, p_task_type, p_payload, p_priority, greatest(p_run_at, v_now),
           coalesce(p_max_attempts, v_default_attempts, 20), p_unique_key,
           p_concurrency_key, v_now)
    on conflict (queue, unique_key) where unique_key is not null do nothing
    returning t.id into v_id;
    exit when found;

    -- Not found means that the task that had the key ended between the two statements.
    select t.id into v_id
      from pgsched.scheduled_tasks as t
     where t.queue = p_queue and t.unique_key = p_unique_key;
    exit when found;
  end loop;
  return v_id;
end;
$$;

comment on function pgsched.enqueue_task is
  'Adds a task and returns its id; with a unique key that a live task of the queue already has, '
  'returns the id of that task and changes nothing. Part of the caller''s transaction. '
  'p_run_at: null or a past time means now. Raises TS400.';

revoke all on function pgsched.enqueue_task from public;
