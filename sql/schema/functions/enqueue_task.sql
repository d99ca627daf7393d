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
  v_settings record;
  v_fault text[];
  v_now timestamptz;
  v_id bigint;
  v_heard boolean;
begin
  -- An argument may bring a collation, by which the indexes are not sorted.
  select q.max_attempts, q.max_payload_bytes, q.notify
    into v_settings
    from pgsched.queues as q
   where q.name = p_queue collate "default";
  if (pgsched._is_name(p_task_type) and pgsched._is_name(p_queue)
      and coalesce(pgsched._is_name(p_unique_key), true)
      and coalesce(pgsched._is_name(p_concurrency_key), true)
      and coalesce(p_run_at > '-infinity' and p_run_at < '9999-01-01 00:00:00+00', true)
      and p_priority between 0 and 9
      and coalesce(p_max_attempts >= 1, true)
      and octet_length(p_payload::text)
            <= coalesce(v_settings.max_payload_bytes, 1048576)) is not true then
    v_fault := pgsched._task_fault(
      p_task_type, octet_length(p_payload::text), p_queue, p_run_at, p_priority, p_max_attempts,
      p_unique_key, p_concurrency_key, coalesce(v_settings.max_payload_bytes, 1048576));
    raise exception using errcode = 'TS400', message = 'p_' || v_fault[1], hint = v_fault[2];
  end if;

  -- The id of this transaction first, then the clock: a queued row is never older than its writer.
  v_now := case when pg_current_xact_id() is not null then clock_timestamp() end;
  p_run_at := greatest(p_run_at, v_now);
  p_max_attempts := coalesce(p_max_attempts, v_settings.max_attempts, 20);

  if p_unique_key is not null then
    v_id := pgsched._add_unique(
      nextval('pgsched.scheduled_tasks_id_seq'), p_task_type, p_payload, p_queue, p_run_at,
      p_priority, p_max_attempts, p_unique_key, p_concurrency_key, v_now);
    v_heard := exists (
      select
        from pgsched.listeners as l
       where l.queue = p_queue collate "default");
  else
    insert into pgsched.scheduled_tasks as t (
           queue, task_type, payload, priority, run_at, max_attempts, concurrency_key, created_at)
    values (p_queue, p_task_type, p_payload, p_priority, p_run_at, p_max_attempts,
           p_concurrency_key, v_now)
    returning t.id, exists (select from pgsched.listeners as l where l.queue = t.queue)
         into v_id, v_heard;
  end if;

  if v_heard and p_run_at = v_now and v_settings.notify is not false then
    perform pg_notify(pgsched.notify_channel(p_queue), '');
  end if;
  return v_id;
end;
$$;

comment on function pgsched.enqueue_task is
  'Adds a task and returns its id; with a unique key that a live task of the queue already has, '
  'returns the id of that task and changes nothing. Part of the caller''s transaction. '
  'p_run_at: null or a past time means now. Raises TS400.';

revoke all on function pgsched.enqueue_task from public;

create function pgsched._add_unique(
    p_id bigint, p_task_type text, p_payload jsonb, p_queue text, p_run_at timestamptz,
    p_priority integer, p_max_attempts integer, p_unique_key text, p_concurrency_key text,
    p_now timestamptz)
  returns bigint
  language plpgsql
as $$
declare
  v_id bigint;
begin
  loop
    insert into pgsched.scheduled_tasks as t (
           id, queue, task_type, payload, priority, run_at, max_attempts, unique_key,
           concurrency_key, created_at)
    values (p_id, p_queue, p_task_type, p_payload, p_priority, p_run_at, p_max_attempts,
           p_unique_key, p_concurrency_key, p_now)
    on conflict (queue, unique_key) where unique_key is not null do nothing
    returning t.id into v_id;
    exit when found;

    -- Not found means that the task that had the key ended between the two statements.
    select t.id into v_id
      from pgsched.scheduled_tasks as t
     where t.queue = p_queue collate "default"
       and t.unique_key = p_unique_key collate "default";
    exit when found;
  end loop;
  return v_id;
end;
$$;

comment on function pgsched._add_unique is
  'Adds a checked task with a unique key, or finds the live task that has the key; returns its id.';

revoke all on function pgsched._add_unique from public;
