create function pgsched.register_listener(p_worker_id bigint, p_queues text[])
  returns void
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set enable_seqscan = off
  set lock_timeout = '200 ms'
as $$
begin
  perform pgsched._name('p_queues', q.name) from unnest(p_queues) as q (name);
  if p_queues is null or array_ndims(p_queues) > 1 then
    raise exception using
      errcode = 'TS400',
      message = 'p_queues is not a list of queues',
      hint = 'Give the queues that the worker listens for, an empty array for none.';
  end if;
  perform from pgsched.workers as w where w.id = p_worker_id for key share;
  if not found then
    raise exception using
      errcode = 'TS404',
      message = format('there is no worker %s', coalesce(p_worker_id::text, 'null')),
      hint = 'Call register_worker first, and again when its row was deleted.';
  end if;

  delete from pgsched.listeners as l
   where l.worker_id = p_worker_id and l.queue <> all (p_queues collate "default");
  insert into pgsched.listeners (queue, worker_id)
  select distinct q.name, p_worker_id
    from unnest(p_queues collate "default") as q (name)
   order by q.name
      on conflict do nothing;
end;
$$;

comment on function pgsched.register_listener is
  'Says for which queues a registered worker listens now, on notify_channel of each; an empty '
  'array: for none. Enqueuing then sends a NOTIFY to these queues. A row ends with its worker''s. '
  'Raises TS400, TS404 (no such worker).';

revoke all on function pgsched.register_listener from public;
