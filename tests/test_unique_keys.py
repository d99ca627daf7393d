"""Unique keys with real sessions: one live task a key, no answer that a rollback makes false."""

from functools import partial
from random import Random

import oracle
import psycopg
import pytest
from oracle import Connect


@pytest.fixture(autouse=True)
def log(conn: psycopg.Connection) -> None:
    oracle.install(conn)


def live(conn: psycopg.Connection) -> list[tuple[str | None, int]]:
    """Keys of the live tasks, and how many have each."""
    return conn.execute(
        "select unique_key, count(*)::integer from pgsched.scheduled_tasks group by 1 order by 1"
    ).fetchall()


@pytest.mark.parametrize("rolled_back", [False, True])
def test_enqueuing_waits_for_an_open_one_with_the_key(connect: Connect, rolled_back: bool) -> None:
    conn, first, second = connect(), connect(), connect()
    with first.transaction(force_rollback=rolled_back):
        [task_id] = oracle.enqueue(first, unique_key="k")
        call = oracle.Call(conn, second, lambda: oracle.enqueue(second, unique_key="k"))
        assert call.waits
        others = oracle.at_once(conn, conn, lambda: oracle.enqueue(conn, queue="b", unique_key="k"))
    [answer] = call.result()
    assert (answer == task_id) is not rolled_back
    ids = conn.execute("select id from pgsched.scheduled_tasks order by id").fetchall()
    assert ids == sorted([(answer,), (others[0],)])
    oracle.check(conn)


@pytest.mark.parametrize("rolled_back", [False, True])
def test_enqueuing_waits_for_the_open_end_of_the_task(connect: Connect, rolled_back: bool) -> None:
    conn, first, second = connect(), connect(), connect()
    [task_id] = oracle.enqueue(conn, unique_key="k")
    [held] = oracle.claim(conn)
    assert oracle.enqueue(conn, unique_key="k") == [task_id]
    with first.transaction(force_rollback=rolled_back):
        assert oracle.complete(first, held)
        call = oracle.Call(conn, second, lambda: oracle.enqueue(second, unique_key="k"))
        assert call.waits
    [answer] = call.result()
    assert (answer == task_id) is rolled_back
    assert live(conn) == [("k", 1)]
    oracle.check(conn)


@pytest.mark.parametrize("isolation", ["read\\ committed", "repeatable\\ read", "serializable"])
def test_eight_sessions_make_one_live_task_a_key(connect: Connect, isolation: str) -> None:
    conn = connect()
    keys = [f"key-{number:02}" for number in range(50)]

    def enqueue(seed: int) -> dict[str, int]:
        session = connect(options=f"-c default_transaction_isolation={isolation}")
        ids = {}
        for key in Random(seed).sample(keys, 50):
            while key not in ids:
                try:
                    [ids[key]] = oracle.enqueue(session, unique_key=key)
                except psycopg.errors.SerializationFailure:
                    continue
        return ids

    answers = oracle.together(partial(enqueue, seed) for seed in range(8))
    assert all(answer == answers[0] for answer in answers)
    assert live(conn) == [(key, 1) for key in keys]
    oracle.check(conn)


def test_a_key_is_taken_again_as_soon_as_its_task_ends(connect: Connect) -> None:
    """Sessions enqueue one key and complete what they claim: never two live tasks, never a loss."""
    conn = connect()

    def turn(session: psycopg.Connection) -> set[int]:
        ids = set()
        for _ in range(100):
            ids.update(oracle.enqueue(session, unique_key="k"))
            for held in oracle.claim(session):
                assert oracle.complete(session, held)
        return ids

    ids = set().union(*oracle.together(partial(turn, connect()) for _ in range(4)))
    assert live(conn) in ([], [("k", 1)])
    assert {task_id for (task_id,) in conn.execute("select id from pgsched.tasks")} == ids
    oracle.check(conn)
