"""Run a program of ours whose clock is wrong: `python skewed.py SECONDS PROGRAM ARGUMENTS`."""

import datetime
import runpy
import sys
import time

_now, _true_time = datetime.datetime.now, time.time
_datetime = datetime.datetime


class _Kind(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _datetime)


class _Skewed(_datetime, metaclass=_Kind):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
        return _now(tz) + datetime.timedelta(seconds=SKEW)


SKEW = float(sys.argv[1])
datetime.datetime = _Skewed  # type: ignore[misc]
time.time = lambda: _true_time() + SKEW
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
