create function pgsched.register_worker(
    p_name text, p_queues text[], p_slots integer, p_presence boolean default false)
  returns bigint
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
as $$
declare
  v_now timestamptz := clock_timestamp();
  v_id bigint;
begin
  p_name := pgsched._name('p_name', p_name);
  perform pgsched._name('p_queues', q.name) from unnest(p_queues) as q (name);
  if (array_ndims(p_queues) = 1 and p_slots >= 1 and p_presence is not null) is not true then
    raise exception using
      errcode = 'TS400',
      message = 'p_queues is not a list of queues, p_slots is below 1, or p_presence is null',
      hint = 'Give the queues that the worker serves, how many tasks it runs at once, and whether '
             'it holds its presence.';
  end if;

  -- Not by an upsert, which would wait for an open reap_stale that suspects this worker, and the
  -- worker's leases with it. A presence counts where it is to be seen: not that of another server
  -- or database, and not that of the id that the worker had before its row was deleted.
  select w.id into v_id
    from pgsched.workers as w
   where w.name = p_name collate "default"
     for no key update nowait;
  if found then
    update pgsched.workers as w
       set queues = p_queues, slots = p_slots, seen_at = v_now, suspect_since = null,
           presence = p_presence
                      and (w.id % 2147483647)::integer::oid in (select pgsched._presences())
     where w.id = v_id;
  else
    insert into pgsched.workers as w (name, queues, slots, started_at, seen_at)
    values (p_name, p_queues, p_slots, v_now, v_now)
    on conflict (name) do update set seen_at = excluded.seen_at
    returning w.id into v_id;
  end if;

  -- A killed worker cannot sign off: nobody needs its row after a day, and nobody waits for its
  -- NOTIFY after 5 minutes. In this order, own row first, calls at the same time cannot deadlock.
  delete from pgsched.workers as w
   where w.id in (
         select o.id
           from pgsched.workers as o
          where o.seen_at < v_now - interval '1 day'
          order by o.id
            for update skip locked);
  delete from pgsched.listeners as l
   where (l.queue, l.worker_id) in (
         select o.queue, o.worker_id
           from pgsched.listeners as o
           join pgsched.workers as w on w.id = o.worker_id
          where w.seen_at < v_now - interval '5 minutes'
          order by o.queue, o.worker_id
            for update of o skip locked);
  return v_id;
end;
$$;

comment on function pgsched.register_worker is
  'Says that a worker process is there and returns the id of its row; a worker repeats it about '
  'every minute. p_presence: it holds its presence now (hold_presence), which is noted if a '
  'session of this database does; to be said at once when that changes. Deletes on the way who was '
  'not seen for a day, and listeners not seen for 5 minutes. Raises TS400, and 55P03 while another '
  'session has the row locked.';

revoke all on function pgsched.register_worker from public;
