"""The worker's loop: one thread owns the database. It reports, extends, reaps, claims, sleeps."""

import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from functools import lru_cache
from queue import Empty

import psycopg

from pgsched import calls
from pgsched.calls import NEWEST_SCHEMA, OLDEST_SCHEMA, Claim, Connection, Outcome, Report
from pgsched.direct import Listener, Presence, backoff
from pgsched.errors import PgschedError, SchemaError
from pgsched.handlers import Executor, Handler, elsewhere, error_text, soon
from pgsched.metrics import Metrics, Timed
from pgsched.reporter import BATCH, Reporter, batches, first_line, is_of
from pgsched.transactions import Transactions
from pgsched.worker import Inbox, Worker

PREFETCH = 1000
PREFETCH_SECONDS = 0.05
"""Claimed beyond the free slots: what will begin within this time at the present rate, at most so
many."""
UNSTARTED_SECONDS = 1.0
"""How long a claim may wait for a slot; then it is given back, for other workers."""
RATE_SECONDS = 0.25
"""Time over which the rate is measured."""
REAP_SECONDS = 2.0
"""At most between two looks for lost tasks: recovery takes twice that, and 5 seconds of grace."""
PRESENCE_SECONDS = 1.0
"""How long the first claim may wait for the worker's presence, which is to count for it, too."""
PRUNE_SECONDS = 60.0
PRUNE_BATCH = 500
REGISTER_SECONDS = 60.0
TIMEOUT_SECONDS = 0.2
"""How often timeouts are looked at."""
IDLE_SECONDS, BUSY_SECONDS = 1.0, 5.0
"""After so long idle, the worker says that it listens; after so long busy, that it does not."""
RETRY_SECONDS = 5.0
"""At most before what failed is tried again; less where leases are short."""
REST_SECONDS = {"busy": 0.05}
"""Wait before an outcome is reported again, by the answer that it got. Busy: another transaction
had its row locked. All others: a second."""
IN_TOUCH_SECONDS = 15.0
"""After so long without a turn, the database, or this process, is taken for stuck."""

USELESS = ("08", "25", "57P")
"""Classes of SQLSTATE that a new connection may cure: it is broken, or its server read-only."""

SETTLED = {
    "completed": {"completed": "completed", "already": "completed"},
    "failed": {"queued": "retried", "failed": "failed", "cancelled": "cancelled"},
    "released": {"queued": "released", "cancelled": "cancelled"},
}
"""By kind of outcome: what the database answers when the claim is over by it, as it is counted."""

log = logging.getLogger("pgsched")


@dataclass(slots=True)
class Step:
    """Something that the loop does while it is wanted, not before ``at`` (of time.monotonic())."""

    act: Callable[[Connection], float]
    """Does it, and says when next."""
    wanted: Callable[[], object]
    at: float
    failures: int = 0


@dataclass(slots=True)
class Share:
    """What a queue has had of the slots. The queue with the least ``turn`` is served first.

    ``empty``: its last claim found less than was asked for.
    """

    weight: int
    poll_at: float
    turn: float = 0.0
    empty: bool = False


@dataclass(eq=False)
class Loop:
    """Runs once, in one thread; all it hears from others comes through its inbox."""

    settings: Worker
    name: str
    handlers: Mapping[str, Handler]
    metrics: Metrics
    inbox: Inbox
    _: KW_ONLY
    drain: bool

    def __post_init__(self) -> None:
        settings = self.settings
        self._lease = timedelta(seconds=settings.lease)
        self._longest_wait = min(RETRY_SECONDS, settings.lease / 6)
        self._stopping = False
        self._transactions = Transactions(settings.dsn, self.name, settings.connections)
        slots, put, handling = settings.concurrency, self.inbox.put, self.metrics.handling
        self._executor = Executor(self.handlers, slots, self._transactions, put, handling)
        self.metrics.slots(lambda: settings.concurrency)
        self.metrics.busy(lambda: self.running)
        self.metrics.prefetched(lambda: len(self._executor.waiting))
        # From claim_task's answer until the database accepted the outcome.
        self._held: dict[Claim, None] = {}
        self._unreported: dict[Claim, Outcome] = {}
        # Of these, what the reporter is at.
        self._reporting: Sequence[Outcome] = ()
        self._reporter = Reporter(settings.dsn, self.name, self.metrics, self.inbox)
        self._worker_id: int | None = None
        self._warn_once = lru_cache(log.warning)
        now = time.monotonic()
        self._rate, self._ended, self._measured_at = 0.0, 0, now
        self._in_touch_at = -math.inf
        self._direct_dsn = settings.dsn if settings.listen_dsn is None else settings.listen_dsn
        self._listener: Listener | None = None
        self._announced: bool | None = None
        self._presence: Presence | None = None
        self._present: bool | None = None
        self._claims_at, self._served_turn = now, 0.0
        self._idle, self._idle_changed_at = False, now
        weights = settings.queues if isinstance(settings.queues, Mapping) else {}
        self._shares = {queue: Share(weights.get(queue, 1), now) for queue in settings.queues}
        self._extension = Step(self._extend, lambda: self._held, now + settings.lease / 3)
        self._registration = Step(self._register, lambda: True, now)
        self._reports = Step(self._report, lambda: self._unreported and not self._reporting, now)
        self._claiming = Step(self._claim, lambda: self._free() > 0 and not self._stopping, now)
        # The most urgent first.
        self._steps = (
            self._extension,
            Step(self._time_out, lambda: self._executor.deadlines, now),
            Step(self._give_back, lambda: self._executor.waiting and not self.drain, now),
            self._reports,
            self._registration,
            Step(self._announce, lambda: not self._stopping, now),
            Step(self._reap, lambda: True, now + REAP_SECONDS * random.random()),
            self._claiming,
            Step(self._prune, lambda: True, now + PRUNE_SECONDS * random.random()),
        )

    @property
    def running(self) -> int:
        """Handlers that run."""
        return self._executor.running

    @property
    def unready(self) -> str:
        """Why it can do nothing now, if so."""
        if time.monotonic() >= self._in_touch_at + IN_TOUCH_SECONDS:
            return "the database does not answer"
        return "claims are refused" if self._claiming.failures else ""

    def run(self) -> None:
        """Until stopped or, when it drains, nothing is due; see Worker.run."""
        queues, types = ",".join(self._shares), ",".join(self.handlers)
        log.info("started: worker=%s queues=%s task_types=%s", self.name, queues, types)
        connection: Connection | None = None
        deadline: float | None = None
        failures = 0
        wait = 0.0
        while True:
            self._receive(wait)
            if self._stopping:
                if deadline is None:
                    deadline = time.monotonic() + self.settings.grace
                    log.info("stopping: worker=%s running=%d", self.name, self.running)
                    self._withdraw()
                if not (self._held or self.running) or time.monotonic() >= deadline:
                    break
            try:
                if connection is None:
                    connection = self._connect()
                wait = self._turn(connection)
                failures, self._in_touch_at = 0, time.monotonic()
            except PgschedError:
                self._close()
                raise
            except Exception as error:
                wait = backoff(failures, self._longest_wait)
                failures, self._in_touch_at = failures + 1, -math.inf
                text, unexpected = first_line(error), not isinstance(error, psycopg.Error)
                log.warning("database: error=%r retry_in=%.1fs", text, wait, exc_info=unexpected)
                if connection is not None:
                    self.metrics.reconnects(1)
                    connection.close()
                    connection = None
            if deadline is not None:
                left = deadline - time.monotonic()
                wait = min(wait, left) if self._held or self.running else 0.0
            elif self.drain and not self._held and self._all_empty():
                self._stopping, wait = True, 0.0
        if self._held:
            ids = ",".join(str(claim.id) for claim in self._held)
            log.warning("left to their leases: tasks=%s", ids)
        if connection is not None:
            self._sign_off(connection)
        self._close()
        log.info("stopped: worker=%s", self.name)

    def _close(self) -> None:
        for each in (self._listener, self._presence, self._reporter, self._executor):
            if each is not None:
                each.close()

    def _connect(self) -> Connection:
        connection = calls.connect(self.settings.dsn, application_name=f"pgsched {self.name}")
        if self._worker_id is None:  # a schema that goes away later may come back
            try:
                with calls.translated():
                    _check_schema(calls.schema_version(connection))
            except Exception:
                connection.close()
                raise
        log.info("connected: worker=%s", self.name)
        if self._listener is None and not self.drain:
            self._listener = Listener(self._direct_dsn, self.name, self._shares, self.inbox.put)
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
                if connection.closed or is_of(error, USELESS):
                    raise
                wait = backoff(step.failures, self._longest_wait)
                step.at = time.monotonic() + wait
                step.failures += 1
                name = step.act.__name__.strip("_")
                log.warning("%s: error=%r retry_in=%.1fs", name, first_line(error), wait)
        return max(0.0, min(s.at for s in self._steps if s.wanted()) - time.monotonic())

    def _all_empty(self) -> bool:
        return all(share.empty for share in self._shares.values())

    def _free(self) -> int:
        """How many more claims can begin now or soon: what cannot be reported keeps its slot."""
        prefetch = min(PREFETCH, int(self._rate * PREFETCH_SECONDS))
        waiting = len(self._executor.waiting)
        if waiting > PREFETCH:
            return 0
        if self._executor.out_of_connections:
            # What waits for a connection takes no slot.
            claims = list(self._executor.waiting)
            waiting = sum(not self.handlers[c.task_type].takes_connection for c in claims)
        if waiting > prefetch // 2:
            return 0  # later, and then more at once
        taken = self.running + waiting + len(self._unreported)
        return self.settings.concurrency + prefetch - taken

    def _receive(self, wait: float) -> None:
        """Sleep so long [s], less when a message comes; take over all that are there."""
        with suppress(Empty):
            message = self.inbox.get(timeout=wait) if wait > 0 else self.inbox.get_nowait()
            while True:
                if isinstance(message, Outcome):
                    self._ended += 1
                    self._take(message)
                elif isinstance(message, list):
                    self._reported(message)
                elif message is None:
                    self._stopping = True
                elif isinstance(message, bool):
                    if self._present is None:
                        self._claiming.at = time.monotonic()
                    self._present, self._registration.at = message, time.monotonic()
                elif isinstance(message, str):
                    self._shares[message].poll_at = self._claiming.at = time.monotonic()
                message = self.inbox.get_nowait()
        now = time.monotonic()
        if (span := now - self._measured_at) > RATE_SECONDS / 100:
            share = 1 - math.exp(-span / RATE_SECONDS)
            self._rate += share * (self._ended / span - self._rate)
            self._ended, self._measured_at = 0, now

    def _take(self, outcome: Outcome) -> None:
        claim = outcome.claim
        self._transactions.held.discard(claim)
        # That of a lost claim, or of one that was timed out, counts no more.
        if claim not in self._held or claim in self._unreported:
            return
        if outcome.kind == "recorded":
            self._settle(claim, "completed")
        else:
            self._unreported[claim] = outcome

    def _withdraw(self, delay: timedelta | None = None) -> None:
        """Give back, uncounted and due at once or after a delay, what has not begun."""
        for claim in self._executor.withdraw():
            self._unreported[claim] = Outcome(claim, "released", delay=delay)

    def _give_back(self, connection: Connection) -> float:
        """What has waited too long: the handlers before it are slower than those before them."""
        for claim in list(self._executor.waiting)[:1]:
            if time.monotonic() < claim.claimed_at + UNSTARTED_SECONDS:
                return claim.claimed_at + UNSTARTED_SECONDS
            # Those that wait for a connection, not for a slot, would be claimed again at once.
            free = self.running < self.settings.concurrency
            self._withdraw(soon() if free else None)
            self._rate = 0.0
        return time.monotonic() + UNSTARTED_SECONDS

    def _time_out(self, connection: Connection) -> float:
        """End attempts whose time is over. A function may go on, and keeps its slot meanwhile."""
        now = time.monotonic()
        for claim, deadline in list(self._executor.deadlines.items()):
            if now < deadline or claim not in self._held or claim in self._unreported:
                continue
            self._executor.cancel(claim)
            # Given back before its transaction ends, nobody could claim it: it fails then.
            if claim not in self._transactions.held:
                error = f"timed out after {self.handlers[claim.task_type].timeout:g} s"
                told = claim.id, claim.task_type, claim.attempt, claim.max_attempts, error
                log.warning("attempt failed: task=%d task_type=%s attempt=%d/%d error=%r", *told)
                self._unreported[claim] = Outcome(claim, "failed", error=error)
        return now + TIMEOUT_SECONDS

    def _register(self, connection: Connection) -> float:
        queues, slots, present = list(self._shares), self.settings.concurrency, bool(self._present)
        worker_id = calls.register_worker(connection, self.name, queues, slots, present)
        if worker_id != self._worker_id:  # of who was not seen for a day, the row is gone
            if self._presence is not None:
                self._presence.close()
            self._presence = Presence(self._direct_dsn, self.name, worker_id, self.inbox.put)
            self._worker_id = worker_id
            self._claims_at = time.monotonic() + PRESENCE_SECONDS
        self._announced = None  # of who was not seen for long, it is forgotten
        return time.monotonic() + REGISTER_SECONDS

    def _announce(self, connection: Connection) -> float:
        """Say that this worker listens, or no more: producers send a NOTIFY only to who does."""
        now = time.monotonic()
        if (idle := self._all_empty()) != self._idle:
            self._idle, self._idle_changed_at = idle, now
        listens = self._announced
        if self._listener is None or not self._listener.active:
            listens = False
        elif now - self._idle_changed_at >= (IDLE_SECONDS if idle else BUSY_SECONDS):
            listens = idle
        if listens != self._announced and self._worker_id is not None:
            queues = list(self._shares) if listens else []
            calls.register_listener(connection, self._worker_id, queues)
            self._announced = listens
            # What was committed before that woke nobody: claim as if it had.
            for queue in queues:
                self.inbox.put(queue)
        return now + IDLE_SECONDS / 2

    def _report(self, connection: Connection) -> float:
        """Have the reporter tell the database how claims ended; `_reported` hears of it."""
        self._reporting = list(self._unreported.values())
        self._reporter.tell(self._reporting)
        return time.monotonic()

    def _reported(self, report: Report) -> None:
        """What the database has not accepted stays unreported."""
        rest = 0.0
        for outcome, answer in report:
            if isinstance(answer, Outcome):
                self._unreported[outcome.claim] = answer
            elif how := SETTLED[outcome.kind].get(answer):
                self._settle(outcome.claim, how)
            elif answer in ("stale", "gone"):
                self._lose(outcome.claim)
            else:
                rest = max(rest, REST_SECONDS.get(answer, 1.0))
        self._reporting = ()
        self._reports.at = time.monotonic() + rest

    def _extend(self, connection: Connection) -> float:
        """Extend every claim that is held, also those whose outcome waits to be reported."""
        rest = self.settings.lease / 3
        reporting, in_transactions = {o.claim for o in self._reporting}, self._transactions.held
        claims = [each for each in self._held if each not in in_transactions]
        for batch in batches(claims):
            answers = calls.extend_tasks(connection, batch, self._lease)
            for claim, answer in zip(batch, answers, strict=True):
                cancels = answer == "cancel_requested" and not claim.cancelled.is_set()
                # A report that is under way ends a claim, too, and a transaction since begun.
                if answer == "lost" and claim not in reporting and claim not in in_transactions:
                    self._lose(claim)
                elif answer == "busy":
                    rest = min(1.0, self.settings.lease / 10)
                elif cancels and self._executor.cancel(claim):
                    self._unreported[claim] = Outcome(claim, "released")
        return time.monotonic() + rest

    def _reap(self, connection: Connection) -> float:
        reaped = calls.reap_stale(connection, BATCH)
        for task_id, status in reaped:
            log.warning("reaped: task=%d status=%s", task_id, status)
            self.metrics.reaped(1, status)
        rest = 0.0 if len(reaped) == BATCH else REAP_SECONDS * random.uniform(0.75, 1.0)
        return time.monotonic() + rest

    def _prune(self, connection: Connection) -> float:
        deleted = calls.prune_finished(connection, PRUNE_BATCH)
        rest = 0.1 if deleted == PRUNE_BATCH else PRUNE_SECONDS * random.uniform(0.75, 1.25)
        return time.monotonic() + rest

    def _claim(self, connection: Connection) -> float:
        """One claim for each queue that is due, by weight, as far as slots are free."""
        now = time.monotonic()
        if self._present is None and now < self._claims_at:
            return self._claims_at
        due = [(queue, share) for queue, share in self._shares.items() if share.poll_at <= now]
        weights = sum(share.weight for _, share in due)
        for _, share in due:
            if share.empty:
                # Who had nothing to claim for a while does not get all of that back now.
                share.turn = max(share.turn, self._served_turn)
        due.sort(key=lambda each: each[1].turn)
        # So few that the limit of a batch does not even out the weights.
        room = min(self._free(), int(BATCH * weights / max(share.weight for _, share in due)))
        served = math.inf
        for queue, share in due:
            free = min(room, self._free())
            if free <= 0 or (self._held and time.monotonic() >= self._extension.at):
                break
            limit = min(BATCH, math.ceil(free * share.weight / weights))
            weights -= share.weight
            with Timed(self.metrics.claim, queue):
                claims = calls.claim_task(connection, self.name, queue, self._lease, limit)
            room -= len(claims)
            if claims:
                self._served_turn = served = min(served, share.turn)
            share.turn += len(claims) / share.weight
            share.empty = len(claims) < limit
            if share.empty:
                rest = self.settings.poll_interval * random.uniform(0.5, 1.5)
                share.poll_at = time.monotonic() + rest
            if claims:
                self.metrics.contention(claims[0].contended, queue)
            self._start(claims)
        return min(share.poll_at for share in self._shares.values())

    def _start(self, claims: Sequence[Claim]) -> None:
        self._held.update(dict.fromkeys(claims))
        for claim in claims:
            if claim.task_type not in self.handlers:
                self._warn_once("no handler, left to other workers: task_type=%s", claim.task_type)
                self._unreported[claim] = elsewhere(claim)
        self._executor.start([each for each in claims if each.task_type in self.handlers])

    def _settle(self, claim: Claim, how: str) -> None:
        """The claim is over, and counted."""
        if how == "completed":
            self.metrics.latency(self.metrics.since_due(claim), claim.queue, claim.task_type)
        del self._held[claim]
        self._unreported.pop(claim, None)
        if self.drain and not self._held:
            # It may have added tasks.
            for share in self._shares.values():
                share.empty, share.poll_at = False, time.monotonic()
            self._claiming.at = time.monotonic()
        task_type = claim.task_type if claim.task_type in self.handlers else ""
        self.metrics.ended(claim.queue, task_type, how)
        level = logging.ERROR if how == "failed" else logging.DEBUG
        told = claim.id, claim.task_type, claim.attempt, how
        log.log(level, "ended: task=%d task_type=%s attempt=%d outcome=%s", *told)

    def _lose(self, claim: Claim) -> None:
        """The claim is another's now, or nobody's: whatever the handler does counts no more."""
        self._executor.cancel(claim)
        log.warning("claim lost: task=%d attempt=%d", claim.id, claim.attempt)
        self._settle(claim, "lost")

    def _sign_off(self, connection: Connection) -> None:
        try:
            if self._worker_id is not None:
                calls.unregister_worker(connection, self._worker_id)
            connection.close()
        except psycopg.Error as error:
            log.warning("not signed off: error=%r", error_text(error))


def _check_schema(version: str) -> None:
    """Refuse what is too old; a newer schema has all that an older one had."""
    known = f"this package is made for {OLDEST_SCHEMA} to {NEWEST_SCHEMA}"
    if version < OLDEST_SCHEMA:
        raise SchemaError(f"schema pgsched is at {version}, {known}: run pgsched migrate")
    if version > NEWEST_SCHEMA:
        log.info("schema pgsched is at %s, %s", version, known)
