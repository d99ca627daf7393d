create function pgsched.pause_queue(p_queue text)
  returns void
  language sql
  security definer
  set search_path = pg_catalog, pg_temp
as $$
  insert into pgsched.queues (name, paused)
  values (pgsched._name('p_queue', p_queue), true)
  on conflict (name) do update
     set paused = true
$$;

comment on function pgsched.pause_queue is
  'From its commit on, claim_task returns nothing from the queue; enqueuing and running tasks go '
  'on. Raises TS400.';

revoke all on function pgsched.pause_queue from public;
