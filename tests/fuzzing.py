"""Calls with arguments that nobody should pass, and what the documents say of them."""

import json
import math
import os
import random
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import hypothesis
import psycopg
from hostile import (
    BROKEN,
    DAY,
    KINDS,
    NULL,
    ROLES,
    TASKS,
    WORKERS,
    YEARS,
    Array,
    Value,
    array,
    number,
    random_values,
)
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

set_hypothesis_home_dir(Path(sys.prefix) / "hypothesis")

# Runs


def settings(examples: int, steps: int = 50, *, shrink: bool = True) -> hypothesis.settings:
    """Of a run; what it finds is not kept, since its seed finds it again."""
    return hypothesis.settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
    )


@contextmanager
def seeded(*, long: bool) -> Iterator[int]:
    """A seed, which an error names: 0, of what is long PGSCHED_FUZZ_SEED, or one at random."""
    seed = int(os.environ.get("PGSCHED_FUZZ_SEED") or random.randrange(2**32)) if long else 0
    try:
        yield seed
    except BaseException as error:
        error.add_note(f"PGSCHED_FUZZ_SEED={seed} repeats it")
        raise


# Functions


class Function(NamedTuple):
    """A public function or procedure; the types of its arguments by their names."""

    name: str
    arguments: dict[str, str]
    required: int
    procedure: bool
    writes: bool


def functions(conn: psycopg.Connection) -> dict[str, Function]:
    """All of them, by the catalog."""
    rows = conn.execute(
        """
        select p.proname::text, coalesce(p.proargnames[:p.pronargs], '{}'),
               array(select format_type(t.oid, null)
                       from unnest(p.proargtypes) with ordinality as t (oid, position)
                      order by t.position),
               p.pronargs - p.pronargdefaults, p.prokind = 'p',
               p.provolatile = 'v' and p.prokind = 'f'
          from pg_proc as p
         where p.pronamespace = 'pgsched'::regnamespace and p.proname not like '\\_%'
         order by p.proname
        """
    )
    return {
        name: Function(name, dict(zip(names, types, strict=True)), *rest)
        for name, names, types, *rest in rows
    }


# What the documents say

Rule = Callable[[Any], bool]


def anything(_: Any) -> bool:
    return True


def given(value: Any) -> bool:
    return value is not None


def is_name(value: Any) -> bool:
    return (
        isinstance(value, str)
        and 1 <= len(value.encode()) <= 63
        and not any(unicodedata.category(sign) == "Cc" for sign in value)
    )


def between(least: float, most: float) -> Rule:
    return lambda value: value is not None and least <= value <= most


def optional(rule: Rule) -> Rule:
    return lambda value: value is None or rule(value)


def is_time(value: Any) -> bool:
    return value is not BROKEN and -math.inf < value < 9999


def is_payload(value: Any) -> bool:
    # As jsonb is written, but for numbers, of which only short documents here have many.
    text = json.dumps(value, default=str, ensure_ascii=False)
    return value is not None and len(text.encode()) <= 1_048_576


def each(rule: Rule, least: int = 0) -> Rule:
    """An array of one dimension, all of whose elements the rule accepts."""
    return lambda value: (
        value is not None
        and len(value.items) >= least
        and value.dimensions <= 1
        and all(map(rule, value.items))
    )


def whole(least: int, most: float) -> Rule:
    """Of a number in JSON."""
    return lambda value: (
        isinstance(value, Decimal) and least <= value <= most and value == value.to_integral_value()
    )


FIELDS: dict[str, Rule] = {
    "task_type": is_name,
    "queue": is_name,
    "payload": optional(is_payload),
    "run_at": optional(lambda value: isinstance(value, str) and is_time(YEARS.get(value, BROKEN))),
    "priority": whole(0, 9),
    "max_attempts": optional(whole(1, 2**31 - 1)),
    "unique_key": optional(is_name),
    "concurrency_key": optional(is_name),
}


def is_task(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and "task_type" in value
        and all(field in FIELDS and FIELDS[field](value[field]) for field in value)
    )


attempts = optional(between(1, 2**31 - 1))
wait = optional(between(0, 365 * DAY))
keep = optional(between(0, 36_525 * DAY))
claim: dict[str, Rule] = {"p_id": given, "p_claim_token": given}
claims: dict[str, Rule] = {"p_ids": each(given), "p_claim_tokens": each(given)}
lease: dict[str, Rule] = {"p_lease": between(1, DAY)}

RULES: dict[str, dict[str, Rule]] = {
    "cancel_task": {"p_id": given},
    "claim_task": {"p_worker": is_name, "p_queue": is_name, "p_limit": between(1, 100), **lease},
    "complete_task": {**claim, "p_result": anything},
    "complete_tasks": {**claims, "p_results": optional(each(anything))},
    "configure_queue": {
        "p_queue": is_name,
        "p_max_attempts": attempts,
        "p_retry_delay": wait,
        "p_retry_delay_max": wait,
        "p_max_payload_bytes": optional(between(2, 268_435_455)),
        "p_keep_completed": keep,
        "p_keep_failed": keep,
        "p_notify": anything,
    },
    "diagnose": {},
    "enqueue_task": {
        "p_task_type": is_name,
        "p_payload": is_payload,
        "p_queue": is_name,
        "p_run_at": optional(is_time),
        "p_priority": between(0, 9),
        "p_max_attempts": attempts,
        "p_unique_key": optional(is_name),
        "p_concurrency_key": optional(is_name),
    },
    "enqueue_tasks": {
        "p_tasks": lambda value: isinstance(value, list) and all(map(is_task, value))
    },
    "extend_task": {**claim, **lease},
    "extend_tasks": {**claims, **lease},
    "fail_task": {**claim, "p_error": anything, "p_retry_in": wait, "p_permanent": given},
    "fail_tasks": {
        **claims,
        "p_errors": optional(each(anything)),
        "p_retry_in": optional(each(wait)),
        "p_permanent": optional(each(anything)),
    },
    "get_task": {"p_id": given},
    "grant_access": {"p_role": ROLES.__contains__, "p_kind": KINDS.__contains__},
    "hold_presence": {"p_worker_id": given},
    "hold_task": claim,
    "list_workers": {},
    "maintain": {},
    "notify_channel": {"p_queue": is_name},
    "pause_queue": {"p_queue": is_name},
    "prune_finished": {"p_limit": between(1, 100_000)},
    "queue_stats": {},
    "reap_stale": {"p_limit": between(1, 1000)},
    "recent_rates": {"p_seconds": between(1, 86_400)},
    "register_listener": {"p_worker_id": anything, "p_queues": each(is_name)},
    "register_worker": {
        "p_name": is_name,
        "p_queues": each(is_name, least=1),
        "p_slots": between(1, 2**31 - 1),
        "p_presence": given,
    },
    "release_task": {**claim, "p_run_at": optional(is_time)},
    "release_tasks": {**claims, "p_delay": optional(each(wait))},
    "reschedule_task": {
        "p_id": given,
        "p_run_at": optional(is_time),
        "p_priority": optional(between(0, 9)),
    },
    "resume_queue": {"p_queue": is_name},
    "retry_task": {"p_id": given},
    "revoke_access": {"p_role": {*ROLES[1:]}.__contains__, "p_kind": KINDS.__contains__},
    "schema_version": {},
    "server_stats": {},
    "unregister_worker": {"p_id": anything},
}

Given = Mapping[str, Value]


def faults(function: str, given: Given) -> set[str]:
    """The arguments that TS400 may name; none: it must not be raised."""
    meanings = {name: value.meaning for name, value in given.items()}
    found = {name for name, meaning in meanings.items() if not RULES[function][name](meaning)}
    lengths = {name: len(m.items) for name, m in meanings.items() if isinstance(m, Array)}
    if "p_ids" in lengths:
        found |= {name for name, length in lengths.items() if length != lengths["p_ids"]}
    return found


def _ends(function: str) -> set[str]:
    """The statuses in which a task may be whose claim is named: a completion may be repeated."""
    repeats = function in ("complete_task", "complete_tasks")
    return {"processing", "completed"} if repeats else {"processing"}


def refusal(function: str, given: Given) -> str | None:
    """The code that a call gives that has no fault, or None."""
    if function == "register_listener":
        return None if given["p_worker_id"].meaning in WORKERS else "TS404"
    if "p_id" not in given or function == "unregister_worker":
        return None
    task = TASKS.get(given["p_id"].meaning)
    if task is None:
        return "TS404"
    if "p_claim_token" in RULES[function]:
        mine = task.token == given["p_claim_token"].meaning
        return None if mine and task.status in _ends(function) else "TS409"
    allowed = {
        "retry_task": task.status in ("failed", "cancelled") and not task.taken,
        "reschedule_task": task.status == "queued",
    }
    return None if allowed.get(function, True) else "TS423"


def outcomes(function: str, given: Given) -> list[tuple[int, str]]:
    """What a batch call without a fault answers."""
    answers = []
    seen = set()
    ids, tokens = given["p_ids"].meaning.items, given["p_claim_tokens"].meaning.items
    column = given["p_permanent"].meaning if "p_permanent" in given else None
    permanent = column.items if column else [False] * len(ids)
    for task_id, token, for_good in zip(ids, tokens, permanent, strict=True):
        task = TASKS.get(task_id)
        first = (task_id, token) not in seen
        seen.add((task_id, token))
        if task is None:
            answer = "gone"
        elif task.token != token or task.status not in _ends(function):
            answer = "stale"
        elif function == "extend_tasks":
            answer = "cancel_requested" if task.cancel_requested else "extended"
        elif function == "complete_tasks":
            answer = "completed" if first and task.status == "processing" else "already"
        elif not first:
            answer = "stale"
        elif task.cancel_requested:
            answer = "cancelled"
        elif function == "fail_tasks" and (for_good or task.last):
            answer = "failed"
        else:
            answer = "queued"
        lost = function == "extend_tasks" and answer in ("gone", "stale")
        answers.append((task_id, "lost" if lost else answer))
    return answers


# Calls


class Call(NamedTuple):
    """A call: what is given, how many of that by position, what is written around each value."""

    function: Function
    given: Given
    by_position: int = 0
    around: str = "{}"
    mode: str = ""
    setting: str = "timezone = 'UTC'"

    def statement(self) -> tuple[bytes, list[str | None]]:
        parts = []
        for position, name in enumerate(self.given):
            kind = self.function.arguments[name]
            texts = kind.startswith("text") or "collate" not in self.around
            text = (self.around if texts else "{}").format("%s", type=kind)
            parts.append(text if position < self.by_position else f"{name} => {text}")
        command = "call" if self.function.procedure else "select * from"
        text = f"{command} pgsched.{self.function.name}({', '.join(parts)})"
        return text.encode(), [value.text for value in self.given.values()]


AROUND = ["{}", "{}::{type}", '{}::{type} collate "C"', "{}::{type} collate public.odd"]
"""What may be written around a value: texts may bring a collation of their own."""
MODES = ["", "isolation level repeatable read", "isolation level serializable", "read only"]
SETTINGS = [
    "timezone = 'UTC'",
    *("timezone = 'Asia/Kathmandu'", "datestyle = 'SQL, DMY'", "intervalstyle = 'sql_standard'"),
    *("plpgsql.extra_errors = 'all'", "quote_all_identifiers = on", "search_path = ''"),
    *("transform_null_equals = on", "extra_float_digits = -15", "enable_indexscan = off"),
]


Known = Mapping[str, list[Value]]


def values(function: Function, name: str, known: Known) -> list[Value]:
    """Hostile values of an argument, and good ones."""
    return known.get(name) or known[function.arguments[name]]


def good(function: Function, name: str, known: Known) -> list[Value]:
    """The values that the argument may have."""
    rule = RULES[function.name][name]
    return [
        each
        for each in values(function, name, known)
        if each.meaning is not BROKEN and rule(each.meaning)
    ]


def calls(function: Function, known: Known) -> st.SearchStrategy[Call]:
    """Mostly of claims that are there, at most two arguments hostile, some left out."""
    names = list(function.arguments)
    some_names = st.sets(st.sampled_from(names), max_size=2) if names else st.just(set[str]())
    hostile = {name: st.sampled_from(values(function, name, known)) for name in names}
    usual = {}
    elements = {}
    for name, kind in function.arguments.items():
        element = kind.removesuffix("[]")
        if kind == element:
            usual[name] = st.sampled_from(good(function, name, known)) | random_values(kind)
        else:
            readable = [value for value in known[element] if value.meaning is not BROKEN]
            elements[name] = st.sampled_from(readable) | random_values(element)
            usual[name] = st.lists(elements[name], max_size=6).map(array)
    tasks = st.sampled_from(list(TASKS))
    # Of each claim the task, and the one whose token it is, if not its own.
    some_claims = st.lists(st.tuples(tasks, st.none() | tasks), max_size=6)
    surroundings = st.tuples(
        st.sampled_from(AROUND),
        st.sampled_from([*MODES[:1] * 6, *MODES]),
        st.sampled_from([*SETTINGS[:1] * 9, *SETTINGS]),
    )

    @st.composite
    def call(draw: st.DrawFn) -> Call:
        chosen = [(task, other or task) for task, other in draw(some_claims)]
        ids = [number(task, 64) for task, _ in chosen]
        tokens = [TASKS[task].token or UUID(int=0) for _, task in chosen]
        claims = {
            "bigint": ids[0] if ids else NULL,
            "bigint[]": array(ids),
            "uuid": Value(str(tokens[0]), tokens[0]) if tokens else NULL,
            "uuid[]": array([Value(str(token), token) for token in tokens]),
        }
        strange, left_out = draw(some_names), draw(some_names)
        given = {}
        for position, (name, kind) in enumerate(function.arguments.items()):
            if name in left_out and (position >= function.required or draw(st.integers(0, 9)) == 0):
                continue
            if name in strange:
                value = draw(hostile[name])
            elif name in ("p_id", "p_ids", "p_claim_token", "p_claim_tokens"):
                value = claims[kind]
            elif name in elements and "p_ids" in function.arguments:
                items = [draw(elements[name]) for _ in chosen]
                value = draw(st.sampled_from([NULL, array(items)]))
            else:
                value = draw(usual[name])
            given[name] = value
        leading = sum(1 for one, other in zip(names, given, strict=False) if one == other)
        by_position = draw(st.integers(0, leading))
        named = draw(st.permutations(list(given)[by_position:]))
        return Call(
            function,
            {name: given[name] for name in [*list(given)[:by_position], *named]},
            by_position,
            *draw(surroundings),
        )

    return call()


# What always holds

BROKEN_RULES = """
create function public.broken_rules()
  returns table (rule text, task bigint)
  language plpgsql
as $$
begin
  return query
  select 'queued with a claim, a request or no attempt left', t.id
    from pgsched.scheduled_tasks as t
   where t.status = 'queued'
     and (num_nonnulls(t.claim_token, t.claimed_by, t.claimed_at, t.lease_expires_at,
                       t.cancel_requested_at) > 0
          or t.attempt not between 0 and t.max_attempts - 1)
   union all
  select 'running without a claim, or beyond the last attempt', t.id
    from pgsched.scheduled_tasks as t
   where t.status = 'processing'
     and (num_nulls(t.claim_token, t.claimed_by, t.claimed_at, t.lease_expires_at) > 0
          or t.attempt not between 1 and t.max_attempts
          or t.lease_expires_at <= t.claimed_at)
   union all
  select 'in both tables', t.id
    from pgsched.scheduled_tasks as t join pgsched.finished_tasks as f on f.id = t.id
   union all
  select 'a token of two claims', max(t.id)
    from pgsched.tasks as t
   where t.claim_token is not null
   group by t.claim_token
  having count(*) > 1
   union all
  select 'a name that none can be', t.id
    from pgsched.tasks as t
   cross join lateral (values (t.queue), (t.task_type), (t.unique_key), (t.concurrency_key),
                              (t.claimed_by)) as n (name)
   where octet_length(n.name) not between 1 and 63 or n.name ~ '[[:cntrl:]]'
   union all
  select 'out of range', t.id
    from pgsched.tasks as t
   where t.priority not between 0 and 9 or t.max_attempts < 1 or not isfinite(t.run_at)
      or t.run_at < t.created_at or octet_length(t.last_error) > 8192
      or t.finished_at < t.created_at or (t.status = 'completed' and t.claim_token is null)
   union all
  select format('queue_stats of %L', coalesce(s.queue, n.queue)), null
    from (select s.queue, s.queued, s.due, s.processing, s.failed
            from pgsched.queue_stats() as s) as s
    full join (
         select t.queue, count(*) filter (where t.status = 'queued') as queued,
                count(*) filter (
                  where t.status = 'queued' and t.run_at <= clock_timestamp()) as due,
                count(*) filter (where t.status = 'processing') as processing,
                count(*) filter (where t.status = 'failed') as failed
           from pgsched.tasks as t
          group by t.queue) as n on n.queue = s.queue
   where (s.queued, s.due, s.processing, s.failed) is distinct from
         (coalesce(n.queued, 0), coalesce(n.due, 0), coalesce(n.processing, 0),
          coalesce(n.failed, 0))
     -- Of a queue without any of these only its settings, if there are, are shown.
     and not (s.queue is null and n.queued + n.processing + n.failed = 0);
end;
$$
"""
"""A function that returns what must never be; its plan is kept."""
