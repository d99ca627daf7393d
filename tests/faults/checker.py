"""Does a run's history agree with what pgsched promises, and with what its tables hold at the end?

A pure function over what was recorded, in the manner of Jepsen: two calls are ordered only where
one had ended before the other began, so that nothing is reported which may have been right. What
PostgreSQL says of its own clock is compared with that clock alone, as far as it is known.
"""

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from history import Note, Op

FINAL = {"completed", "failed", "cancelled"}
ENDS = FINAL | {"queued", "released"}
"""Answers that say that the call ended the claim; `released`: queued or cancelled."""
ACCEPTED = ENDS | {"extended", "cancel_requested"}
USES = {"complete", "fail", "release", "extend", "transact"}
"""Calls of a claim's holder; `transact` is hold_task, an effect and complete_task in one."""

GRACE = 5.0
"""Seconds that nobody must have held a worker's presence before its tasks are taken."""
LATE = 30.0
"""Seconds for which a call of which nobody heard may still be on its way or at work."""
LONG = GRACE + 2.0
"""Seconds left of a lease within which its holder, when it is killed, can be missed."""
KILLS = 5
"""Of so many who could have been missed before a lease ended, one should have been."""
ROUNDING = 0.001


class Violation(NamedTuple):
    """A broken promise, in a word and in a sentence."""

    kind: str
    text: str


class Claim(NamedTuple):
    """A task as claim_task returned it; times are the server's, in seconds."""

    op: Op
    token: str
    attempt: int
    max_attempts: int
    run_at: float
    lease_end: float

    @property
    def at(self) -> float:
        return self.lease_end - float(self.op.args["lease"])


class Event(NamedTuple):
    """What a call said of one task; `answer` is None when that is unknown.

    `permanent`: whether a fail was to be the last, None when that was not recorded; `key`: the
    unique key that was asked for.
    """

    op: Op
    token: str | None
    answer: str | None
    delay: float = 0.0
    permanent: bool | None = None
    key: str | None = None

    @property
    def accepted(self) -> bool:
        return self.answer in ACCEPTED


class Row(NamedTuple):
    """A task as the tables have it at the end; `tag` names the call that enqueued it.

    `effects`: how many rows its handler wrote; `followers`: how many tasks it enqueued; `queue` is
    None when it was not recorded, nor was the key then.
    """

    id: int
    tag: str
    task_type: str
    status: str
    attempt: int
    max_attempts: int
    token: str | None
    effects: int = 0
    followers: int = 0
    queue: str | None = None
    unique_key: str | None = None


@dataclass(slots=True)
class Task:
    """What the history says of a task."""

    claims: list[Claim] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


@dataclass
class Report:
    """The violations, and what else is worth knowing of a run; times in seconds.

    `missed`: processes that were killed while present, with much left of a lease, and whether they
    were missed before it ended.
    """

    violations: list[Violation] = field(default_factory=list)
    tasks: int = 0
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    executions: int = 0
    repeated: int = 0
    recoveries: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    missed: dict[str, bool] = field(default_factory=dict)
    faults: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    noticed: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))


def check(history: Iterable[Op | Note], rows: Iterable[Row]) -> Report:
    """Everything that is wrong."""
    checker = Checker()
    for entry in history:
        if isinstance(entry, Op):
            checker.add_op(entry)
        else:
            checker.add_note(entry)
    for row in rows:
        checker.check_row(row)
    checker.check_rest()
    return checker.report


class Checker:
    """Takes a whole history, then every row once, then looks at what has no row."""

    def __init__(self) -> None:
        self.report = Report()
        self._tasks: dict[int, Task] = defaultdict(Task)
        self._enqueues: dict[str, Op] = {}
        self._stored: Counter[str] = Counter()
        self._seen: set[int] = set()
        self._tokens: set[str] = set()
        self._reaping: list[tuple[float, float]] = []
        self._reap_unknown = inf
        self._claims_unknown: list[float] = []
        self._registered: dict[str, list[Op]] = defaultdict(list)
        self._present: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._ended: dict[str, float] = {}
        self._frozen: list[tuple[str, float, float]] = []
        self._clock: list[float] = []
        self._starts: Counter[int] = Counter()
        self._failures: Counter[int] = Counter()

    def say(self, kind: str, text: str) -> None:
        self.report.violations.append(Violation(kind, text))

    # The history

    def add_op(self, op: Op) -> None:
        self.report.calls[op.call, op.status] += 1
        known = op.status == "ok"
        if op.call in {"reap", "maintain"}:
            self._reaping.append((op.begin, min(op.end, op.begin + LATE)))
        if op.call == "enqueue":
            self._enqueues[op.name] = op
            if known and len(op.result) != op.args["count"]:
                self.say(
                    "garbled", f"{len(op.result)} ids of {op.args['count']} tasks: {_told(op)}"
                )
                return
            keys = op.args.get("keys", [None] * op.args["count"])
            for task_id, key in zip(op.result, keys, strict=True) if known else ():
                self._tasks[task_id].events.append(Event(op, None, "enqueued", key=key))
        elif op.status == "fail":
            pass
        elif op.call == "claim":
            for task_id, *values in op.result if known else ():
                self._tasks[task_id].claims.append(Claim(op, *values))
            if not known:
                insort(self._claims_unknown, op.begin)
        elif op.call == "reap":
            for task_id, status in op.result if known else ():
                self._tasks[task_id].events.append(Event(op, None, status))
            if not known:
                self._reap_unknown = min(self._reap_unknown, op.begin)
        elif op.call == "maintain":  # it does not say which
            self._reap_unknown = min(self._reap_unknown, op.begin)
        elif op.call == "register":
            self._registered[op.args["worker"]].append(op)
        elif "ids" in op.args:
            ids = op.args["ids"]
            nothing: list[Any] = [None] * len(ids)
            answers = op.result if known else nothing
            tokens = op.args.get("tokens", nothing)
            delays = op.args.get("delays", nothing)
            permanent = op.args.get("permanent", nothing)
            if len(answers) != len(ids):
                self.say("garbled", f"{len(answers)} answers to {len(ids)} tasks: {_told(op)}")
                return
            for task_id, token, answer, delay, last in zip(
                ids, tokens, answers, delays, permanent, strict=True
            ):
                self._tasks[task_id].events.append(Event(op, token, answer, delay or 0.0, last))

    def add_note(self, note: Note) -> None:
        match note.kind, note.data:
            case "clock", [server_time]:
                self._clock.append(server_time - note.time)
            case "ended", [process]:
                self._ended[process] = note.time
            case "fault", [name, begin]:
                self.report.faults[name].append(note.time - begin)
            case "frozen", [process, begin]:
                self._frozen.append((process, begin, note.time))
            case "present", [worker, begin, end]:
                self._present[worker].append((begin, end))
            case "left", [text]:
                self.say("left behind", text)
            case ("slow" | "error") as kind, found:
                self.report.noticed[kind].append(found)
            case "start", [task_id]:
                self._starts[task_id] += 1
            case "failure", [task_id]:  # a repetition is asked for
                self._failures[task_id] += 1

    # The rows

    def check_row(self, row: Row) -> None:
        self.report.tasks += 1
        if row.id in self._seen:
            self.say("doubled", f"task {row.id} is stored twice")
            return
        self._seen.add(row.id)
        self._stored[row.tag] += 1
        task = self._tasks.pop(row.id, None) or Task()
        for violation in self._check_task(row, task):
            self.report.violations.append(violation)
        starts = self._starts[row.id]
        self.report.executions += starts
        self.report.repeated += max(0, starts - self._failures[row.id] - 1)

    def check_rest(self) -> None:
        """What the history has, and the tables do not."""
        for task_id, task in self._tasks.items():
            first = (task.claims or task.events)[0]
            self.say("lost", f"task {task_id} is in no table: {_told(first.op)}")
        for name, op in self._enqueues.items():
            stored, count = self._stored[name], op.args["count"]
            if op.status == "unknown" and stored not in {0, count} and not op.args.get("keys"):
                self.say("invented", f"{stored} of {count} tasks are stored: {_told(op)}")
        missed = self.report.missed
        if len(missed) >= KILLS and not any(missed.values()):
            self.say("presence", f"none was missed before its lease ended: {', '.join(missed)}")

    def _check_task(self, row: Row, task: Task) -> Iterator[Violation]:
        task.claims.sort(key=lambda claim: claim.at)
        for kind, texts in (
            ("invented", self._check_enqueue(row, task)),
            ("key", _check_keys(row, task)),
            ("token", self._check_tokens(task)),
            ("attempt", self._check_attempts(row, task)),
            ("early", self._check_times(task)),
            ("overlap", self._check_leases(task)),
            ("stale", _check_uses(task)),
            ("completed twice", _check_completions(task)),
            ("revived", _check_ends(task)),
            ("forgotten", _check_acknowledged(row, task)),
            ("cancel", _check_requests(row, task)),
            ("uncaused", self._check_status(row, task)),
            ("attempts left", _check_failures(row, task)),
            ("effect", _check_effects(row)),
        ):
            for text in texts:
                told = "; ".join(_told(each.op, row.id) for each in _in_order(task))
                yield Violation(kind, f"task {row.id} {text}: {told}")
        if row.status in {"queued", "processing"}:
            yield Violation("unfinished", f"task {row.id} is still {row.status}")
        self._note_recoveries(task)

    def _check_enqueue(self, row: Row, task: Task) -> Iterator[str]:
        if row.tag.startswith("after:"):
            return  # counted as a follower of that task
        op = self._enqueues.get(row.tag)
        returned = any(event.op is op for event in task.events)
        if op is None:
            yield "was enqueued by nobody"
        elif op.status == "fail":
            yield f"is there, though it was rolled back: {_told(op)}"
        elif op.status == "ok" and not returned:
            yield f"is there, and was not returned: {_told(op)}"
        for event in task.events:
            if event.op.call == "enqueue" and event.op is not op and not event.op.args.get("keys"):
                yield f"was returned by two calls: {_told(event.op)}"

    def _check_tokens(self, task: Task) -> Iterator[str]:
        for claim in task.claims:
            if claim.token in self._tokens:
                yield f"has a token that was given before, {claim.token}"
            self._tokens.add(claim.token)

    def _check_attempts(self, row: Row, task: Task) -> Iterator[str]:
        for attempt, most in [(row.attempt, row.max_attempts)] + [
            (claim.attempt, claim.max_attempts) for claim in task.claims
        ]:
            if attempt > most:
                yield f"had attempt {attempt} of {most}"
        attempt, token, since = 0, "", -inf
        for claim in task.claims:
            releases = _ends_of(task, token, {"release"})
            least = attempt + (not releases)
            most = attempt + (not any(event.accepted for event in releases))
            if any(_is_retry(e, since, claim.op.end) for e in task.events):
                least, most = 1, max(most, 1)
            if claim.attempt > most:
                # Claims of which no answer came.
                most += bisect_left(self._claims_unknown, claim.op.end)
            if not least <= claim.attempt <= most:
                yield f"had attempt {claim.attempt} after attempt {attempt}"
            attempt, token, since = claim.attempt, claim.token, claim.op.begin

    def _check_times(self, task: Task) -> Iterator[str]:
        due = [
            event.op.args["run_at"]
            for event in task.events
            if event.op.call == "enqueue" and event.op.args.get("run_at")
        ]
        for claim in task.claims:
            if claim.at < max([claim.run_at, *due]) - ROUNDING:
                yield f"was claimed at {claim.at}, before {max([claim.run_at, *due])}"
        for before, after in zip(task.claims, task.claims[1:], strict=False):
            if any(_is_retry(e, before.op.begin, after.op.end) for e in task.events):
                continue  # due at once, however long it had to wait before
            for event in _ends_of(task, before.token, {"fail", "release"}):
                waited = after.op.end - event.op.begin
                if event.answer == "queued" and waited < event.delay - ROUNDING:
                    yield f"was claimed {waited:.3f} s after a delay of {event.delay} s had begun"

    def _check_leases(self, task: Task) -> Iterator[str]:
        """Nobody is given a task before the lease of the claim before is over, or the claim is."""
        for before, after in zip(task.claims, task.claims[1:], strict=False):
            lease_end = self._lease_end(task, before)
            if after.at >= lease_end - ROUNDING:
                continue
            ends = _ends_of(task, before.token, {"fail", "release"})
            if any(event.op.begin < after.op.end for event in ends):
                continue
            if self._may_be_gone(before, after):
                continue
            early = f"{lease_end - after.at:.3f} s"
            yield f"was claimed {early} before the lease of {before.token} ended"

    def _lease_end(self, task: Task, claim: Claim) -> float:
        """The lease did not end before this, by the server's clock."""
        offset = min(self._clock, default=-inf)
        extended = [
            # It was extended after the call began.
            event.op.begin + offset + float(event.op.args["lease"])
            for event in task.events
            if event.token == claim.token and event.op.call == "extend" and event.accepted
        ]
        return max([claim.lease_end, *extended])

    def _may_be_gone(self, before: Claim, after: Claim) -> bool:
        """Whether the holder's presence may have been missed for long enough.

        It was there when the holder last said so, unless a reaper had just locked what it says.
        """
        worker = before.op.args["worker"]
        if any(
            begin <= before.op.begin and after.op.end <= end for begin, end in self._present[worker]
        ):
            return False
        registered = [op for op in self._registered[worker] if op.args["presence"]]
        return bool(registered) and all(
            op.begin + GRACE <= after.op.end
            for op in registered
            if op.status == "ok"
            and op.end <= before.op.begin
            and not any(begin < op.end and op.begin < end for begin, end in self._reaping)
        )

    def _check_status(self, row: Row, task: Task) -> Iterator[str]:
        """What ended the task stands in the history."""
        if row.status == "completed":
            causes = {"complete", "transact"}
        elif row.status == "failed":
            causes = {"fail", "reap"}
        elif row.status == "cancelled":
            causes = {"cancel"}
        else:
            return
        if row.status == "failed" and self._reap_unknown < inf:
            return
        if not any(
            event.op.call in causes
            and event.token in {None, row.token}
            and event.answer in {None, row.status, "requested"}
            for event in task.events
        ):
            yield f"is {row.status}, which nobody asked for"

    def _note_recoveries(self, task: Task) -> None:
        """How long a task waited whose holder was stopped and never came back to it."""
        for before, after in zip(task.claims, task.claims[1:], strict=False):
            if after.attempt <= before.attempt:
                continue  # it was released, or retried
            process = before.op.process
            stops = [("kill", self._ended.get(process, inf), inf)] + [
                ("freeze", begin, end) for name, begin, end in self._frozen if name == process
            ]
            ends = [
                *_ends_of(task, before.token, USES),
                *(e for e in task.events if e.op.call == "reap"),
            ]
            ended = min((e.op.begin for e in ends if e.op.begin > before.op.end), default=inf)
            for kind, stopped, back in stops:
                if before.op.end <= stopped < min(ended, after.op.begin) and after.op.begin < back:
                    self.report.recoveries[kind].append(after.op.end - stopped)
                    if kind == "kill" and after.attempt == before.attempt + 1:
                        self._note_missed(task, before, after, stopped)

    def _note_missed(self, task: Task, before: Claim, after: Claim, stopped: float) -> None:
        """Whether a worker that was killed was missed by its presence, if it could be."""
        offset = max(self._clock, default=inf)
        lease_end = self._lease_end(task, before)
        told = [op for op in self._registered[before.op.args["worker"]] if op.end < stopped]
        last = max(told, key=lambda op: op.end, default=None)
        if last is None or last.status != "ok" or not last.args["presence"]:
            return
        if lease_end - (stopped + offset) < LONG:
            return
        reaped = [e.op.end + offset for e in task.events if e.op.call == "reap"]
        taken = min([after.at, *(at for at in reaped if at > stopped + offset)])
        missed, process = self.report.missed, before.op.process
        missed[process] = missed.get(process, False) or taken < lease_end - ROUNDING


def _ends_of(task: Task, token: str, calls: set[str]) -> list[Event]:
    """What ended the claim with this token, or may have."""
    return [
        event
        for event in task.events
        if event.token == token
        and event.op.call in calls
        and (event.answer is None or event.answer in ENDS)
    ]


def _check_uses(task: Task) -> Iterator[str]:
    """No call is accepted of a claim that is over."""
    for number, claim in enumerate(task.claims):
        over = [later.op for later in task.claims[number + 1 :]]
        for event in task.events:
            call, answer, after = event.op.call, event.answer, event.op.begin > claim.op.end
            ended = event.token == claim.token and call in USES and answer in ENDS
            freed = (
                (call == "reap" and answer in ENDS)
                or (call == "cancel" and answer == "cancelled")
                or (call == "retry" and answer == "queued")
            )
            if ended or (freed and after):
                over.append(event.op)
        ends = 0
        for event in task.events:
            if event.token != claim.token or event.op.call not in USES or not event.accepted:
                continue
            ends += event.answer in ENDS
            if any(op is not event.op and op.end < event.op.begin for op in over):
                yield f"took {event.op.call} from {claim.token}, whose claim was over"
        if ends > 1:
            yield f"ended the claim of {claim.token} {ends} times"


def _check_keys(row: Row, task: Task) -> Iterator[str]:
    """A unique key gives a task that has it, and that had not ended."""
    for event in task.events:
        if event.key is None:
            continue
        queue = event.op.args.get("queue", row.queue)
        if row.queue is not None and (row.queue, row.unique_key) != (queue, event.key):
            yield f"has key {row.unique_key} in {row.queue}, and was returned for {_told(event.op)}"
        for end in task.events:
            if end.answer not in FINAL | {"already"} or end.op.end >= event.op.begin:
                continue
            if end.answer in {"completed", "already"} or not _retried(task, end, event.op.end):
                yield f"was returned for {event.key} when it had ended: {_told(event.op)}"
                break


def _check_completions(task: Task) -> Iterator[str]:
    if (count := sum(event.answer == "completed" for event in task.events)) > 1:
        yield f"was completed {count} times"


def _is_retry(event: Event, after: float, before: float = inf) -> bool:
    """Whether it brought the task back, or may have, between these times."""
    return (
        event.op.call == "retry"
        and event.answer in {None, "queued"}
        and (event.answer is None or event.op.end > after)
        and event.op.begin < before
    )


def _retried(task: Task, end: Event, before: float = inf) -> bool:
    """Whether the task may have been brought back after this end."""
    return any(_is_retry(event, end.op.begin, before) for event in task.events)


def _check_ends(task: Task) -> Iterator[str]:
    """What has ended is not claimed again, unless it is retried, and what was completed never."""
    for end in task.events:
        for claim in task.claims if end.answer in FINAL else ():
            if claim.op.begin > end.op.end and (
                end.answer == "completed" or not _retried(task, end, claim.op.end)
            ):
                yield f"was claimed after it was {end.answer}"


def _check_acknowledged(row: Row, task: Task) -> Iterator[str]:
    """What was said to be so is still so."""
    for event in task.events:
        if event.answer in {"completed", "already"}:
            if (row.status, row.token) != ("completed", event.token):
                yield f"was completed with {event.token}, and is {row.status} with {row.token}"
        elif event.answer in FINAL and row.status != event.answer and not _retried(task, event):
            yield f"was {event.answer}, and is {row.status}"


def _check_requests(row: Row, task: Task) -> Iterator[str]:
    """Of a task that is to be cancelled only a completion is taken; it does not come back."""
    for request in task.events:
        if request.answer != "requested":
            continue
        done = request.op.end
        for event in task.events:
            if (
                event.op.call in {"fail", "release", "reap"}
                and event.op.begin > done
                and event.answer in {"queued", "failed"}
                and not _retried(task, request, event.op.end)
            ):
                yield f"was to be cancelled, and {event.op.call} said {event.answer}"
        for claim in task.claims:
            if claim.op.begin > done and not _retried(task, request, claim.op.end):
                yield f"was to be cancelled, and was claimed again with {claim.token}"
        if row.status in {"queued", "failed"} and not _retried(task, request):
            yield f"was to be cancelled, and is {row.status}"


def _check_failures(row: Row, task: Task) -> Iterator[str]:
    """A task fails for good with its last attempt, or when its worker says so."""
    claims = {claim.token: claim for claim in task.claims}
    for event in task.events:
        claim = claims.get(event.token or "")
        if event.op.call != "fail" or claim is None:
            continue
        last = event.permanent or claim.attempt >= claim.max_attempts
        told = f"with attempt {claim.attempt} of {claim.max_attempts}"
        if event.answer == "failed" and not last and event.permanent is not None:
            yield f"failed for good {told}"
        if event.answer == "queued" and last:
            yield f"was to fail for good {told}, and did not"
    given_up = any(
        event.op.call == "fail"
        and event.token == row.token
        and event.answer in {None, "failed"}
        and event.permanent is not False
        for event in task.events
    )
    if row.status == "failed" and row.attempt < row.max_attempts and not given_up:
        yield f"is failed with attempt {row.attempt} of {row.max_attempts}"


def _check_effects(row: Row) -> Iterator[str]:
    """The effects of a transaction and its completion are there together or not at all."""
    expected = int(row.status == "completed" and row.task_type == "pay")
    for what, count in (("effects", row.effects), ("followers", row.followers)):
        if count != expected:
            yield f"is {row.status} and has {count} {what}"


def _in_order(task: Task) -> list[Claim | Event]:
    return sorted([*task.claims, *task.events], key=lambda each: each.op.begin)


def _told(op: Op, task_id: int | None = None) -> str:
    """A call in a few words, of one task if it says something of that."""
    answer = op.result
    if "ids" in op.args and task_id in op.args["ids"] and answer is not None:
        answer = answer[op.args["ids"].index(task_id)]
    elif isinstance(answer, list) and op.call in {"claim", "reap"}:
        answer = next((each[1:] for each in answer if each[0] == task_id), answer)
    elif op.call == "enqueue" and op.status == "ok":
        answer = "added"
    return f"[{op.begin:.3f} to {op.end:.3f}] {op.name} {op.call} {op.status} {answer}"
