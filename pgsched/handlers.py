"""Runs handlers: plain functions in threads, coroutines on one event loop. Knows no database."""

import asyncio
import contextlib
import inspect
import json
import logging
import queue
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, cast
from uuid import UUID

from pgsched.calls import Claim, Task, to_json
from pgsched.errors import Fail, InvalidArgument, Retry, Snooze

Handler = Callable[[Task], Any | Awaitable[Any]]

log = logging.getLogger("pgsched")

ERROR_LENGTH = 8192
"""Characters of an error that are sent to the database, which keeps as many bytes."""
RESULT_LENGTH = 1_048_576
"""Bytes of a result's JSON: a batch of a hundred has to fit in one message."""
CANCEL_SECONDS = 1.0
"""How long cancelled coroutines get when the event loop ends."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a handler ended: what is to be told to the database."""

    claim: Claim
    kind: Literal["completed", "failed", "released"]
    result: str | None = None
    error: str = ""
    delay: timedelta | None = None
    permanent: bool = False


Inbox = queue.SimpleQueue[Outcome | None]
"""What handlers' threads and signal handlers tell the loop; None: stop. Its put never deadlocks, as
the lock of an Event does when a signal comes at the wrong moment."""


def error_text(error: BaseException) -> str:
    """Type and message of any exception, as text that PostgreSQL can store."""
    name = type(error).__name__
    try:
        text = f"{name}: {error!s}".removesuffix(": ")  # a plain str, whatever __str__ returns
    except BaseException as broken:
        text = f"{name}: (its message cannot be read: {type(broken).__name__})"
    return text[:ERROR_LENGTH].replace("\0", "\ufffd").encode("utf-8", "replace").decode()


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
        self._work: queue.SimpleQueue[Claim | None] = queue.SimpleQueue()
        self._spawned = 0
        self._idle = threading.Semaphore(0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        self._ending: asyncio.Task[None] | None = None
        self._coroutines: dict[UUID, asyncio.Task[Outcome]] = {}

    def start(self, claim: Claim) -> None:
        """Run the handler of a claim whose type has one; returns at once.

        Raises RuntimeError or OSError, and runs nothing, when the system has no more threads.
        """
        if inspect.iscoroutinefunction(self._handlers[claim.task_type]):
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            if self._loop_thread is None:
                self._loop_thread = self._spawn(self._run_loop, "pgsched-loop")
            self._loop.call_soon_threadsafe(self._start_coroutine, claim)
            return
        if not self._idle.acquire(blocking=False) and self._spawned < self._threads:
            self._spawn(self._run_functions, "pgsched-handler")
            self._spawned += 1
        self._work.put(claim)

    def cancel(self, token: UUID) -> None:
        """Cancel the coroutine of a claim; a plain function only sees ``task.cancelled``."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel_coroutine, token)

    def close(self) -> None:
        """Cancel what runs on the event loop and end that; functions may run to their end."""
        for _ in range(self._spawned):
            self._work.put(None)
        if self._loop is not None and self._loop_thread is not None:
            self._loop.call_soon_threadsafe(self._begin_end)
            self._loop_thread.join(2 * CANCEL_SECONDS)

    def _spawn(self, target: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def _run_functions(self) -> None:
        while claim := self._work.get():
            try:
                outcome = _completed(claim, self._handlers[claim.task_type](_task(claim)))
            # Also SystemExit and KeyboardInterrupt: a handler ends its task, not the worker.
            except BaseException as error:
                outcome = _ended_by(claim, error)
            self._idle.release()
            self._done(outcome)

    # What follows runs on the thread of the event loop.

    def _run_loop(self) -> None:
        assert self._loop is not None
        while self._ending is None:
            # The exit of a task that a handler made comes out here, too; all others go on.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()
        self._loop.close()

    def _begin_end(self) -> None:
        self._ending = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        for coroutine in self._coroutines.values():
            coroutine.cancel()
        if self._coroutines:
            await asyncio.wait(self._coroutines.values(), timeout=CANCEL_SECONDS)
        asyncio.get_running_loop().stop()

    def _start_coroutine(self, claim: Claim) -> None:
        coroutine = asyncio.get_running_loop().create_task(self._run_coroutine(claim))
        self._coroutines[claim.token] = coroutine

        def ended(coroutine: asyncio.Task[Outcome]) -> None:
            del self._coroutines[claim.token]
            # Cancelled before its first step, it could not make an outcome of that itself.
            outcome = (
                _ended_by(claim, asyncio.CancelledError())
                if coroutine.cancelled()
                else coroutine.result()
            )
            self._done(outcome)

        coroutine.add_done_callback(ended)

    def _cancel_coroutine(self, token: UUID) -> None:
        if coroutine := self._coroutines.get(token):
            coroutine.cancel()

    async def _run_coroutine(self, claim: Claim) -> Outcome:
        handler = cast("Callable[[Task], Awaitable[Any]]", self._handlers[claim.task_type])
        try:
            return _completed(claim, await handler(_task(claim)))
        except BaseException as error:
            return _ended_by(claim, error)


def _task(claim: Claim) -> Task:
    try:
        return replace(claim, payload=json.loads(claim.payload))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"Python cannot read the payload: {error}") from error


def _completed(claim: Claim, result: Any) -> Outcome:
    text = None if result is None else to_json(result)
    if text is not None and len(text) > RESULT_LENGTH:
        raise InvalidArgument(f"result is {len(text)} bytes long, the limit is {RESULT_LENGTH}")
    return Outcome(claim, "completed", result=text)


def _ended_by(claim: Claim, error: BaseException) -> Outcome:
    """Never raises: an outcome that got lost would hold its slot, and its lease, for ever."""
    delay = None
    try:
        if isinstance(error, Snooze | Retry):
            with contextlib.suppress(BaseException):
                delay = error.delay if isinstance(error.delay, timedelta) else None
        if isinstance(error, Snooze) and delay is not None:
            return Outcome(claim, "released", delay=delay)
        _log_failure(claim, error)
        if isinstance(error, Retry):
            return Outcome(claim, "failed", error=error_text(error), delay=delay)
        return Outcome(claim, "failed", error=error_text(error), permanent=isinstance(error, Fail))
    except BaseException:
        return Outcome(claim, "failed", error="an exception that cannot be read")


def _log_failure(claim: Claim, error: BaseException) -> None:
    """Says where it came from, not its message, which may quote the payload: see last_error."""
    told = isinstance(error, Fail | Retry)
    log.warning(
        "attempt failed: task=%d task_type=%s attempt=%d/%d error=%s%s",
        *(claim.id, claim.task_type, claim.attempt, claim.max_attempts, type(error).__name__),
        "" if told else "\n" + "".join(traceback.format_tb(error.__traceback__)[1:]).rstrip(),
    )
