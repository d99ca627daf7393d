create function pgsched.fail_task(
    p_id bigint,
    p_claim_token uuid,
    p_error text,
    p_retry_in interval default null,
    p_permanent boolean default false)
  returns table (status text, run_at timestamptz)
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
  set enable_seqscan = off
as $$
#variable_conflict use_column
declare
  v_retry_seconds double precision := date_part('epoch', p_retry_in);
  v_error text := pgsched._clip(p_error);
  v_now timestamptz;
  v_task pgsched.scheduled_tasks;
  v_status text;
  v_run_at timestamptz;
begin
  if p_permanent is null then
    raise exception using
      errcode = 'TS400',
      message = 'p_permanent must not be null',
      hint = 'Give true or false.';
  end if;
  if not v_retry_seconds between 0 and 31536000 then
    raise exception using
      errcode = 'TS400',
      message = format('p_retry_in is out of range: %s', p_retry_in),
      hint = 'Give 0 seconds to 365 days, or null for the backoff of the queue.';
  end if;

  v_task := pgsched._lock_claim(p_id, p_claim_token);
  v_now := clock_timestamp();
  v_status := case
                when v_task.cancel_requested_at is not null then 'cancelled'
                when p_permanent or v_task.attempt >= v_task.max_attempts then 'failed'
                else 'queued'
              end;
  if v_status = 'queued' then
    v_run_at := v_now + interval '1 second'
                * coalesce(v_retry_seconds, pgsched._backoff_seconds(v_task.queue, v_task.attempt));
    perform pgsched._requeue_tasks(array[p_id], array[v_error], v_run_at);
  else
    perform pgsched._finish_tasks(array[p_id], array[v_error], v_status, v_now);
  end if;
  return query select v_status, v_run_at;
end;
$$;

comment on function pgsched.fail_task is
  'Ends a claim without success. queued: the next attempt is at run_at, after p_retry_in (0 to '
  '365 days) or the backoff of the queue; failed: attempts used up, or p_permanent; cancelled: a '
  'cancel was requested; run_at is null for these two. p_error is kept to 8 KiB. '
  'Raises TS400, TS404 (no such task), TS409 (claim not current: nothing was changed).';

revoke all on function pgsched.fail_task from public;

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
