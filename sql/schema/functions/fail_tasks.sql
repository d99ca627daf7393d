-- Takes no advisory lock and waits for no row: one handler's open transaction must not hold up what
-- became of all other tasks of its process.
create function pgsched.fail_tasks(
    p_ids bigint[],
    p_claim_tokens uuid[],
    p_errors text[],
    p_retry_in interval[] default null,
    p_permanent boolean[] default null)
  returns table (id bigint, outcome text, run_at timestamptz)
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan
  set enable_seqscan = off
  set jit = off
as $$
#variable_conflict use_column
declare
  v_retry_seconds double precision[];
  v_locked bigint[];
begin
  perform pgsched._check_batch(p_ids, p_claim_tokens);
  perform pgsched._check_column('p_errors', p_errors, p_ids);
  perform pgsched._check_column('p_retry_in', p_retry_in, p_ids);
  perform pgsched._check_column('p_permanent', p_permanent, p_ids);
  v_retry_seconds := array(
    select pgsched._delay_seconds('p_retry_in', r.retry_in)
      from unnest(p_retry_in) with ordinality as r (retry_in, position)
     order by r.position);
  v_locked := pgsched._lock_claims(p_ids, p_claim_tokens);

  return query
  with given as materialized (
    select g.*,
           row_number() over (partition by g.id, g.claim_token order by g.position) as repetition
      from unnest(p_ids, p_claim_tokens, p_errors, v_retry_seconds, p_permanent)
             with ordinality
             as g (id, claim_token, error, retry_seconds, permanent, position)),
  current as materialized (
    select g.*
      from given as g
      join pgsched.scheduled_tasks as t on t.id = g.id and t.claim_token = g.claim_token
     where t.id = any (v_locked) and g.repetition = 1),
  ended as materialized (
    select c.position, e.status, e.run_at
      from pgsched._end_attempts(
             array(select c.id from current as c order by c.position),
             array(select c.error from current as c order by c.position),
             array(select c.retry_seconds from current as c order by c.position),
             array(select c.permanent from current as c order by c.position)) as e
      join current as c on c.id = e.id)
  select g.id,
         case
           when e.position is not null then e.status
           when t.claim_token = g.claim_token and g.id <> all (v_locked) then 'busy'
           when t.id is not null or f.id is not null then 'stale'
           else 'gone'
         end,
         e.run_at
    from given as g
    left join ended as e on e.position = g.position
    left join (
         select s.id, s.claim_token
           from pgsched.scheduled_tasks as s
          where s.id = any (p_ids)) as t on t.id = g.id
    left join (
         select s.id from pgsched.finished_tasks as s where s.id = any (p_ids)) as f on f.id = g.id
   order by g.position;
end;
$$;

comment on function pgsched.fail_tasks is
  'Ends many claims without success and answers in the order given. queued, failed, cancelled: as '
  'fail_task; stale: the claim is not current, nothing was changed; gone: no such task; busy: '
  'another transaction has the row locked, nothing was changed, try again. Raises TS400.';

revoke all on function pgsched.fail_tasks from public;
