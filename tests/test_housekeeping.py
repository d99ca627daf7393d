"""What workers do beside their tasks: as good as nothing while they are idle, and retention."""

from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from workers import LISTENERS, count, quick, running, sessions, wait_for, wait_until

from pgsched import calls, enqueue, loop

WORKERS, QUEUES = 20, 5


def test_idle_workers_write_nothing(
    dsn: str, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims: list[str] = []
    claim_task = calls.claim_task

    def watched(conn: calls.Connection, *args: Any) -> list[calls.Claim]:
        claims.append(args[1])
        return claim_task(conn, *args)

    def look() -> tuple[object, ...]:
        """The newest transaction that wrote, the end of the log, and how often we claimed."""
        [found] = conn.execute(
            "select pg_snapshot_xmax(pg_current_snapshot()), pg_current_wal_insert_lsn()"
        )
        return found

    queues = [f"queue {number}" for number in range(QUEUES)]
    with ExitStack() as stack:
        monkeypatch.setattr(calls, "claim_task", watched)
        for _ in range(WORKERS):
            stack.enter_context(running(quick(dsn, queues=queues, poll_interval=0.5)))
        listening = "select count(*) from pgsched.listeners"
        wait_until(lambda: conn.execute(listening).fetchone() == (WORKERS * QUEUES,))
        assert len(sessions(conn, LISTENERS)) == WORKERS

        def nothing_was_written() -> bool:
            # The server itself writes now and then, so one quiet stretch will do.
            before, claimed = look(), len(claims)
            wait_until(lambda: len(claims) >= claimed + 2 * WORKERS * QUEUES)
            assert set(claims[claimed:]) == set(queues)
            return look() == before

        wait_until(nothing_was_written)


def test_a_worker_deletes_what_its_queue_keeps_no_longer(
    dsn: str, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "PRUNE_SECONDS", 0.2)
    monkeypatch.setattr(loop, "PRUNE_BATCH", 7)
    worker = quick(dsn)
    worker.task("noop")(lambda task: None)
    conn.execute("select pgsched.configure_queue('brief', p_keep_completed => '1 hour')")
    with running(worker):
        kept = enqueue(conn, "noop")
        wait_for(conn, kept, "completed")
        # Of a queue that this worker does not serve, too.
        conn.execute(
            """
            insert into pgsched.finished_tasks (
                   id, queue, task_type, payload, status, priority, run_at, attempt, max_attempts,
                   created_at, finished_at)
            select 1000 + n, 'brief', 'noop', '{}', 'completed', 5, now(), 1, 1, now(),
                   now() - n * interval '1 minute'
              from generate_series(1, 100) as n
            """
        )
        wait_until(lambda: count(conn, "completed") <= 60)
        left = conn.execute("select id from pgsched.finished_tasks order by id").fetchall()
    assert left == [(kept,), *((1000 + n,) for n in range(1, 60))]
