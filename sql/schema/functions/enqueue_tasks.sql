-- Tasks with a unique key are added in the order of their keys, so that two batches with the same
-- keys cannot deadlock.
create function pgsched.enqueue_tasks(p_tasks jsonb)
  returns setof bigint
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set enable_seqscan = off
  set jit = off
as $$
declare
  v_fault record;
  v_now timestamptz;
  v_ids bigint[];
  v_task record;
begin
  if (jsonb_typeof(p_tasks) = 'array') is not true then
    raise exception using
      errcode = 'TS400',
      message = 'p_tasks is not a JSON array',
      hint = 'Give an array of objects with the arguments of enqueue_task, without p_.';
  end if;

  select f.ordinal, f.fault into v_fault from pgsched._field_fault(p_tasks) as f;
  if not found then
    select f.ordinal, f.fault
      into v_fault
      from (select t.ordinal,
                   pgsched._task_fault(
                     t.task_type, octet_length(t.payload::text), t.queue, t.run_at, t.priority,
                     t.max_attempts, t.unique_key, t.concurrency_key,
                     coalesce(q.max_payload_bytes, 1048576)) as fault
              from pgsched._tasks_of(p_tasks) as t
              left join pgsched.queues as q on q.name = t.queue) as f
     where f.fault is not null
     order by f.ordinal
     limit 1;
  end if;
  if found then
    raise exception using
      errcode = 'TS400',
      message = format('p_tasks[%s]: %s', v_fault.ordinal - 1, v_fault.fault[1]),
      hint = v_fault.fault[2];
  end if;

  -- The id of this transaction first, then the clock: a queued row is never older than its writer.
  perform pg_current_xact_id();
  v_now := clock_timestamp();
  v_ids := array(
    select nextval('pgsched.scheduled_tasks_id_seq')
      from generate_series(1, jsonb_array_length(p_tasks)));

  insert into pgsched.scheduled_tasks (
         id, queue, task_type, payload, priority, run_at, max_attempts, concurrency_key,
         created_at)
  select v_ids[t.ordinal], t.queue, t.task_type, t.payload, t.priority,
         greatest(t.run_at, v_now), coalesce(t.max_attempts, q.max_attempts, 20),
         t.concurrency_key, v_now
    from pgsched._tasks_of(p_tasks) as t
    left join pgsched.queues as q on q.name = t.queue
   where t.unique_key is null
   order by t.ordinal;

  for v_task in
    select t.*, greatest(t.run_at, v_now) as due_at,
           coalesce(t.max_attempts, q.max_attempts, 20)::integer as attempts
      from pgsched._tasks_of(p_tasks) as t
      left join pgsched.queues as q on q.name = t.queue
     where t.unique_key is not null
     order by t.queue, t.unique_key, t.ordinal
  loop
    v_ids[v_task.ordinal] := pgsched._add_unique(
      v_ids[v_task.ordinal], v_task.task_type, v_task.payload, v_task.queue, v_task.due_at,
      v_task.priority::integer, v_task.attempts, v_task.unique_key, v_task.concurrency_key, v_now);
  end loop;

  perform pg_notify(pgsched.notify_channel(l.queue), '')
     from (select distinct s.queue from pgsched.listeners as s) as l
     left join pgsched.queues as q on q.name = l.queue
    where coalesce(q.notify, true)
      and exists (
          select
            from pgsched._tasks_of(p_tasks) as t
           where t.queue = l.queue and (t.run_at > v_now) is not true);

  return query select i.id from unnest(v_ids) as i (id);
end;
$$;

comment on function pgsched.enqueue_tasks is
  'Adds many tasks, all or none, and returns their ids in the order given. p_tasks: an array of '
  'objects with the arguments of enqueue_task, without p_; what is left out has its default. '
  'Raises TS400 naming the element.';

revoke all on function pgsched.enqueue_tasks from public;

create function pgsched._is_time(p_text text)
  returns boolean
  language plpgsql
  stable
as $$
begin
  return p_text::timestamptz is not null;
exception
  when invalid_datetime_format or datetime_field_overflow or invalid_parameter_value
    or invalid_time_zone_displacement_value then
    return false;
end;
$$;

comment on function pgsched._is_time is
  'Whether PostgreSQL reads the text as a timestamptz.';

revoke all on function pgsched._is_time from public;

create function pgsched._field_fault(p_tasks jsonb)
  returns table (ordinal bigint, fault text[])
  language sql
  stable
as $$
  select f.ordinal,
         case
           when f.key is null then
             array['not an object', 'Give the arguments of enqueue_task, without p_.']
           when f.expected is null then
             array[quote_ident(left(f.key, 80)) || ' is not a field of a task',
                   'Give the arguments of enqueue_task, without p_.']
           else
             array[f.key || ' is not ' || f.expected || ': ' || left(f.value::text, 80),
                   'Leave it out for its default.']
         end
    from (select e.ordinal, g.key, g.value, jsonb_typeof(g.value) as type,
                 case
                   when g.key in ('task_type', 'queue') then 'a string'
                   when g.key in ('unique_key', 'concurrency_key') then 'a string or null'
                   when g.key = 'run_at' then 'a time as a string, or null'
                   when g.key = 'priority' then 'a number'
                   when g.key = 'max_attempts' then 'a number or null'
                   when g.key = 'payload' then 'JSON'
                 end as expected
            from jsonb_array_elements(p_tasks) with ordinality as e (task, ordinal)
            left join lateral jsonb_each(
                   case when jsonb_typeof(e.task) = 'object' then e.task else '{}' end) as g
              on true
           where e.task <> '{}') as f
   where case f.expected
           when 'a string' then f.type = 'string'
           when 'a string or null' then f.type in ('string', 'null')
           when 'a time as a string, or null' then
             f.type = 'null' or f.type = 'string' and pgsched._is_time(f.value #>> '{}')
           when 'a number' then f.type = 'number'
           when 'a number or null' then f.type in ('number', 'null')
           when 'JSON' then true
           else false
         end is not true
   order by f.ordinal, f.key
   limit 1
$$;

comment on function pgsched._field_fault is
  'The first element of an array that is not an object with the fields of a task in the right '
  'JSON types: what is wrong, and a hint. No row: all are.';

revoke all on function pgsched._field_fault from public;

create function pgsched._tasks_of(p_tasks jsonb)
  returns table (
    ordinal bigint, task_type text, payload jsonb, queue text, run_at timestamptz,
    priority numeric, max_attempts numeric, unique_key text, concurrency_key text)
  language sql
  stable
as $$
  select e.ordinal, e.task ->> 'task_type', coalesce(e.task -> 'payload', '{}'),
         coalesce(e.task ->> 'queue', 'default'), (e.task ->> 'run_at')::timestamptz,
         coalesce((e.task ->> 'priority')::numeric, 5), (e.task ->> 'max_attempts')::numeric,
         e.task ->> 'unique_key', e.task ->> 'concurrency_key'
    from jsonb_array_elements(p_tasks) with ordinality as e (task, ordinal)
$$;

comment on function pgsched._tasks_of is
  'The fields of tasks in JSON that have the right types, with their defaults.';

revoke all on function pgsched._tasks_of from public;
