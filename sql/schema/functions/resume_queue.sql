create function pgsched.resume_queue(p_queue text)
  returns void
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
as $$
begin
  p_queue := pgsched._name('p_queue', p_queue);
  update pgsched.queues as q
     set paused = false
   where q.name = p_queue collate "default" and q.paused;
end;
$$;

comment on function pgsched.resume_queue is
  'Ends what pause_queue did; a queue that is not paused stays as it is. Raises TS400.';

revoke all on function pgsched.resume_queue from public;
