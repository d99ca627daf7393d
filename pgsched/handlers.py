"""Runs handlers: plain functions in threads, coroutines on one event loop. Knows no database."""

import asyncio
import concurrent.futures
import inspect
import json
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, cast
from uuid import UUID

from pgsched.calls import Claim, Task, to_json
from pgsched.errors import Fail, InvalidArgument, Retry, Snooze

Handler = Callable[[Task], Any | Awaitable[Any]]

ERROR_LENGTH = 8192
"""Characters of an error that are sent to the database, which keeps as many bytes."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a handler ended: what is to be told to the database, and how long it ran [s]."""

    claim: Claim
    kind: Literal["completed", "failed", "released"]
    result: str | None = None
    error: str = ""
    delay: timedelta | None = None
    permanent: bool = False
    seconds: float = 0.0


def error_text(error: BaseException) -> str:
    """Type and message of any exception, as text that PostgreSQL can store."""
    try:
        message = str(error)
    except Exception as broken:
        message = f"(its message cannot be read: {type(broken).__name__})"
    text = f"{type(error).__name__}: {message[:ERROR_LENGTH]}" if message else type(error).__name__
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")[:ERROR_LENGTH]


class Executor:
    """Runs each claim's handler, plain functions in up to ``threads`` daemon threads.

    The caller bounds how many it starts. ``done`` is called from the thread that ran the handler.
    A handler that never ends does not keep the process from ending.
    """

    def __init__(
        self, handlers: Mapping[str, Handler], threads: int, done: Callable[[Outcome], None]
    ) -> None:
        self._handlers = handlers
        self._threads = threads
        self._done = done
        self._work: queue.SimpleQueue[tuple[Claim, threading.Event]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._coroutines: dict[UUID, concurrent.futures.Future[None]] = {}

    def start(self, claim: Claim, cancelled: threading.Event) -> None:
        """Run the handler of a claim whose type has one; returns at once."""
        if inspect.iscoroutinefunction(self._handlers[claim.task_type]):
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._spawn(self._loop.run_forever, "pgsched-loop")
            self._coroutines[claim.token] = asyncio.run_coroutine_threadsafe(
                self._run_coroutine(claim, cancelled), self._loop
            )
            return
        self._work.put((claim, cancelled))
        if not self._idle.acquire(blocking=False) and self._threads:
            self._threads -= 1
            self._spawn(self._run_functions, "pgsched-handler")

    def cancel(self, token: UUID) -> None:
        """Cancel the coroutine of a claim; a plain function only sees ``task.cancelled``."""
        if coroutine := self._coroutines.get(token):
            coroutine.cancel()

    def close(self) -> None:
        """End the event loop, with whatever still runs on it."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _spawn(self, target: Callable[[], None], name: str) -> None:
        threading.Thread(target=target, name=name, daemon=True).start()

    def _run_functions(self) -> None:
        while True:
            claim, cancelled = self._work.get()
            started = time.monotonic()
            try:
                outcome = _completed(
                    claim, self._handlers[claim.task_type](_task(claim, cancelled))
                )
            # Also SystemExit and KeyboardInterrupt: a handler ends its task, not the worker.
            except BaseException as error:
                outcome = _ended_by(claim, error)
            self._idle.release()
            self._done(replace(outcome, seconds=time.monotonic() - started))

    async def _run_coroutine(self, claim: Claim, cancelled: threading.Event) -> None:
        started = time.monotonic()
        try:
            handler = cast("Callable[[Task], Awaitable[Any]]", self._handlers[claim.task_type])
            outcome = _completed(claim, await handler(_task(claim, cancelled)))
        except BaseException as error:
            outcome = _ended_by(claim, error)
        self._coroutines.pop(claim.token, None)
        self._done(replace(outcome, seconds=time.monotonic() - started))


def _task(claim: Claim, cancelled: threading.Event) -> Task:
    try:
        payload = json.loads(claim.payload)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"Python cannot read the payload: {error}") from error
    return Task(
        id=claim.id,
        queue=claim.queue,
        task_type=claim.task_type,
        payload=payload,
        priority=claim.priority,
        attempt=claim.attempt,
        max_attempts=claim.max_attempts,
        run_at=claim.run_at,
        created_at=claim.created_at,
        cancelled=cancelled,
    )


def _completed(claim: Claim, result: Any) -> Outcome:
    return Outcome(claim, "completed", result=None if result is None else to_json(result))


def _ended_by(claim: Claim, error: BaseException) -> Outcome:
    if isinstance(error, Snooze):
        return Outcome(claim, "released", delay=error.delay)
    if isinstance(error, Retry):
        return Outcome(claim, "failed", error=error_text(error), delay=error.delay)
    return Outcome(claim, "failed", error=error_text(error), permanent=isinstance(error, Fail))
