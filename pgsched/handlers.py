"""Runs handlers: plain functions in threads, coroutines on one event loop."""

import asyncio
import contextlib
import inspect
import json
import logging
import math
import os
import queue
import random
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from pgsched.calls import Claim, Connection, Outcome, Task, to_json
from pgsched.errors import Fail, InvalidArgument, Retry, Snooze
from pgsched.transactions import NotBegun, Transactions

log = logging.getLogger("pgsched")

ERROR_LENGTH = 8192
"""Characters of an error that are sent to the database, which keeps as many bytes."""
RESULT_LENGTH = 1_048_576
"""Bytes of a result's JSON: a batch of a hundred has to fit in one message."""
CANCEL_SECONDS = 1.0
"""How long cancelled coroutines get when the event loop ends."""
ELSEWHERE_SECONDS, SOON_SECONDS = (15.0, 45.0), (1.0, 5.0)
"""How long a task that cannot be run here, or not now, is left to other workers."""


class Handler:
    """A function that handles tasks of a type; ``timeout`` in seconds."""

    def __init__(self, function: Callable[..., Any], timeout: float | None = None) -> None:
        self.function, self.timeout = function, timeout
        self.is_coroutine = inspect.iscoroutinefunction(function)
        self.takes_connection = _required_arguments(function) > 1
        if self.is_coroutine and self.takes_connection:
            raise InvalidArgument("a coroutine takes no connection: use a plain function")


def _required_arguments(function: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in kinds and each.default is each.empty for each in parameters)


def elsewhere(claim: Claim) -> Outcome:
    """The claim is given back, for other workers."""
    return Outcome(claim, "released", delay=timedelta(seconds=random.uniform(*ELSEWHERE_SECONDS)))


def soon() -> timedelta:
    """When a claim that is given back is due again, since nothing can be done with it now."""
    return timedelta(seconds=random.uniform(*SOON_SECONDS))


def error_text(error: BaseException) -> str:
    """Type and message of any exception, as text that PostgreSQL can store."""
    name = type(error).__name__
    try:
        text = f"{name}: {error!s}".removesuffix(": ")  # a plain str, whatever __str__ returns
    except BaseException as broken:
        text = f"{name}: (its message cannot be read: {type(broken).__name__})"
    return text[:ERROR_LENGTH].replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def spawn(target: Callable[[], None], name: str) -> threading.Thread:
    """A thread that does not keep the process from ending."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


@dataclass(eq=False)
class Executor:
    """Runs the handlers of claims, ``concurrency`` at once, of those that take a connection as many
    as there are of these; further ones wait for their turn.

    ``running``: handlers that run. ``waiting``: claims whose handler has not begun, the oldest
    first. ``deadlines``: when handlers with a timeout are to end, by token. ``done`` is called from
    the thread that ran the handler, which runs in a context that ``timed`` makes. A handler that
    never ends does not keep the process from ending.
    """

    handlers: Mapping[str, Handler]
    concurrency: int
    transactions: Transactions
    done: Callable[[Outcome], None]
    timed: Callable[[Claim], AbstractContextManager[object]] = contextlib.nullcontext

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self.running = 0
        self._in_transaction = 0
        self.waiting: dict[Claim, None] = {}
        self.deadlines: dict[Claim, float] = {}
        self._work: queue.SimpleQueue[Claim | None] = queue.SimpleQueue()
        self._spawned = 0
        self._idle = threading.Semaphore(0)
        self._coroutines: dict[Claim, asyncio.Task[Outcome]] = {}
        self._loop = asyncio.new_event_loop()
        self._loop_thread: threading.Thread | None = None
        self._ending = False

    @property
    def out_of_connections(self) -> bool:
        """Whether a handler that takes one would have to wait."""
        return self._in_transaction >= self.transactions.limit

    def start(self, claims: Sequence[Claim]) -> None:
        """Run the handlers of claims, whose types have one, now or when it is their turn."""
        with self._lock:
            begin = dict.fromkeys(filter(self._enter, claims))
            self.waiting.update(dict.fromkeys(each for each in claims if each not in begin))
        for claim in begin:
            self._launch(claim)

    def withdraw(self) -> list[Claim]:
        """The claims whose handlers have not begun, and will not begin now."""
        with self._lock:
            claims = list(self.waiting)
            self.waiting.clear()
        return claims

    def cancel(self, claim: Claim) -> bool:
        """Cancel a coroutine; a plain function only sees ``task.cancelled``.

        Returns whether the handler has not begun, and will not: there will be no outcome.
        """
        claim.cancelled.set()
        with self._lock:
            if claim in self.waiting:
                del self.waiting[claim]
                return True
        if self._loop_thread is not None:
            self._loop.call_soon_threadsafe(self._cancel_coroutine, claim)
        return False

    def close(self) -> None:
        """Cancel what runs on the event loop and end that; functions may run to their end."""
        for _ in range(self._spawned):
            self._work.put(None)
        if self._loop_thread is None:
            self._loop.close()
        else:
            asyncio.run_coroutine_threadsafe(self._end_loop(), self._loop)
            self._loop_thread.join(2 * CANCEL_SECONDS)
        self.transactions.close()

    def _enter(self, claim: Claim) -> bool:
        """Whether the handler may begin now; it counts as running then."""
        if self.running >= self.concurrency:
            return False
        handler = self.handlers[claim.task_type]
        if handler.takes_connection and self.out_of_connections:
            return False
        self.running += 1
        self._in_transaction += handler.takes_connection
        if handler.timeout is not None:
            self.deadlines[claim] = time.monotonic() + handler.timeout
        return True

    def _leave(self, claim: Claim) -> None:
        self.running -= 1
        self._in_transaction -= self.handlers[claim.task_type].takes_connection
        self.deadlines.pop(claim, None)

    def _launch(self, claim: Claim) -> None:
        """Hand a claim, which counts as running, to a thread or to the event loop."""
        handler = self.handlers[claim.task_type]
        try:
            with self._lock:
                if handler.is_coroutine:
                    self._loop_thread = self._loop_thread or spawn(self._run_loop, "pgsched-loop")
                elif not self._idle.acquire(blocking=False) and self._spawned < self.concurrency:
                    spawn(self._run_functions, "pgsched-handler")
                    self._spawned += 1
        except RuntimeError as error:
            log.error("cannot start a handler, left to other workers: error=%r", str(error))
            with self._lock:
                self._leave(claim)
            self.done(elsewhere(claim))
            return
        if handler.is_coroutine:
            self._loop.call_soon_threadsafe(self._start_coroutine, claim)
        else:
            self._work.put(claim)

    def _end(self, outcome: Outcome) -> Claim | None:
        """A handler has ended; returns the claim whose handler may begin in its place."""
        with self._lock:
            self._leave(outcome.claim)
            following = next(filter(self._enter, self.waiting), None)
            if following is not None:
                del self.waiting[following]
        self.done(outcome)
        return following

    def _run_functions(self) -> None:
        while claim := self._work.get():
            following: Claim | None = claim
            # Without a turn through other threads, which would take longer than a short task.
            while following and not self.handlers[following.task_type].is_coroutine:
                following = self._end(self._run_function(following))
            self._idle.release()
            if following:
                self._launch(following)

    def _run_function(self, claim: Claim) -> Outcome:
        handler = self.handlers[claim.task_type]
        if handler.takes_connection:
            return self._run_in_transaction(claim, handler)
        return run_function(claim, partial(self._call, claim, handler))

    def _call(self, claim: Claim, handler: Handler, *more: Any) -> str | None:
        with self.timed(claim):
            return call(claim, handler, *more)

    def _run_in_transaction(self, claim: Claim, handler: Handler) -> Outcome:
        def work(connection: Connection) -> str | None:
            result = self._call(claim, handler, connection)
            if time.monotonic() >= self.deadlines.get(claim, math.inf):
                raise TimeoutError(f"timed out after {handler.timeout:g} s")
            return result

        try:
            self.transactions.run(claim, work)
            return Outcome(claim, "recorded")
        except NotBegun as error:
            log.warning("no transaction: task=%d error=%r", claim.id, str(error.__cause__).strip())
            return Outcome(claim, "released", delay=soon())
        except BaseException as error:
            return _ended_by(claim, error)

    # What follows runs on the thread of the event loop.

    def _run_loop(self) -> None:
        while not self._ending:
            # The exit of a task that a handler made comes out here, too; all others go on.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()
        self._loop.close()

    async def _end_loop(self) -> None:
        self._ending = True
        for coroutine in self._coroutines.values():
            coroutine.cancel()
        if self._coroutines:
            await asyncio.wait(self._coroutines.values(), timeout=CANCEL_SECONDS)
        asyncio.get_running_loop().stop()

    async def _await(self, claim: Claim) -> Outcome:
        with self.timed(claim):
            return await run_coroutine(claim, self.handlers[claim.task_type])

    def _start_coroutine(self, claim: Claim) -> None:
        coroutine = asyncio.get_running_loop().create_task(self._await(claim))
        self._coroutines[claim] = coroutine

        def ended(coroutine: asyncio.Task[Outcome]) -> None:
            del self._coroutines[claim]
            # Cancelled before its first step, it could not make an outcome of that itself.
            early = coroutine.cancelled()
            outcome = _ended_by(claim, asyncio.CancelledError()) if early else coroutine.result()
            if following := self._end(outcome):
                self._launch(following)

        coroutine.add_done_callback(ended)

    def _cancel_coroutine(self, claim: Claim) -> None:
        if coroutine := self._coroutines.get(claim):
            coroutine.cancel()


class _InThisProcess:
    """A child that the handler forked ends when the handler does: it is no worker."""

    def __enter__(self) -> None:
        self._process = os.getpid()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if os.getpid() != self._process:
            code = error.code if isinstance(error, SystemExit) else error and 1
            os._exit(code if isinstance(code, int) else code is not None)


def call(claim: Claim, handler: Handler, *more: Any) -> str | None:
    """Call a plain function with its task, and what else it takes; returns JSON text."""
    with _InThisProcess():
        return _json(handler.function(_task(claim), *more))


def run_function(claim: Claim, work: Callable[[], str | None]) -> Outcome:
    """How the call of a handler's function ends, here and now."""
    try:
        return Outcome(claim, "completed", result=work())
    # Also SystemExit and KeyboardInterrupt: a handler ends its task, not the worker.
    except BaseException as error:
        return _ended_by(claim, error)


async def run_coroutine(claim: Claim, handler: Handler) -> Outcome:
    """Run a coroutine function with its task."""
    try:
        with _InThisProcess():
            return Outcome(claim, "completed", result=_json(await handler.function(_task(claim))))
    except BaseException as error:
        return _ended_by(claim, error)


def _task(claim: Claim) -> Task:
    try:
        # A copy would take longer.
        claim.payload = json.loads(claim.payload)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"Python cannot read the payload: {error}") from error
    return claim


def _json(result: Any) -> str | None:
    text = None if result is None else to_json(result)
    if text is not None and len(text) > RESULT_LENGTH:
        raise InvalidArgument(f"result is {len(text)} bytes long, the limit is {RESULT_LENGTH}")
    return text


def _ended_by(claim: Claim, error: BaseException) -> Outcome:
    """Never raises: an outcome that got lost would hold its slot, and its lease, for ever."""
    delay = None
    try:
        if isinstance(error, Snooze | Retry):
            with contextlib.suppress(BaseException):
                delay = error.delay if isinstance(error.delay, timedelta) else None
        if isinstance(error, Snooze) and delay is not None:
            return Outcome(claim, "released", delay=delay)
        stopped = isinstance(error, asyncio.CancelledError | TimeoutError)
        if not (stopped and claim.cancelled.is_set()):
            _log_failure(claim, error)
        permanent = isinstance(error, Fail)
        return Outcome(claim, "failed", error=error_text(error), delay=delay, permanent=permanent)
    except BaseException:
        return Outcome(claim, "failed", error="an exception that cannot be read")


def _log_failure(claim: Claim, error: BaseException) -> None:
    """Says where it came from, not its message, which may quote the payload: see last_error."""
    frames = [] if isinstance(error, Fail | Retry) else traceback.extract_tb(error.__traceback__)
    own = takewhile(lambda frame: Path(frame.filename).parent == Path(__file__).parent, frames)
    where = "".join(["\n", *traceback.format_list(frames[len(list(own)) :])]).rstrip()
    told = claim.id, claim.task_type, claim.attempt, claim.max_attempts, type(error).__name__
    log.warning("attempt failed: task=%d task_type=%s attempt=%d/%d error=%s%s", *told, where)
