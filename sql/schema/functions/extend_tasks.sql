-- Takes no advisory lock and waits for no row: one handler's open transaction must not stop the
-- leases of all other tasks of its process.
create function pgsched.extend_tasks(
    p_ids bigint[],
    p_claim_tokens uuid[],
    p_lease interval default '5 minutes')
  returns table (id bigint, outcome text, lease_expires_at timestamptz)
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan
  set enable_seqscan = off
  set jit = off
as $$
#variable_conflict use_column
declare
  v_lease_seconds double precision := pgsched._lease_seconds(p_lease);
  v_now timestamptz;
begin
  perform pgsched._check_batch(p_ids, p_claim_tokens);
  v_now := clock_timestamp();

  return query
  with given as materialized (
    select g.id, g.claim_token, g.position
      from unnest(p_ids, p_claim_tokens) with ordinality as g (id, claim_token, position)),
  locked as materialized (
    select t.id
      from pgsched.scheduled_tasks as t
     where t.id = any (p_ids)
       and exists (
           select from given as g where g.id = t.id and g.claim_token = t.claim_token)
     order by t.id
       for no key update of t skip locked),
  extended as (
    update pgsched.scheduled_tasks as t
       set lease_expires_at =
             greatest(t.lease_expires_at, v_now + v_lease_seconds * interval '1 second')
     where t.id = any (array(select l.id from locked as l))
    returning t.id, t.claim_token, t.cancel_requested_at, t.lease_expires_at)
  select g.id,
         case
           when e.cancel_requested_at is not null then 'cancel_requested'
           when e.id is not null then 'extended'
           when t.id is not null then 'busy'
           else 'lost'
         end,
         e.lease_expires_at
    from given as g
    left join extended as e on e.id = g.id and e.claim_token = g.claim_token
    left join (
         select s.id, s.claim_token from pgsched.scheduled_tasks as s where s.id = any (p_ids)) as t
           on t.id = g.id and t.claim_token = g.claim_token
   order by g.position;
end;
$$;

comment on function pgsched.extend_tasks is
  'Moves the end of many leases to p_lease from now, never to an earlier time, and answers in the '
  'order given. extended; cancel_requested: extended too, but the task should stop; busy: another '
  'transaction has the row locked, nothing was changed, try again; lost: the claim is not current. '
  'Raises TS400.';

revoke all on function pgsched.extend_tasks from public;
