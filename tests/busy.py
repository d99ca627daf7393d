"""A database with tasks in every state, and sessions that keep changing them: to be copied."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from threading import Event

import psycopg
from psycopg import sql

FILL = rb"""
select pgsched.configure_queue(
         'busy', p_keep_completed => '0.2 s', p_keep_failed => '0.2 s');
select pgsched.configure_queue('kept', p_max_attempts => 7, p_retry_delay => '1 minute');

select pgsched.enqueue_task('test', p_queue => 'kept', p_priority => n % 10)
  from generate_series(1, 30) as n;
select pgsched.complete_task(id, claim_token, '{"done": true}')
  from pgsched.claim_task('w', 'kept', p_limit => 4);
select pgsched.fail_task(id, claim_token, E'tab \t, line \n, \\. and ' || chr(252), '0', true)
  from pgsched.claim_task('w', 'kept', p_limit => 3);
select pgsched.fail_task(id, claim_token, 'boom')
  from pgsched.claim_task('w', 'kept', p_limit => 2);
select pgsched.cancel_task(min(id))
  from pgsched.scheduled_tasks where queue = 'kept' and status = 'queued';
select pgsched.cancel_task(id) from pgsched.claim_task('w', 'kept', '1 hour', 2);
select from pgsched.claim_task('w', 'kept', '1 hour', 3);
select pgsched.enqueue_task(
         'test', '{"a": [1.50, null, "\u00fc\\"]}', 'kept', p_run_at => now() + interval '1 day',
         p_unique_key => 'key', p_concurrency_key => 'c');

select pgsched.enqueue_task('test', p_queue => 'paused') from generate_series(1, 5);
select pgsched.pause_queue('paused');
select pgsched.enqueue_task('test', p_queue => 'only running');
select from pgsched.claim_task('w', 'only running', '1 hour');
select pgsched.enqueue_task('test', p_queue => 'only later', p_run_at => now() + interval '1 day');
"""

TOIL = [
    "select pgsched.enqueue_task('test', p_queue => 'busy') from generate_series(1, 12)",
    "select pgsched.enqueue_task('test', p_queue => 'busy', p_unique_key => random()::text)",
    """
    select pgsched.complete_task(id, claim_token)
      from pgsched.claim_task('w', 'busy', p_limit => 9)
    """,
    """
    select pgsched.fail_task(id, claim_token, 'boom', p_permanent => random() < 0.5)
      from pgsched.claim_task('w', 'busy', p_limit => 3)
    """,
    "select from pgsched.claim_task('w', 'busy', '1 second', 3)",
    """
    select pgsched.cancel_task(id)
      from (select id from pgsched.scheduled_tasks where queue = 'busy' limit 1) as t
    """,
    """
    select pgsched.retry_task(id)
      from (select id from pgsched.finished_tasks
             where queue = 'busy' and status = 'failed' limit 1) as t
    """,
    "select pgsched.unregister_worker(pgsched.register_worker(random()::text, '{busy}', 1))",
    "select from pgsched.maintain()",
]


def fill(conn: psycopg.Connection) -> None:
    """Add tasks in every state, in queues with and without settings, which stay as they are."""
    conn.execute(FILL)


@contextmanager
def at_work(dsn: str, sessions: int = 2) -> Iterator[None]:
    """Meanwhile sessions add, claim, end, cancel, retry, reap and delete tasks of queue `busy`."""
    stop = Event()

    def toil() -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            for statement in cycle(TOIL):
                # Slow enough for whoever follows, on a machine that has other things to do.
                if stop.wait(0.005):
                    return
                try:
                    conn.execute(statement.encode())
                except psycopg.Error as error:
                    # The other session came first.
                    if error.sqlstate not in ("TS404", "TS423"):
                        raise

    with ThreadPoolExecutor(sessions) as pool:
        ends = [pool.submit(toil) for _ in range(sessions)]
        try:
            yield
        finally:
            stop.set()
        for end in ends:
            end.result()


def content(conn: psycopg.Connection) -> dict[str, list[str]]:
    """All rows of the schema's tables, also of yoyo's."""
    tables = conn.execute("select tablename from pg_tables where schemaname = 'pgsched'").fetchall()
    rows = sql.SQL("select t::text from pgsched.{} as t order by 1")
    return {
        name: [text for (text,) in conn.execute(rows.format(sql.Identifier(name)))]
        for (name,) in tables
    }
