-- Is a claim current, and if not, why; and the lock of whoever acts on the task.

create function pgsched._raise_read_only()
  returns void
  language plpgsql
as $$
begin
  raise exception using
    errcode = '25006',
    message = 'cannot change tasks in a read-only transaction',
    hint = 'Connect to the primary server, or start a transaction that may write.';
end;
$$;

comment on function pgsched._raise_read_only is
  'Raises 25006, for what would take an advisory lock, or find nothing to do, before it writes.';

revoke all on function pgsched._raise_read_only from public;

create function pgsched._lock_task(p_id bigint)
  returns bigint
  language plpgsql
as $$
begin
  if current_setting('transaction_read_only')::boolean then
    perform pgsched._raise_read_only();
  end if;
  return case when pg_advisory_xact_lock(1337, (p_id % 2147483647)::integer) is not null
              then p_id end;
end;
$$;

comment on function pgsched._lock_task is
  'The id, its task''s advisory lock held until the caller''s transaction ends; waits for it.';

revoke all on function pgsched._lock_task from public;

-- The task's lock first, then its row, if the claim is current.
create function pgsched._lock_claim(p_id bigint, p_claim_token uuid)
  returns void
  language plpgsql
as $$
begin
  p_id := pgsched._lock_task(p_id);
  perform from pgsched.scheduled_tasks as t
    where t.id = p_id and t.claim_token = p_claim_token
      for update;
  if not found then
    perform pgsched._raise_not_current(p_id, p_claim_token);
  end if;
end;
$$;

comment on function pgsched._lock_claim is
  'Locks the task of a current claim until the caller''s transaction ends; else TS400, TS404 or '
  'TS409.';

revoke all on function pgsched._lock_claim from public;

-- In id order, and waits for nobody: a row that somebody has locked is not among them.
create function pgsched._lock_claims(p_ids bigint[], p_claim_tokens uuid[])
  returns bigint[]
  language sql
  set plan_cache_mode = force_generic_plan
  set enable_seqscan = off
as $$
  select array(
    select t.id
      from pgsched.scheduled_tasks as t
     where t.id = any (p_ids)
       and exists (
           select
             from unnest(p_ids, p_claim_tokens) as g (id, claim_token)
            where g.id = t.id and g.claim_token = t.claim_token)
     order by t.id
       for update of t skip locked)
$$;

comment on function pgsched._lock_claims is
  'The ids of those claims that are current, their rows locked until the caller''s transaction '
  'ends, without those that another transaction has locked.';

revoke all on function pgsched._lock_claims from public;

create function pgsched._raise_no_task(p_id bigint)
  returns void
  language plpgsql
as $$
begin
  if p_id is null then
    raise exception using
      errcode = 'TS400',
      message = 'p_id must not be null',
      hint = 'Give the id of a task.';
  end if;
  raise exception using
    errcode = 'TS404',
    message = format('there is no task %s', p_id),
    hint = 'The id is wrong, or the finished task has been deleted.';
end;
$$;

comment on function pgsched._raise_no_task is
  'Explains why no task was found: TS400 for a null, else TS404.';

revoke all on function pgsched._raise_no_task from public;

-- One statement over both tables: a task that moves between them is seen in one of them. A snapshot
-- that is older than the task's last change does not show it; then locking the row raises 40001,
-- which is the truth: nothing can be told about the task in this transaction.
create function pgsched._status(p_id bigint)
  returns text
  language plpgsql
as $$
declare
  v_status text;
begin
  if current_setting('transaction_isolation') in ('repeatable read', 'serializable') then
    perform from pgsched.scheduled_tasks as t where t.id = p_id for no key update;
    perform from pgsched.finished_tasks as f where f.id = p_id for no key update;
  end if;
  select t.status into v_status from pgsched.tasks as t where t.id = p_id;
  if not found then
    perform pgsched._raise_no_task(p_id);
  end if;
  return v_status;
end;
$$;

comment on function pgsched._status is
  'Status of a task, live or finished; else TS400 or TS404, or 40001 where the caller''s snapshot '
  'is too old to tell.';

revoke all on function pgsched._status from public;

create function pgsched._raise_wrong_state(p_id bigint, p_status text, p_hint text)
  returns void
  language plpgsql
as $$
begin
  raise exception using
    errcode = 'TS423',
    message = format('task %s is %s', p_id, p_status),
    hint = p_hint;
end;
$$;

comment on function pgsched._raise_wrong_state is
  'Raises TS423: the call is not for a task in this status.';

revoke all on function pgsched._raise_wrong_state from public;

create function pgsched._raise_not_current(p_id bigint, p_claim_token uuid)
  returns void
  language plpgsql
as $$
begin
  if p_id is null or p_claim_token is null then
    raise exception using
      errcode = 'TS400',
      message = 'p_id and p_claim_token must not be null',
      hint = 'Give the id and the claim_token that claim_task returned.';
  end if;
  perform pgsched._status(p_id);
  raise exception using
    errcode = 'TS409',
    message = format('this claim of task %s is not current', p_id),
    hint = 'The claim was completed, failed or released, or the task was reaped: its lease ended, '
           'or its worker was gone. Drop the work: another worker may have the task.';
end;
$$;

comment on function pgsched._raise_not_current is
  'Explains why no row had an id and a token: TS400 for a null, TS409 for a claim that is over, '
  'else as _status.';

revoke all on function pgsched._raise_not_current from public;
