"""What a worker counts and times, in Prometheus' form. prometheus_client is imported only here."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

log = logging.getLogger("pgsched")

LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    *(60, 300, 900, 3600),
)
"""1 millisecond to 1 hour."""


class Metrics:
    """The metrics of one worker, in a registry of its own.

    Labels are bounded by what the worker was set up with: its queues, the task types that it has a
    handler for, and the outcomes named here.
    """

    def __init__(self, slots: int) -> None:
        self.registry = CollectorRegistry()
        self.scheduling_latency = Histogram(
            "pgsched_scheduling_latency_seconds",
            "Time from a task's run_at to its accepted completion.",
            ["queue", "task_type"],
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )
        Gauge(
            "pgsched_worker_slots", "Tasks this worker runs at once.", registry=self.registry
        ).set(slots)
        self.slots_busy = Gauge(
            "pgsched_worker_slots_busy", "Tasks this worker runs now.", registry=self.registry
        )
        self.lock_contention = Counter(
            "pgsched_lock_contention_total",
            "Due tasks that a claim passed by because another session held them (sampled).",
            ["queue"],
            registry=self.registry,
        )
        self.outcomes = Counter(
            "pgsched_task_outcomes_total",
            "Ended claims: completed, retried, failed, cancelled, released, lost.",
            ["queue", "task_type", "outcome"],
            registry=self.registry,
        )
        self.reaped = Counter(
            "pgsched_reaped_total",
            "Tasks of lost workers that this worker took back, by what they became.",
            ["status"],
            registry=self.registry,
        )
        self.reconnects = Counter(
            "pgsched_reconnects_total",
            "Connections to the database that were lost.",
            registry=self.registry,
        )

    @contextmanager
    def served(self, port: int | None, host: str) -> Iterator[None]:
        """Serve ``/metrics`` meanwhile; a port that is taken is only logged."""
        with ExitStack() as at_end:
            if port is not None:
                try:
                    server, _ = start_http_server(port, host, self.registry)
                except (OSError, UnicodeError) as error:
                    log.error("no metrics page: port=%d error=%r", port, str(error))
                else:
                    at_end.callback(server.server_close)
                    at_end.callback(server.shutdown)
            yield
