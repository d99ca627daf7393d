"""Hostile arguments: every call does what the documents say, or is refused as they say.

The functions and their arguments come from the catalog: a new one fails here until RULES says what
it has to accept.
"""

from collections.abc import Iterator
from typing import Any

import fuzzing
import hostile
import mutants
import psycopg
import pytest
from fuzzing import AROUND, MODES, RULES, SETTINGS, Call, Function, Known
from hostile import BROKEN, TASKS, Value, array
from hypothesis import given, seed
from mutants import Mutant
from psycopg.types.string import TextLoader

from pgsched.embedded import Server

NAME_TOO_LONG = Mutant("_is_name", "between 1 and 63", "between 1 and 64")
PRIORITY_THAT_STAYS = Mutant("reschedule_task", "coalesce(p_priority, t.priority)", "t.priority")
DELAY_LEFT_TO_THE_TABLE = Mutant("configure_queue", "between 0 and 31536000", "between 0 and 1e9")


def prepare(conn: psycopg.Connection) -> None:
    """Add what is named in calls."""
    hostile.fill(conn)
    conn.execute(fuzzing.BROKEN_RULES)


def take_as_text(conn: psycopg.Connection) -> None:
    """Python reads neither every number nor every style."""
    for name in ("jsonb", "interval", "timestamptz"):
        conn.adapters.register_loader(name, TextLoader)


@pytest.fixture(scope="module")
def filled(server: Server, template: str) -> Iterator[str]:
    """The URL of a database with tasks in every status; calls in it are rolled back."""
    dsn = server.create_database("fuzz", template=template)
    with psycopg.connect(dsn, autocommit=True) as conn:
        prepare(conn)
    yield dsn
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute("drop database fuzz with (force)")


@pytest.fixture
def session(filled: str) -> Iterator[psycopg.Connection]:
    """A session of that database, in which no lock is left at the end."""
    with psycopg.connect(filled, autocommit=True, options="-c statement_timeout=20s") as session:
        take_as_text(session)
        yield session
        locks = "select from pg_locks where pid = pg_backend_pid() and locktype = 'advisory'"
        assert session.execute(locks).fetchall() == []


@pytest.fixture
def known(session: psycopg.Connection) -> Known:
    return hostile.values(session.info.server_version)


def check(session: psycopg.Connection, call: Call) -> None:
    """Make the call, in a transaction that is rolled back; it answers as it should."""
    statement, values = call.statement()
    session.execute(f"begin {call.mode}; set local {call.setting}".encode())
    try:
        cursor = session.execute(statement, values)
        rows = [] if call.function.procedure else cursor.fetchall()
    except psycopg.Error as error:
        check_refusal(call, error)
    else:
        assert allowed(call) == {None}
        check_success(session, call, rows)
    finally:
        session.rollback()


def is_broken(call: Call) -> bool:
    return any(value.meaning is BROKEN for value in call.given.values())


def allowed(call: Call) -> set[str | None]:
    """The codes, or the class of codes, that the call may raise; None: it succeeds."""
    function = call.function
    if not set(list(function.arguments)[: function.required]) <= set(call.given):
        return {"42883"}
    if is_broken(call):
        return {"22"}
    may_not_write = call.mode == "read only" and function.writes
    if fuzzing.faults(function.name, call.given):
        return {"TS400", "25006"} if may_not_write else {"TS400"}
    return {"25006" if may_not_write else fuzzing.refusal(function.name, call.given)}


def check_refusal(call: Call, error: psycopg.Error) -> None:
    code, message = error.sqlstate or "", error.diag.message_primary or ""
    if is_broken(call) and (code.startswith("22") or code == "54001"):  # too deep
        code = "22"
    assert code in allowed(call), (error, error.diag.context)
    if not code.startswith("TS"):
        # No code of ours ran, but that which looks for read-only transactions.
        assert code == "25006" or "pgsched" not in (error.diag.context or "")
        return
    if code == "TS400":
        faults = fuzzing.faults(call.function.name, call.given)
        named = {argument.removeprefix("p_") for argument in faults}
    else:
        which = "p_worker_id" if call.function.name == "register_listener" else "p_id"
        named = {str(call.given[which].text or "null")}
    assert [name for name in named if name in message], message
    assert error.diag.message_hint


def check_success(session: psycopg.Connection, call: Call, rows: list[Any]) -> None:
    function = call.function.name
    if "p_ids" in RULES[function]:
        assert fuzzing.outcomes(function, call.given) == [(row[0], row[1]) for row in rows]
    elif function in STORED:
        values = {name: value.text for name, value in call.given.items()}
        wanted = dict.fromkeys(RULES[function]) | values | {"ids": [row[0] for row in rows]}
        stored = session.execute(STORED[function].encode(), wanted).fetchall()
        assert [as_given for (as_given,) in stored] == [True] * len(rows)
    if call.function.writes:
        assert session.execute("select * from public.broken_rules()").fetchall() == []


# Whether tasks are there as they were given; all have priority 5 before.
STORED = {
    "enqueue_task": """
        select (t.task_type, t.queue, t.payload, t.priority, t.unique_key, t.concurrency_key)
               is not distinct from
               (%(p_task_type)s, coalesce(%(p_queue)s, 'default'),
                coalesce(%(p_payload)s::jsonb, '{}'), coalesce(%(p_priority)s::integer, 5),
                %(p_unique_key)s, %(p_concurrency_key)s)
          from pgsched.tasks as t
         where t.id = any (%(ids)s)
        """,
    # Of several with one unique key the first counts.
    "enqueue_tasks": """
        select (t.queue, t.unique_key) is not distinct from
               (coalesce(g.task ->> 'queue', 'default'), g.task ->> 'unique_key')
               and (t.unique_key is not null
                    or (t.task_type, t.payload, t.priority, t.concurrency_key)
                       is not distinct from
                       (g.task ->> 'task_type', coalesce(g.task -> 'payload', '{}'),
                        coalesce((g.task ->> 'priority')::numeric, 5),
                        g.task ->> 'concurrency_key'))
          from jsonb_array_elements(%(p_tasks)s::jsonb) with ordinality as g (task, position)
          join unnest(%(ids)s::bigint[]) with ordinality as i (id, position) using (position)
          join pgsched.tasks as t on t.id = i.id
        """,
    "reschedule_task": """
        select t.priority = coalesce(%(p_priority)s::integer, 5)
               and t.run_at between greatest(%(p_run_at)s::timestamptz, now())
                                and greatest(%(p_run_at)s::timestamptz, clock_timestamp())
          from pgsched.tasks as t
         where t.id = %(p_id)s::bigint
        """,
    # A release ends cancelled where a cancel was requested, which changes no time.
    "release_task": """
        select t.cancel_requested_at is not null
               or t.run_at between greatest(%(p_run_at)s::timestamptz, now())
                               and greatest(%(p_run_at)s::timestamptz, clock_timestamp())
          from pgsched.tasks as t
         where t.id = %(p_id)s::bigint
        """,
}


def usual(function: Function, known: Known) -> dict[str, Value]:
    """Arguments without a fault; of a task or a claim for which the call is, if there is one."""
    values = {name: fuzzing.good(function, name, known)[0] for name in function.arguments}
    for task_id, task in TASKS.items():
        claim = {
            "p_id": Value(str(task_id), task_id),
            "p_claim_token": Value(str(task.token), task.token),
        }
        claims = {f"{name}s": array([value]) for name, value in claim.items()}
        values = {name: {**claim, **claims}.get(name, value) for name, value in values.items()}
        if fuzzing.refusal(function.name, values) is None:
            break
    return values


def try_each(session: psycopg.Connection, known: Known, name: str) -> None:
    """Every hostile value of each argument, one at a time; every way to call, and surroundings."""
    function = fuzzing.functions(session)[name]
    values = usual(function, known)
    for by_position in range(len(values) + 1):
        check(session, Call(function, values, by_position))
    for around in AROUND:
        for mode in MODES:
            check(session, Call(function, values, around=around, mode=mode))
    for setting in SETTINGS:
        check(session, Call(function, values, setting=setting))
    for argument in function.arguments:
        check(session, Call(function, {n: v for n, v in values.items() if n != argument}))
        for value in fuzzing.values(function, argument, known):
            check(session, Call(function, {**values, argument: value}))


def test_every_argument_of_every_function_has_a_rule(session: psycopg.Connection) -> None:
    there = {name: set(function.arguments) for name, function in fuzzing.functions(session).items()}
    assert {name: set(rules) for name, rules in RULES.items()} == there


@pytest.mark.parametrize("name", RULES)
def test_one_hostile_argument(session: psycopg.Connection, known: Known, name: str) -> None:
    try_each(session, known, name)


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("claim_task", NAME_TOO_LONG),
        ("configure_queue", DELAY_LEFT_TO_THE_TABLE),
        ("reschedule_task", PRIORITY_THAT_STAYS),
    ],
)
def test_a_check_that_is_missing_is_seen(
    conn: psycopg.Connection, known: Known, name: str, mutant: Mutant
) -> None:
    prepare(conn)
    take_as_text(conn)
    mutants.install(conn, mutant)
    with pytest.raises(AssertionError):
        try_each(conn, known, name)


@pytest.mark.parametrize("examples", [10, pytest.param(500, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", RULES)
def test_any_arguments(session: psycopg.Connection, known: Known, name: str, examples: int) -> None:
    @fuzzing.settings(examples)
    @given(fuzzing.calls(fuzzing.functions(session)[name], known))
    def any_call(call: Call) -> None:
        check(session, call)

    with fuzzing.seeded(long=examples > 100) as number:
        seed(number)(any_call)()
