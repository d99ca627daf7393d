-- Takes no advisory lock and waits for no row: one handler's open transaction must not hold up the
-- completions of all other tasks of its process.
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
begin
  perform pgsched._check_batch(p_ids, p_claim_tokens);
  perform pgsched._check_column('p_results', p_results, p_ids);

  return query
  with given as materialized (
    select g.id, g.claim_token, g.result, g.position,
           row_number() over (partition by g.id, g.claim_token order by g.position) as repetition
      from unnest(p_ids, p_claim_tokens, p_results)
             with ordinality as g (id, claim_token, result, position)),
  locked as materialized (
    select t.id
      from pgsched.scheduled_tasks as t
     where t.id = any (p_ids)
       and exists (
           select from given as g where g.id = t.id and g.claim_token = t.claim_token)
     order by t.id
       for update of t skip locked),
  ended as (
    delete from pgsched.scheduled_tasks as t
     where t.id = any (array(select l.id from locked as l))
    returning t.*),
  kept as (
    insert into pgsched.finished_tasks (
           id, queue, task_type, payload, status, priority, run_at, attempt, max_attempts,
           claim_token, claimed_by, claimed_at, lease_expires_at, unique_key, concurrency_key,
           cancel_requested_at, last_error, created_at, finished_at, result)
    select e.id, e.queue, e.task_type, e.payload, 'completed', e.priority, e.run_at, e.attempt,
           e.max_attempts, e.claim_token, e.claimed_by, e.claimed_at, e.lease_expires_at,
           e.unique_key, e.concurrency_key, e.cancel_requested_at, e.last_error, e.created_at,
           clock_timestamp(), g.result
      from ended as e
      join given as g on g.id = e.id and g.claim_token = e.claim_token and g.repetition = 1
     where not exists (
           select
             from pgsched.queues as q
            where q.name = e.queue and date_part('epoch', q.keep_completed) = 0))
  select g.id,
         case
           when e.id is not null and g.repetition = 1 then 'completed'
           when e.id is not null then 'already'
           when t.claim_token = g.claim_token then 'busy'
           when f.claim_token = g.claim_token and f.status = 'completed' then 'already'
           when t.id is not null or f.id is not null then 'stale'
           else 'gone'
         end
    from given as g
    left join ended as e on e.id = g.id and e.claim_token = g.claim_token
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
