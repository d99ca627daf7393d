"""The driver of an earlier commit, as a wheel: what still runs while somebody upgrades."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

COMMIT = "79daee348ddedc6309814cdc82eb291b1b47a074"
"""The last one that knows no migration but 0001."""


class NoHistory(Exception):
    """The commit is not here: this is no clone, or a shallow one."""


def install(folder: Path) -> Path:
    """Build the commit's wheel, install it, and return the folder that Python is to import from."""
    source, target = folder / "source", folder / "installed"
    source.mkdir()
    git = ["git", "-C", str(ROOT), "archive", COMMIT]
    archive = subprocess.run(git, capture_output=True, check=False)
    if archive.returncode:
        raise NoHistory(f"no previous driver: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", source], input=archive.stdout, check=True)
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(source)]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    [wheel] = folder.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", target, wheel], check=True)
    return target
