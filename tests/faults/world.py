"""The processes under test, each recorded in a file of its own for as long as it lives."""

import subprocess
import sys
from pathlib import Path
from threading import Thread

from history import Recorder

HERE = Path(__file__).parent


class WorkerHandle:
    """A process that works on tasks; `route` says how it reaches the server."""

    def __init__(
        self, name: str, route: str, arguments: list[str], folder: Path, recorder: Recorder
    ) -> None:
        self.name = name
        self.route = route
        self._arguments = arguments
        self._folder = folder
        self._recorder = recorder
        self.start()

    @property
    def pid(self) -> int:
        """Of the process that runs now, or ran last."""
        return self._process.pid

    @property
    def record(self) -> str:
        """The name of its history."""
        return f"{self.name}.{self.pid}"

    def start(self) -> None:
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self._arguments],
                cwd=HERE,
                stdin=subprocess.PIPE,  # its end tells the process of ours
                stdout=log,
                stderr=log,
            )
        Thread(target=self._watch, args=[self._process, self.record], daemon=True).start()

    def _watch(self, process: subprocess.Popen[bytes], record: str) -> None:
        process.wait()
        self._recorder.note("ended", record)

    def restart(self) -> None:
        """Start it again after its end."""
        self.kill()
        self.start()

    def is_running(self) -> bool:
        """Whether the process exists, stopped or not."""
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def stop(self) -> int:
        """Let it end as it likes to, and return its exit status."""
        self._process.terminate()
        return self._process.wait(30)
