begin;
\ir fixtures.sql
select plan(45);

select is(pg_temp.arguments_of('pgsched.diagnose'), '', 'diagnose takes nothing');
select is(pg_temp.result_of('pgsched.diagnose'),
  'TABLE(check_name text, level text, finding text, advice text)',
  'diagnose returns findings');

-- The findings about what this file has made.
create function pg_temp.found()
  returns table (check_name text, level text, finding text)
  language sql
as $$
  select d.check_name, d.level, d.finding from pgsched.diagnose() as d where d.finding ~ '''pgtap '
$$;

create function pg_temp.due(p_queue text, p_age interval, p_tasks integer default 1)
  returns void
  language sql
as $$
  insert into pgsched.scheduled_tasks (
         queue, task_type, payload, priority, run_at, max_attempts, created_at)
  select p_queue, 'a', '{}', 5, clock_timestamp() - p_age, 1, clock_timestamp()
    from generate_series(1, p_tasks)
$$;

-- Every check says something, and what to do unless all is well
select results_eq(
  $$select check_name from pgsched.diagnose() group by check_name
     order by check_name collate "C"$$,
  array['dead letters', 'leases', 'limits', 'objects', 'public', 'queues', 'settings', 'snapshots',
        'standby', 'vacuum', 'workers'],
  'every check is there, whether or not it finds something');
select is_empty(
  $$select check_name, level, advice from pgsched.diagnose()
     where (level in ('note', 'warning', 'error') and advice <> '') is not true
       and (level = 'ok' and advice is null) is not true$$,
  'every finding comes with advice, and ok without');
select is_empty(
  $$select check_name from pgsched.diagnose() group by check_name
    having bool_or(level = 'ok') and count(*) > 1$$,
  'a check that found something does not say ok');
select is_empty(
  $$select check_name from pgsched.diagnose()
     where check_name in ('objects', 'standby') and level <> 'ok'$$,
  'nothing is damaged, and this is no standby');

-- Queues
select is_empty('select * from pg_temp.found()', 'there is nothing to say of queues without tasks');
select pg_temp.due('pgtap new', '50 seconds'), pg_temp.due('pgtap later', '-1 hours'),
       pg_temp.due('pgtap busy', '4 minutes 50 seconds'),
       pgsched.register_worker('pgtap 1', '{x,pgtap busy,pgtap behind}', 1) \g /dev/null
select is_empty('select * from pg_temp.found()', 'nor of tasks that have not been due for long');
select pg_temp.due('pgtap alone', '61 seconds'), pg_temp.due('pgtap behind', '5 minutes', 2),
       pg_temp.due('pgtap paused', '3 hours'), pg_temp.due('pgtap o''clock', '50 hours', 10000),
       pg_temp.due('pgtap o''clock', '0') \g /dev/null
select pgsched.pause_queue(queue)
  from unnest(array['pgtap paused', 'pgtap still', 'pgtap later']) as queue \g /dev/null
select results_eq(
  'select * from pg_temp.found()',
  $$values
    ('queues', 'warning', 'Queue ''pgtap alone'' has 1 task due, the oldest for 61 seconds, and no '
                          'worker serves it.'),
    ('queues', 'warning', 'Queue ''pgtap behind'' has 2 tasks due, the oldest for 5 minutes: its '
                          'workers cannot keep up.'),
    ('queues', 'warning', 'Queue ''pgtap o''''clock'' has 10000 or more tasks due, the oldest for '
                          '2 days, and no worker serves it.'),
    ('queues', 'warning', 'Queue ''pgtap paused'' is paused, with 1 task due, the oldest for 3 '
                          'hours.'),
    ('queues', 'note', 'Queue ''pgtap later'' is paused.'),
    ('queues', 'note', 'Queue ''pgtap still'' is paused.')$$,
  'tasks that nobody will run are found, the worst first');
select results_eq(
  $$select advice from pgsched.diagnose() where finding ~ 'pgtap still'$$,
  array['When it may go on: select pgsched.resume_queue(''pgtap still'')'],
  'the advice can be copied');
select matches(advice, '; workers serve: (.*, )?''pgtap behind'', ''pgtap busy'', (.*, )?''x''',
               'the advice names the queues that are served')
  from pgsched.diagnose() where finding ~ 'pgtap alone';
update pgsched.workers set seen_at = clock_timestamp() - interval '2 minutes'
 where name = 'pgtap 1';
select results_eq(
  $$select finding from pg_temp.found() where finding ~ 'pgtap behind'$$,
  array['Queue ''pgtap behind'' has 2 tasks due, the oldest for 5 minutes, and no worker serves '
        'it.'],
  'a worker that was not seen for 2 minutes serves nothing');

-- Snapshots
select is(count(*), (not pg_has_role('pg_read_all_stats', 'usage'))::integer::bigint,
          'an owner who cannot see the transactions of others is told, and no other')
  from pgsched.diagnose()
 where check_name = 'snapshots' and advice ~ '^grant pg_read_all_stats to ';

-- Dead letters
select id as first, token from pg_temp.claimed('pgtap dead') \gset
select status from pgsched.fail_task(:first, :'token', 'boom', p_permanent => true) \g /dev/null
update pgsched.finished_tasks set finished_at = clock_timestamp() - interval '1 day'
 where id = :first;
select id as last, token from pg_temp.claimed('pgtap dead') \gset
select status from pgsched.fail_task(:last, :'token', 'boom', p_permanent => true) \g /dev/null
update pgsched.finished_tasks set finished_at = clock_timestamp() - interval '90 minutes'
 where id = :last;
select results_eq(
  $$select * from pg_temp.found() where check_name = 'dead letters'$$,
  format($$values ('dead letters', 'note', 'Queue ''pgtap dead'' has 2 tasks that failed for good; '
                                           'the last one, %s, 90 minutes ago.')$$, :last),
  'dead letters are found, with the last one');

-- Workers
select is_empty($$select * from pg_temp.found() where check_name = 'workers'$$,
                'a lost worker that holds nothing is not named');
select isnt_empty(
  $$select finding from pgsched.diagnose()
     where check_name = 'workers' and level = 'note'
       and finding ~ '^\d+ workers? went away without signing off, holding nothing\.$'$$,
  'but counted');
select id as held, token from pg_temp.claimed('pgtap held', p_lease_left => '-59 seconds') \gset
update pgsched.scheduled_tasks set claimed_by = 'pgtap 1' where id = :held;
select results_eq(
  $$select * from pg_temp.found() where check_name = 'workers'$$,
  $$values ('workers', 'warning', 'Worker ''pgtap 1'' was last seen 2 minutes ago, and holds 1 '
                                  'task.')$$,
  'one that holds tasks is named');

create function pg_temp.without_presence()
  returns integer
  language sql
as $$
  select coalesce(sum(substring(d.finding from '^(\d+) workers? ha(?:s|ve) no presence: ')::integer),
                  0)::integer
    from pgsched.diagnose() as d where d.check_name = 'workers'
$$;
select pg_temp.without_presence() as before \gset
select pgsched.register_worker('pgtap 2', '{x}', 1), pgsched.register_worker('pgtap 3', '{x}', 1)
  \g /dev/null
select is(pg_temp.without_presence(), :before + 2, 'workers without a presence are counted');
update pgsched.workers set presence = true where name = 'pgtap 2';
select is(pg_temp.without_presence(), :before + 1, 'one that has it is not');
update pgsched.workers set presence = false, suspect_since = clock_timestamp()
 where name = 'pgtap 2';
select is(pg_temp.without_presence(), :before + 1, 'nor one that was found to be gone');

-- Leases; others may have some that are over
select results_eq($$select tasks, overdue from pgsched._running() where claimed_by = 'pgtap 1'$$,
                  'values (1::bigint, 0::bigint)', 'a lease may have been over for some seconds');
update pgsched.scheduled_tasks set lease_expires_at = clock_timestamp() - interval '61 seconds'
 where id = :held;
select results_eq($$select tasks, overdue from pgsched._running() where claimed_by = 'pgtap 1'$$,
                  'values (1::bigint, 1::bigint)', 'but not for more than a minute');
select matches(finding, '^Nobody took back ', 'such a task should have been taken back')
  from pgsched.diagnose() where check_name = 'leases';

-- Settings, as this session has them
create function pg_temp.level_of(p_setting text, p_value text)
  returns text
  language plpgsql
as $$
declare
  v_before text := current_setting(p_setting);
  v_level text;
begin
  perform set_config(p_setting, p_value, true);
  select d.level into v_level
    from pgsched.diagnose() as d
   where d.check_name = 'settings' and starts_with(d.finding, p_setting || ' is ');
  perform set_config(p_setting, v_before, true);
  return v_level;
end;
$$;

create temporary table settings (setting text, value text, level text);
insert into settings (setting, value, level)
values ('synchronous_commit', 'off', 'warning'),
       ('synchronous_commit', 'local', null),
       ('default_transaction_read_only', 'on', 'warning'),
       ('default_transaction_read_only', 'off', null),
       ('default_transaction_isolation', 'serializable', 'warning'),
       ('default_transaction_isolation', 'repeatable read', 'warning'),
       ('default_transaction_isolation', 'read committed', null),
       ('statement_timeout', '1ms', 'warning'),
       ('statement_timeout', '1999ms', 'warning'),
       ('statement_timeout', '2s', null),
       ('statement_timeout', '0', null),
       ('lock_timeout', '1ms', 'warning'),
       ('lock_timeout', '99ms', 'warning'),
       ('lock_timeout', '100ms', null),
       ('lock_timeout', '0', null),
       ('idle_in_transaction_session_timeout', '4999ms', 'warning'),
       ('idle_in_transaction_session_timeout', '5s', null),
       ('idle_in_transaction_session_timeout', '0', 'note'),
       ('transaction_timeout', '59999ms', 'warning'),
       ('transaction_timeout', '1h', null),
       ('transaction_timeout', '0', null);
-- The last one came with PostgreSQL 17.
select is(pg_temp.level_of(setting, value), level,
          format('%s = %s is %s', setting, value, coalesce('a ' || level, 'well')))
  from settings where setting in (select name from pg_settings);
select skip(format('there is no %s', setting), 1)
  from settings where setting not in (select name from pg_settings);

-- Rights
select pg_temp.may_call('pgsched.diagnose',
                        $$select bool_or(finding ~ 'pgtap still') from pgsched.diagnose()$$,
                        'true');

select * from finish();
rollback;
