"""Unique keys with real sessions: one live task a key, no answer that a rollback makes false.

A test that is also run against mutants takes nothing but the connection factory.
"""

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from threading import Event

import mutants
import oracle
import psycopg
import pytest
from oracle import Claim, Connect

Enqueue = Callable[[psycopg.Connection, str], int]

KEYS = [f"key-{number:02}" for number in range(100)]


@pytest.fixture(autouse=True)
def log(conn: psycopg.Connection) -> None:
    oracle.install(conn)


def live(conn: psycopg.Connection) -> list[tuple[str | None, int]]:
    """Keys of the live tasks, and how many have each."""
    return conn.execute(
        "select unique_key, count(*)::integer from pgsched.scheduled_tasks group by 1 order by 1"
    ).fetchall()


def one(session: psycopg.Connection, key: str) -> int:
    [task_id] = oracle.enqueue(session, unique_key=key)
    return task_id


def batch(session: psycopg.Connection, keys: Sequence[str]) -> list[int]:
    return oracle.enqueue_batch(session, [{"unique_key": key} for key in keys])


def one_in_batch(session: psycopg.Connection, key: str) -> int:
    [task_id] = batch(session, [key])
    return task_id


@pytest.mark.parametrize("rolled_back", [False, True])
@pytest.mark.parametrize("second_enqueue", [one, one_in_batch])
@pytest.mark.parametrize("first_enqueue", [one, one_in_batch])
def test_enqueuing_waits_for_an_open_one_with_the_key(
    connect: Connect, first_enqueue: Enqueue, second_enqueue: Enqueue, rolled_back: bool
) -> None:
    conn, first, second, third = connect(), connect(), connect(), connect()
    with first.transaction(force_rollback=rolled_back):
        task_id = first_enqueue(first, "k")
        call = oracle.Call(conn, second, lambda: second_enqueue(second, "k"))
        assert call.waits
        [other] = oracle.at_once(
            conn, third, lambda: oracle.enqueue(third, queue="b", unique_key="k")
        )
    answer = call.result()
    assert (answer == task_id) is not rolled_back
    ids = conn.execute("select id from pgsched.scheduled_tasks order by id").fetchall()
    assert ids == sorted([(answer,), (other,)])
    oracle.check(conn)


@pytest.mark.parametrize("rolled_back", [False, True])
@pytest.mark.parametrize("enqueue", [one, one_in_batch])
def test_enqueuing_waits_for_the_open_end_of_the_task(
    connect: Connect, enqueue: Enqueue, rolled_back: bool
) -> None:
    conn, first, second = connect(), connect(), connect()
    task_id = enqueue(conn, "k")
    [held] = oracle.claim(conn)
    assert enqueue(conn, "k") == task_id
    with first.transaction(force_rollback=rolled_back):
        assert oracle.complete(first, held)
        call = oracle.Call(conn, second, lambda: enqueue(second, "k"))
        assert call.waits
    assert (call.result() == task_id) is rolled_back
    assert live(conn) == [("k", 1)]
    oracle.check(conn)


@pytest.mark.parametrize("enqueue", [one, one_in_batch])
@pytest.mark.parametrize("change", [oracle.extend_one, oracle.release])
def test_enqueuing_waits_for_an_open_change_of_the_task(
    connect: Connect, change: Callable[[psycopg.Connection, Claim], object], enqueue: Enqueue
) -> None:
    conn, first, second = connect(), connect(), connect()
    task_id = enqueue(conn, "k")
    [held] = oracle.claim(conn)
    with first.transaction():
        change(first, held)
        call = oracle.Call(conn, second, lambda: enqueue(second, "k"))
        assert call.waits
    assert call.result() == task_id
    oracle.check(conn)


@pytest.mark.parametrize("enqueue", [one, one_in_batch])
def test_enqueuing_does_not_wait_for_a_handler_that_holds_the_task(
    connect: Connect, enqueue: Enqueue
) -> None:
    conn, holder, second = connect(), connect(), connect()
    task_id = enqueue(conn, "k")
    [held] = oracle.claim(conn)
    with holder.transaction():
        oracle.hold(holder, held)
        assert oracle.at_once(conn, second, lambda: enqueue(second, "k")) == task_id
    oracle.check(conn)


@pytest.mark.parametrize("isolation", ["read\\ committed", "repeatable\\ read", "serializable"])
def test_eight_sessions_make_one_live_task_a_key(connect: Connect, isolation: str) -> None:
    conn = connect()
    keys = KEYS[:50]

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


def test_eight_sessions_enqueue_the_same_keys_in_batches(connect: Connect) -> None:
    """In any order, with repetitions, and nobody deadlocks."""
    conn = connect()

    def enqueue(seed: int) -> dict[str, int]:
        session, random = connect(), Random(seed)
        ids: dict[str, int] = {}
        for _ in range(60):
            keys = random.sample(KEYS, 49)
            keys.append(random.choice(keys))
            for key, task_id in zip(keys, batch(session, keys), strict=True):
                assert ids.setdefault(key, task_id) == task_id
        return ids

    answers = oracle.together(partial(enqueue, seed) for seed in range(8))
    assert live(conn) == [(key, 1) for key in KEYS]
    rows = conn.execute("select unique_key, id from pgsched.scheduled_tasks").fetchall()
    assert answers == [dict(rows)] * 8
    oracle.check(conn)


def test_batches_of_keys_while_their_tasks_end(connect: Connect) -> None:
    """Each id is that of a task; a key has one live task at most; nobody deadlocks."""
    conn = connect()
    over = Event()

    def enqueue(seed: int) -> set[int]:
        session, random = connect(), Random(seed)
        ids: set[int] = set()
        try:
            for _ in range(60):
                ids.update(batch(session, random.sample(KEYS, 50)))
        finally:
            over.set()
        return ids

    def end(seed: int) -> set[int]:
        session, random = connect(), Random(seed)
        while not over.is_set():
            held = oracle.claim(session, limit=30)
            random.shuffle(held)
            oracle.complete_batch(session, held[10:])
            for each in held[:5]:
                oracle.fail(session, each, permanent=True)
                oracle.outcome(partial(oracle.retry, session, each.id))
            for each in held[5:10]:
                oracle.release(session, each)
                oracle.cancel(session, each.id)
        return set()

    ids = set().union(
        *oracle.together(
            [*(partial(enqueue, n) for n in range(6)), partial(end, 6), partial(end, 7)]
        )
    )
    assert {count for _, count in live(conn)} <= {1}
    assert {task_id for (task_id,) in conn.execute("select id from pgsched.tasks")} == ids
    oracle.check(conn)


def test_batches_take_keys_in_one_order(connect: Connect) -> None:
    """Both wait for the key in the middle, and no deadlock follows when it comes free."""
    conn, holder, first, second = connect(), connect(), connect(), connect()
    with holder.transaction(force_rollback=True):
        one(holder, "m")
        calls = [
            oracle.Call(conn, session, partial(batch, session, keys))
            for session, keys in ((first, ["a", "m", "z"]), (second, ["z", "m", "a"]))
        ]
        assert [call.waits for call in calls] == [True, True]
    ids = calls[0].result()
    assert calls[1].result() == ids[::-1]
    assert live(conn) == [("a", 1), ("m", 1), ("z", 1)]
    oracle.check(conn)


def test_a_batch_in_input_order_is_seen_to_deadlock(connect: Connect) -> None:
    mutants.install(connect(), mutants.ENQUEUE_IN_INPUT_ORDER)
    with pytest.raises(psycopg.errors.DeadlockDetected):
        test_batches_take_keys_in_one_order(connect)
