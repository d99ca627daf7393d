create function pgsched.configure_queue(
    p_queue text,
    p_max_attempts integer default null,
    p_retry_delay interval default null,
    p_retry_delay_max interval default null,
    p_max_payload_bytes integer default null,
    p_keep_completed interval default null,
    p_keep_failed interval default null,
    p_notify boolean default null)
  returns void
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
as $$
declare
  v_fault text;
begin
  p_queue := pgsched._name('p_queue', p_queue);
  v_fault := case
    when p_max_attempts < 1 then
      format('p_max_attempts is out of range: %s', p_max_attempts)
    when not date_part('epoch', p_retry_delay) between 0 and 31536000 then
      format('p_retry_delay is out of range: %s', p_retry_delay)
    when not date_part('epoch', p_retry_delay_max) between 0 and 31536000 then
      format('p_retry_delay_max is out of range: %s', p_retry_delay_max)
    when not p_max_payload_bytes between 2 and 268435455 then
      format('p_max_payload_bytes is out of range: %s', p_max_payload_bytes)
    when not date_part('epoch', p_keep_completed) between 0 and 3155760000 then
      format('p_keep_completed is out of range: %s', p_keep_completed)
    when not date_part('epoch', p_keep_failed) between 0 and 3155760000 then
      format('p_keep_failed is out of range: %s', p_keep_failed)
  end;
  if v_fault is not null then
    raise exception using
      errcode = 'TS400',
      message = v_fault,
      hint = 'Attempts: at least 1. Retry delays: 0 to 365 days. Payload: 2 to 268435455 bytes. '
             'Keeping: 0 to 100 years.';
  end if;

  insert into pgsched.queues as q (
         name, max_attempts, retry_delay, retry_delay_max, max_payload_bytes, keep_completed,
         keep_failed, notify)
  values (p_queue, p_max_attempts, p_retry_delay, p_retry_delay_max, p_max_payload_bytes,
         p_keep_completed, p_keep_failed, coalesce(p_notify, true))
  on conflict (name) do update
     set max_attempts = coalesce(p_max_attempts, q.max_attempts),
         retry_delay = coalesce(p_retry_delay, q.retry_delay),
         retry_delay_max = coalesce(p_retry_delay_max, q.retry_delay_max),
         max_payload_bytes = coalesce(p_max_payload_bytes, q.max_payload_bytes),
         keep_completed = coalesce(p_keep_completed, q.keep_completed),
         keep_failed = coalesce(p_keep_failed, q.keep_failed),
         notify = coalesce(p_notify, q.notify);
end;
$$;

comment on function pgsched.configure_queue is
  'Changes settings of a queue; null leaves a setting as it is. May be repeated. The settings are '
  'the columns of queues. Raises TS400.';

revoke all on function pgsched.configure_queue from public;
