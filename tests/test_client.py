"""What a producer calls, and the SQL functions as the driver calls them."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import rows
from workers import row

from pgsched import (
    ClaimLost,
    InvalidArgument,
    PgschedError,
    SchemaError,
    TaskNotFound,
    WrongState,
    calls,
    enqueue,
    errors,
)
from pgsched.calls import Claim, Outcome
from pgsched.embedded import Server

Connect = Callable[..., psycopg.Connection]

LEASE = timedelta(minutes=1)

CANCEL = "update pgsched.scheduled_tasks set cancel_requested_at = now() where id = %s"
LOCK = "select from pgsched.scheduled_tasks where id = %s for update"


@pytest.fixture(scope="module")
def shared_dsn(server: Server, template: str) -> Iterator[str]:
    """A database for tests whose transaction is rolled back."""
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        yield server.create_database("client", template=template)
        admin.execute("drop database client with (force)")


@pytest.fixture
def session(shared_dsn: str) -> Iterator[psycopg.Connection]:
    """A connection in a transaction that is rolled back afterwards."""
    with psycopg.connect(shared_dsn) as session:
        yield session
        session.rollback()


def column(conn: psycopg.Connection, task_id: int, name: str) -> Any:
    """One column of a task."""
    query = f"select {name} from pgsched.tasks where id = %s".encode()
    [(value,)] = conn.execute(query, [task_id])
    return value


def tasks(conn: psycopg.Connection) -> int:
    """How many tasks there are."""
    [(number,)] = conn.execute("select count(*) from pgsched.tasks")
    assert isinstance(number, int)
    return number


def claim(conn: psycopg.Connection, limit: int = 1, queue: str = "default") -> list[Claim]:
    return calls.claim_task(conn, "worker", queue, LEASE, limit)


# enqueue


def test_a_task_is_stored_as_given(session: psycopg.Connection) -> None:
    run_at = datetime(2100, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    task_id = enqueue(
        session,
        "charge_card",
        {"card": 7},
        queue="billing",
        run_at=run_at,
        priority=2,
        max_attempts=3,
        unique_key="u",
        concurrency_key="c",
    )
    stored = session.execute(
        """
        select id, task_type, payload, queue, run_at, priority, max_attempts, unique_key,
               concurrency_key, status, attempt
          from pgsched.tasks
        """
    ).fetchall()
    assert stored == [
        (task_id, "charge_card", {"card": 7}, "billing", run_at, 2, 3, "u", "c", "queued", 0)
    ]


def test_a_type_is_all_it_needs(session: psycopg.Connection) -> None:
    enqueue(session, "type")
    stored = session.execute(
        """
        select payload, queue, run_at = created_at, priority, max_attempts, unique_key,
               concurrency_key
          from pgsched.tasks
        """
    ).fetchall()
    assert stored == [({}, "default", True, 5, 20, None, None)]


@pytest.mark.parametrize(
    "payload",
    [
        {"a": {"b": [1, 2.5, True, None, "x"]}},
        [],
        0,
        False,
        "",
        '\u00e4 \N{SNOWMAN} \N{PILE OF POO} \\ " \n % %s',
        10**300,
        -1e-7,
    ],
    ids=repr,
)
def test_a_payload_comes_back_as_it_was(session: psycopg.Connection, payload: Any) -> None:
    task_id = enqueue(session, "type", payload)
    assert column(session, task_id, "payload") == payload
    [claimed] = claim(session)
    assert json.loads(claimed.payload) == payload


def deep_list() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


NO_JSON: dict[str, Any] = {
    "nan": math.nan,
    "infinity": [math.inf],
    "set": {1, 2},
    "datetime": datetime.now(UTC),
    "key": {(1, 2): 3},
    "object": object(),
    "nul": "a\0b",
    "nul key": {"a\0b": 1},
    "surrogate": "\ud800",
    "deep": deep_list(),
}


@pytest.mark.parametrize("payload", NO_JSON.values(), ids=NO_JSON.keys())
def test_a_payload_that_is_no_json_is_refused(session: psycopg.Connection, payload: Any) -> None:
    with pytest.raises(InvalidArgument), session.transaction():
        enqueue(session, "type", payload)
    assert tasks(session) == 0


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("task_type", ""),
        ("task_type", 64 * "t"),
        ("task_type", 32 * "\u00e4"),
        ("task_type", "a\nb"),
        ("queue", ""),
        ("queue", 64 * "q"),
        ("priority", -1),
        ("priority", 10),
        ("priority", None),
        ("max_attempts", 0),
        ("unique_key", ""),
        ("concurrency_key", 64 * "c"),
        ("payload", "x" * 1_048_577),
        ("run_at", datetime.max.replace(tzinfo=UTC)),
        ("run_at", datetime(2100, 1, 1)),  # noqa: DTZ001
    ],
    ids=lambda value: repr(value)[:20],
)
def test_an_argument_out_of_range_is_refused_by_name(
    session: psycopg.Connection, argument: str, value: Any
) -> None:
    arguments = {"task_type": "type", argument: value}
    with pytest.raises(InvalidArgument, match=argument), session.transaction():
        enqueue(session, **arguments)
    assert tasks(session) == 0


@pytest.mark.parametrize("text", ["a\0b", "\ud800"], ids=["nul", "surrogate"])
@pytest.mark.parametrize("argument", ["task_type", "queue", "unique_key"])
def test_text_that_the_database_cannot_hold_is_refused(
    session: psycopg.Connection, argument: str, text: str
) -> None:
    arguments: dict[str, Any] = {"task_type": "type", argument: text}
    with pytest.raises((PgschedError, psycopg.Error)), session.transaction():
        enqueue(session, **arguments)
    assert tasks(session) == 0


def test_run_at_and_delay_exclude_each_other(session: psycopg.Connection) -> None:
    with pytest.raises(InvalidArgument, match="run_at or delay"):
        enqueue(session, "type", run_at=datetime.now(UTC), delay=timedelta(seconds=1))


@pytest.mark.parametrize(
    ("delay", "due_in"),
    [
        (timedelta(hours=1), timedelta(hours=1)),
        (timedelta(0), timedelta(0)),
        (timedelta(hours=-1), timedelta(0)),
    ],
    ids=str,
)
def test_a_delay_counts_from_now_by_the_servers_clock(
    session: psycopg.Connection, delay: timedelta, due_in: timedelta
) -> None:
    session.execute("set timezone to 'Pacific/Kiritimati'")
    found = row(session, enqueue(session, "type", delay=delay)).due_in
    assert due_in - timedelta(minutes=1) < found <= due_in


def test_a_time_in_the_past_means_now(session: psycopg.Connection) -> None:
    task_id = enqueue(session, "type", run_at=datetime(2000, 1, 1, tzinfo=UTC))
    assert column(session, task_id, "run_at = created_at") is True


def test_the_transaction_stays_the_callers(connect: Connect, conn: psycopg.Connection) -> None:
    session = connect(autocommit=False)
    enqueue(session, "type")
    assert tasks(conn) == 0
    session.rollback()
    task_id = enqueue(session, "type")
    with pytest.raises(InvalidArgument), session.transaction():
        enqueue(session, "type", priority=10)
    session.commit()
    assert [claimed.id for claimed in claim(conn, 100)] == [task_id]


def test_an_autocommit_connection_enqueues_at_once(
    conn: psycopg.Connection, connect: Connect
) -> None:
    task_id = enqueue(conn, "type")
    assert [claimed.id for claimed in claim(connect(), 100)] == [task_id]


def test_a_unique_key_is_taken_while_its_task_lives(session: psycopg.Connection) -> None:
    first = enqueue(session, "type", unique_key="key")
    assert enqueue(session, "other", {"ignored": True}, unique_key="key") == first
    assert enqueue(session, "type", unique_key="key", queue="other") != first
    assert enqueue(session, "type") != first
    [claimed] = claim(session, 1)
    assert enqueue(session, "type", unique_key="key") == claimed.id == first
    assert calls.complete_tasks(session, [Outcome(claimed, "completed")]) == ["completed"]
    assert enqueue(session, "type", unique_key="key") > first


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"row_factory": rows.dict_row}, id="dict_row"),
        pytest.param({"row_factory": rows.namedtuple_row}, id="namedtuple_row"),
        pytest.param({"row_factory": rows.scalar_row}, id="scalar_row"),
        pytest.param({"cursor_factory": psycopg.ClientCursor}, id="ClientCursor"),
        pytest.param({"cursor_factory": psycopg.RawCursor}, id="RawCursor"),
        pytest.param({"prepare_threshold": 0}, id="always prepared"),
        pytest.param({"prepare_threshold": None}, id="never prepared"),
    ],
)
def test_the_connection_may_be_set_up_in_any_way(connect: Connect, options: dict[str, Any]) -> None:
    session = connect(**options)
    task_id = enqueue(session, "type", {"n": 1}, delay=timedelta(seconds=0))
    assert column(connect(), task_id, "payload") == {"n": 1}


def test_it_works_in_a_pipeline(conn: psycopg.Connection) -> None:
    with conn.pipeline():
        first, second = enqueue(conn, "type"), enqueue(conn, "type")
    assert [claimed.id for claimed in claim(conn, 100)] == [first, second]


# Errors


def test_without_the_schema_it_says_what_to_run(server: Server) -> None:
    with psycopg.connect(server.dsn()) as conn, pytest.raises(SchemaError, match="pgsched migrate"):
        enqueue(conn, "type")


def test_without_the_right_it_says_so(session: psycopg.Connection) -> None:
    session.execute("create role client_without_rights")
    session.execute("set local role client_without_rights")
    with pytest.raises(SchemaError, match="permission denied"):
        enqueue(session, "type")


def test_other_errors_of_the_database_pass_through(connect: Connect) -> None:
    session = connect(autocommit=False)
    with pytest.raises(psycopg.errors.DivisionByZero):
        session.execute("select 1 / 0")
    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        enqueue(session, "type")
    session.close()
    with pytest.raises(psycopg.OperationalError):
        enqueue(session, "type")


@pytest.mark.parametrize(
    ("sqlstate", "expected"),
    [
        ("TS400", InvalidArgument),
        ("TS404", TaskNotFound),
        ("TS409", ClaimLost),
        ("TS423", WrongState),
    ],
)
def test_an_sqlstate_becomes_its_exception_with_the_hint(
    session: psycopg.Connection, sqlstate: str, expected: type[PgschedError]
) -> None:
    statement = "do $$ begin raise 'what' using errcode = '{}', hint = 'do this'; end $$"
    with pytest.raises(expected) as caught, calls.translated():
        session.execute(statement.format(sqlstate).encode())
    assert type(caught.value) is expected
    assert str(caught.value) == "what (do this)"
    assert isinstance(caught.value.__cause__, psycopg.Error)
    assert issubclass(expected, PgschedError)


def test_an_error_of_no_sqlstate_is_left_as_it_is() -> None:
    error = psycopg.OperationalError("gone")
    assert errors.from_database(error) is error


# The calls of the worker

WAITED = "date_part('epoch', claimed_at - run_at)"


@pytest.fixture
def claimed(conn: psycopg.Connection) -> list[Claim]:
    """Three claims."""
    for number in range(3):
        enqueue(conn, "type", number)
    return claim(conn, 3)


def test_a_claim_says_what_there_is_to_know(session: psycopg.Connection) -> None:
    task_id = enqueue(session, "type", {"b": 1, "a": "\u00e4"}, priority=4, max_attempts=6)
    [claimed] = calls.claim_task(session, "worker", "default", timedelta(seconds=90), 5)
    assert (claimed.id, claimed.task_type, claimed.queue) == (task_id, "type", "default")
    assert (claimed.priority, claimed.attempt, claimed.max_attempts) == (4, 1, 6)
    assert claimed.payload == '{"a": "\u00e4", "b": 1}'
    assert claimed.run_at == claimed.created_at
    assert claimed.contended == 0
    assert column(session, task_id, "claim_token::text") == claimed.token
    assert column(session, task_id, WAITED) == claimed.waited >= 0
    assert column(session, task_id, "lease_expires_at - claimed_at") == timedelta(seconds=90)
    assert claim(session) == []


def test_extensions_are_answered_in_the_order_given(
    conn: psycopg.Connection, connect: Connect, claimed: list[Claim]
) -> None:
    extended, cancelled, busy = claimed
    before = [column(conn, each.id, "lease_expires_at") for each in (extended, busy)]
    conn.execute(CANCEL, [cancelled.id])
    with connect().transaction() as block:
        block.connection.execute(LOCK, [busy.id])
        lost = replace(extended, token=str(uuid4()))
        answers = calls.extend_tasks(conn, [busy, lost, cancelled, extended], timedelta(hours=1))
    assert answers == ["busy", "lost", "cancel_requested", "extended"]
    assert column(conn, extended.id, "lease_expires_at") > before[0]
    assert column(conn, busy.id, "lease_expires_at") == before[1]


def test_completions_are_answered_in_the_order_given(
    conn: psycopg.Connection, connect: Connect, claimed: list[Claim]
) -> None:
    completed, stale, busy = claimed
    given = [
        Outcome(busy, "completed", "1"),
        Outcome(completed, "completed", '{"x": 1}'),
        Outcome(replace(stale, token=str(uuid4())), "completed", "2"),
        Outcome(replace(stale, id=10**9), "completed"),
    ]
    with connect().transaction() as block:
        block.connection.execute(LOCK, [busy.id])
        answers = calls.complete_tasks(conn, given)
    assert answers == ["busy", "completed", "stale", "gone"]
    assert row(conn, completed.id).result == {"x": 1}
    again = calls.complete_tasks(conn, [Outcome(completed, "completed")])
    assert again == ["already"]


def test_failures_are_answered_in_the_order_given(
    conn: psycopg.Connection, connect: Connect
) -> None:
    ids = [enqueue(conn, "type") for _ in range(5)]
    retried, failed, cancelled, busy, stale = claim(conn, 5)
    conn.execute(CANCEL, [cancelled.id])
    in_a_day = timedelta(days=1)
    given = [
        Outcome(busy, "failed", error="a"),
        Outcome(retried, "failed", error="b", delay=in_a_day),
        Outcome(replace(stale, token=str(uuid4())), "failed", error="c"),
        Outcome(failed, "failed", error="d", permanent=True),
        Outcome(replace(stale, id=10**9), "failed", error="e"),
        Outcome(cancelled, "failed", error="f"),
    ]
    with connect().transaction() as block:
        block.connection.execute(LOCK, [busy.id])
        answers = calls.fail_tasks(conn, given)
    assert answers == ["busy", "queued", "stale", "failed", "gone", "cancelled"]
    assert [row(conn, task_id).last_error for task_id in ids] == ["b", "d", "f", None, None]
    assert row(conn, retried.id).due_in > timedelta(hours=23)
    assert row(conn, busy.id).status == row(conn, stale.id).status == "processing"


def test_releases_are_answered_in_the_order_given(
    conn: psycopg.Connection, connect: Connect
) -> None:
    for _ in range(5):
        enqueue(conn, "type")
    later, now, cancelled, busy, stale = claim(conn, 5)
    conn.execute(CANCEL, [cancelled.id])
    given = [
        Outcome(busy, "released"),
        Outcome(later, "released", delay=timedelta(hours=1)),
        Outcome(replace(stale, token=str(uuid4())), "released"),
        Outcome(now, "released"),
        Outcome(replace(stale, id=10**9), "released"),
        Outcome(cancelled, "released"),
    ]
    with connect().transaction() as block:
        block.connection.execute(LOCK, [busy.id])
        answers = calls.release_tasks(conn, given)
    assert answers == ["busy", "queued", "stale", "queued", "gone", "cancelled"]
    released = row(conn, later.id)
    assert (released.status, released.attempt) == ("queued", 0)
    assert timedelta(minutes=59) < released.due_in <= timedelta(hours=1)
    released = row(conn, now.id)
    assert (released.status, released.attempt) == ("queued", 0)
    assert released.due_in <= timedelta(0)
    assert row(conn, busy.id).status == row(conn, stale.id).status == "processing"


def test_a_held_claim_is_completed_in_the_transaction_or_not_at_all(
    conn: psycopg.Connection, connect: Connect, claimed: list[Claim]
) -> None:
    session = calls.connect(conn.info.dsn, application_name="test")
    with session, session.transaction():
        calls.hold_task(session, claimed[0])
        calls.complete_task(session, claimed[0], '{"x": 1}')
        assert row(conn, claimed[0].id).status == "processing"
    assert row(conn, claimed[0].id).result == {"x": 1}
    with calls.connect(conn.info.dsn, application_name="test") as session:
        with session.transaction(force_rollback=True):
            calls.hold_task(session, claimed[1])
            calls.complete_task(session, claimed[1], None)
        assert row(conn, claimed[1].id).status == "processing"


def test_a_claim_that_is_not_current_is_lost_and_an_unknown_task_not_found(
    conn: psycopg.Connection, claimed: list[Claim]
) -> None:
    for task_id, expected in ((claimed[0].id, ClaimLost), (10**9, TaskNotFound)):
        claim = replace(claimed[0], id=task_id, token=str(uuid4()))
        with pytest.raises(expected), calls.translated():
            calls.hold_task(conn, claim)
        with pytest.raises(expected), calls.translated():
            calls.complete_task(conn, claim, None)


def test_finished_tasks_are_pruned_as_far_as_told(
    conn: psycopg.Connection, claimed: list[Claim]
) -> None:
    calls.complete_tasks(conn, [Outcome(each, "completed") for each in claimed])
    assert calls.prune_finished(conn, 2) == 0
    conn.execute("update pgsched.finished_tasks set finished_at = finished_at - interval '2 days'")
    assert [calls.prune_finished(conn, 2) for _ in range(3)] == [2, 1, 0]


def test_reaping_says_what_became_of_each_task(
    conn: psycopg.Connection, claimed: list[Claim]
) -> None:
    assert calls.reap_stale(conn, 10) == []
    conn.execute(
        """
        update pgsched.scheduled_tasks
           set lease_expires_at = clock_timestamp() - interval '1 second',
               max_attempts = case id when %s then 1 else 20 end
        """,
        [claimed[1].id],
    )
    assert sorted(calls.reap_stale(conn, 10)) == [
        (claimed[0].id, "queued"),
        (claimed[1].id, "failed"),
        (claimed[2].id, "queued"),
    ]


def test_a_worker_registers_again_and_signs_off(session: psycopg.Connection) -> None:
    worker_id = calls.register_worker(session, "name", ["a", "b"], 3, False)
    session.execute("call pgsched.hold_presence(%s)", [worker_id])
    assert calls.register_worker(session, "name", ["a"], 4, True) == worker_id
    rows = session.execute("select id, name, queues, slots, presence from pgsched.workers")
    assert rows.fetchall() == [(worker_id, "name", ["a"], 4, True)]
    calls.unregister_worker(session, worker_id)
    calls.unregister_worker(session, worker_id)
    assert session.execute("select id from pgsched.workers").fetchall() == []


def test_statistics_have_a_row_for_each_queue_in_use(session: psycopg.Connection) -> None:
    assert calls.database_stats(session)[1] == []
    enqueue(session, "type", queue="a")
    enqueue(session, "type", queue="a", delay=timedelta(hours=1))
    enqueue(session, "type", queue="b")
    [claimed] = claim(session, queue="b")
    session.execute("insert into pgsched.queues (name, paused) values ('c', true)")
    _, (a, b, c) = calls.database_stats(session)
    assert 0 < a["oldest_due_age"] < 60
    a["oldest_due_age"] = 0
    numbers = {"queued": 0, "due": 0, "processing": 0, "failed": 0, "oldest_due_age": 0}
    assert a == {**numbers, "queue": "a", "paused": False, "queued": 2, "due": 1}
    assert b == {**numbers, "queue": "b", "paused": False, "processing": 1}
    assert c == {**numbers, "queue": "c", "paused": True}
    calls.fail_tasks(session, [Outcome(claimed, "failed", permanent=True)])
    assert [queue["failed"] for queue in calls.database_stats(session)[1]] == [0, 1, 0]


def test_the_schemas_version_is_a_number_of_four_digits(session: psycopg.Connection) -> None:
    version = calls.schema_version(session)
    assert len(version) == 4
    assert version.isdigit()


def test_connect_makes_what_a_pooler_can_sit_behind(dsn: str) -> None:
    with calls.connect(dsn, application_name="x" * 100) as conn:
        assert conn.autocommit
        assert conn.prepare_threshold is None
        assert conn.execute("show application_name").fetchone() == ("x" * 63,)
        assert conn.info.encoding == "utf-8"
    with calls.connect(f"{dsn}&application_name=mine", application_name="ours") as conn:
        assert conn.execute("show application_name").fetchone() == ("mine",)
