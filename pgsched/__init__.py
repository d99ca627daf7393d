"""pgsched: a distributed task scheduler inside PostgreSQL. This is its thin Python driver."""

from pgsched.calls import Task, enqueue
from pgsched.errors import (
    ClaimLost,
    Fail,
    InvalidArgument,
    PgschedError,
    Retry,
    SchemaError,
    Snooze,
    TaskNotFound,
    WrongState,
)
from pgsched.worker import Worker

__all__ = [
    "ClaimLost",
    "Fail",
    "InvalidArgument",
    "PgschedError",
    "Retry",
    "SchemaError",
    "Snooze",
    "Task",
    "TaskNotFound",
    "Worker",
    "WrongState",
    "enqueue",
]
