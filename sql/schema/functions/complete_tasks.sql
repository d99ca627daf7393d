-- Takes no advisory lock and waits for no row: one handler's open transaction must not hold up the
-- completions of all other tasks of its process. A locked row is found again by its place; one that
-- was changed since the snapshot is not, and stays, as busy.
create function pgsched.complete_tasks(
    p_ids bigint[],
    p_claim_tokens uuid[],
    p_results jsonb[] default null)
  returns table (id bigint, outcome text)
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan
  set enable_seqscan = off
  set jit = off
as $$
#variable_conflict use_column
declare
  -- Positions in p_ids.
  v_ended bigint[];
begin
  -- Between two calls of reap_stale more may die than claims should read past. An isolation level
  -- above could make a completion fail for it.
  if random() < 1.0 / 16 and current_setting('transaction_isolation') = 'read committed' then
    perform pgsched._move_claim_marks(array(
      select distinct t.queue from pgsched.scheduled_tasks as t where t.id = any (p_ids)));
  end if;
  perform pgsched._check_batch(p_ids, p_claim_tokens);
  perform pgsched._check_column('p_results', p_results, p_ids);

  with locked as materialized (
    select t.ctid as place, g.result, g.position
      from pgsched.scheduled_tasks as t
      join (select distinct on (u.id, u.claim_token) u.*
              from unnest(p_ids, p_claim_tokens, p_results)
                     with ordinality as u (id, claim_token, result, position)
             order by u.id, u.claim_token, u.position) as g
        on g.id = t.id and g.claim_token = t.claim_token
     where t.id = any (p_ids)
     order by t.id
       for update of t skip locked),
  ended as (
    delete from pgsched.scheduled_tasks as t
     using locked as l
     where t.ctid = l.place
    returning t.*, l.result, l.position),
  kept as (
    insert into pgsched.finished_tasks (
           id, queue, task_type, payload, status, priority, run_at, attempt, max_attempts,
           claim_token, claimed_by, claimed_at, lease_expires_at, unique_key, concurrency_key,
           cancel_requested_at, last_error, created_at, finished_at, result)
    select e.id, e.queue, e.task_type, e.payload, 'completed', e.priority, e.run_at, e.attempt,
           e.max_attempts, e.claim_token, e.claimed_by, e.claimed_at, e.lease_expires_at,
           e.unique_key, e.concurrency_key, e.cancel_requested_at, e.last_error, e.created_at,
           clock_timestamp(), e.result
      from ended as e
     where e.queue <> all (array(
           select q.name
             from pgsched.queues as q
            where q.name in (select n.queue from ended as n)
              and date_part('epoch', q.keep_completed) = 0)))
  select array(select e.position from ended as e) into v_ended;

  if cardinality(v_ended) = cardinality(p_ids) then
    return query select g.id, 'completed' from unnest(p_ids) as g (id);
    return;
  end if;

  -- What was not ended is looked up after it: a task that moves between the tables is seen in one.
  return query
  select g.id,
         case
           when g.position = any (v_ended) then 'completed'
           when e.claim_token = g.claim_token then 'already'
           when t.claim_token = g.claim_token then 'busy'
           when f.claim_token = g.claim_token and f.status = 'completed' then 'already'
           when e.id is not null or t.id is not null or f.id is not null then 'stale'
           else 'gone'
         end
    from unnest(p_ids, p_claim_tokens) with ordinality as g (id, claim_token, position)
    left join (
         select p_ids[n.position] as id, p_claim_tokens[n.position] as claim_token
           from unnest(v_ended) as n (position)) as e on e.id = g.id
    left join (
         select s.id, s.claim_token
           from pgsched.scheduled_tasks as s
          where s.id = any (p_ids)) as t on t.id = g.id
    left join (
         select s.id, s.claim_token, s.status
           from pgsched.finished_tasks as s
          where s.id = any (p_ids)) as f on f.id = g.id
   order by g.position;
end;
$$;

comment on function pgsched.complete_tasks is
  'Ends many claims with success and answers in the order given. completed; already: this same '
  'claim had completed it; stale: the claim is not current, nothing was changed; gone: no such '
  'task; busy: another transaction has the row locked, nothing was changed, try again. '
  'Raises TS400.';

revoke all on function pgsched.complete_tasks from public;
