-- Takes no advisory lock and waits for no row, as fail_tasks.
create function pgsched.release_tasks(
    p_ids bigint[],
    p_claim_tokens uuid[],
    p_delay interval[] default null)
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
  v_delay_seconds double precision[];
  v_locked bigint[];
begin
  perform pgsched._check_batch(p_ids, p_claim_tokens);
  perform pgsched._check_column('p_delay', p_delay, p_ids);
  v_delay_seconds := array(
    select pgsched._delay_seconds('p_delay', d.delay)
      from unnest(p_delay) with ordinality as d (delay, position)
     order by d.position);
  v_locked := pgsched._lock_claims(p_ids, p_claim_tokens);

  return query
  with given as materialized (
    select g.*,
           row_number() over (partition by g.id, g.claim_token order by g.position) as repetition
      from unnest(p_ids, p_claim_tokens, v_delay_seconds)
             with ordinality as g (id, claim_token, delay_seconds, position)),
  current as materialized (
    select g.*
      from given as g
      join pgsched.scheduled_tasks as t on t.id = g.id and t.claim_token = g.claim_token
     where t.id = any (v_locked) and g.repetition = 1),
  ended as materialized (
    select c.position, e.status
      from pgsched._release_claims(
             array(select c.id from current as c order by c.position),
             array(
               select clock_timestamp() + c.delay_seconds * interval '1 second'
                 from current as c
                order by c.position)) as e
      join current as c on c.id = e.id)
  select g.id,
         case
           when e.position is not null then e.status
           when t.claim_token = g.claim_token and g.id <> all (v_locked) then 'busy'
           when t.id is not null or f.id is not null then 'stale'
           else 'gone'
         end
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

comment on function pgsched.release_tasks is
  'Gives many claims back and answers in the order given. queued: due after p_delay (0 to 365 '
  'days; null: now), the attempt not counted; cancelled: a cancel was requested; stale: the claim '
  'is not current, nothing was changed; gone: no such task; busy: another transaction has the row '
  'locked, nothing was changed, try again. Raises TS400.';

revoke all on function pgsched.release_tasks from public;
