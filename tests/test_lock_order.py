"""All calls at once on the same tasks: no deadlock, no long wait for a lock, the oracle holds."""

from collections.abc import Callable
from functools import partial
from random import Random
from threading import Event, Timer
from typing import Any

import mutants
import oracle
import psycopg
import pytest
from oracle import Claim, Connect
from workers import wait_until

# For any lock. No transaction here is open longer than one call takes, so that nobody should wait
# even a third of this; the rest is for a machine that has other things to do.
LONGEST_WAIT = "300ms"
QUEUES = ["kept", "forgotten"]
KEYS = [f"key-{number:02}" for number in range(40)]


@pytest.fixture(autouse=True)
def log(conn: psycopg.Connection) -> None:
    oracle.install(conn)


class Caller:
    """A session and what it may call, on claims that all callers share, each call by itself."""

    def __init__(self, session: psycopg.Connection, claims: list[Claim], seed: int) -> None:
        self.session = session
        self.claims = claims
        self.random = Random(seed)

    def some(self, count: int) -> list[Claim]:
        """Some of the latest claims, in any order: most are current, or few, or long reaped."""
        latest = self.claims[-self.random.choice([20, 200, 2000]) :]
        return self.random.sample(latest, min(count, len(latest)))

    def call(self, call: Callable[..., Any], *args: Any) -> None:
        """Call it with the session; the claim may be over, the task in any state or deleted."""
        try:
            call(self.session, *args)
        except psycopg.Error as error:
            if error.sqlstate not in {"TS404", "TS409", "TS423"}:
                raise

    def work(self) -> None:
        """Claim tasks, some of which nobody ends; end claims in every way."""
        for queue in QUEUES:
            oracle.enqueue(self.session, 4, queue=queue)
            self.claims += oracle.claim(self.session, queue=queue, limit=10, lease="1 second")
        fail_for_good = partial(oracle.fail, permanent=True)
        for end in (oracle.complete, oracle.fail, fail_for_good, oracle.release):
            for held in self.some(2):
                self.call(end, held)
        distinct = {held.id: held for held in self.some(4)}
        self.call(oracle.complete_together, list(distinct.values()))
        for end_batch in (oracle.fail_batch, oracle.release_batch, oracle.complete_batch):
            end_batch(self.session, self.some(20))

    def extend(self) -> None:
        oracle.extend(self.session, self.some(40), lease="1 second")
        for held in self.some(5):
            self.call(partial(oracle.extend_one, lease="1 second"), held)

    def hold(self) -> None:
        for held in self.some(5):
            self.call(oracle.hold_and_complete, held)

    def enqueue(self) -> None:
        """A batch of unique keys, in any order."""
        tasks = [
            {"queue": self.random.choice(QUEUES), "unique_key": key}
            for key in self.random.sample(KEYS, 20)
        ]
        oracle.enqueue_batch(self.session, tasks)

    def cancel(self) -> None:
        for held in self.some(5):
            self.call(oracle.cancel, held.id)

    def retry(self) -> None:
        for held in self.some(20):
            self.call(oracle.retry, held.id)

    def reschedule(self) -> None:
        for held in self.some(20):
            self.call(partial(oracle.reschedule, priority=self.random.randint(0, 9)), held.id)

    def reap(self) -> None:
        oracle.reap(self.session, limit=self.random.randint(1, 100))

    def prune(self) -> None:
        oracle.prune(self.session, limit=self.random.randint(1, 100))

    def maintain(self) -> None:
        oracle.maintain(self.session)

    def configure(self) -> None:
        queue = self.random.choice(QUEUES)
        for call in ("pause_queue", "configure_queue", "resume_queue"):
            self.session.execute(f"select pgsched.{call}(%s)", [queue])


CALLERS = [
    *[Caller.work] * 8,
    *[Caller.enqueue] * 2,
    *[Caller.reap] * 2,
    *(Caller.extend, Caller.hold, Caller.cancel, Caller.retry, Caller.reschedule),
    *(Caller.prune, Caller.maintain, Caller.configure),
]
EVENTS = {
    *("enqueued", "claimed", "held", "extended", "completed", "failed", "released", "reaped"),
    *("requested", "cancel_requested", "cancelled", "rescheduled", "retried", "deleted"),
}


def storm(connect: Connect, *, seconds: float, longest_wait: str = LONGEST_WAIT) -> None:
    """Run all callers for so long; raise the first error of any.

    A transaction lingers up to 2 ms before its commit, so that they meet more often.
    """
    conn = connect()
    for queue, keep in zip(QUEUES, ["100 milliseconds", "0"], strict=True):
        conn.execute(
            """
            select pgsched.configure_queue(
                     %s, p_max_attempts => 3, p_keep_completed => %s, p_keep_failed => '1 second')
            """,
            [queue, keep],
        )
    conn.execute(
        """
        create function oracle.linger() returns trigger language plpgsql as $$
        begin
          perform pg_sleep(random() / 500);
          return null;
        end;
        $$;
        create trigger linger after insert on oracle.log
          for each statement execute function oracle.linger();
        """
    )
    sessions = [
        connect(options=f"-c deadlock_timeout=100ms -c lock_timeout={longest_wait}")
        for _ in CALLERS
    ]
    pids = [session.info.backend_pid for session in sessions]
    claims: list[Claim] = []
    errors: list[BaseException] = []
    notices: list[str | None] = []
    over = Event()

    def repeat(step: Callable[[Caller], None], session: psycopg.Connection, seed: int) -> None:
        session.add_notice_handler(lambda notice: notices.append(notice.message_primary))
        caller = Caller(session, claims, seed)
        try:
            while not over.is_set():
                step(caller)
        except BaseException as error:
            errors.append(error)
        finally:
            over.set()
            session.close()

    end = Timer(seconds, over.set)
    end.start()
    oracle.together(
        partial(repeat, step, session, seed)
        for seed, (step, session) in enumerate(zip(CALLERS, sessions, strict=True))
    )
    end.cancel()
    if errors:
        raise errors[0]
    assert notices == []
    oracle.check(conn)
    events = {event for (event,) in conn.execute("select distinct event from oracle.log")}
    assert events == EVENTS
    assert deadlocks(conn, pids) == 0


def deadlocks(conn: psycopg.Connection, pids: list[int]) -> int:
    """How many there were in this database; these processes count theirs when they end."""

    def ended() -> bool:
        found = conn.execute("select from pg_stat_activity where pid = any (%s)", [pids])
        return not found.fetchall()

    wait_until(ended)
    [(count,)] = conn.execute(
        "select deadlocks from pg_stat_database where datname = current_database()"
    )
    assert isinstance(count, int)
    return count


@pytest.mark.parametrize("seconds", [6, pytest.param(60, marks=pytest.mark.long)])
def test_all_calls_at_once_never_deadlock_and_never_wait_long(
    connect: Connect, seconds: float
) -> None:
    storm(connect, seconds=seconds)


def test_a_long_wait_is_seen(connect: Connect) -> None:
    mutants.install(connect(), mutants.RELEASE_THAT_SLEEPS)
    with pytest.raises(psycopg.errors.LockNotAvailable):
        storm(connect, seconds=30)


def test_a_deadlock_is_seen(connect: Connect) -> None:
    mutants.install(connect(), mutants.BATCH_COMPLETION_IN_REVERSE)
    with pytest.raises(psycopg.errors.DeadlockDetected):
        storm(connect, seconds=60, longest_wait="0")
