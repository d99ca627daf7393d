-- How tasks end or come back, other than by completion, which has its own statement for speed. Rows
-- are found by any (p_ids), here and in the batch calls: a plan made from statistics of an empty
-- table would otherwise join by reading all of it.

create function pgsched._finish_tasks(
    p_ids bigint[], p_errors text[], p_status text, p_now timestamptz)
  returns void
  language sql
as $$
  with ended as (
    delete from pgsched.scheduled_tasks as t
     using unnest(p_ids, p_errors) as g (id, error)
     where t.id = any (p_ids) and t.id = g.id
    returning t.*, g.error)
  insert into pgsched.finished_tasks (
         id, queue, task_type, payload, status, priority, run_at, attempt, max_attempts,
         claim_token, claimed_by, claimed_at, lease_expires_at, unique_key, concurrency_key,
         cancel_requested_at, last_error, created_at, finished_at)
  select e.id, e.queue, e.task_type, e.payload, p_status, e.priority, e.run_at, e.attempt,
         e.max_attempts, e.claim_token, e.claimed_by, e.claimed_at, e.lease_expires_at,
         e.unique_key, e.concurrency_key, e.cancel_requested_at,
         coalesce(e.error, e.last_error), e.created_at, p_now
    from ended as e
$$;

comment on function pgsched._finish_tasks is
  'Moves tasks whose rows the caller has locked to finished_tasks as failed or cancelled; '
  'an error that is null, or missing, keeps the last one.';

revoke all on function pgsched._finish_tasks from public;

create function pgsched._requeue_tasks(
    p_ids bigint[], p_errors text[], p_run_at timestamptz[], p_uncount integer default 0)
  returns void
  language sql
as $$
  update pgsched.scheduled_tasks as t
     set status = 'queued', run_at = g.run_at, attempt = t.attempt - p_uncount,
         claim_token = null, claimed_by = null, claimed_at = null, lease_expires_at = null,
         last_error = coalesce(g.error, t.last_error)
    from unnest(p_ids, p_errors, p_run_at) as g (id, error, run_at)
   where t.id = any (p_ids) and t.id = g.id
$$;

comment on function pgsched._requeue_tasks is
  'Makes tasks whose rows the caller has locked queued again, their claim over; an error that is '
  'null, or missing, keeps the last one; p_uncount 1 takes the claim back out of attempt.';

revoke all on function pgsched._requeue_tasks from public;

-- Doubling, and up to half as much again at random: the next wait is never shorter than the last,
-- and tasks that failed together have spread by the time their wait reaches the limit. 2^40 is past
-- any limit and far from an overflow.
create function pgsched._backoff_seconds(p_queue text, p_attempt integer)
  returns double precision
  language sql
  volatile
as $$
  select least(
           date_part('epoch', coalesce(q.retry_delay, '1 second'))
             * 2.0 ^ least(p_attempt - 1, 40) * (1 + random() / 2),
           date_part('epoch', coalesce(q.retry_delay_max, '1 hour')))
    from (select) as always
    left join pgsched.queues as q on q.name = p_queue
$$;

comment on function pgsched._backoff_seconds is
  'Wait in seconds after failed attempt n of a queue: retry_delay * 2^(n-1), up to half as much '
  'again at random, at most retry_delay_max.';

revoke all on function pgsched._backoff_seconds from public;

create function pgsched._clip(p_text text)
  returns text
  language sql
  immutable
as $$
  select case
           when octet_length(p_text) <= 8192 then p_text
           when octet_length(left(p_text, 8192)) <= 8192 then left(p_text, 8192)
           else left(p_text, 2048)
         end
$$;

comment on function pgsched._clip is
  'The text cut to 8192 bytes or less without splitting a character (of at most 4 bytes).';

revoke all on function pgsched._clip from public;

create function pgsched._end_attempts(
    p_ids bigint[], p_errors text[], p_retry_seconds double precision[], p_permanent boolean[])
  returns table (id bigint, status text, run_at timestamptz)
  language plpgsql
as $$
#variable_conflict use_column
declare
  -- The row locks have given this transaction its id: what becomes queued is not older than that.
  v_now timestamptz := clock_timestamp();
  v_group record;
begin
  for v_group in
    select j.status, array_agg(j.id order by j.id) as ids,
           array_agg(j.error order by j.id) as errors,
           array_agg(v_now + j.wait * interval '1 second' order by j.id) as run_at
      from (select a.*,
                   case when a.status = 'queued' then
                     coalesce(a.retry_seconds, pgsched._backoff_seconds(a.queue, a.attempt))
                   end as wait
              from (select t.id, t.queue, t.attempt, pgsched._clip(g.error) as error,
                           g.retry_seconds,
                           case
                             when t.cancel_requested_at is not null then 'cancelled'
                             when g.permanent or t.attempt >= t.max_attempts then 'failed'
                             else 'queued'
                           end as status
                      from unnest(p_ids, p_errors, p_retry_seconds, p_permanent)
                             as g (id, error, retry_seconds, permanent)
                      join pgsched.scheduled_tasks as t on t.id = g.id
                     where t.id = any (p_ids)
                    offset 0) as a) as j
     group by j.status
  loop
    if v_group.status = 'queued' then
      perform pgsched._requeue_tasks(v_group.ids, v_group.errors, v_group.run_at);
    else
      perform pgsched._finish_tasks(v_group.ids, v_group.errors, v_group.status, v_now);
    end if;
    return query
    select g.id, v_group.status, g.run_at
      from unnest(v_group.ids, v_group.run_at) as g (id, run_at);
  end loop;
end;
$$;

comment on function pgsched._end_attempts is
  'Ends, without success, claims whose rows the caller has locked, and says what became of each. '
  'Seconds that are null: the backoff of the queue.';

revoke all on function pgsched._end_attempts from public;

create function pgsched._release_claims(p_ids bigint[], p_run_at timestamptz[])
  returns table (id bigint, status text)
  language plpgsql
as $$
#variable_conflict use_column
declare
  v_now timestamptz := clock_timestamp();
  v_group record;
begin
  for v_group in
    select t.cancel_requested_at is not null as cancelled, array_agg(t.id order by t.id) as ids,
           array_agg(greatest(g.run_at, v_now) order by t.id) as run_at
      from unnest(p_ids, p_run_at) as g (id, run_at)
      join pgsched.scheduled_tasks as t on t.id = g.id
     where t.id = any (p_ids)
     group by t.cancel_requested_at is not null
  loop
    if v_group.cancelled then
      perform pgsched._finish_tasks(v_group.ids, '{}', 'cancelled', v_now);
    else
      perform pgsched._requeue_tasks(v_group.ids, '{}', v_group.run_at, 1);
    end if;
    return query
    select g.id, case when v_group.cancelled then 'cancelled' else 'queued' end
      from unnest(v_group.ids) as g (id);
  end loop;
end;
$$;

comment on function pgsched._release_claims is
  'Gives back claims whose rows the caller has locked, uncounted, due at the given times, not '
  'before now; says what became of each.';

revoke all on function pgsched._release_claims from public;
