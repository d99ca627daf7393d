-- Checks that several functions share. They run inside functions that pin search_path, and return
-- the checked value, since PL/pgSQL evaluates an assignment several times faster than a perform.

create function pgsched._name(p_argument text, p_value text)
  returns text
  language plpgsql
  immutable
as $$
begin
  if (octet_length(p_value) between 1 and 63 and p_value !~ '[[:cntrl:]]') is not true then
    raise exception using
      errcode = 'TS400',
      message = format('%s is not a valid name: %s', p_argument,
                       coalesce(quote_literal(left(p_value, 80)), 'null')),
      hint = 'Give 1 to 63 bytes without control characters.';
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

-- Years of five digits are where clients stop reading timestamps (Python's datetime ends at 9999).
create function pgsched._run_at(p_value timestamptz)
  returns timestamptz
  language plpgsql
  immutable
as $$
begin
  if p_value in ('infinity', '-infinity') or p_value >= '9999-01-01 00:00:00+00' then
    raise exception using
      errcode = 'TS400',
      message = format('p_run_at is out of range: %s', p_value),
      hint = 'Give a time before the year 9999, or null for now.';
  end if;
  return p_value;
end;
$$;

comment on function pgsched._run_at is
  'The value, if it is null or a time before the year 9999; else TS400.';

revoke all on function pgsched._run_at from public;

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
