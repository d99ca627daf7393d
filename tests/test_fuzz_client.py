"""Hostile arguments of enqueue and of the command line: documented exceptions, one line each."""

import math
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from enum import StrEnum
from types import ModuleType
from typing import Any
from uuid import UUID

import fuzzing
import psycopg
import pytest
from command_line import pgsched
from hostile import TEXTS
from hypothesis import given, seed
from hypothesis import strategies as st

from pgsched import InvalidArgument, Worker, enqueue
from pgsched.embedded import Server


class Word(StrEnum):
    WORD = "word"


endless: list[Any] = []
endless.append(endless)
first = datetime(1, 1, 1, tzinfo=UTC)
last = datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)

THINGS = [
    *TEXTS,
    *("a\0b", "\ud800", "\udfff\ud800", Word.WORD, b"", b"\xff", bytearray(b"a")),
    *(None, True, False, 0, 1, -1, 9, 10, 2**31 - 1, 2**31, -(2**63), 2**63, 10**4000, -(10**5000)),
    *(0.0, 5.0, 1.5, math.nan, math.inf, 1e300, 1j, Decimal("NaN"), Decimal(5), UUID(int=0)),
    *([], {}, (), set(), ["a"], {"a": {1}}, {1: 2}, {(): 1}, {"\0": 1}, ["\ud800"], [math.nan]),
    *(endless, object(), type, len, "x" * 1_048_575, {"a": first}),
    *(timedelta(0), timedelta.max, timedelta.min, timedelta(days=-1), timedelta(days=2_900_000)),
    *(first, last, first.replace(tzinfo=None), datetime.now(UTC)),
    *(
        each.replace(tzinfo=timezone(timedelta(hours=h)))
        for each in (first, last)
        for h in (-23, 23)
    ),
    datetime(2000, 1, 1, tzinfo=timezone(timedelta(microseconds=1))),
]
OPTIONS = ["queue", "run_at", "delay", "priority", "max_attempts", "unique_key", "concurrency_key"]


@pytest.fixture(scope="module")
def database(server: Server, template: str) -> Iterator[str]:
    yield server.create_database("fuzz_client", template=template)
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute("drop database fuzz_client with (force)")


@pytest.fixture
def conn(database: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database, autocommit=True) as conn:
        yield conn


def add(conn: psycopg.Connection, task_type: Any, payload: Any, **options: Any) -> None:
    """The task is added, or refused by InvalidArgument, or by psycopg, which sends no NUL."""
    with conn.transaction(force_rollback=True):
        try:
            with conn.transaction():
                task_id = enqueue(conn, task_type, payload, **options)
        except (InvalidArgument, psycopg.DataError):
            return
        [(found,)] = conn.execute("select task_type from pgsched.tasks where id = %s", [task_id])
        assert found == task_type


def test_enqueue_takes_a_thing_or_refuses_it(conn: psycopg.Connection) -> None:
    for thing in THINGS:
        add(conn, thing, None)
        add(conn, "a", thing)
        for option in OPTIONS:
            add(conn, "a", None, **{option: thing})
        no_connection: Any = thing
        with pytest.raises(InvalidArgument, match="conn"):
            enqueue(no_connection, "a")


@pytest.mark.parametrize("examples", [50, pytest.param(3000, marks=pytest.mark.long)])
def test_enqueue_takes_any_things_or_refuses_them(conn: psycopg.Connection, examples: int) -> None:
    thing = st.sampled_from(THINGS) | st.text() | st.integers() | st.timedeltas()

    @fuzzing.settings(examples)
    @given(st.text(), thing, st.dictionaries(st.sampled_from(OPTIONS), thing))
    def any_things(task_type: str, payload: Any, options: dict[str, Any]) -> None:
        add(conn, task_type, payload, **options)

    with fuzzing.seeded(long=examples > 100) as number:
        seed(number)(any_things)()


WORDS = [
    *("", " ", "5", "-5", "0", "nan", "inf", "-inf", "1e300", "1e400", "0.1", "9" * 400, "0002"),
    *("default", "x" * 64, "\ud800", "a\n", "\x1b[31m", "\ufeff", "%s", "'; --", "{", '"\\ud800"'),
    *("-", "--", "--help", "@/etc/passwd", "$(id)", "[" * 2000, "admin", "pg_monitor"),
]
COMMANDS = [
    *("enqueue {}", "enqueue a {}", "enqueue a --queue {}", "enqueue a --delay {}"),
    *("enqueue a --priority {}", "enqueue a --max-attempts {}", "enqueue a --unique-key {}"),
    *("pause {}", "resume {}", "retry {}", "cancel {}", "show {}", "top --interval {}"),
    *("migrate --to {}", "migrate --lock-timeout {}", "grant worker {}", "grant {} pg_monitor"),
    "sql --from {}",
]


def say(*arguments: str) -> int:
    """The exit code; with 0 there is output and no error, else the reverse, in one line."""
    result = pgsched(*arguments)
    lines = result.stderr.splitlines()
    if result.exit_code:
        # A usage error has click's two lines and an empty one above it.
        assert len(lines) == (4 if lines[0].startswith("Usage: ") else 1)
        assert lines[-1].startswith("Error: ")
    assert bool(lines) == bool(result.exit_code)
    assert bool(result.stdout) == (not result.exit_code)
    return result.exit_code


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_takes_a_word_or_says_why_not(database: str, command: str) -> None:
    for word in WORDS:
        arguments = [word if part == "{}" else part for part in command.split()]
        say(*arguments, *([] if arguments[0] == "sql" else ["--dsn", database]))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        *(
            (option, ["", "x", "nan", "inf", "-1", "1e400", "9" * 400])
            for option in ("concurrency", "lease", "poll-interval", "grace", "connections")
        ),
        ("metrics-port", ["", "x", "-1", "0", "65536", "9" * 400]),
        ("queue", ["", "\ud800", "\x01", "x" * 64]),
    ],
)
def test_a_worker_does_not_start_with_nonsense(
    database: str, monkeypatch: pytest.MonkeyPatch, option: str, words: list[str]
) -> None:
    module: Any = ModuleType("fuzz_app")
    module.worker = Worker(database)
    monkeypatch.setitem(sys.modules, "fuzz_app", module)
    for word in words:
        assert say("worker", "fuzz_app", f"--{option}={word}") in (1, 2)
