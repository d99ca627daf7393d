"""Some minutes of faults in one: nothing is lost, doubled or left behind."""

import random
from pathlib import Path

from run import run
from summary import summary


def test_every_task_is_accounted_for_after_many_faults(tmp_path: Path) -> None:
    seed = random.randrange(1_000_000)
    report = run(tmp_path, tasks=10_500, faults=32, seconds=45, seed=seed, pooled=False)
    text = f"seed {seed}\n{summary(report)}"
    print(text)
    assert report.violations == [], text
    assert report.tasks >= 10_000
    assert sum(map(len, report.faults.values())) >= 30
    assert report.executions >= 1000
