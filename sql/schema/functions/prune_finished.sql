-- Bounded by rows and by time, since a row may have a large payload to delete: the steps grow while
-- they are fast. Finding what is old is not counted: it takes longer while a snapshot keeps deleted
-- rows, and each call has to get further. Each pair of status and queue is found by skipping
-- through the index, and they are taken in random order, so that one that never ends does not keep
-- the others waiting.
create function pgsched.prune_finished(p_limit integer default 10000)
  returns bigint
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set enable_seqscan = off
  set jit = off
as $$
declare
  v_now timestamptz := clock_timestamp();
  v_time_left interval := interval '0.5 seconds';
  v_start timestamptz;
  v_kind record;
  v_ids bigint[];
  v_from integer;
  v_step integer := 1;
  v_deleted bigint := 0::bigint;
begin
  if (p_limit between 1 and 100000) is not true then
    raise exception using
      errcode = 'TS400',
      message = format('p_limit is out of range: %s', coalesce(p_limit::text, 'null')),
      hint = 'Give 1 to 100000.';
  end if;
  if current_setting('transaction_read_only')::boolean then
    perform pgsched._raise_read_only();
  end if;

  for v_kind in
    with recursive kinds as (
      (select f.status, f.queue
         from pgsched.finished_tasks as f
        order by f.status, f.queue
        limit 1)
       union all
      select n.status, n.queue
        from kinds as k
       cross join lateral (
             select f.status, f.queue
               from pgsched.finished_tasks as f
              where (f.status, f.queue) > (k.status, k.queue)
              order by f.status, f.queue
              limit 1) as n)
    select k.status, k.queue,
           v_now - interval '1 second' * date_part(
             'epoch',
             case when k.status = 'completed' then coalesce(q.keep_completed, '1 day')
                  else coalesce(q.keep_failed, '30 days')
             end) as finished_before
      from kinds as k
      left join pgsched.queues as q on q.name = k.queue
     order by random()
  loop
    v_ids := array(
      select f.id
        from pgsched.finished_tasks as f
       where f.status = v_kind.status and f.queue = v_kind.queue
         and f.finished_at < v_kind.finished_before
       order by f.finished_at, f.id
       limit p_limit - v_deleted
         for update skip locked);
    v_start := clock_timestamp();
    v_from := 1;
    while v_from <= cardinality(v_ids) loop
      delete from pgsched.finished_tasks as f
       where f.id = any (v_ids[v_from : v_from + v_step - 1]);
      v_deleted := v_deleted + least(v_step, cardinality(v_ids) - v_from + 1);
      if clock_timestamp() > v_start + v_time_left then
        return v_deleted;
      end if;
      v_from := v_from + v_step;
      v_step := least(2 * v_step, 100);
    end loop;
    v_time_left := v_time_left - (clock_timestamp() - v_start);
    exit when v_deleted = p_limit or clock_timestamp() > v_now + interval '1 second';
  end loop;
  return v_deleted;
end;
$$;

comment on function pgsched.prune_finished is
  'Deletes finished tasks that are older than their queue keeps them, at most p_limit (1 to '
  '100000) and for about half a second, and says how many. Call it again while it returns more '
  'than 0. Passes by rows that another session has locked. Raises TS400.';

revoke all on function pgsched.prune_finished from public;
