"""pgsched in its two settings and the yardsticks B, D and N, as scripts for pgbench.

What they are compared for is told in docs/performance.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

YARDSTICKS = Path(__file__).with_name("yardsticks.sql").read_text()

ENQUEUE_DUE = """
insert into pgsched.scheduled_tasks (queue, task_type, payload, priority, run_at, max_attempts,
       created_at)
select 'default', 'noop', jsonb_build_object('i', i), 5, now(), 20, now()
  from generate_series(1, {tasks}) as i
"""
"""Past enqueue_tasks, which is measured on its own: what it leaves is the same."""


@dataclass(frozen=True, slots=True)
class Design:
    """How a table of `tasks` due tasks is made, and what a session does there over and over.

    `claim` stores the ids, `finish` ends those tasks: `limit` of them a time. `unfinished` counts.
    """

    pgsched: bool
    schema: tuple[str, ...]
    fill: str
    claim: Callable[[int], str]
    finish: Callable[[int], str]
    unfinished: str

    def prepare(self, tasks: int) -> list[str]:
        """Statements for a database that has `tasks` due tasks."""
        return [*self.schema, self.fill.format(tasks=tasks)]

    def pair(self, limit: int) -> str:
        """The script: claim, commit, finish, commit."""
        return self.claim(limit) + self.finish(limit)


def _pgsched_claim(limit: int, queue: str = "'default'") -> str:
    if limit == 1:
        return f"select id, claim_token as token from pgsched.claim_task('bench', {queue}) \\gset\n"
    return (
        "select coalesce(array_agg(id), '{}') as ids,"
        " coalesce(array_agg(claim_token), '{}') as tokens"
        f" from pgsched.claim_task('bench', {queue}, p_limit => {limit}) \\gset\n"
    )


def _pgsched_finish(limit: int) -> str:
    if limit == 1:
        return "select pgsched.complete_task(:id, :token);\n"
    # A claim with an older snapshot may hold the lock of a row for a moment, and the row is busy.
    return (
        "select coalesce(array_agg(id), '{}') as busy, count(*) > 0 as again"
        " from pgsched.complete_tasks(:ids::bigint[], :tokens::uuid[])"
        " where outcome = 'busy' \\gset\n"
        "\\if :again\n"
        "select pgsched.complete_task(c.id, c.token)"
        " from unnest(:ids::bigint[], :tokens::uuid[]) as c (id, token)"
        " where c.id = any (:busy::bigint[]);\n"
        "\\endif\n"
    )


def pgsched_pair(limit: int, queue: str) -> str:
    """The script of pgsched for tasks of a queue, an SQL expression."""
    return _pgsched_claim(limit, queue) + _pgsched_finish(limit)


def _unlocked(limit: int) -> str:
    return (
        "(select id from plain_tasks where status = 'queued' order by id"
        f" limit {limit} for update skip locked)"
    )


def _plain_claim(limit: int) -> str:
    which = f"= {_unlocked(limit)}" if limit == 1 else f"= any (array{_unlocked(limit)})"
    update = (
        "update plain_tasks set status = 'claimed', claimed_at = now()"
        f" where id {which} returning id"
    )
    if limit == 1:
        return f"{update} \\gset\n"
    return f"with c as ({update}) select coalesce(array_agg(id), '{{}}') as ids from c \\gset\n"


def _plain_finish(limit: int) -> str:
    which = "= :id" if limit == 1 else "= any (:ids::bigint[])"
    return (
        "update plain_tasks set status = 'completed', finished_at = now()"
        f" where id {which} and status = 'claimed';\n"
    )


def _naive_claim(limit: int) -> str:
    return (
        "begin;\n"
        "with c as (select id from plain_tasks where status = 'queued' order by id"
        f" limit {limit} for update) select coalesce(array_agg(id), '{{}}') as ids from c \\gset\n"
        "update plain_tasks set status = 'claimed', claimed_at = now()"
        " where id = any (:ids::bigint[]);\n"
        "commit;\n"
    )


def _naive_finish(_: int) -> str:
    return _plain_finish(2)


def _deletion(limit: int) -> str:
    return f"delete from plain_tasks where id = any (array{_unlocked(limit)}) returning id;\n"


_PLAIN = (
    False,
    (YARDSTICKS,),
    "insert into plain_tasks (payload)"
    " select jsonb_build_object('i', i) from generate_series(1, {tasks}) as i",
)
_PLAIN_UNFINISHED = "select count(*) from plain_tasks where status <> 'completed'"
_PGSCHED_UNFINISHED = "select count(*) from pgsched.scheduled_tasks"

DESIGNS = {
    "pgsched": Design(True, (), ENQUEUE_DUE, _pgsched_claim, _pgsched_finish, _PGSCHED_UNFINISHED),
    "pgsched, no history": Design(
        True,
        ("select pgsched.configure_queue('default', p_keep_completed => '0 seconds')",),
        ENQUEUE_DUE,
        _pgsched_claim,
        _pgsched_finish,
        _PGSCHED_UNFINISHED,
    ),
    "B": Design(*_PLAIN, _plain_claim, _plain_finish, _PLAIN_UNFINISHED),
    "D": Design(*_PLAIN, _deletion, lambda _: "", "select count(*) from plain_tasks"),
    "N": Design(*_PLAIN, _naive_claim, _naive_finish, _PLAIN_UNFINISHED),
}
