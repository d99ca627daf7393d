create function pgsched.notify_channel(p_queue text)
  returns text
  language sql
  immutable
  security definer
  set search_path = pg_catalog, pg_temp
as $$
  select 'pgsched_' || to_hex(hashtextextended(pgsched._name('p_queue', p_queue), 0))
$$;

comment on function pgsched.notify_channel is
  'The channel to LISTEN to for new tasks of a queue: a hash, since a name of 63 bytes leaves no '
  'room for a prefix. A listener says so by register_listener. Raises TS400.';

revoke all on function pgsched.notify_channel from public;
