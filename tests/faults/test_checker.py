"""The checker passes what is right and names what is wrong, in histories made by hand."""

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import psycopg
import pytest
from checker import Row, check
from history import Note, Op, Recorder, read
from summary import left_behind

QUEUED, DONE = "queued", "completed"


def op(
    call: str, begin: float, end: float, result: Any = None, *, status: str = "ok", **args: Any
) -> Op:
    """A call of a process of its own; with a `token` it is about task 1 alone."""
    if token := args.pop("token", None):
        args.update(ids=[1], tokens=[token])
        result = [result] if status == "ok" else None
    name = f"{call} at {begin:g}"
    return Op(name, args.pop("process", "p"), call, begin, end, status, args, result)


def enqueue(begin: float = 0, *, status: str = "ok", ids: Sequence[int] = (1,), **args: Any) -> Op:
    return op("enqueue", begin, begin + 1, list(ids), status=status, count=1, **args)


def claim(
    begin: float,
    token: str,
    attempt: int = 1,
    *,
    most: int = 3,
    lease: float = 100.0,
    status: str = "ok",
) -> Op:
    """Claims task 1 at `begin` by the server's clock, which the run's clock agrees with."""
    task = [1, token, attempt, most, 0.5, begin + lease]
    args = {"worker": "w", "queue": "q", "lease": lease, "process": token}
    return op("claim", begin, begin + 1, [task], status=status, **args)


def one(call: str, begin: float, answer: str) -> Op:
    """A call about task 1 that takes no token."""
    return op(call, begin, begin + 1, [answer], ids=[1])


def fail(begin: float, answer: str | None, *, permanent: bool) -> Op:
    """Of claim A."""
    args: dict[str, Any] = {"ids": [1], "tokens": ["A"], "permanent": [permanent]}
    if answer is None:
        return op("fail", begin, begin + 1, status="unknown", **args)
    return op("fail", begin, begin + 1, [answer], **args)


def with_key(key: str, begin: float, end: float) -> Op:
    """Returns task 1."""
    return op("enqueue", begin, end, [1], count=1, keys=[key], queue="q")


def row(status: str = DONE, token: str | None = "A", **changes: Any) -> Row:
    fields = {"id": 1, "tag": "enqueue at 0", "task_type": "noop", "attempt": 1, "max_attempts": 3}
    return Row(**{**fields, "status": status, "token": token, **changes})


CLOCK = Note("p", "clock", 0.0, [0.0])
A, B = claim(10, "A"), claim(30, "B", 2)
DONE_A, DONE_B = op("complete", 20, 21, DONE, token="A"), op("complete", 40, 41, DONE, token="B")
UNKNOWN_A = op("complete", 20, inf, status="unknown", token="A")
FAIL_A = op("fail", 20, 21, QUEUED, token="A")
RELEASE_A = op("release", 20, 21, QUEUED, token="A")
DEAD_A = op("fail", 20, 21, "failed", token="A")
CANCEL, RETRY = one("cancel", 22, "cancelled"), one("retry", 25, QUEUED)
REAP = op("reap", 25, 26, [[1, QUEUED]])
REQUEST = one("cancel", 15, "requested")
PAY: dict[str, Any] = {"task_type": "pay", "effects": 1, "followers": 1}
FOLLOWER = row(id=2, tag="after:1")
FOLLOWER_ENDS = op("complete", 20, 21, [DONE], ids=[2], tokens=["A"])

RIGHT: dict[str, tuple[list[Op], list[Row]]] = {
    "completed": ([enqueue(), A, DONE_A], [row()]),
    "completed, the answer lost": ([enqueue(), A, UNKNOWN_A], [row()]),
    "completed again": (
        [enqueue(), A, DONE_A, op("complete", 30, 31, "already", token="A")],
        [row()],
    ),
    "failed and tried again": ([enqueue(), A, FAIL_A, B, DONE_B], [row(token="B", attempt=2)]),
    "released": ([enqueue(), A, RELEASE_A, claim(30, "B", 1), DONE_B], [row(token="B")]),
    "reaped when its lease was over": (
        [enqueue(), claim(10, "A", lease=15), REAP, B, DONE_B],
        [row(token="B", attempt=2)],
    ),
    "refused": (
        [enqueue(), A, FAIL_A, B, op("complete", 32, 33, "stale", token="A"), DONE_B],
        [row(token="B", attempt=2)],
    ),
    "accepted while another claim began": (
        [enqueue(), A, op("fail", 20, 35, QUEUED, token="A"), B, DONE_B],
        [row(token="B", attempt=2)],
    ),
    "a dead letter": ([enqueue(), A, DEAD_A], [row("failed")]),
    "a dead letter of the last attempt": (
        [enqueue(), claim(10, "A", most=1), fail(20, "failed", permanent=False)],
        [row("failed", max_attempts=1)],
    ),
    "a dead letter of which a reap does not tell": (
        [enqueue(), claim(10, "A", most=1), op("maintain", 20, 21)],
        [row("failed", max_attempts=1)],
    ),
    "failed for good": (
        [enqueue(), A, fail(20, "failed", permanent=True)],
        [row("failed")],
    ),
    "failed for good, the answer lost": (
        [enqueue(), A, fail(20, None, permanent=True)],
        [row("failed")],
    ),
    "a key that was taken": (
        [with_key("k", 0, 1), with_key("k", 2, 3), A, DONE_A],
        [row(queue="q", unique_key="k")],
    ),
    "a key that was taken until then": (
        [with_key("k", 0, 1), A, DONE_A, with_key("k", 20.5, 30)],
        [row(queue="q", unique_key="k")],
    ),
    "a key that a retry took again": (
        [*(with_key("k", 0, 1), A, DEAD_A, RETRY, with_key("k", 28, 29), B, DONE_B)],
        [row(token="B", attempt=2, queue="q", unique_key="k")],
    ),
    "keys of which nobody heard": (
        [op("enqueue", 0, 1, status="unknown", count=1, keys=["k"])],
        [],
    ),
    "a key of which little was recorded": (
        [op("enqueue", 0, 1, [1], count=1, keys=["k"]), A, DONE_A],
        [row()],
    ),
    "a request to cancel, and a failure": (
        [enqueue(), A, REQUEST, op("fail", 20, 21, "cancelled", token="A")],
        [row("cancelled")],
    ),
    "a request to cancel, and a completion": ([enqueue(), A, REQUEST, DONE_A], [row()]),
    "a request to cancel, and a failure meanwhile": (
        [enqueue(), A, op("fail", 14, 16, QUEUED, token="A"), REQUEST, CANCEL],
        [row("cancelled")],
    ),
    "a request to cancel, then a retry": (
        [
            *(enqueue(), A, REQUEST, op("fail", 20, 21, "cancelled", token="A")),
            *(RETRY, claim(30, "B", 1), DONE_B),
        ],
        [row(token="B")],
    ),
    "a dead letter that was retried": (
        [enqueue(), A, DEAD_A, RETRY, claim(30, "B", 1), DONE_B],
        [row(token="B")],
    ),
    "cancelled": ([enqueue(), CANCEL], [row("cancelled", None, attempt=0)]),
    "a claim that nobody heard of": (
        [enqueue(), claim(10, "", lease=15, status="unknown"), B, DONE_B],
        [row(token="B", attempt=2)],
    ),
    "an enqueue that nobody heard of": ([enqueue(status="unknown"), A, DONE_A], [row()]),
    "an enqueue that never was": ([enqueue(status="unknown")], []),
    "rolled back": ([enqueue(status="fail")], []),
    "a transaction": (
        [enqueue(), A, op("transact", 20, 21, DONE, token="A"), FOLLOWER_ENDS],
        [row(**PAY), FOLLOWER],
    ),
    "gone, as its presence said": (
        [
            op("register", 1, 2, worker="w", presence=True),
            *(enqueue(), A, REAP, B, DONE_B),
        ],
        [row(token="B", attempt=2)],
    ),
    "extended after the lease": (
        [
            *(enqueue(), claim(10, "A", lease=2)),
            *(op("extend", 20, 21, "extended", token="A", lease=5), B, DONE_B),
        ],
        [row(token="B", attempt=2)],
    ),
}

WRONG: dict[str, tuple[str, list[Op], list[Row]]] = {
    "an enqueue is lost": ("lost", [enqueue()], []),
    "a task that was claimed is lost": ("lost", [enqueue(status="unknown"), A], []),
    "what was rolled back is there": ("invented", [enqueue(status="fail")], [row(QUEUED, None)]),
    "nobody enqueued it": ("invented", [], [row(QUEUED, None)]),
    "one more than was returned": (
        "invented",
        [enqueue()],
        [row(QUEUED, None), row(QUEUED, None, id=2)],
    ),
    "half of a batch": (
        "invented",
        [op("enqueue", 0, inf, status="unknown", count=2)],
        [row(QUEUED, None)],
    ),
    "more answers than tasks": (
        "garbled",
        [enqueue(), A, DONE_A, op("extend", 15, 16, ["lost", "lost"], ids=[1], tokens=["A"])],
        [row()],
    ),
    "two calls return it": ("invented", [enqueue(), enqueue(2)], [row(QUEUED, None)]),
    "a task is in both tables": ("doubled", [enqueue(), A, DONE_A], [row(), row(QUEUED)]),
    "a task does not end": ("unfinished", [enqueue()], [row(QUEUED, None)]),
    "two completions are accepted": (
        "completed twice",
        [enqueue(), A, DONE_A, op("complete", 20, 22, DONE, token="A")],
        [row()],
    ),
    "a claim is ended twice": (
        "stale",
        [enqueue(), A, FAIL_A, op("release", 20, 22, QUEUED, token="A")],
        [row(QUEUED, None)],
    ),
    "claimed before the lease was over": (
        "overlap",
        [enqueue(), A, B, DONE_B],
        [row(token="B", attempt=2)],
    ),
    "reaped in spite of an extension": (
        "overlap",
        [
            *(enqueue(), claim(10, "A", lease=5)),
            *(op("extend", 12, 13, "extended", token="A", lease=30), REAP, B, DONE_B),
        ],
        [row(token="B", attempt=2)],
    ),
    "its failure came after the second claim": (
        "overlap",
        [enqueue(), A, B, op("fail", 32, 33, QUEUED, token="A"), DONE_B],
        [row(token="B", attempt=2)],
    ),
    "its presence was missed for too short a time": (
        "overlap",
        [
            op("register", 9, 10, worker="w", presence=True),
            *(enqueue(), A, op("reap", 11, 12, [[1, QUEUED]]), claim(12, "B", 2), DONE_B),
        ],
        [row(token="B", attempt=2)],
    ),
    "a stale completion": (
        "stale",
        [enqueue(), A, FAIL_A, B, op("complete", 32, 33, DONE, token="A")],
        [row(attempt=2)],
    ),
    "a stale extension": (
        "stale",
        [enqueue(), A, FAIL_A, op("extend", 22, 23, "extended", token="A", lease=1)],
        [row(QUEUED, None)],
    ),
    "a completion after it was reaped": (
        "stale",
        [enqueue(), claim(10, "A", lease=2), REAP, op("complete", 28, 29, DONE, token="A")],
        [row()],
    ),
    "a failure after it was cancelled": (
        "stale",
        [enqueue(), A, CANCEL, op("fail", 28, 29, QUEUED, token="A")],
        [row(QUEUED, None)],
    ),
    "a token is given twice": (
        "token",
        [enqueue(), A, FAIL_A, claim(30, "A", 2)],
        [row(QUEUED, None, attempt=2)],
    ),
    "one attempt too many": ("attempt", [enqueue(), claim(10, "A", 4)], [row(QUEUED)]),
    "an attempt that nobody made": ("attempt", [enqueue(), claim(10, "A", 2)], [row(QUEUED)]),
    "an attempt that does not count": (
        "attempt",
        [enqueue(), A, FAIL_A, claim(30, "B", 1), DONE_B],
        [row(token="B")],
    ),
    "a release that counts": (
        "attempt",
        [enqueue(), A, RELEASE_A, B, DONE_B],
        [row(token="B", attempt=2)],
    ),
    "it comes back after its completion": (
        "revived",
        [enqueue(), A, DONE_A, B],
        [row("processing", "B", attempt=2)],
    ),
    "it comes back after it was cancelled": (
        "revived",
        [enqueue(), CANCEL, B],
        [row("processing", "B")],
    ),
    "a completion is forgotten": ("forgotten", [enqueue(), A, DONE_A], [row(QUEUED, None)]),
    "it is another one's completion": ("forgotten", [enqueue(), A, DONE_A], [row(token="B")]),
    "a cancellation is forgotten": ("forgotten", [enqueue(), CANCEL], [row(QUEUED, None)]),
    "a completion that nobody made": ("uncaused", [enqueue(), A], [row()]),
    "a cancellation that nobody made": ("uncaused", [enqueue(), A], [row("cancelled")]),
    "a dead letter without a cause": ("uncaused", [enqueue(), A], [row("failed")]),
    "a dead letter with attempts left": (
        "attempts left",
        [enqueue(), A, fail(20, "failed", permanent=False)],
        [row("failed")],
    ),
    "a failure with attempts left, then a retry": (
        "attempts left",
        [
            *(enqueue(), A, fail(20, "failed", permanent=False)),
            *(RETRY, claim(30, "B", 1), DONE_B),
        ],
        [row(token="B")],
    ),
    "a failure for good that is tried again": (
        "attempts left",
        [enqueue(), A, fail(20, QUEUED, permanent=True), B, DONE_B],
        [row(token="B", attempt=2)],
    ),
    "reaped with attempts left": (
        "attempts left",
        [enqueue(), claim(10, "A", lease=2), op("reap", 25, 26, [[1, "failed"]])],
        [row("failed")],
    ),
    "maintained away with attempts left": (
        "attempts left",
        [enqueue(), claim(10, "A", lease=2), op("maintain", 25, 26)],
        [row("failed")],
    ),
    "a key gives what had ended": (
        "key",
        [with_key("k", 0, 1), A, DONE_A, with_key("k", 22, 23)],
        [row(queue="q", unique_key="k")],
    ),
    "a key gives what was cancelled": (
        "key",
        [with_key("k", 0, 1), CANCEL, with_key("k", 24, 25)],
        [row("cancelled", None, attempt=0)],
    ),
    "a key gives the task of another key": (
        "key",
        [with_key("k", 0, 1), with_key("l", 2, 3), A, DONE_A],
        [row(queue="q", unique_key="k")],
    ),
    "a key gives the task of another queue": (
        "key",
        [with_key("k", 0, 1), A, DONE_A],
        [row(queue="r", unique_key="k")],
    ),
    "fewer ids than tasks": (
        "garbled",
        [op("enqueue", 0, 1, [1], count=2, keys=["k", "l"]), A, DONE_A],
        [row()],
    ),
    "a failure forgets a request to cancel": (
        "cancel",
        [enqueue(), A, REQUEST, FAIL_A, one("cancel", 30, "cancelled")],
        [row("cancelled")],
    ),
    "a reap forgets a request to cancel": (
        "cancel",
        [enqueue(), claim(10, "A", lease=4), REQUEST, REAP, one("cancel", 30, "cancelled")],
        [row("cancelled")],
    ),
    "claimed again in spite of a request to cancel": (
        "cancel",
        [
            *(enqueue(), A, REQUEST, op("release", 20, 21, "released", token="A")),
            *(claim(30, "B", 1), DONE_B),
        ],
        [row(token="B")],
    ),
    "queued in spite of a request to cancel": (
        "cancel",
        [enqueue(), A, REQUEST, op("release", 20, 21, "released", token="A")],
        [row(QUEUED, None)],
    ),
    "completed, and no effect": (
        "effect",
        [enqueue(), A, op("transact", 20, 21, DONE, token="A")],
        [row(task_type="pay", followers=1)],
    ),
    "two effects": (
        "effect",
        [enqueue(), A, op("transact", 20, 21, DONE, token="A")],
        [row(**{**PAY, "effects": 2})],
    ),
    "an effect of what was not completed": (
        "effect",
        [enqueue(), A, op("transact", 20, inf, status="unknown", token="A")],
        [row(QUEUED, None, **PAY)],
    ),
    "claimed before its time": (
        "early",
        [enqueue(run_at=11.0), A, DONE_A],
        [row()],
    ),
    "claimed during its delay": (
        "early",
        [enqueue(), A, op("fail", 20, 21, [QUEUED], ids=[1], tokens=["A"], delays=[60]), B, DONE_B],
        [row(token="B", attempt=2)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_right_passes(case: str) -> None:
    ops, rows = RIGHT[case]
    assert check([CLOCK, *ops], rows).violations == []


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case: str) -> None:
    kind, ops, rows = WRONG[case]
    assert kind in {violation.kind for violation in check([CLOCK, *ops], rows).violations}


def test_a_worker_that_is_present_is_not_gone() -> None:
    ops, rows = RIGHT["gone, as its presence said"]
    present = Note("p", "present", 0.0, ["w", 9.0, 32.0])
    [violation] = check([CLOCK, present, *ops], rows).violations
    assert violation.kind == "overlap"


def test_what_is_left_behind_is_named() -> None:
    [violation] = check([Note("p", "left", 0.0, ["an advisory lock"])], []).violations
    assert violation == ("left behind", "an advisory lock")


def test_a_lock_and_a_transaction_are_found(dsn: str, conn: psycopg.Connection) -> None:
    assert list(left_behind(dsn)) == []
    conn.execute("select pg_advisory_lock(1337, 7)")
    assert len(list(left_behind(dsn, patience=0))) == 1
    conn.execute("select pg_advisory_unlock_all()")
    conn.execute("begin")
    assert len(list(left_behind(dsn, patience=0))) == 1


def test_what_runs_more_often_than_was_asked_for_is_counted() -> None:
    ops = [enqueue(), A, FAIL_A, B, DONE_B]
    notes = [Note("p", kind, 0.0, [1]) for kind in ("start", "failure", "start", "start")]
    report = check([CLOCK, *ops, *notes], [row(token="B", attempt=2)])
    assert (report.executions, report.repeated) == (3, 1)


def test_it_is_measured_how_long_a_task_waits_for_another_worker() -> None:
    ops = [enqueue(), claim(10, "A", lease=15), B, DONE_B]
    for kind, note in (
        ("kill", Note("p", "ended", 20.0, ["A"])),
        ("freeze", Note("p", "frozen", 40.0, ["A", 20.0])),
    ):
        report = check([CLOCK, *ops, note], [row(token="B", attempt=2)])
        assert report.recoveries == {kind: [11.0]}


@pytest.mark.parametrize(
    ("attempt", "presence", "lease", "taken", "missed"),
    [
        (2, True, 30, 31, True),
        (2, True, 30, 41, False),
        (2, True, 16, 41, None),  # too little of it was left
        (2, False, 30, 41, None),
        (3, True, 30, 41, None),  # nobody heard of the claim between
    ],
)
def test_it_is_noted_whether_who_was_killed_was_missed(
    attempt: int, presence: bool, lease: float, taken: float, missed: bool | None
) -> None:
    ops = [
        op("register", 1, 2, worker="w", presence=presence),
        *(enqueue(), claim(10, "A", lease=lease), op("maintain", 21, 22)),
        claim(5, "", status="unknown"),
        *(claim(taken, "B", attempt), op("complete", 50, 51, DONE, token="B")),
    ]
    end = Note("p", "ended", 20.0, ["A"])
    report = check([CLOCK, *ops, end], [row(token="B", attempt=attempt)])
    assert (None if missed is None else {"A": missed}) == (report.missed or None)


@pytest.mark.parametrize(
    ("killed", "missed", "kinds"), [(5, 0, ["presence"]), (5, 1, []), (4, 0, [])]
)
def test_of_many_who_are_killed_one_is_missed_in_time(
    killed: int, missed: int, kinds: list[str]
) -> None:
    history: list[Op | Note] = [CLOCK, op("register", 1, 2, worker="w", presence=True)]
    rows = []
    for number in range(1, killed + 1):
        first, second, taken = f"A{number}", f"B{number}", 31 if number <= missed else 41
        given: dict[str, Any] = {"worker": "w", "queue": "q", "lease": 30.0}
        history += [
            op("enqueue", number / 10, 1, [number], count=1),
            op("claim", 10, 11, [[number, first, 1, 3, 0.5, 40]], process=first, **given),
            Note("p", "ended", 20.0, [first]),
            op("claim", taken, 42, [[number, second, 2, 3, 0.5, taken + 30]], **given),
            op("complete", 50, 51, [DONE], ids=[number], tokens=[second]),
        ]
        tag = f"enqueue at {number / 10:g}"
        rows.append(row(id=number, tag=tag, token=second, attempt=2))
    assert kinds == [violation.kind for violation in check(history, rows).violations]


def test_the_history_keeps_what_was_said_and_what_was_not(tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise ValueError(name)

    def break_off(name: str) -> None:
        raise psycopg.OperationalError("gone")

    def die(name: str) -> None:
        raise SystemExit

    recorder = Recorder(tmp_path, "one")
    assert recorder.call("a", {"x": 1}, lambda name: [name]) == ["one:0"]
    for function in (refuse, break_off, die):
        with pytest.raises((ValueError, psycopg.Error, SystemExit)):
            recorder.call("b", {}, function)
    recorder.note("start", 7)
    recorder.close()
    with (tmp_path / "one.jsonl").open("a") as file:
        file.write('[1.5,"call",9')  # as a kill may leave it

    first, second, third, note, fourth = read(tmp_path)
    assert isinstance(note, Note)
    assert (note.kind, note.data) == ("start", [7])
    found = []
    for each in (first, second, third, fourth):
        assert isinstance(each, Op)
        assert each.begin <= each.end
        found.append((each.name, each.call, each.status, each.args, each.end == inf))
    assert found == [
        ("one:0", "a", "ok", {"x": 1}, False),
        ("one:1", "b", "fail", {}, False),
        ("one:2", "b", "unknown", {}, False),
        ("one:3", "b", "unknown", {}, True),
    ]


def test_an_error_of_the_server_is_told_from_the_end_of_the_session(
    tmp_path: Path, conn: psycopg.Connection
) -> None:
    recorder = Recorder(tmp_path, "one")
    for call in ("pg_sleep(-1 / 0)", "pg_terminate_backend(pg_backend_pid())"):
        query = f"select {call}".encode()
        with pytest.raises(psycopg.Error):
            recorder.call("a", {}, lambda name: conn.execute(query).fetchall())  # noqa: B023
    recorder.close()
    assert [op.status for op in read(tmp_path) if isinstance(op, Op)] == ["fail", "unknown"]
