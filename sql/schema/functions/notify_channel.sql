create function pgsched.notify_channel(p_queue text)
  returns text
  language sql
  immutable
  security definer
  set search_path = pg_catalog, pg_temp
as $$
  -- An argument may bring a collation by which other names have the same hash.
  select 'pgsched_'
         || to_hex(hashtextextended(pgsched._name('p_queue', p_queue) collate "default", 0))
$$;

comment on function pgsched.notify_channel is
  'The channel to LISTEN to for new tasks of a queue: a hash, since a name of 63 bytes leaves no '
  'room for a prefix. A listener says so by register_listener. Raises TS400.';

revoke all on function pgsched.notify_channel from public;

create function pgsched._notify(p_queues text[])
  returns void
  language sql
as $$
  select pg_notify(pgsched.notify_channel(l.queue), '')
    from (select distinct s.queue
            from pgsched.listeners as s
           where s.queue = any (p_queues)) as l
    left join pgsched.queues as q on q.name = l.queue
   where coalesce(q.notify, true)
$$;

comment on function pgsched._notify is
  'Wakes the listeners of these queues when the caller''s transaction commits.';

revoke all on function pgsched._notify from public;
