-- Checks that several functions share. A fault is an array of message and hint, or null; these are
-- single expressions, which the planner inlines. The others return the checked value, since
-- PL/pgSQL evaluates an assignment several times faster than a perform. All run inside functions
-- that pin search_path. Arguments may bring a collation that no regular expression takes.

create function pgsched._is_name(p_value text)
  returns boolean
  language sql
  immutable
as $$
  select octet_length(p_value) between 1 and 63 and p_value collate "default" !~ '[[:cntrl:]]'
$$;

comment on function pgsched._is_name is
  'Whether the value is 1 to 63 bytes without control characters; a null is not, nor is it false.';

revoke all on function pgsched._is_name from public;

create function pgsched._name_fault(p_argument text, p_value text)
  returns text[]
  language sql
  immutable
as $$
  select case
           when pgsched._is_name(p_value) is not true then array[
                  p_argument || ' is not a valid name: '
                    || coalesce(quote_literal(left(p_value, 80)), 'null'),
                  'Give 1 to 63 bytes without control characters.']
         end
$$;

comment on function pgsched._name_fault is
  'Null if the value is 1 to 63 bytes without control characters; else what is wrong, and a hint.';

revoke all on function pgsched._name_fault from public;

create function pgsched._name(p_argument text, p_value text)
  returns text
  language plpgsql
  immutable
as $$
declare
  v_fault text[] := pgsched._name_fault(p_argument, p_value);
begin
  if v_fault is not null then
    raise exception using errcode = 'TS400', message = v_fault[1], hint = v_fault[2];
  end if;
  return p_value;
end;
$$;

comment on function pgsched._name is
  'The value, if it is 1 to 63 bytes without control characters; else TS400 naming the argument.';

revoke all on function pgsched._name from public;

-- Seconds, not an interval, so that neither a month's length nor a clock change bends a lease.
create function pgsched._lease_seconds(p_lease interval)
  returns double precision
  language plpgsql
  immutable
as $$
declare
  v_seconds double precision := date_part('epoch', p_lease);
begin
  if (v_seconds between 1 and 86400) is not true then
    raise exception using
      errcode = 'TS400',
      message = format('p_lease is not a valid lease: %s', coalesce(p_lease::text, 'null')),
      hint = 'Give 1 second to 24 hours.';
  end if;
  return v_seconds;
end;
$$;

comment on function pgsched._lease_seconds is
  'Length of a lease in seconds; TS400 unless it is 1 second to 24 hours.';

revoke all on function pgsched._lease_seconds from public;

create function pgsched._delay_seconds(p_argument text, p_value interval)
  returns double precision
  language plpgsql
  immutable
as $$
declare
  v_seconds double precision := date_part('epoch', p_value);
begin
  if not v_seconds between 0 and 31536000 then
    raise exception using
      errcode = 'TS400',
      message = format('%s is out of range: %s', p_argument, p_value),
      hint = 'Give 0 seconds to 365 days, or null.';
  end if;
  return v_seconds;
end;
$$;

comment on function pgsched._delay_seconds is
  'A wait in seconds; TS400 naming the argument unless it is null or 0 to 365 days.';

revoke all on function pgsched._delay_seconds from public;

-- Years of five digits are where clients stop reading timestamps (Python's datetime ends at 9999).
create function pgsched._run_at_fault(p_value timestamptz)
  returns text[]
  language sql
  stable
as $$
  select case
           when p_value = '-infinity' or p_value >= '9999-01-01 00:00:00+00'
           then array['run_at is out of range: ' || p_value::text,
                      'Give a time before the year 9999, or null for now.']
         end
$$;

comment on function pgsched._run_at_fault is
  'Null if the value is null or a time before the year 9999; else what is wrong, and a hint.';

revoke all on function pgsched._run_at_fault from public;

create function pgsched._priority_fault(p_value numeric)
  returns text[]
  language sql
  immutable
as $$
  select case
           when (p_value between 0 and 9 and p_value % 1 = 0) is not true
           then array['priority is out of range: ' || coalesce(left(p_value::text, 80), 'null'),
                      'Give 0 (first) to 9 (last).']
         end
$$;

comment on function pgsched._priority_fault is
  'Null if the value is 0 to 9 without a fraction; else what is wrong, and a hint.';

revoke all on function pgsched._priority_fault from public;

-- Numbers are numeric since JSON's are.
create function pgsched._task_fault(
    p_task_type text, p_payload_bytes integer, p_queue text, p_run_at timestamptz,
    p_priority numeric, p_max_attempts numeric, p_unique_key text, p_concurrency_key text,
    p_max_payload_bytes integer)
  returns text[]
  language sql
  stable
as $$
  select coalesce(
           pgsched._name_fault('task_type', p_task_type),
           pgsched._name_fault('queue', p_queue),
           case when p_unique_key is not null then
             pgsched._name_fault('unique_key', p_unique_key) end,
           case when p_concurrency_key is not null then
             pgsched._name_fault('concurrency_key', p_concurrency_key) end,
           pgsched._run_at_fault(p_run_at),
           pgsched._priority_fault(p_priority),
           case when p_max_attempts not between 1 and 2147483647 or p_max_attempts % 1 <> 0 then
             array['max_attempts is out of range: ' || left(p_max_attempts::text, 80),
                   'Give at least 1, or null for the default of the queue.'] end,
           case when p_payload_bytes is null then
             array['payload must not be null', 'Give JSON.'] end,
           case when p_payload_bytes > p_max_payload_bytes then
             array['payload is ' || p_payload_bytes || ' bytes long, the limit of the queue is '
                     || p_max_payload_bytes,
                   'Store large data elsewhere and enqueue a reference to it.'] end)
$$;

comment on function pgsched._task_fault is
  'Null for a task that may be added; else what is wrong, beginning with the field, and a hint.';

revoke all on function pgsched._task_fault from public;

create function pgsched._check_batch(p_ids bigint[], p_claim_tokens uuid[])
  returns void
  language plpgsql
  immutable
as $$
begin
  if (cardinality(p_ids) = cardinality(p_claim_tokens)
      and coalesce(array_ndims(p_ids), 1) = 1
      and coalesce(array_ndims(p_claim_tokens), 1) = 1
      and array_position(p_ids, null) is null
      and array_position(p_claim_tokens, null) is null) is not true then
    raise exception using
      errcode = 'TS400',
      message = 'p_ids and p_claim_tokens do not pair up',
      hint = 'Give two arrays of one dimension and equal length without nulls.';
  end if;
end;
$$;

comment on function pgsched._check_batch is
  'Raises TS400 unless both arrays have one dimension, equal length and no null.';

revoke all on function pgsched._check_batch from public;

create function pgsched._check_column(p_argument text, p_values anyarray, p_ids bigint[])
  returns void
  language plpgsql
  immutable
as $$
begin
  if cardinality(p_values) <> cardinality(p_ids) or array_ndims(p_values) > 1 then
    raise exception using
      errcode = 'TS400',
      message = format('p_ids and %s do not pair up', p_argument),
      hint = 'Give one value for each id, null for none, or null instead of the array.';
  end if;
end;
$$;

comment on function pgsched._check_column is
  'Raises TS400 unless the array is null or has one dimension and as many values as there are ids.';

revoke all on function pgsched._check_column from public;
