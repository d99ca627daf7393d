create function pgsched.list_workers()
  returns table (
    id bigint, name text, queues text[], slots integer, started_at timestamptz,
    seen_at timestamptz, running bigint, presence boolean)
  language sql
  stable
  security definer
  set search_path = pg_catalog, pg_temp
as $$
  select w.id, w.name, w.queues, w.slots, w.started_at, w.seen_at,
         coalesce(r.tasks, 0), w.presence
    from pgsched.workers as w
    left join pgsched._running() as r on r.claimed_by = w.name
   order by w.id
$$;

comment on function pgsched.list_workers is
  'Every worker that registered and did not sign off, with the tasks that are claimed in its name '
  'now. presence: reap_stale would miss it within seconds. A worker that has not called '
  'register_worker for minutes is frozen, cut off or gone.';

revoke all on function pgsched.list_workers from public;
