-- A step that cannot run now undoes no other: each has a block of its own. Statement timeouts and
-- cancels are not among the conditions: who set them wants the call to end. Marks come first, as
-- they move only while the transaction has written nothing, and then what takes longest, so that
-- nothing that a worker may wait for is locked meanwhile.
create function pgsched.maintain()
  returns table (step text, affected bigint)
  language plpgsql
  security definer
  set search_path = pg_catalog, pg_temp
as $$
declare
  v_lock integer;
begin
  if current_setting('transaction_read_only')::boolean then
    perform pgsched._raise_read_only();
  end if;
  for v_lock, step in values (4, 'move_claim_marks'), (3, 'prune_finished'), (2, 'reap_stale') loop
    affected := null;
    begin
      if pg_try_advisory_xact_lock(1338, v_lock) then
        affected := case step
          when 'move_claim_marks' then pgsched._move_claim_marks(null)
          when 'reap_stale' then (select count(*) from pgsched.reap_stale())
          when 'prune_finished' then pgsched.prune_finished()
        end;
      end if;
    exception
      when lock_not_available or deadlock_detected or serialization_failure or out_of_memory then
        raise warning using
          errcode = sqlstate,
          message = format('%s could not run now: %s', step, sqlerrm),
          hint = 'maintain tries it again when it is called next.';
    end;
    return next;
  end loop;
end;
$$;

comment on function pgsched.maintain is
  'Does every periodic duty once, each bounded: move_claim_marks, prune_finished, reap_stale. '
  'affected: tasks that the step changed, or queues whose marks moved; null: another session is at '
  'it, or a warning says why it could not run. Safe from any number of callers; call it every '
  'minute or so.';

revoke all on function pgsched.maintain from public;
