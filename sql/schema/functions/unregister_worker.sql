create function pgsched.unregister_worker(p_id bigint)
  returns void
  language sql
  security definer
  set search_path = pg_catalog, pg_temp
as $$
  delete from pgsched.workers as w where w.id = p_id
$$;

comment on function pgsched.unregister_worker is
  'Says that a worker process ends; an unknown id changes nothing.';

revoke all on function pgsched.unregister_worker from public;
