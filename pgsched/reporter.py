"""Tells the database how claims ended, in a thread and over a connection of its own."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from queue import SimpleQueue
from typing import Any

import psycopg

from pgsched import calls
from pgsched.calls import Answer, Connection, Outcome, Report
from pgsched.direct import RETRY_SECONDS, backoff
from pgsched.handlers import error_text, spawn
from pgsched.metrics import Metrics, Timed
from pgsched.worker import Inbox

BATCH = 100
"""Most tasks of one claim, completion or reap: bounds how long each transaction is."""

REFUSED = ("22", "23", "54", "P0", "TS")
"""Classes of SQLSTATE that say no to one outcome for good: bad data, a constraint, a limit."""
NOTHING_GOES = ("08", "25", "40", "42", "53", "57P", "58")
"""Classes of SQLSTATE that say no to whatever is asked now; any other is about what was asked."""

log = logging.getLogger("pgsched")


class Reporter:
    """Reports while the loop claims, since a commit waits for the disk, and an answer for the
    server. Puts a Report in ``inbox`` for each call of ``tell``, however that went."""

    def __init__(self, dsn: str, name: str, metrics: Metrics, inbox: Inbox) -> None:
        self._dsn, self._name, self._metrics, self._inbox = dsn, name, metrics, inbox
        self._work: SimpleQueue[Sequence[Outcome]] = SimpleQueue()
        self._thread = spawn(self._run, "pgsched-reporter")

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        """Report these, at least one."""
        self._work.put(outcomes)

    def close(self) -> None:
        """End it, at once unless it is just waiting for an answer."""
        self._work.put(())
        self._thread.join(1.0)

    def _run(self) -> None:
        outcomes, name, failures = self._work.get(), f"pgsched {self._name} reporter", 0
        while outcomes:
            report: Report = []
            try:
                with calls.connect(self._dsn, application_name=name) as connection:
                    while outcomes:
                        report = []
                        for kind in ("completed", "failed", "released"):
                            for batch in batches([each for each in outcomes if each.kind == kind]):
                                report += zip(batch, self._send(connection, batch), strict=True)
                        self._inbox.put(report)
                        outcomes, failures = self._work.get(), 0
            except Exception as error:
                text, wait = first_line(error), backoff(failures, RETRY_SECONDS)
                unexpected = not isinstance(error, psycopg.Error)
                log.warning("report: error=%r retry_in=%.1fs", text, wait, exc_info=unexpected)
                self._metrics.reconnects(1)
                self._inbox.put(report)
                time.sleep(wait)
                outcomes, failures = self._work.get(), failures + 1

    def _send(self, connection: Connection, batch: Sequence[Outcome]) -> Sequence[Answer]:
        """What became of each; an outcome that is refused alone is found by halving the batch."""
        try:
            with Timed(self._metrics.flush):
                return calls.tell(connection, batch)
        except psycopg.Error as error:
            if connection.closed or is_of(error, NOTHING_GOES):
                raise
            if half := len(batch) // 2:
                halves = (self._send(connection, part) for part in (batch[:half], batch[half:]))
                return list(chain.from_iterable(halves))
            [outcome] = batch
            if is_of(error, REFUSED):
                return [_simpler(outcome, error)]
            log.warning("not accepted: task=%d error=%r", outcome.claim.id, first_line(error))
            return ["refused"]


def _simpler(outcome: Outcome, refusal: psycopg.Error) -> Answer:
    """What says less, when the database refused what was said; nothing less: the claim is gone."""
    # A result that jsonb cannot hold: a NUL, too deep.
    what = "result" if outcome.kind == "completed" else outcome.delay and f"delay {outcome.delay}"
    # Not every database's encoding has every character.
    ascii_only = outcome.error.encode("ascii", "backslashreplace").decode()
    error = f"{what} refused: {error_text(refusal)}" if what else ascii_only
    if error == outcome.error:
        log.error("left to its lease: task=%d error=%r", outcome.claim.id, error_text(refusal))
        return "gone"
    return replace(outcome, kind="failed", result=None, error=error, delay=None)


def first_line(error: BaseException) -> str:
    """Of its text: an error of the server has several."""
    return error_text(error).partition("\n")[0]


def is_of(error: psycopg.Error, classes: tuple[str, ...]) -> bool:
    """Whether its SQLSTATE is of one of them; without one, the connection broke."""
    return (error.sqlstate or "08").startswith(classes)


def batches(items: Sequence[Any]) -> Iterator[Any]:
    """All of them, so many at a time as one statement takes."""
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]
