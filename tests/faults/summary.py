"""What a run was like, in words and figures, and what its server noticed."""

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles

import psycopg
from checker import Report
from clients import NAME

SHOWN = 20
"""Violations that are told; the others are counted."""
POOLERS = "('application_name', 'client_encoding', 'DateStyle', 'TimeZone',"
POOLERS += " 'standard_conforming_strings', 'IntervalStyle')"
"""Settings that PgBouncer gives each session as its client has them."""


def left_behind(dsn: str, pooled: str | None = None, patience: float = 10.0) -> Iterator[str]:
    """Advisory locks, open transactions and, in sessions that are shared, changed settings."""
    query = """
        select format('%s: %s %s, lock of class %s', a.application_name, a.state,
                      coalesce(a.xact_start::text, ''), l.classid)
          from pg_stat_activity as a
          left join pg_locks as l on l.pid = a.pid and l.locktype = 'advisory'
         where a.datname = current_database() and a.pid <> pg_backend_pid()
           and (a.xact_start is not null or l.pid is not null)
    """
    with psycopg.connect(dsn, autocommit=True) as conn:
        deadline = time.monotonic() + patience
        # Sessions of processes that were killed are just ending.
        while (found := conn.execute(query).fetchall()) and time.monotonic() < deadline:
            time.sleep(0.1)
    yield from (text for (text,) in found)
    for _ in range(8 if pooled else 0):
        with psycopg.connect(pooled or "", autocommit=True, prepare_threshold=None) as conn:
            changed = conn.execute(
                f"select name, setting from pg_settings where source = 'session'"
                f" and name not in {POOLERS}".encode()
            )
            yield from (f"{name} is {setting}" for name, setting in changed)


def noticed(path: Path) -> Iterator[tuple[str, str, int, float]]:
    """From the server's log: errors, and statements of the driver that took long; how often, how
    long at most [ms]."""
    errors: Counter[str] = Counter()
    slow: dict[str, list[float]] = defaultdict(list)
    duration = 0.0
    with path.open(errors="replace") as lines:
        for line in lines:
            state, _, rest = line.partition("|")
            name, _, text = rest.partition("|")
            if text.startswith(("ERROR:", "FATAL:", "PANIC:")):
                errors[state] += 1
            elif text and name.startswith("pgsched ") and not name.startswith(NAME):
                found = re.match(r"LOG:  duration: ([\d.]+) ms", text)
                duration = float(found[1]) if found else 0.0
            elif text:
                duration = 0.0
            # The statement may go on in lines of its own.
            if duration and (function := re.search(r"pgsched\.(\w+)", line)):
                slow[function[1]].append(duration)
                duration = 0.0
    for state, count in errors.items():
        yield "error", state, count, 0.0
    for function_name, durations in slow.items():
        yield "slow", function_name, len(durations), max(durations)


def summary(report: Report) -> str:
    """For people."""
    lines = [
        f"tasks                {report.tasks}",
        f"executions           {report.executions}, of which repeated {report.repeated}",
        f"faults               {sum(map(len, report.faults.values()))}",
    ]
    for name, durations in sorted(report.faults.items()):
        lines.append(
            f"  {name:34} {len(durations):4}  {sum(durations) / len(durations):5.1f} s each"
        )
    lines.append(f"  {'calls':34} {'ok':>8} {'fail':>8} {'unknown':>8}")
    for call in sorted({call for call, _ in report.calls}):
        counts = [report.calls[call, status] for status in ("ok", "fail", "unknown")]
        lines.append(f"  {call:34} " + " ".join(f"{count:8}" for count in counts))
    for kind, times in sorted(report.recoveries.items()):
        lines.append(f"handed out again after a {kind}: {_spread(times)}")
    if missed := report.missed:
        lines.append(
            f"killed while present  {len(missed)}, before a lease ended {sum(missed.values())}"
        )
    for what in ("slow", "error"):
        for name, count, longest in sorted(report.noticed[what]):
            more = f", at most {longest:.0f} ms" if longest else ""
            lines.append(f"{what:8} {name:30} {count:6}{more}")
    lines.append(f"violations           {len(report.violations)}")
    kinds = Counter(violation.kind for violation in report.violations)
    lines += [f"  {kind:20} {count}" for kind, count in kinds.most_common()]
    lines += [f"  {kind}: {text}" for kind, text in report.violations[:SHOWN]]
    return "\n".join(lines)


def _spread(times: list[float]) -> str:
    cuts = quantiles(times, n=100, method="inclusive") if len(times) > 1 else times * 99
    spread = f"p50 {cuts[49]:.2f} s, p99 {cuts[98]:.2f} s, at most {max(times):.2f} s"
    return f"{len(times)} tasks, {spread}"
