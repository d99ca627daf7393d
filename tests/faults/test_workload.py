"""The workload of the fault suite, without faults: the checker passes it, and sees broken SQL."""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import clients
import mutants
import psycopg
import pytest
from checker import KILLS, Report, check
from history import Recorder, read
from mutants import Mutant
from psycopg.types.json import Jsonb
from run import prepare, stored

TOKEN_OF_AN_ATTEMPT = Mutant(
    "claim_task",
    "claim_token = gen_random_uuid()",
    "claim_token = md5(t.id || ' ' || t.attempt)::uuid",
)
CLAIM_WITHOUT_TIME = Mutant("claim_task", "and s.run_at <= v_now", "")
CLAIM_WITHOUT_COUNT = Mutant("claim_task", "attempt = t.attempt + 1", "attempt = t.attempt")
PRESENCE_WITHOUT_GRACE = Mutant(
    "_gone_workers", "between v_start and p_now - interval '5 seconds'", "<= p_now"
)
PRESENCE_UNSEEN = [
    Mutant("_gone_workers", words, "")
    for words in (
        "where pg_try_advisory_xact_lock_shared(1339, (s.id % 2147483647)::integer)",
        "where (a.id % 2147483647)::integer::oid not in (select pgsched._presences())",
    )
]
NEVER_GONE = Mutant("_gone_workers", "p_now < v_start + interval '5 seconds'", "true")
REAP_FOR_GOOD = Mutant(
    "_reap_tasks", "null) as e", "array_fill(true, array[cardinality(p_ids)])) as e"
)
FAILURE_FOR_GOOD = Mutant(
    "_end_attempts", "t.attempt >= t.max_attempts", "t.attempt >= least(t.max_attempts, 2)"
)
PERMANENT_FAILURE_TRIED_AGAIN = Mutant("_end_attempts", "g.permanent or", "")
KEY_OF_WHAT_HAS_ENDED = Mutant(
    "_add_unique",
    "  loop\n",
    """
      select f.id into v_id
        from pgsched.finished_tasks as f
       where f.queue = p_queue and f.unique_key = p_unique_key
       limit 1;
      if found then
        return v_id;
      end if;
      loop
    """,
)
KEY_OF_ANOTHER = Mutant("_add_unique", '= p_unique_key collate "default"', "is not null")
CANCEL_NOT_NOTED = Mutant("cancel_task", "and t.cancel_requested_at is null", "and false")
PRUNE_WHAT_IS_YOUNG = Mutant(
    "prune_finished", "f.finished_at < v_kind.finished_before", "f.finished_at < v_now"
)


def work(dsn: str, folder: Path, rounds: Sequence[float], find: str = "") -> Report:
    """Let SQL clients work, for so many seconds each time, until the checker finds this kind."""
    folder.mkdir()
    recorder = Recorder(folder, "clients")
    ids: deque[int] = deque(maxlen=1000)
    producer = clients.Producer(recorder, dsn, "producer", ids)
    everybody = [
        producer,
        clients.Operator(recorder, dsn, "operator", ids),
        *(clients.SqlWorker(recorder, dsn, f"worker {number}") for number in range(4)),
        *(clients.LateWorker(recorder, dsn, f"late worker {number}") for number in range(2)),
        clients.PresentWorker(recorder, dsn, "present worker"),
    ]
    with psycopg.connect(dsn, autocommit=True) as conn:
        prepare(conn)
        [(now,)] = conn.execute("select date_part('epoch', clock_timestamp())")
        recorder.note("clock", now)
        for seconds in rounds:
            producer.quota += 1000 * seconds
            stop = Event()
            threads = clients.start(everybody, stop)
            time.sleep(seconds)
            stop.set()
            for thread in threads:
                thread.join()
            with conn.transaction():
                report = check(read(folder), stored(conn))
            if find in {violation.kind for violation in report.violations}:
                break
    recorder.close()
    return report


def test_the_workload_passes(dsn: str, tmp_path: Path) -> None:
    report = work(dsn, tmp_path / "history", [4])
    assert [each for each in report.violations if each.kind != "unfinished"] == []
    assert {call for call, _ in report.calls} == {
        *("enqueue", "claim", "complete", "fail", "release", "extend", "transact"),
        *("cancel", "retry", "reap", "maintain", "register"),
    }


@pytest.mark.parametrize(
    "broken",
    [
        (mutants.CLAIM_BY_ID, mutants.CLAIM_WITHOUT_ROW_LOCK, "overlap"),
        (CLAIM_WITHOUT_TIME, "early"),
        (CLAIM_WITHOUT_COUNT, "attempt"),
        (TOKEN_OF_AN_ATTEMPT, "token"),
        (mutants.COMPLETE_WITHOUT_TOKEN, "stale"),
        (PRUNE_WHAT_IS_YOUNG, "lost"),
        (FAILURE_FOR_GOOD, "attempts left"),
        (KEY_OF_ANOTHER, "key"),
        (CANCEL_NOT_NOTED, "cancel"),
        (mutants.RETRY_OF_ANY_STATUS, "revived"),
        # Other ways to the same.
        *(
            pytest.param(broken, marks=pytest.mark.long)
            for broken in (
                (mutants.REAP_BY_ID_ONLY, "overlap"),
                (PRESENCE_WITHOUT_GRACE, "overlap"),
                (*PRESENCE_UNSEEN, "overlap"),
                (mutants.FAILURE_WITHOUT_TOKEN, "stale"),
                (mutants.BATCH_LOCK_WITHOUT_TOKEN, mutants.BATCH_FAILURE_WITHOUT_TOKEN, "stale"),
                (mutants.BATCH_LOCK_WITHOUT_TOKEN, mutants.BATCH_RELEASE_WITHOUT_TOKEN, "stale"),
                (mutants.EXTENSION_WITHOUT_TOKEN, "stale"),
                (mutants.BATCH_COMPLETION_WITHOUT_TOKEN, "stale"),
                (REAP_FOR_GOOD, "attempts left"),
                (PERMANENT_FAILURE_TRIED_AGAIN, "attempts left"),
                (KEY_OF_WHAT_HAS_ENDED, "key"),
            )
        ),
    ],
)
def test_a_broken_function_is_seen(
    dsn: str, conn: psycopg.Connection, tmp_path: Path, broken: tuple[Any, ...]
) -> None:
    *parts, kind = broken
    for mutant in parts:
        mutants.install(conn, mutant)
    report = work(dsn, tmp_path / "history", [0.5, 1, 2, 4, 8, 16], kind)
    assert kind in {violation.kind for violation in report.violations}


@pytest.mark.parametrize(
    ("broken", "kinds"),
    [([], set()), pytest.param([NEVER_GONE], {"presence"}, marks=pytest.mark.long)],
)
def test_killed_workers_are_missed_before_their_leases_end(
    dsn: str, conn: psycopg.Connection, tmp_path: Path, broken: Sequence[Mutant], kinds: set[str]
) -> None:
    for mutant in broken:
        mutants.install(conn, mutant)
    prepare(conn)
    recorders = [Recorder(tmp_path, f"killed {number}") for number in range(KILLS)]
    rest = Recorder(tmp_path, "rest")
    [(now,)] = conn.execute("select date_part('epoch', clock_timestamp())")
    rest.note("clock", now)
    query = "select pgsched.enqueue_task('noop', %s, 'bulk') from generate_series(1, %s)"
    args = {"count": KILLS}
    rest.call("enqueue", args, lambda tag: clients.column(conn, query, Jsonb({"tag": tag}), KILLS))
    with ExitStack() as sessions:
        for recorder in recorders:
            name = recorder.process
            worker = clients.PresentWorker(recorder, dsn, name, pooled=True)
            sessions.enter_context(worker.conn)
            presence = sessions.enter_context(worker.connect())
            worker.be_present(presence, name, worker.register(name, False))
            assert len(worker.claim("bulk", 1, 10.0, name)) == 1
    for recorder in recorders:
        rest.note("ended", recorder.process)
        recorder.close()
    other, left = clients.SqlWorker(rest, dsn, "other", pooled=True), KILLS
    with other.conn:
        while left:
            other.reap()
            held = other.claim("bulk", KILLS, 10.0)
            other.complete(held)
            left -= len(held)
            time.sleep(0.1)
    rest.close()
    with conn.transaction():
        report = check(read(tmp_path), stored(conn))
    assert kinds == {violation.kind for violation in report.violations}
    assert dict.fromkeys((each.process for each in recorders), not kinds) == report.missed
