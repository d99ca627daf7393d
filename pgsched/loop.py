"""The worker's loop: one thread owns the database. It reports, extends, reaps, claims, sleeps."""

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from queue import Empty
from typing import TypeVar
from uuid import UUID

import psycopg

from pgsched import calls
from pgsched.calls import Claim, Connection
from pgsched.errors import ClaimLost, PgschedError, TaskNotFound, from_database
from pgsched.handlers import Executor, Handler, Inbox, Outcome, error_text
from pgsched.metrics import Metrics
from pgsched.worker import Worker

BATCH = 100
"""Most tasks of one claim, completion or reap: bounds how long each transaction is."""
REAP_SECONDS = 5.0
REGISTER_SECONDS = 60.0
RETRY_SECONDS = (0.1, 5.0)
"""Wait before what failed is tried again, and, doubling, at most before each further time."""
BUSY_SECONDS = 0.05
"""Wait before an outcome whose row another transaction had locked is reported again."""
REFUSED_SECONDS = 1.0
"""Wait before an outcome that the database refused for now is reported again."""
UNKNOWN_TYPE_SECONDS = (15.0, 45.0)
"""How long a task that has no handler here is left to other workers."""

REFUSED = ("22", "23", "54", "P0", "TS")
"""Classes of SQLSTATE that say no to one outcome for good: bad data, a constraint, a limit."""
USELESS = ("08", "25", "57P")
"""Classes of SQLSTATE that a new connection may cure: it is broken, or its server read-only."""
NOTHING_GOES = ("08", "25", "40", "42", "53", "57P", "58")
"""Classes of SQLSTATE that say no to whatever is asked now; any other is about what was asked."""

T = TypeVar("T")

log = logging.getLogger("pgsched")


@dataclass(slots=True)
class Step:
    """Something that the loop does while it is wanted, not before ``at`` (of time.monotonic())."""

    act: Callable[[Connection], float]
    """Does it, and says when next."""
    wanted: Callable[[], bool]
    at: float
    failures: int = 0


class Loop:
    """Runs once, in one thread; all it hears from others comes through its inbox.

    ``busy``: handlers that run.
    """

    def __init__(
        self,
        settings: Worker,
        name: str,
        handlers: Mapping[str, Handler],
        metrics: Metrics,
        inbox: Inbox,
    ) -> None:
        self._settings = settings
        self._name = name
        self._lease = timedelta(seconds=settings.lease)
        self._handlers = handlers
        self._metrics = metrics
        self._inbox = inbox
        self._stopping = False
        self._executor = Executor(handlers, settings.concurrency, inbox.put)
        # From claim_task's answer until the database accepted the outcome. By token: the same task
        # may be claimed again while a lost claim's handler still runs.
        self._held: dict[UUID, Claim] = {}
        self._unreported: dict[UUID, Outcome] = {}
        self.busy = 0
        self._worker_id: int | None = None
        self._unknown_types: set[str] = set()
        now = time.monotonic()
        self._poll_at = dict.fromkeys(settings.queues, now)
        self._extension = Step(self._extend, lambda: bool(self._held), now + settings.lease / 3)
        # The most urgent first.
        self._steps = (
            self._extension,
            Step(self._report, lambda: bool(self._unreported), now),
            Step(self._register, lambda: True, now),
            Step(self._reap, lambda: True, now + REAP_SECONDS * random.random()),
            Step(self._claim, lambda: self._free() > 0 and not self._stopping, now),
        )

    def run(self) -> None:
        """Until stopped; see Worker.run."""
        queues, types = ",".join(self._settings.queues), ",".join(self._handlers)
        log.info("started: worker=%s queues=%s task_types=%s", self._name, queues, types)
        connection: Connection | None = None
        deadline: float | None = None
        failures = 0
        wait = 0.0
        while True:
            self._receive(wait)
            self._metrics.slots_busy.set(self.busy)
            if self._stopping:
                if deadline is None:
                    deadline = time.monotonic() + self._settings.grace
                    log.info("stopping: worker=%s running=%d", self._name, self.busy)
                if not self._held or time.monotonic() >= deadline:
                    break
            try:
                if connection is None:
                    connection = self._connect()
                wait = self._turn(connection)
                failures = 0
            except PgschedError:
                self._executor.close()
                raise
            except Exception as error:
                wait = self._backoff(failures)
                failures += 1
                log.warning(
                    "database: error=%r retry_in=%.1fs",
                    *(_first_line(error), wait),
                    exc_info=not isinstance(error, psycopg.Error),
                )
                if connection is not None:
                    self._metrics.reconnects.inc()
                    connection.close()
                    connection = None
            if deadline is not None:
                wait = min(wait, deadline - time.monotonic()) if self._held else 0.0
        if self._held:
            log.warning(
                "left to their leases: tasks=%s",
                ",".join(str(claim.id) for claim in self._held.values()),
            )
        self._executor.close()
        if connection is not None:
            self._sign_off(connection)
        log.info("stopped: worker=%s", self._name)

    def _backoff(self, failures: int) -> float:
        first, longest = RETRY_SECONDS
        longest = min(longest, self._settings.lease / 6)
        return min(first * 2.0 ** min(failures, 16), longest) * random.uniform(0.5, 1.0)

    def _connect(self) -> Connection:
        connection = calls.connect(self._settings.dsn, application_name=f"pgsched {self._name}")
        if self._worker_id is None:
            try:
                with calls.translated():
                    calls.schema_version(connection)
            except Exception:
                connection.close()
                raise
        log.info("connected: worker=%s", self._name)
        return connection

    def _turn(self, connection: Connection) -> float:
        """Everything that is due; returns how long [s] nothing else will be.

        While the connection holds, each step fails alone: what cannot be reported or reaped stops
        no lease from being extended and nothing else from being claimed.
        """
        for step in self._steps:
            if not step.wanted() or time.monotonic() < step.at:
                continue
            try:
                step.at = step.act(connection)
                step.failures = 0
            except psycopg.Error as error:
                if connection.closed or _is(error, USELESS):
                    raise
                wait = self._backoff(step.failures)
                step.at = time.monotonic() + wait
                step.failures += 1
                name = step.act.__name__.strip("_")
                log.warning("%s: error=%r retry_in=%.1fs", name, _first_line(error), wait)
        return max(0.0, min(s.at for s in self._steps if s.wanted()) - time.monotonic())

    def _free(self) -> int:
        """Slots for new claims: what cannot be reported keeps its own."""
        return self._settings.concurrency - self.busy - len(self._unreported)

    def _receive(self, wait: float) -> None:
        """Sleep so long [s], less when a message comes; take over all that are there."""
        try:
            message = self._inbox.get(timeout=wait) if wait > 0 else self._inbox.get_nowait()
            while True:
                if message is None:
                    self._stopping = True
                else:
                    self.busy -= 1
                    # The outcome of a lost claim counts no more.
                    if message.claim.token in self._held:
                        self._unreported[message.claim.token] = message
                message = self._inbox.get_nowait()
        except Empty:
            pass

    def _register(self, connection: Connection) -> float:
        self._worker_id = calls.register_worker(
            connection, self._name, self._settings.queues, self._settings.concurrency
        )
        return time.monotonic() + REGISTER_SECONDS

    def _report(self, connection: Connection) -> float:
        """Tell the database how claims ended. What it has not accepted stays unreported."""
        rest = 0.0
        for batch in _batches(self._of_kinds("completed")):
            for outcome, answer in zip(batch, self._complete(connection, batch), strict=True):
                if answer in ("completed", "already"):
                    self._observe_latency(outcome.claim)
                    self._settle(outcome.claim, "completed")
                elif answer in ("stale", "gone"):
                    self._lose(outcome.claim)
                elif answer == "busy":
                    rest = max(rest, BUSY_SECONDS)
                elif answer == "refused":
                    rest = REFUSED_SECONDS
        for outcome in self._of_kinds("failed", "released"):
            if time.monotonic() >= self._extension.at:
                break
            claim = outcome.claim
            try:
                status = self._fail_or_release(connection, outcome)
            except psycopg.errors.LockNotAvailable:
                # To the end of the line: it must not hold up the others, nor any lease.
                self._unreported[claim.token] = self._unreported.pop(claim.token)
                rest = max(rest, BUSY_SECONDS)
                break
            except psycopg.Error as error:
                if isinstance(from_database(error), ClaimLost | TaskNotFound):
                    self._lose(claim)
                elif _is(error, REFUSED):
                    self._simplify(outcome, error)
                elif connection.closed or _is(error, NOTHING_GOES):
                    raise
                else:
                    log.warning("not accepted: task=%d error=%r", claim.id, _first_line(error))
                    rest = REFUSED_SECONDS
            else:
                self._settle(claim, status)
        return time.monotonic() + rest

    def _fail_or_release(self, connection: Connection, outcome: Outcome) -> str:
        claim, delay = outcome.claim, outcome.delay
        if outcome.kind == "released":
            calls.release_task(connection, claim, delay or timedelta())
            return "released"
        status = calls.fail_task(connection, claim, outcome.error, delay, outcome.permanent)
        return "retried" if status == "queued" else status

    def _simplify(self, outcome: Outcome, refusal: psycopg.Error) -> None:
        """Say less, at once, when the database refused what was said."""
        claim, error = outcome.claim, outcome.error
        if outcome.delay is not None:
            error = f"delay {outcome.delay} refused: {error_text(refusal)}"
            outcome = replace(outcome, kind="failed", delay=None, error=error)
        elif not error.isascii():
            # Not every database's encoding has every character.
            error = error.encode("ascii", "backslashreplace").decode()
            outcome = replace(outcome, error=error)
        else:
            log.error("left to its lease: task=%d error=%r", claim.id, error_text(refusal))
            self._lose(claim)
            return
        self._unreported[claim.token] = outcome

    def _complete(self, connection: Connection, batch: Sequence[Outcome]) -> Sequence[str]:
        """What became of each; an outcome that is refused alone is found by halving the batch."""
        if time.monotonic() >= self._extension.at:
            return ["busy"] * len(batch)
        try:
            return calls.complete_tasks(
                connection,
                [outcome.claim for outcome in batch],
                [outcome.result for outcome in batch],
            )
        except psycopg.Error as error:
            if connection.closed or _is(error, NOTHING_GOES):
                raise
            if half := len(batch) // 2:
                first, second = batch[:half], batch[half:]
                return [*self._complete(connection, first), *self._complete(connection, second)]
            [outcome] = batch
            if not _is(error, REFUSED):
                log.warning("not accepted: task=%d error=%r", outcome.claim.id, _first_line(error))
                return ["refused"]
            # A result that jsonb cannot hold: a NUL, too deep.
            self._unreported[outcome.claim.token] = replace(
                outcome, kind="failed", result=None, error=f"result refused: {error_text(error)}"
            )
            return ["failed"]

    def _extend(self, connection: Connection) -> float:
        """Extend every claim that is held, also those whose outcome waits to be reported."""
        rest = self._settings.lease / 3
        for batch in _batches(list(self._held.values())):
            answers = calls.extend_tasks(connection, batch, self._lease)
            for claim, answer in zip(batch, answers, strict=True):
                if answer == "lost":
                    self._lose(claim)
                elif answer == "busy":
                    rest = min(1.0, self._settings.lease / 10)
                elif answer == "cancel_requested" and not claim.cancelled.is_set():
                    claim.cancelled.set()
                    self._executor.cancel(claim.token)
        return time.monotonic() + rest

    def _reap(self, connection: Connection) -> float:
        reaped = calls.reap_stale(connection, BATCH)
        for task_id, status in reaped:
            log.warning("reaped: task=%d status=%s", task_id, status)
            self._metrics.reaped.labels(status).inc()
        rest = 0.0 if len(reaped) == BATCH else REAP_SECONDS * random.uniform(0.75, 1.25)
        return time.monotonic() + rest

    def _claim(self, connection: Connection) -> float:
        """One claim for each queue that is due, as far as slots are free."""
        for queue in list(self._poll_at):
            free, now = self._free(), time.monotonic()
            if free <= 0 or (self._held and now >= self._extension.at):
                break
            if self._poll_at[queue] > now:
                continue
            # To the end of the line, so that no queue always comes first.
            self._poll_at[queue] = self._poll_at.pop(queue)
            limit = min(free, BATCH)
            claims = calls.claim_task(connection, self._name, queue, self._lease, limit)
            if len(claims) < limit:
                rest = self._settings.poll_interval * random.uniform(0.5, 1.5)
                self._poll_at[queue] = time.monotonic() + rest
            if claims:
                self._metrics.lock_contention.labels(queue).inc(claims[0].contended)
            for claim in claims:
                self._start(claim)
        return min(self._poll_at.values())

    def _start(self, claim: Claim) -> None:
        self._held[claim.token] = claim
        if claim.task_type in self._handlers:
            try:
                self._executor.start(claim)
                self.busy += 1
                return
            except (RuntimeError, OSError) as error:
                log.error("cannot start a handler, left to other workers: error=%r", str(error))
        elif claim.task_type not in self._unknown_types:
            self._unknown_types.add(claim.task_type)
            log.warning("no handler, left to other workers: task_type=%s", claim.task_type)
        delay = timedelta(seconds=random.uniform(*UNKNOWN_TYPE_SECONDS))
        self._unreported[claim.token] = Outcome(claim, "released", delay=delay)

    def _of_kinds(self, *kinds: str) -> list[Outcome]:
        return [outcome for outcome in self._unreported.values() if outcome.kind in kinds]

    def _settle(self, claim: Claim, how: str) -> None:
        """The claim is over, and counted."""
        del self._held[claim.token]
        self._unreported.pop(claim.token, None)
        task_type = claim.task_type if claim.task_type in self._handlers else ""
        self._metrics.outcomes.labels(claim.queue, task_type, how).inc()
        log.log(
            logging.ERROR if how == "failed" else logging.DEBUG,
            "ended: task=%d task_type=%s attempt=%d outcome=%s",
            *(claim.id, claim.task_type, claim.attempt, how),
        )

    def _lose(self, claim: Claim) -> None:
        """The claim is another's now, or nobody's: whatever the handler does counts no more."""
        claim.cancelled.set()
        self._executor.cancel(claim.token)
        log.warning("claim lost: task=%d attempt=%d", claim.id, claim.attempt)
        self._settle(claim, "lost")

    def _observe_latency(self, claim: Claim) -> None:
        """run_at to now: by the server's clock until the claim, by this machine's from there on."""
        waited = (claim.lease_expires_at - self._lease - claim.run_at).total_seconds()
        self._metrics.scheduling_latency.labels(claim.queue, claim.task_type).observe(
            max(0.0, waited) + time.monotonic() - claim.claimed_at
        )

    def _sign_off(self, connection: Connection) -> None:
        try:
            if self._worker_id is not None:
                calls.unregister_worker(connection, self._worker_id)
            connection.close()
        except psycopg.Error as error:
            log.warning("not signed off: error=%r", error_text(error))


def _first_line(error: BaseException) -> str:
    return error_text(error).partition("\n")[0]


def _is(error: psycopg.Error, classes: tuple[str, ...]) -> bool:
    return (error.sqlstate or "08").startswith(classes)


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]
