create function pgsched.diagnose()
  returns table (check_name text, level text, finding text, advice text)
  language sql
  stable
  security definer
  set search_path = pg_catalog, pg_temp
  set enable_seqscan = off
  set jit = off
as $$
  with found as materialized (
    select f.* from pgsched._find_damage() as f
     union all
    select f.* from pgsched._find_rights() as f
     union all
    select f.* from pgsched._find_snapshots() as f
     union all
    select f.* from pgsched._find_settings() as f
     union all
    select f.* from pgsched._find_limits() as f
     union all
    select f.* from pgsched._find_queues() as f
     union all
    select f.* from pgsched._find_workers() as f)
  select c.name, coalesce(f.level, 'ok'), coalesce(f.finding, c.nothing_found), f.advice
    from (values
      (1, 'objects', 'Every index is there and valid, and no id is given again.'),
      (2, 'public', 'PUBLIC may do nothing here.'),
      (3, 'settings', 'No setting of the server endangers tasks or hinders calls.'),
      (4, 'limits', 'There is room for connections and locks.'),
      (5, 'standby', 'The server may be written to.'),
      (6, 'vacuum', 'Dead rows are removed.'),
      (7, 'snapshots', 'No old transaction keeps vacuum away.'),
      (8, 'workers', 'Every registered worker was seen within 2 minutes.'),
      (9, 'leases', 'Tasks whose lease ended are taken back.'),
      (10, 'queues', 'No task has been due for long.'),
      (11, 'dead letters', 'No task failed for good.')) as c (position, name, nothing_found)
    left join found as f on f.check_name = c.name
   order by c.position, array_position(array['error', 'warning', 'note'], f.level), f.finding
$$;

comment on function pgsched.diagnose is
  'Looks for what keeps tasks from running, or will: damaged objects, old snapshots, settings, '
  'limits, queues without workers, lost workers, dead letters. One row a finding, with its level '
  '(ok, note, warning, error) and advice what to do; a check that finds nothing is one row ok.';

revoke all on function pgsched.diagnose from public;
