-- What several functions have to stand, each by itself or one after the other.
begin;
\ir fixtures.sql
select plan(155);

-- Ids: the highest is reaped. First of all: a claim of task 1 would hold its lock.
select pg_temp.others_are_stale() \gset
\if :others_are_stale
  select skip('tasks of others are stale');
\else
  select pg_temp.claimed('pgtap reaped', 9223372036854775807, '0') \g /dev/null
  select results_eq('select * from pgsched.reap_stale()',
                    $$values (9223372036854775807, 'queued')$$, 'the highest id is reaped');
  delete from pgsched.scheduled_tasks where id = 9223372036854775807;
\endif

-- Backoff: attempt after attempt, until doubling would overflow, and the last but one there can be.
-- The ids have one lock in common, which leaves room in the shared lock table.
create temporary sequence one_lock minvalue -9000000000000000000 increment 2147483647;

create function pg_temp.wait(p_queue text, p_attempt integer)
  returns table (run_at timestamptz, at_least interval, at_most interval)
  language plpgsql
as $$
declare
  v_claim record;
  v_before timestamptz;
begin
  select * into v_claim
    from pg_temp.claimed(p_queue, nextval('one_lock'), p_attempt => p_attempt,
                         p_max_attempts => 2147483647);
  v_before := clock_timestamp();
  select f.run_at into run_at from pgsched.fail_task(v_claim.id, v_claim.token, 'x') as f;
  at_least := run_at - clock_timestamp();
  at_most := run_at - v_before;
  return next;
end;
$$;

create temporary table delays (queue text, delay double precision, longest double precision);
insert into delays (queue, delay, longest)
values ('pgtap 0', 0, 31536000), ('pgtap 1 second', 1, 31536000),
       ('pgtap 1 hour', 3600, 31536000), ('pgtap 365 days', 31536000, 31536000),
       ('pgtap 1 second by default', 1, 3600);
select pgsched.configure_queue(queue, p_retry_delay => delay * interval '1 second',
                               p_retry_delay_max => longest * interval '1 second')
  from delays where queue <> 'pgtap 1 second by default' \g /dev/null
create temporary table waits as
select d.queue, a.attempt, w.*, s.shortest * interval '1 second' as shortest,
       least(d.longest, s.shortest * 1.5) * interval '1 second' as longest
  from delays as d
 cross join (select generate_series(1, 70) union all select unnest(array[1000, 2147483646]))
         as a (attempt)
 cross join lateral (values (least(d.longest, d.delay * 2.0 ^ least(a.attempt - 1, 100))))
         as s (shortest)
 cross join lateral pg_temp.wait(d.queue, a.attempt) as w;
select results_eq(
  format($$select count(*), bool_and(at_most >= shortest and at_least <= longest),
                  min(at_most) >= '0', max(run_at) < '9999-01-01 00:00:00+00'
             from waits where queue = %L$$, queue),
  'values (72::bigint, true, true, true)',
  format('from a delay of %s each wait is doubled and made longer by up to a half, is not below 0 '
         'and ends before the year 9999', substr(queue, 7)))
  from delays;
select is_empty(
  format($$select attempt, wait_before, at_most
             from (select attempt, at_most, lag(at_least) over (order by attempt) as wait_before
                     from waits where queue = %L) as w
            where at_most < wait_before$$, queue),
  format('from a delay of %s no wait is shorter than the one before', substr(queue, 7)))
  from delays;

-- What a call with a task and the token of its last claim says.
create function pg_temp.outcome(p_call text, p_id bigint)
  returns text
  language plpgsql
as $$
declare
  v_queue text;
  v_token uuid;
begin
  select t.queue, t.claim_token into v_queue, v_token from pgsched.tasks as t where t.id = p_id;
  return case p_call
    when 'claim' then (
      select format('attempt %s of %s', c.attempt, c.max_attempts)
        from pgsched.claim_task('w', v_queue) as c
       where c.id = p_id)
    when 'hold' then pgsched.hold_task(p_id, v_token)::text
    when 'extend' then (
      pgsched.extend_task(p_id, v_token, '1 day') > clock_timestamp() + interval '23 hours')::text
    when 'extend in a batch' then (
      select e.outcome
        from pgsched.extend_tasks(array[p_id], array[v_token]) as e
       where e.id = p_id)
    when 'release' then pgsched.release_task(p_id, v_token)::text
    when 'fail' then (select f.status from pgsched.fail_task(p_id, v_token, 'x', '0') as f)
    when 'fail for good' then (
      select f.status from pgsched.fail_task(p_id, v_token, 'x', p_permanent => true) as f)
    when 'cancel' then pgsched.cancel_task(p_id)
    when 'retry' then (pgsched.retry_task(p_id) = p_id)::text
    when 'reschedule' then pgsched.reschedule_task(p_id, null, 9)::text
    when 'complete' then pgsched.complete_task(p_id, v_token, '"done"')::text
    when 'complete in a batch' then (
      select c.outcome
        from pgsched.complete_tasks(array[p_id], array[v_token]) as c
       where c.id = p_id)
  end;
end;
$$;

-- Attempts: the fewest and the most that there can be
create temporary table last_attempt (call text, outcome text);
insert into last_attempt (call, outcome)
values ('claim', 'attempt %1$s of %1$s'), ('release', ''), ('claim', 'attempt %1$s of %1$s'),
       ('fail', 'failed'), ('retry', 'true'), ('claim', 'attempt 1 of %s');
select pgsched.configure_queue('pgtap attempts ' || n, n)
  from unnest(array[1, 2147483647]) as n \g /dev/null
create temporary table tried as
select 'a queue' as whose, n as attempts,
       pgsched.enqueue_task('a', p_queue => 'pgtap attempts ' || n) as id
  from unnest(array[1, 2147483647]) as n
 union all
select 'a task', n, pgsched.enqueue_task('a', p_queue => 'pgtap own ' || n, p_max_attempts => n)
  from unnest(array[1, 2147483647]) as n;
update pgsched.scheduled_tasks as t
   set attempt = attempts - 1
  from tried
 where tried.id = t.id;
select results_eq(
  format('select call, pg_temp.outcome(call, %s) from last_attempt', id),
  format('select call, format(outcome, %s) from last_attempt', attempts),
  format('the number of attempts of %s may be %s', whose, attempts))
  from tried;

-- Ids: those at both ends go through every other call
create temporary table life (call text, outcome text);
insert into life (call, outcome)
values ('reschedule', ''), ('claim', 'attempt 1 of 20'), ('hold', ''), ('extend', 'true'),
       ('extend in a batch', 'extended'), ('release', ''), ('claim', 'attempt 1 of 20'),
       ('fail', 'queued'), ('claim', 'attempt 2 of 20'), ('cancel', 'requested'),
       ('extend in a batch', 'cancel_requested'), ('fail', 'cancelled'), ('cancel', 'finished'),
       ('retry', 'true'), ('cancel', 'cancelled'), ('retry', 'true'), ('claim', 'attempt 1 of 20'),
       ('fail for good', 'failed'), ('retry', 'true'), ('claim', 'attempt 1 of 20'),
       ('complete', 'true'), ('complete', 'false'), ('complete in a batch', 'already');
create temporary table ids as
select unnest(array[9223372036854775807, 9223372036854775806, :huge, -9223372036854775806,
                    -9223372036854775807, -9223372036854775808]) as id;
insert into pgsched.scheduled_tasks (
       id, queue, task_type, payload, priority, run_at, max_attempts, created_at)
select id, 'pgtap id ' || id, 'a', '{}', 5, clock_timestamp(), 20, clock_timestamp() from ids;
select pg_temp.claimed('pgtap neighbours', id - sign(id)::integer * distance)
  from ids cross join unnest(array[2147483647, 4294967296]) as distance \g /dev/null
create temporary table neighbours as select * from pgsched.tasks where queue = 'pgtap neighbours';
select results_eq(
  format('select call, pg_temp.outcome(call, %s) from life', id), 'select call, outcome from life',
  format('%s may be the id of a task', id))
  from ids;
select results_eq(
  $$select * from pgsched.tasks where queue = 'pgtap neighbours' order by id$$,
  'select * from neighbours order by id',
  'tasks that share their locks or their low 32 bits are not changed');

-- Errors in text: long ones, through both ways to fail, and one that is very long
create temporary table long_errors as
select e.*, for_good, c.*
  from (values ('1 MB of ASCII', '', 'x', 1000000), ('1 MB of blanks', '', ' ', 1000000),
               ('1 MB in characters of 2 bytes, moved by one', 'x', 'é', 500000),
               ('1 MB in characters of 3 bytes', '', '€', 333334),
               ('1 MB in characters of 4 bytes', '', '🐘', 250000),
               ('50 MB in characters of 2 bytes', '', 'é', 25000000))
       as e (what, first, sign, times)
  join (values (false), (true)) as f (for_good) on times <= 1000000 or for_good
 cross join lateral pg_temp.claimed('pgtap ' || what, nextval('one_lock'),
                                    p_attempt => for_good::integer + 1) as c;
select pgsched.fail_task(id, token, first || repeat(sign, times), p_permanent => for_good)
  from long_errors \g /dev/null
select ok(octet_length(last_error) between 2048 and 8192
          and starts_with(first || repeat(sign, 8192), last_error),
          format('of %s the begin is kept when a task %s', what,
                 case when for_good then 'fails for good' else 'is to be retried' end))
  from long_errors join pgsched.tasks as t using (id);

-- Errors in text: what is no text
create temporary table no_texts (expression text, code text);
insert into no_texts (expression, code)
values ($$E'a\x00b'$$, '22021'), ($$E'a\000b'$$, '22021'), ($$E'a\u0000b'$$, '42601'),
       ($$convert_from('\x610062', 'UTF8')$$, '22021'), ($$'a' || chr(0)$$, '54000'),
       ($$jsonb '"a\u0000b"' #>> '{}'$$, '22P05'), ($$json '"a\u0000b"' #>> '{}'$$, '22P05'),
       ($$E'a\ud800'$$, '42601'), ($$jsonb '"a\ud800"' #>> '{}'$$, '22P02'),
       ($$convert_from('\xeda080', 'UTF8')$$, '22021'), ($$E'a\xff'$$, '22021');
select * from pg_temp.claimed('pgtap text') \gset
select pg_temp.task(:id) as before \gset
select throws_ok(format('select pgsched.fail_task(%s, %L, %s)', :id, :'token', expression),
                 code, null, format('%s is no error that a task could fail with', expression))
  from no_texts;
select is(pg_temp.task(:id), :'before', 'the task that could not fail is as it was');
select is(status, 'queued', 'and can fail with another error')
  from pgsched.fail_task(:id, :'token', 'a�b');

-- JSON that jsonb does not take, as a payload and as a result
create temporary table no_json (json text, code text);
insert into no_json (json, code)
values ('"a\u0000b"', '22P05'), ('{"\u0000": 1}', '22P05'), ('["\ud800"]', '22P02'),
       ('"\udc00\ud83d"', '22P02'), ('{"\ud800": 1}', '22P02'), ('NaN', '22P02'),
       ('1e131072', '22003');
select * from pg_temp.claimed('pgtap json') \gset
select pg_temp.task(:id) as before \gset
select throws_ok(format(call, json, :id, :'token'), code, null,
                 format('%s is no %s', json, what))
  from no_json
 cross join (values ('payload', 'select pgsched.enqueue_task(''a'', %1$L, ''pgtap no json'')'),
                    ('payload in a batch',
                     'select pgsched.enqueue_tasks(jsonb_build_array(jsonb_build_object(
                        ''task_type'', ''a'', ''queue'', ''pgtap no json'',
                        ''payload'', %1$L::json)))'),
                    ('result', 'select pgsched.complete_task(%2$s, %3$L, %1$L)'),
                    ('result in a batch',
                     'select * from pgsched.complete_tasks(array[%2$s], array[uuid %3$L],
                                                           array[%1$L::jsonb])'))
         as c (what, call);
select is_empty($$select id from pgsched.tasks where queue = 'pgtap no json'$$, 'none was added');
select is(pg_temp.task(:id), :'before', 'the task that could not be completed is as it was');
select is(pgsched.complete_task(:id, :'token', '"\\u0000 \ud83d\ude00"'), true,
          'signs that only look like it are taken');
select is(pg_temp.task(:id) ->> 'result', '\u0000 😀', 'as what they are');

-- The size of a payload is that of the text that PostgreSQL makes of it
create temporary table payloads (given text, bytes integer);
insert into payloads (given, bytes)
values (' [ ] ', 2), ('{"b":1,"a":2,"b":3}', 16), ('1e20', 21), ('"é"', 4), ('"\u00e9"', 4),
       ('"\u0001"', 8), ('"\ud83d\ude00"', 6), ('1e100000', 100001);
select pgsched.configure_queue('pgtap fits ' || bytes, p_max_payload_bytes => bytes),
       pgsched.configure_queue('pgtap one less ' || bytes, p_max_payload_bytes => bytes - 1)
  from payloads where bytes > 2 \g /dev/null
create function pg_temp.batch(p_queue text, p_payload jsonb)
  returns jsonb
  language sql
as $$
  select jsonb_build_array(
           jsonb_build_object('task_type', 'a', 'queue', p_queue, 'payload', p_payload))
$$;

select is(pg_temp.task(id) -> 'payload', given::jsonb,
          format('%s fits into %s bytes', given, bytes))
  from payloads
 cross join lateral pgsched.enqueue_task('a', given::jsonb, 'pgtap fits ' || bytes) as id;
select is(pg_temp.task(id) -> 'payload', given::jsonb, 'also in a batch')
  from payloads
 cross join lateral pgsched.enqueue_tasks(
       pg_temp.batch('pgtap fits ' || bytes, given::jsonb)) as id;
select throws_ok(
         format('select pgsched.enqueue_task(''a'', %L, %L)', given, 'pgtap one less ' || bytes),
         'TS400',
         format('p_payload is %s bytes long, the limit of the queue is %s', bytes, bytes - 1),
         format('%s does not fit into a byte less', given))
  from payloads where bytes > 2;
select throws_ok(
         format('select pgsched.enqueue_tasks(%L)',
                pg_temp.batch('pgtap one less ' || bytes, given::jsonb)),
         'TS400',
         format('p_tasks[0]: payload is %s bytes long, the limit of the queue is %s',
                bytes, bytes - 1),
         'nor in a batch')
  from payloads where bytes > 2;
select is_empty($$select id from pgsched.tasks where queue like 'pgtap one less %'$$,
                'a payload that does not fit is not added');

-- Times: the last one and the first, wherever the caller lives
create function pg_temp.stored_run_at(p_call text, p_run_at text)
  returns text
  language plpgsql
as $$
declare
  v_before timestamptz := clock_timestamp();
  v_time timestamptz := p_run_at;
  v_claim record;
  v_id bigint;
begin
  case p_call
    when 'enqueue_task' then
      v_id := pgsched.enqueue_task('a', p_queue => 'pgtap times', p_run_at => v_time);
    when 'enqueue_tasks' then
      v_id := pgsched.enqueue_tasks(jsonb_build_array(jsonb_build_object(
        'task_type', 'a', 'queue', 'pgtap times', 'run_at', p_run_at)));
    when 'release_task' then
      select c.id, c.token into v_claim from pg_temp.claimed('pgtap times') as c;
      v_id := v_claim.id;
      perform pgsched.release_task(v_id, v_claim.token, v_time);
    when 'reschedule_task' then
      v_id := pgsched.enqueue_task('a', p_queue => 'pgtap times', p_run_at => '2999-01-01');
      perform pgsched.reschedule_task(v_id, v_time);
  end case;
  return (select case when t.run_at between v_before and clock_timestamp() then 'now'
                      else (t.run_at at time zone 'UTC')::text end
            from pgsched.scheduled_tasks as t
           where t.id = v_id);
end;
$$;

create temporary table calls (call text, fault text);
insert into calls (call, fault)
values ('enqueue_task', 'p_run_at is out of range: '),
       ('enqueue_tasks', 'p_tasks[0]: run_at is out of range: '),
       ('release_task', 'p_run_at is out of range: '),
       ('reschedule_task', 'p_run_at is out of range: ');
set local timezone = 'Etc/GMT+12';
discard plans;
select is(pg_temp.stored_run_at(call, given), stored, format('%s takes %s', call, given))
  from calls
 cross join (values ('9998-12-31 23:59:59.999999+00', '9998-12-31 23:59:59.999999'),
                    ('9999-01-01 13:59:59.999999+14', '9998-12-31 23:59:59.999999'),
                    ('9998-12-31 11:59:59.999999', '9998-12-31 23:59:59.999999'),
                    ('4713-01-01 00:00:00+00 BC', 'now'))
         as t (given, stored);
select throws_ok(format('select pg_temp.stored_run_at(%L, %L)', call, given),
                 'TS400', fault || given::timestamptz, format('%s does not take %s', call, given))
  from calls
 cross join unnest(array['9999-01-01 00:00:00+00', '9998-12-31 12:00:00', 'infinity',
                         '-infinity']) as given;
set local timezone = 'Pacific/Kiritimati';
discard plans;
select is(pg_temp.stored_run_at(call, '9999-01-01 13:59:59.999999'), '9998-12-31 23:59:59.999999',
          call || ' goes by the year in UTC')
  from calls;

-- Collations: an argument may bring one by which A is a, if the server can have such a one, and by
-- which no regular expression can be matched.
select exists (select from pg_collation where collname = 'en-x-icu') as has_icu \gset
\if :has_icu
  create collation pg_temp.any_case (
    provider = icu, locale = 'und-u-ks-level2', deterministic = false);
\else
  create collation pg_temp.any_case from "C";
\endif
select isnt(
  pgsched.enqueue_task('a', p_queue => 'pgtap case', p_unique_key => 'k' collate pg_temp.any_case),
  pgsched.enqueue_task('a', p_queue => 'pgtap case', p_unique_key => 'K' collate pg_temp.any_case),
  'k is not the unique key K');
select throws_ok(
  $$select pgsched.enqueue_task(E'a\x01' collate pg_temp.any_case)$$,
  'TS400', pg_temp.name_error('p_task_type', E'a\x01'), 'a bad name is one in any collation');
select pgsched.pause_queue('PGTAP CASE' collate pg_temp.any_case) \g /dev/null
select is_empty(
  $$select id from pgsched.claim_task('w', 'PGTAP CASE' collate pg_temp.any_case)$$,
  'a queue has no task of one that is written otherwise');
select is(count(*), 1::bigint, 'and pauses no other')
  from pgsched.claim_task('w' collate pg_temp.any_case, 'pgtap case' collate pg_temp.any_case);
select pgsched.resume_queue('pgtap case' collate pg_temp.any_case) \g /dev/null
select ok(paused, 'nor does one resume it') from pgsched.queues where name = 'PGTAP CASE';
select is(pgsched.notify_channel('pgtap case' collate pg_temp.any_case) collate "default",
          pgsched.notify_channel('pgtap case'), 'a queue has one channel');
select pgsched.register_worker('pgtap w' collate pg_temp.any_case, array['q'], 1) as worker \gset
select isnt(pgsched.register_worker('PGTAP W' collate pg_temp.any_case, array['q'], 1),
            :worker::bigint, 'a worker has its own row');
select pgsched.register_listener(
         :worker, array['pgtap q', 'PGTAP Q'] collate pg_temp.any_case) \g /dev/null
select bag_eq(format('select queue from pgsched.listeners where worker_id = %s', :worker),
              array['pgtap q', 'PGTAP Q'], 'and listens to each queue');
select pgsched.register_listener(:worker, array['PGTAP Q'] collate pg_temp.any_case) \g /dev/null
select bag_eq(format('select queue from pgsched.listeners where worker_id = %s', :worker),
              array['PGTAP Q'], 'or to one of them');
select is(name, 'pgtap w', 'whose name stays as it was') from pgsched.workers where id = :worker;

select * from finish();
rollback;
