"""What is there for calls to name, and values that nobody should pass."""

import json
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID, uuid5

import psycopg
from hypothesis import strategies as st

BROKEN = object()
"""What a text stands for that PostgreSQL cannot read."""
JSON_NULL = object()
"""What null in JSON stands for, which is no null."""


# What is there


class Task(NamedTuple):
    """A task that calls may name; `last`: no attempt is left; `taken`: its unique key is."""

    status: str
    token: UUID | None
    cancel_requested: bool = False
    stale: bool = False
    last: bool = False
    taken: bool = False
    queue: str = "default"


def _token(task_id: int) -> UUID:
    return uuid5(UUID(int=0), str(task_id))


TASKS = {
    3: Task("processing", _token(3)),
    1: Task("queued", None),
    2: Task("queued", None, queue="paused"),
    4: Task("processing", _token(4), cancel_requested=True),
    5: Task("processing", _token(5), stale=True),
    6: Task("processing", _token(6), last=True),
    7: Task("completed", _token(7)),
    8: Task("failed", _token(8)),
    9: Task("cancelled", None),
    10: Task("failed", _token(10), taken=True),
    11: Task("queued", None, taken=True),
    12: Task("processing", _token(12), queue="forgotten"),
    3 + 2**31 - 1: Task("processing", _token(13)),
    2**63 - 1: Task("processing", _token(14)),
    -(2**63): Task("processing", _token(15), stale=True, last=True),
}
WORKERS = {1}
ROLES = ["postgres", "pg_monitor"]
"""The owner of the schema, and another one."""
KINDS = ["producer", "worker", "observer", "admin"]


def fill(conn: psycopg.Connection) -> None:
    """Add TASKS, WORKERS, queues with settings, and a collation."""
    for task_id, task in TASKS.items():
        conn.execute(
            """
            insert into pgsched.scheduled_tasks (
                   id, queue, task_type, payload, status, priority, run_at, attempt, max_attempts,
                   claim_token, claimed_by, claimed_at, lease_expires_at, unique_key,
                   cancel_requested_at, created_at)
            select %(id)s, %(queue)s, 'a', '{}',
                   case when h.held then 'processing' else 'queued' end,
                   5, c.created, %(attempt)s, 3, %(token)s, case when h.held then 'w' end,
                   case when h.held then c.created end,
                   case when h.held then c.created + %(lease)s * interval '1 minute' end,
                   case when %(taken)s then 'taken' end,
                   case when %(cancel_requested)s then c.created end, c.created
              from (select clock_timestamp() - interval '1 hour' as created) as c,
                   (select %(token)s::uuid is not null as held) as h
            """,
            {
                **task._asdict(),
                "id": task_id,
                "attempt": 3 if task.last else 1,
                "lease": 10 if task.stale else 1000,
            },
        )
        if task.status in ("completed", "failed", "cancelled"):
            conn.execute(
                "select pgsched._finish_tasks(array[%s::bigint], '{}', %s, clock_timestamp())",
                [task_id, task.status],
            )
    conn.execute(
        """
        select setval('pgsched.scheduled_tasks_id_seq', 1000);
        select pgsched.pause_queue('paused');
        select pgsched.configure_queue('forgotten', p_keep_completed => '0');
        select pgsched.configure_queue('kept', 7, '1 hour', '2 hours');
        select pgsched.register_worker('w', array['default'], 5);
        select pgsched.register_listener(1, array['default', 'kept']);
        """
    )
    # By this one A is a, if the server can have such a one.
    icu = conn.execute("select from pg_collation where collname = 'en-x-icu'").fetchall()
    odd = "(provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
    conn.execute(b"create collation public.odd " + (odd.encode() if icu else b'from "C"'))


# Values


class Value(NamedTuple):
    """What is sent, and what it stands for: None is null."""

    text: str | None
    meaning: Any

    def __repr__(self) -> str:
        text = repr(self.text)
        return text if len(text) < 500 else f"{text[:500]}... ({len(text)} characters)"


class Array(NamedTuple):
    """What an array stands for: an empty one has no dimension."""

    items: list[Any]
    dimensions: int


NULL = Value(None, None)


def json_value(text: str) -> Value:
    meaning = json.loads(text, parse_int=Decimal, parse_float=Decimal)
    return Value(text, JSON_NULL if meaning is None else meaning)


def number(value: int, bits: int) -> Value:
    return Value(str(value), value if -(2 ** (bits - 1)) <= value < 2 ** (bits - 1) else BROKEN)


def array(values: Sequence[Value]) -> Value:
    """An array of one dimension, or none."""
    quoted = [
        "NULL" if each.text is None else '"' + each.text.translate(_ESCAPES) + '"'
        for each in values
    ]
    meanings = [each.meaning for each in values]
    meaning = BROKEN if BROKEN in meanings else Array(meanings, int(meanings != []))
    return Value("{" + ",".join(quoted) + "}", meaning)


_ESCAPES = str.maketrans({'"': '\\"', "\\": "\\\\"})

TEXTS = [
    *("default", "a", "paused", "forgotten", "kept", "w", "k", "nULL"),
    *("x" * 63, "\u00e9" * 31 + "x", "\N{ELEPHANT}" * 15, "e\u0301", "\ufeff", "\u202ea"),
    *(" ", " a ", "o'brien", '"', "\\", "\\'", "%s", "%", "%1$s", "$1", "$$", "{}", "{a,b}", "--"),
    *(*ROLES, *KINDS, "public", "none", "current_user", '"postgres"', "POSTGRES"),
    *("'; drop table pgsched.scheduled_tasks; --", "pg_sleep(9)", "/*", "\\N", "\U0010ffff", "0"),
    *("", "x" * 64, "\u00e9" * 32, "\N{ELEPHANT}" * 16, "x" * 100_000, "\ufeff" * 22),
    *("\n", "a\n", "\ta", "a\x01", "\x1b[31m", "a\x7f", "\r", "a\u0085", "\x1f'\\"),
]
WHOLE = [
    *(1, *TASKS, 0, -1, 2, 9, 10, 99, 100, 101, 999, 1000, 1001, 99_999, 100_000, 100_001),
    *(86_399, 86_400, 86_401, 268_435_455, 268_435_456, 2**31 - 2, 2**31 - 1, 2**31, 2**32),
    *(-(2**31) + 1, -(2**31), -(2**31) - 1, -(2**32), 2**53 + 1, 2**63 - 2, 2**63, -(2**63) - 1),
]
BROKEN_NUMBERS = [Value(text, BROKEN) for text in ("", "x", "1.5", "NaN", "1e3", "--1", "9" * 5000)]

DAY = 86_400.0
INTERVALS: list[tuple[str, float]] = [
    *(("1 second", 1), ("1.5 seconds", 1.5), ("0", 0), ("0.999999 seconds", 0.999999)),
    *(("1 microsecond", 1e-6), ("-1 microsecond", -1e-6), ("-00:00:01", -1), ("1 day", DAY)),
    *(("24:00:00.000001", DAY + 1e-6), ("1 day +00:00:00.000001", DAY + 1e-6)),
    *(("2 days -24:00:00", DAY), ("1 mon -30 days", 0), ("1 mon -31 days", -DAY)),
    *(("-1 mon +31 days", DAY), ("1 year -365 days", DAY / 4), ("-1 year +365 days", -DAY / 4)),
    *(("365 days", 365 * DAY), ("365 days +00:00:00.000001", 365 * DAY + 1e-6)),
    *(("1 year", 365.25 * DAY), ("100 years", 36_525 * DAY)),
    *(("100 years +00:00:00.000001", 36_525 * DAY + 1e-6), ("36525 days", 36_525 * DAY)),
    *(("178000000 years", math.inf), ("-178000000 years", -math.inf)),
    *(("2147483647:00:00", math.inf), ("-2147483647:00:00", -math.inf)),
    *(("2147483647 days", math.inf), ("-2147483648 days", -math.inf)),
]
BROKEN_INTERVALS = ("", "x", "1 day 1 day", "1e400 days", "999999999999 years", "NaN")
INFINITE_INTERVALS = ("infinity", "-infinity")
"""From PostgreSQL 17 on; before that they cannot be read."""

TIMES: list[tuple[str, float]] = [
    *(("now", 2000), ("epoch", 1970), ("tomorrow", 2000), ("2000-01-01 00:00:00+00", 2000)),
    *(("1999-12-31T23:59:59.999999-15:59", 1999), ("2000-06-01 12:00 America/New_York", 2000)),
    *(("4714-11-24 00:00:00+00 BC", -4714), ("0044-03-15 BC", -44), ("20000101T000000Z", 2000)),
    *(("9998-12-31 23:59:59.999999+00", 9998), ("9999-01-01 00:00:00+00", 9999)),
    *(("9998-12-31 23:59:59.999999-01", 9999), ("294276-12-31 23:59:59.999999+00", 294_276)),
    *(("infinity", math.inf), ("-infinity", -math.inf), (" 2000-01-01 ", 2000)),
]
BROKEN_TIMES = [
    *("", "x", "0", "NaN", "294277-01-01 00:00:00+00", "4714-11-23 00:00:00+00 BC"),
    *("2000-02-30", "2000-01-01 25:00", "2000-01-01 Mars/Olympus", "2000-01-01 00:00+99"),
    *("9" * 40, "9" * 5000, "1 day", "null", "J99999999999999999999", "2000-01-01 00:00:00 PM AM"),
]
YEARS: dict[str, Any] = {**dict(TIMES), **dict.fromkeys(BROKEN_TIMES, BROKEN)}

DEPTH = 500
DOCUMENTS = [
    *("{}", "[]", "null", "true", "0", '""', '"null"', '{"a": {"b": [1, 2.5, null, "x"]}}'),
    *('{"a": 1, "a": 2}', '{"": {"\\u0001": "\\ufeff"}}', '"%s $1 \' \\" \\\\ $$"', "-0.0"),
    *("9" * 5000, "1e1000", "1e-1000", "[" * DEPTH + "]" * DEPTH, '{"a":' * 300 + "1" + "}" * 300),
    *("[" + "0," * 5000 + "0]", json.dumps({str(n): n for n in range(3000)})),
    *('"' + "x" * 1_048_574 + '"', '"' + "x" * 1_048_575 + '"'),
]
BROKEN_DOCUMENTS = ["", "{", "x", "'a'", '"\\u0000"', '"\\ud800"', "[1,]", "NaN", "[" * 50_000]

FIELDS: dict[str, list[Any]] = {
    "task_type": [None, 1, "", "x" * 64, "a\n", ["a"], True],
    "queue": [None, 1, "", "x" * 64, "\ufeff", {}],
    "unique_key": [1, "", "x" * 64, "\t", [], False],
    "concurrency_key": [1, "", "x" * 64, "\x7f", {}, True],
    "priority": [None, "5", -1, 10, 0.5, 1e15, -1e15, [], True],
    "max_attempts": ["5", 0, -1, 1.5, 2**31, 2**63, 1e300, [], False],
    "run_at": [*YEARS, 0, 2000, [], {}, True],
    "payload": ["", 0, [], "x" * 1_048_575],
}
"""Values in JSON for the fields of a task."""
BATCHES = [
    *('[{"task_type": "a"}]', "[]", "{}", '"[]"', "[null]", "[[]]", "[1]", "[{}]", '["{}"]'),
    '[{"task_type": "a", "queue": "kept", "payload": null, "run_at": null, "priority": 0.0,'
    ' "max_attempts": null, "unique_key": null, "concurrency_key": null}]',
    '[{"task_type": "a", "unique_key": "k"}, {"task_type": "b", "unique_key": "k"}]',
    '[{"task_type": "a", "priority": 9, "max_attempts": 2147483647}]',
    '[{"task_type": "a"}, {"task_type": "a", "prio": 1}]',
    '[{"task_type": "a", "p_queue": "a"}]',
    '[{"task_type": "a", "%s": 1}]',
    *(
        json.dumps([{"task_type": "a", field: value}])
        for field, values in FIELDS.items()
        for value in values
    ),
    '[{"task_type": "a", "priority": ' + "9" * 5000 + "}]",
    '[{"task_type": "a", "max_attempts": 1e5000}]',
    '[{"task_type": "a", "priority": 1e-5000}]',
    json.dumps([{"task_type": "a", "unique_key": str(n % 700)} for n in range(1000)]),
    '[{"task_type": "a"},' * 300 + "1" + "]" * 300,
]
BROKEN_ARRAYS = ["", "{", "}", "x", "{a", '{"}', "{1}{2}", "[2:1]={}", "{{1},{2,3}}"]


def values(server_version: int) -> dict[str, list[Value]]:
    """Hostile values of each type, and some good ones, as this version of PostgreSQL reads them.

    Of one argument there are more, by its name.
    """
    found: dict[str, list[Value]] = {
        "text": [NULL, *(Value(text, text) for text in TEXTS)],
        "integer": [NULL, *(number(n, 32) for n in WHOLE), *BROKEN_NUMBERS],
        "bigint": [NULL, *(number(n, 64) for n in WHOLE), *BROKEN_NUMBERS],
        "boolean": [
            *(NULL, Value("true", True), Value(" F ", False), Value("0", False)),
            *(Value(text, BROKEN) for text in ("", "x", "2", "maybe", "null")),
        ],
        "interval": [
            NULL,
            *(Value(*each) for each in INTERVALS),
            *(Value(text, BROKEN) for text in BROKEN_INTERVALS),
            *(
                Value(text, float(text) if server_version >= 170_000 else BROKEN)
                for text in INFINITE_INTERVALS
            ),
        ],
        "timestamp with time zone": [NULL, *(Value(*each) for each in YEARS.items())],
        "uuid": [
            NULL,
            *(Value(str(task.token), task.token) for task in TASKS.values() if task.token),
            Value("{" + str(_token(3)).upper() + "}", _token(3)),
            Value(str(UUID(int=0)), UUID(int=0)),
            *(Value(text, BROKEN) for text in ("", "x", "0" * 31, "0" * 33, "null")),
        ],
        "jsonb": [
            NULL,
            *map(json_value, DOCUMENTS),
            *(Value(text, BROKEN) for text in BROKEN_DOCUMENTS),
        ],
    }
    for name, elements in list(found.items()):
        readable = [each for each in elements if each.meaning is not BROKEN]
        [one, two, *_] = [each for each in readable if each.meaning is not None]
        square = f"{{{array([one, two]).text},{array([two, one]).text}}}"
        moved = f"[-3:-2]={array([one, two]).text}"
        found[f"{name}[]"] = [
            *(NULL, array([]), array([NULL]), array([one, NULL, two]), array([two] * 3000)),
            *(array([each]) for each in elements if each.text is None or len(each.text) < 9999),
            Value(square, Array([one.meaning, two.meaning, two.meaning, one.meaning], 2)),
            Value(f"{{{array([one]).text}}}", Array([one.meaning], 2)),
            Value(moved, Array([one.meaning, two.meaning], 1)),
            *(Value(text, BROKEN) for text in BROKEN_ARRAYS),
        ]
    found["p_tasks"] = [*map(json_value, BATCHES), *found["jsonb"]]
    return found


def random_values(name: str) -> st.SearchStrategy[Value]:
    """Of a type that is no array."""
    texts = st.text(st.characters(exclude_categories=["Cs", "Zl", "Zp"], exclude_characters="\0"))
    match name:
        case "text":
            return texts.map(lambda text: Value(text, text))
        case "integer":
            return st.integers(-(2**31), 2**31 - 1).map(lambda n: number(n, 32))
        case "bigint":
            return st.integers(-(2**63), 2**63 - 1).map(lambda n: number(n, 64))
        case "boolean":
            return st.booleans().map(lambda value: Value(str(value), value))
        case "interval":
            units = [st.integers(-most, most) for most in (1000, 40_000, 90_000)]
            return st.tuples(*units).map(lambda each: interval(*each))
        case "timestamp with time zone":
            return st.datetimes().map(lambda time: Value(f"{time.isoformat()}+00", time.year))
        case "uuid":
            return st.uuids().map(lambda value: Value(str(value), value))
    leaves = st.none() | st.booleans() | st.floats(-1e300, 1e300) | texts
    trees = st.recursive(leaves, lambda t: st.lists(t) | st.dictionaries(texts, t), max_leaves=9)
    documents = trees | st.lists(random_tasks, max_size=4)
    return documents.map(lambda document: json_value(json.dumps(document)))


names = st.sampled_from([text for text in TEXTS if 0 < len(text) < 20])
random_tasks = st.fixed_dictionaries(
    {"task_type": names},
    optional={
        "payload": st.none() | st.integers() | names,
        "queue": names,
        "run_at": st.none() | st.sampled_from(list(YEARS)),
        "priority": st.integers(-1, 10) | st.sampled_from([0.5, 5.0, 1e300, None, "5"]),
        "max_attempts": st.none() | st.integers(0, 2**31) | st.sampled_from([1.5, "1", True]),
        "unique_key": st.none() | names,
        "concurrency_key": st.none() | names,
    },
)


def interval(months: int, days: int, seconds: int) -> Value:
    """A year has 365.25 days, a month 30, as PostgreSQL counts an epoch."""
    years, rest = divmod(abs(months), 12)
    length = math.copysign(years * 365.25 * DAY + rest * 30 * DAY, months)
    return Value(
        f"{months:+} months {days:+} days {seconds:+} seconds", length + days * DAY + seconds
    )
