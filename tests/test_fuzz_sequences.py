"""Calls in any order, by three sessions, with right claims and wrong ones: no rule is broken.

What a call has to answer is told from what its session sees just before it. What others have locked
in transactions that they left open may be passed by, called busy or waited for instead.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import fuzzing
import mutants
import oracle
import psycopg
import pytest
from hypothesis import reject, seed
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from mutants import Mutant
from oracle import Claim, Connect

T = TypeVar("T")

QUEUES = ["default", "kept", "forgotten"]
NEVER = datetime(1970, 1, 1, tzinfo=UTC)
LATER = datetime(9998, 1, 1, tzinfo=UTC)

callers = st.integers(0, 2)
queues = st.sampled_from(QUEUES)
numbers = st.integers(0, 20)
# Which claim, the latest first, and of which other one the token is.
claims = st.tuples(st.integers(0, 4) | numbers, st.just(0) | st.integers(0, 3))


def some_of(each: st.SearchStrategy[T]) -> st.SearchStrategy[list[T]]:
    return st.integers(1, 6).flatmap(lambda size: st.lists(each, min_size=size, max_size=size))


def hold(session: psycopg.Connection, held: Claim) -> None:
    """Without a log: a batch call of another, not yet committed, may have ended the claim."""
    session.execute("select pgsched.hold_task(%s, %s)", [held.id, held.token])


Call = Callable[[psycopg.Connection, Any], Any]
fail_for_good = partial(oracle.fail, permanent=True)
# For less than claims have from the beginning, when the end stays where it is, and for more.
extend_one = partial(oracle.extend_one, lease="4 minutes")
extend = partial(oracle.extend, lease="6 minutes")
ENDS = [
    *(oracle.complete, oracle.fail, fail_for_good, oracle.release, hold),
    *(extend_one, oracle.hold_and_complete),
]
BATCHES = [oracle.complete_batch, oracle.fail_batch, oracle.release_batch, extend]

# What a transaction begins with: it claims tasks of a queue, or locks the task of a claim that is
# current, or its row.
beginnings = queues | st.tuples(st.sampled_from([hold, extend_one]), numbers)
Beginning = str | tuple[Call, int]

STEPS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "begin_or_end": {"by": callers, "commit": st.booleans(), "first": beginnings},
    "enqueue": {
        "by": callers,
        "queue": queues,
        "count": st.integers(1, 3),
        "priorities": st.lists(st.integers(0, 9), min_size=1, max_size=3),
        "key": st.none() | st.sampled_from(["a", "b"]),
        "batch": st.booleans(),
    },
    "claim": {"by": callers, "queue": queues, "limit": st.integers(1, 5)},
    "act": {"by": callers, "actions": some_of(st.tuples(st.sampled_from(ENDS), claims))},
    "act_on_many": {"by": callers, "call": st.sampled_from(BATCHES), "which": some_of(claims)},
    "operate": {
        "by": callers,
        "actions": some_of(st.tuples(st.sampled_from(["cancel", "retry", "reschedule"]), numbers)),
        "run_at": st.sampled_from([None, datetime(1, 1, 2, tzinfo=UTC), LATER]),
        "priority": st.none() | st.integers(0, 9),
    },
    "configure_and_register": {
        "queue": st.sampled_from(["default", "kept"]),
        "attempts": st.none() | st.integers(1, 3),
        "pause": st.none() | st.booleans(),
        "worker": st.sampled_from(["a", "b"]),
        "leave": st.booleans(),
    },
    "recover": {
        "each": st.none() | st.integers(1, 3),
        "limit": st.sampled_from([1, 2, 1000]),
        "duty": st.sampled_from(["reap", "prune", "maintain"]),
    },
}
steps = st.one_of(
    [st.tuples(st.just(name), st.fixed_dictionaries(given)) for name, given in STEPS.items()]
)

# hypothesis begins each run with the simplest sequence that there is: 40 times this.
SIMPLEST = ("begin_or_end", {"by": 0, "commit": False, "first": QUEUES[0]})

MUTANTS = [
    mutants.HOLD_WITHOUT_CHECK,
    mutants.HOLD_WITHOUT_LOCK,
    mutants.BATCH_LOCK_WITHOUT_TOKEN,
    Mutant("_lock_task", "pg_advisory_xact_lock", "pg_advisory_lock"),
]


class Row(NamedTuple):
    """A task, as a session sees it."""

    status: str
    token: UUID | None
    cancel_requested: bool
    last: bool
    queue: str
    unique_key: str | None
    lease: datetime


def is_current(row: Row | None, held: Claim) -> bool:
    return row is not None and (row.status, row.token) == ("processing", held.token)


class Sequences(RuleBasedStateMachine):
    """The sessions, the claims they were ever given, and what they have locked."""

    conn: psycopg.Connection
    sessions: Sequence[psycopg.Connection]

    def __init__(self) -> None:
        super().__init__()
        self.conn.execute(
            """
            truncate pgsched.scheduled_tasks, pgsched.finished_tasks, pgsched.queues,
                     pgsched.workers, pgsched.listeners, oracle.log restart identity;
            select pgsched.configure_queue('forgotten', 1, p_keep_completed => '0')
            """
        )
        self.pids = [session.info.backend_pid for session in self.sessions]
        self.begun = False
        self.claims: list[Claim] = []
        self.ids = [0]
        self.workers: dict[str, int] = {}
        # What each open transaction may have locked, and of which tasks it has the lock.
        self.open: dict[int, set[int]] = {}
        self.held: dict[int, set[int]] = {}
        self.since: dict[int, datetime] = {}
        self.queued: dict[int, datetime] = {}
        self.floor = self.clock()
        for queue in QUEUES:
            self.ids += oracle.enqueue(self.conn, 5, queue=queue, priorities=[5, 7, 2])
            self.claims += oracle.claim(self.conn, queue=queue, limit=3)
        self.all_is_well()

    def teardown(self) -> None:
        for session in self.sessions:
            session.rollback()
            session.execute("select pg_advisory_unlock_all()")  # the next run is to begin clean

    def clock(self) -> datetime:
        [(now,)] = self.conn.execute("select clock_timestamp()")
        assert isinstance(now, datetime)
        return now

    # One rule for all: hypothesis leaves out some in each run, and faults of locks need several.
    @rule(step=steps)
    def step(self, step: tuple[str, dict[str, Any]]) -> None:
        if not self.begun and step == SIMPLEST:
            reject()
        self.begun = True
        name, given = step
        getattr(self, name)(**given)

    # Transactions

    def begin_or_end(self, by: int, commit: bool, first: Beginning) -> None:
        if by in self.open:
            self.end(by, commit)
        elif len(self.open) < 2:
            self.begin(by, first)

    def begin(self, by: int, first: Beginning) -> None:
        self.sessions[by].execute("begin")
        self.open[by], self.held[by], self.since[by] = set(), set(), self.clock()
        if isinstance(first, str):
            self.claim(by, first, limit=2)
        else:
            call, number = first
            rows = self.rows(by)
            current = [each for each in self.claims if is_current(rows.get(each.id), each)]
            if current:
                self.act_on(by, call, current[-1 - number % len(current)])

    def end(self, by: int, commit: bool) -> None:
        session = self.sessions[by]
        session.commit() if commit else session.rollback()
        del self.open[by], self.held[by]
        self.floor = self.since.pop(by)

    def call(self, by: int, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """What it returns, or the SQLSTATE that it raises, which ends a transaction."""
        try:
            return call(self.sessions[by], *args, **options)
        except psycopg.Error as error:
            if by in self.open:
                self.end(by, commit=False)
            return error.sqlstate

    def touch(self, by: int, ids: Iterable[int], held: Iterable[int] = ()) -> None:
        if by in self.open:
            self.open[by].update(ids)
            self.held[by].update(held)

    def locked(self, by: int) -> set[int]:
        """What others have, perhaps, in transactions that are open."""
        return {each for other, ids in self.open.items() if other != by for each in ids}

    def rows(self, by: int) -> dict[int, Row]:
        rows = self.sessions[by].execute(
            """
            select id, status, claim_token, cancel_requested_at is not null,
                   attempt >= max_attempts, queue, unique_key,
                   coalesce(lease_expires_at, to_timestamp(0))
              from pgsched.tasks
            """
        )
        return {task_id: Row(*row) for task_id, *row in rows}

    def live(self, rows: dict[int, Row], queue: str, key: str | None) -> int | None:
        """The live task of the queue that has this key."""
        for task_id, row in rows.items():
            live = row.status in ("queued", "processing")
            if live and (row.queue, row.unique_key) == (queue, key):
                return task_id
        return None

    # Producers

    def enqueue(
        self, by: int, queue: str, count: int, priorities: list[int], key: str | None, batch: bool
    ) -> None:
        there = key and self.live(self.rows(by), queue, key)
        if batch:
            tasks = [
                {"queue": queue, "priority": priorities[n % len(priorities)], "unique_key": key}
                for n in range(count)
            ]
            ids = self.call(by, oracle.enqueue_batch, tasks)
        else:
            given = {"queue": queue, "priorities": priorities, "unique_key": key}
            ids = self.call(by, oracle.enqueue, count, **given)
        if ids == "55P03" and key and self.open.keys() - {by}:
            return
        assert len(ids) == count
        if key:
            assert set(ids) == {there or ids[0]}
        if not there:
            assert min(ids) > max(self.ids)
            self.ids += ids
            self.touch(by, ids)

    # Workers

    def due(self, by: int, queue: str, lock: str = "") -> list[int]:
        """The tasks that a claim may take, in its order."""
        rows = self.sessions[by].execute(
            f"""
            select t.id
              from pgsched.scheduled_tasks as t
             where t.queue = %(queue)s and t.status = 'queued' and t.run_at <= clock_timestamp()
               and not exists (
                   select from pgsched.queues as q where q.name = %(queue)s and q.paused)
             order by t.priority, t.run_at, t.id {lock}
            """.encode(),
            {"queue": queue},
        )
        return [task_id for (task_id,) in rows]

    def claim(self, by: int, queue: str, limit: int) -> None:
        session = self.sessions[by]
        began = self.clock()
        with session.transaction(force_rollback=True):
            free = self.due(by, queue, "for no key update of t skip locked")
        # What others hold has its row locked and counts for the limit, but is passed by.
        picked = free[:limit]
        others = {each for other, ids in self.held.items() if other != by for each in ids}
        wanted = [task_id for task_id in picked if task_id not in others]
        assert set(self.due(by, queue)) - set(free) <= self.locked(by)
        got = oracle.claim(session, queue=queue, limit=limit, worker=f"worker {by}")
        assert [each.id for each in got] == wanted
        for each in got:
            assert each.lease_expires_at >= began + timedelta(minutes=5)
        self.claims += got
        self.touch(by, picked, wanted)

    def some(self, which: tuple[int, int]) -> Claim:
        number, other = which
        claim = self.claims[-1 - number % len(self.claims)]
        token = self.claims[-1 - (number + other) % len(self.claims)].token
        return claim._replace(token=token)

    def act(self, by: int, actions: list[tuple[Call, tuple[int, int]]]) -> None:
        for call, which in actions:
            self.act_on(by, call, self.some(which))

    def act_on(self, by: int, call: Call, held: Claim) -> None:
        row = self.rows(by).get(held.id)
        least = self.clock() + timedelta(minutes=4)
        answer = self.call(by, call, held)
        if answer == "55P03" and held.id in self.locked(by):
            return
        current = is_current(row, held)
        if row is None:
            assert answer == "TS404"
        elif call == oracle.complete and (row.status, row.token) == ("completed", held.token):
            assert answer is False
        elif not current:
            assert answer == "TS409"
        elif call in (oracle.complete, oracle.hold_and_complete):
            assert answer is True
        elif call in (oracle.fail, fail_for_good):
            failed = row.last or call == fail_for_good
            assert answer == (
                "cancelled" if row.cancel_requested else "failed" if failed else "queued"
            )
        elif call == extend_one:
            assert answer >= max(row.lease, least)
        else:
            assert answer is None
        if current or answer is False:
            self.touch(by, [held.id], [] if call == extend_one else [held.id])

    def act_on_many(self, by: int, call: Call, which: list[tuple[int, int]]) -> None:
        held = [self.some(each) for each in which]
        rows = self.rows(by)
        least = self.clock() + timedelta(minutes=6)
        answers = self.call(by, call, held)
        after = self.rows(by)
        locked = self.locked(by)
        seen = set()
        for each, answer in zip(held, answers, strict=True):
            row = rows.get(each.id)
            pair = (each.id, each.token)
            current = is_current(row, each)
            if answer == "busy":
                assert current
                assert each.id in locked
            elif call == extend:
                wanted = "lost"
                if row and current:
                    wanted = "cancel_requested" if row.cancel_requested else "extended"
                    assert after[each.id].lease >= max(row.lease, least)
                assert answer == wanted
            elif row is None:
                assert answer == "gone"
            elif call == oracle.complete_batch:
                already = pair in seen or (row.status, row.token) == ("completed", each.token)
                wanted = "already" if already else "completed" if current else "stale"
                assert answer == wanted
            elif not current or pair in seen:
                assert answer == "stale"
            elif row.cancel_requested:
                assert answer == "cancelled"
            else:
                failed = call == oracle.fail_batch and row.last
                assert answer == ("failed" if failed else "queued")
            if current and answer != "busy":
                seen.add(pair)
                self.touch(by, [each.id])

    # Operators

    def operate(
        self,
        by: int,
        actions: list[tuple[str, int]],
        run_at: datetime | None,
        priority: int | None,
    ) -> None:
        for action, number in actions:
            task_id = self.ids[-1 - number % len(self.ids)]
            match action:
                case "cancel":
                    self.cancel(by, task_id)
                case "retry":
                    self.retry(by, task_id)
                case "reschedule":
                    self.reschedule(by, task_id, run_at, priority)

    def cancel(self, by: int, task_id: int) -> None:
        row = self.rows(by).get(task_id)
        answer = self.call(by, oracle.cancel, task_id)
        if answer == "55P03" and task_id in self.locked(by):
            return
        answers = {"queued": "cancelled", "processing": "requested"}
        assert answer == (answers.get(row.status, "finished") if row else "TS404")
        if answer in ("cancelled", "requested"):
            self.touch(by, [task_id])

    def retry(self, by: int, task_id: int) -> None:
        rows = self.rows(by)
        row = rows.get(task_id)
        answer = self.call(by, oracle.retry, task_id)
        key = row and row.unique_key
        if answer == "55P03" and (task_id in self.locked(by) or (key and self.open.keys() - {by})):
            return
        if row is None:
            assert answer == "TS404"
        elif row.status not in ("failed", "cancelled") or (key and self.live(rows, row.queue, key)):
            assert answer == "TS423"
        else:
            assert answer == task_id
            due = Row("queued", None, False, False, row.queue, key, NEVER)
            assert self.rows(by)[task_id] == due
            self.touch(by, [task_id])

    def reschedule(
        self, by: int, task_id: int, run_at: datetime | None, priority: int | None
    ) -> None:
        row = self.rows(by).get(task_id)
        answer = self.call(by, oracle.reschedule, task_id, run_at=run_at, priority=priority)
        if answer == "55P03" and task_id in self.locked(by):
            return
        assert answer == ("TS404" if not row else None if row.status == "queued" else "TS423")
        if answer is None:
            self.touch(by, [task_id])

    def configure_and_register(
        self, queue: str, attempts: int | None, pause: bool | None, worker: str, leave: bool
    ) -> None:
        self.conn.execute("select pgsched.configure_queue(%s, %s)", [queue, attempts])
        if pause is not None:
            call = "pause_queue" if pause else "resume_queue"
            self.conn.execute(f"select pgsched.{call}(%s)".encode(), [queue])
        [(worker_id,)] = self.conn.execute(
            "select pgsched.register_worker(%s, array[%s], 1, p_presence => true)", [worker, queue]
        )
        assert worker_id == self.workers.setdefault(worker, worker_id)
        self.conn.execute("select pgsched.register_listener(%s, array[%s])", [worker_id, queue])
        if leave:
            self.conn.execute("select pgsched.unregister_worker(%s)", [self.workers.pop(worker)])
        found = self.conn.execute("select name, id, presence from pgsched.list_workers()")
        there = {(name, worker_id, False) for name, worker_id in self.workers.items()}
        assert set(found.fetchall()) == there

    # Time, recovery and retention

    def let_time_pass(self, each: int) -> None:
        """Leases end of every so many claims, a year passes for what ended; not of locked rows."""
        self.conn.execute(
            """
            update pgsched.scheduled_tasks
               set claimed_at = claimed_at - interval '1 hour',
                   lease_expires_at = lease_expires_at - interval '1 hour'
             where id in (
                   select id from pgsched.scheduled_tasks
                    where id %% %s = 0 and status = 'processing' for update skip locked)
            """,
            [each],
        )
        self.conn.execute(
            """
            update pgsched.finished_tasks
               set created_at = created_at - interval '1 year',
                   run_at = run_at - interval '1 year',
                   finished_at = finished_at - interval '1 year'
             where id in (
                   select id from pgsched.finished_tasks
                    where id %% %s = 0 for update skip locked)
            """,
            [each],
        )

    def recover(self, each: int | None, limit: int, duty: str) -> None:
        if each:
            self.let_time_pass(each)
        by = min({0, 1, 2} - self.open.keys())
        session, locked = self.sessions[by], self.locked(by)
        [(stale, old)] = session.execute(
            """
            select array(select id from pgsched.scheduled_tasks
                          where status = 'processing' and lease_expires_at <= clock_timestamp()),
                   array(select id from pgsched.finished_tasks
                          where finished_at < clock_timestamp() - interval '31 days')
            """
        )
        if duty == "reap":
            reaped = oracle.reap(session, limit=limit)
            assert set(reaped) <= set(stale) - locked
            assert len(reaped) == limit or set(stale) - set(reaped) <= locked
        elif duty == "prune":
            count = oracle.prune(session, limit=limit)
            assert count <= len(old)
            assert count == limit or count >= len(set(old) - locked)
        else:
            oracle.maintain(session)

    # After each step

    @invariant()
    def all_is_well(self) -> None:
        assert self.conn.execute("select * from broken_rules()").fetchall() == []
        self.nothing_that_became_queued_is_older_than_its_call()
        self.nothing_is_locked_that_no_call_is_about()
        if not self.open:
            self.nothing_stays_locked()
            oracle.check(self.conn)

    def nothing_that_became_queued_is_older_than_its_call(self) -> None:
        found = self.conn.execute(
            "select id, run_at from pgsched.scheduled_tasks where status = 'queued'"
        )
        queued: dict[int, datetime] = dict(found.fetchall())
        for task_id, run_at in queued.items():
            assert run_at == self.queued.get(task_id) or run_at >= self.floor
        self.queued, self.floor = queued, self.clock()

    def nothing_is_locked_that_no_call_is_about(self) -> None:
        locks = """
            select pid, objid::bigint from pg_locks
             where locktype = 'advisory' and classid = 1337 and pid = any (%(pids)s)
        """
        held = {(self.pids[by], each) for by, ids in self.held.items() for each in ids}
        assert set(self.conn.execute(locks, {"pids": self.pids})) == held
        rows = """
            with live as (select id from pgsched.scheduled_tasks for update skip locked),
                 ended as (select id from pgsched.finished_tasks for update skip locked)
            select id from pgsched.tasks
            except
            (select id from live union all select id from ended)
        """
        locked = {task_id for (task_id,) in self.conn.execute(rows)}
        assert locked <= set().union(*self.open.values())

    def nothing_stays_locked(self) -> None:
        busy = """
            select pid from pg_locks where pid = any (%(pids)s)
             union all
            select pid from pg_stat_activity
             where pid = any (%(pids)s) and (state <> 'idle' or xact_start is not null)
        """
        assert self.conn.execute(busy, {"pids": self.pids}).fetchall() == []


def run(connect: Connect, times: int, *, long: bool = False, shrink: bool = True) -> None:
    """Run so many sequences, each by a seed of its own: most of what one makes are alike."""

    class Run(Sequences):
        conn = connect()
        sessions = tuple(connect(options="-c lock_timeout=50ms") for _ in range(3))

    # Only one of each seed: the next ones may be copies of it with a change.
    settings = fuzzing.settings(1, steps=40, shrink=shrink)
    with fuzzing.seeded(long=long) as first:
        for number in range(first, first + times):
            run_state_machine_as_test(seed(number)(Run), settings=settings)


@pytest.fixture(autouse=True)
def log(conn: psycopg.Connection) -> None:
    oracle.install(conn)
    conn.execute(fuzzing.BROKEN_RULES)


@pytest.mark.parametrize("times", [12, pytest.param(300, marks=pytest.mark.long)])
def test_calls_in_any_order(connect: Connect, times: int) -> None:
    run(connect, times, long=times > 100)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_fault_is_seen(connect: Connect, mutant: Mutant) -> None:
    mutants.install(connect(), mutant)
    with pytest.raises(AssertionError):
        run(connect, 20, shrink=False)
