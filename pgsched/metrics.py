"""What a worker counts and times, in Prometheus' form. prometheus_client is imported only here."""

import logging
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, lru_cache, partial
from threading import Lock
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from pgsched import calls
from pgsched.calls import Claim, DatabaseStats, Document
from pgsched.handlers import error_text, spawn
from pgsched.worker import promised

log = logging.getLogger("pgsched")

TASK_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    *(60, 300, 900, 3600),
)
"""1 millisecond to 1 hour."""
CALL_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
"""Half a millisecond to 10 seconds."""
OUTCOMES = ("completed", "retried", "failed", "cancelled", "released", "lost")
REAPED = ("queued", "failed", "cancelled")

Record = Callable[..., None]
"""Takes an amount, then the values of the labels. Never raises."""

QUEUES = 100
"""Most queues that the figures of the database name."""
ANSWER_SECONDS = 4.0
"""How long a scrape waits for the database."""
FRESH_SECONDS = 1.0
"""What the database was asked so lately, it is not asked again."""
CLIENTS = 100
"""Most requests at once."""
CLIENT_SECONDS = 5.0
"""How long a client may be silent, and may take to read its answer."""


class Timed:
    """Records how many seconds it takes, however it ends; costs less than a generator would."""

    def __init__(self, record: Record, *labels: str) -> None:
        self._record, self._labels = record, labels

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._record(time.monotonic() - self._began, *self._labels)


class Metrics:
    """The metrics of one worker, in a registry of its own.

    Labels are bounded by what the worker was set up with: its queues, the task types that it has a
    handler for, and the outcomes named here.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._tell_once = lru_cache(log.error)
        self._begun: set[tuple[str, str]] = set()
        of_task = partial(self._new, Histogram, ["queue", "task_type"], buckets=TASK_BUCKETS)
        self.latency = of_task("scheduling_latency_seconds", "run_at to accepted completion.")
        self.start_delay = of_task("start_delay_seconds", "run_at to the begin of the handler.")
        self.handler = of_task("handler_duration_seconds", "Handlers, however they ended.")
        of_call = partial(self._new, Histogram, buckets=CALL_BUCKETS)
        self.claim = of_call(["queue"], "claim_duration_seconds", "Claims of a batch of tasks.")
        self.flush = of_call([], "flush_duration_seconds", "Reports of a batch of outcomes.")
        gauge, counter = partial(self._new, Gauge, []), partial(self._new, Counter)
        self.slots = gauge("worker_slots", "Tasks this worker runs at once.")
        self.busy = gauge("worker_slots_busy", "Tasks this worker runs now.")
        self.prefetched = gauge("worker_prefetched", "Claims whose handler has not begun.")
        self.contention = counter(["queue"], "lock_contention_total", "Due tasks that others held.")
        ends = ["queue", "task_type", "outcome"]
        self._outcomes = counter(ends, "task_outcomes_total", "Ended claims.")
        self.reaped = counter(["status"], "reaped_total", "Tasks taken from lost workers.")
        for status in REAPED:
            self.reaped(0, status)
        self.reconnects = counter([], "reconnects_total", "Connections that were lost.")

    def _new(self, kind: Any, labels: list[str], name: str, text: str, **options: Any) -> Record:
        options["registry"] = self.registry
        metric = cache(partial(kind, f"pgsched_{name}", text, labels, **options))
        does = {Histogram: "observe", Counter: "inc", Gauge: "set_function"}[kind]

        @cache
        def child(*values: str) -> Any:
            return getattr(metric().labels(*values) if values else metric(), does)

        def record(amount: Any, *values: str) -> None:
            try:
                child(*values)(amount)
            except Exception as error:
                self._tell_once("not counted: metric=%s error=%r", name, error_text(error))

        # It cannot be made while PROMETHEUS_MULTIPROC_DIR names no folder.
        with suppress(Exception):
            metric()
        return record

    def ended(self, queue: str, task_type: str, outcome: str) -> None:
        """Count the end of a claim. Prometheus sees no increase in a series that begins with 1, so
        all outcomes of a queue and type begin with the first."""
        if (queue, task_type) not in self._begun:
            self._begun.add((queue, task_type))
            for each in OUTCOMES:
                self._outcomes(0, queue, task_type, each)
        self._outcomes(1, queue, task_type, outcome)

    def since_due(self, claim: Claim) -> float:
        """run_at to now: by the server's clock until the claim, by this machine's from there on."""
        return claim.waited + time.monotonic() - claim.claimed_at

    def handling(self, claim: Claim) -> Timed:
        """The handler of the claim begins now, and runs meanwhile."""
        self.start_delay(self.since_due(claim), claim.queue, claim.task_type)
        return Timed(self.handler, claim.queue, claim.task_type)

    @contextmanager
    def served(self, port: int | None, host: str, unready: Callable[[], str]) -> Iterator[None]:
        """Serve ``/metrics``, ``/healthz`` and ``/readyz`` meanwhile; what fails is only logged.

        ``unready``: says why the worker is not ready, or nothing.
        """
        metrics = make_wsgi_app(self.registry)

        def page(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
            path, status, text = environ["PATH_INFO"], "200 OK", "ok"
            if path == "/metrics":
                return metrics(environ, start)
            if path == "/readyz" and (why := unready()):
                status, text = "503 Service Unavailable", why
            elif path not in ("/healthz", "/readyz"):
                status, text = "404 Not Found", "/metrics /healthz /readyz"
            start(status, [("Content-Type", "text/plain")])
            return [text.encode() + b"\n"]

        with ExitStack() as at_end:
            if port is not None:
                try:
                    server = at_end.enter_context(_Server(host, port, page))
                    spawn(server.serve_forever, "pgsched-metrics")
                    at_end.callback(server.shutdown)
                except Exception as error:
                    hint = "each worker of a machine needs a metrics_port of its own"
                    log.error("no metrics page: port=%d error=%r (%s)", port, str(error), hint)
            yield


class Database(Collector):
    """Figures of all queues, asked for when they are scraped: one question at a time, in a thread
    of its own, since nothing bounds how long a connection takes to be made."""

    def __init__(self, dsn: str, name: str) -> None:
        self._dsn, self._name = dsn, name
        self._lock = Lock()
        self._answer: Future[DatabaseStats] | None = None
        self._asked_at = -math.inf

    def collect(self) -> list[GaugeMetricFamily]:
        try:
            return _families(self._latest().result(ANSWER_SECONDS))
        except Exception as error:
            log.warning("no figures of the database: error=%r", error_text(error))
            return _families(None)

    def _latest(self) -> Future[DatabaseStats]:
        with self._lock:
            now, answer = time.monotonic(), self._answer
            if answer is None or (answer.done() and now >= self._asked_at + FRESH_SECONDS):
                self._answer = answer = promised(self._ask, "pgsched-database")
                self._asked_at = now
            return answer

    def _ask(self) -> DatabaseStats:
        name = f"pgsched {self._name} metrics"
        with (
            calls.translated(),
            calls.connect(self._dsn, application_name=name) as connection,
            connection.transaction(),
        ):
            calls.limit_statements(connection)
            return calls.database_stats(connection)


def _families(answer: DatabaseStats | None) -> list[GaugeMetricFamily]:
    families = []

    def gauge(name: str, text: str, *labels: str) -> Callable[[Sequence[str], float], None]:
        families.append(GaugeMetricFamily(f"pgsched_{name}", text, labels=labels))
        return families[-1].add_metric

    gauge("database_up", "1: the database answered this scrape.")((), answer is not None)
    if answer is not None:
        server, queues = answer
        gauge("workers", "Workers seen within 2 minutes.")((), server["workers"])
        text = "Age of the oldest snapshot that holds back vacuum."
        gauge("oldest_snapshot_age_seconds", text)((), server["oldest_snapshot_age"])
        tasks = gauge("queue_tasks", "Tasks by status, up to 10000.", "queue", "status")
        due = gauge("queue_due", "Tasks due now, up to 10000.", "queue")
        age = gauge("queue_oldest_due_age_seconds", "0: none is due.", "queue")
        paused = gauge("queue_paused", "1: paused.", "queue")
        for each in _bounded(queues):
            name = each["queue"]
            for status in ("queued", "processing", "failed"):
                tasks((name, status), each[status])
            due((name,), each["due"])
            age((name,), each["oldest_due_age"])
            paused((name,), each["paused"])
    return families


def _bounded(queues: list[Document]) -> list[Document]:
    """Those with the most due tasks, and the rest as one without a name."""
    queues = sorted(queues, key=lambda each: (-each["due"], each["queue"]))
    queues, rest = queues[:QUEUES], queues[QUEUES:]
    if rest:
        one: Document = {"queue": ""}
        for name in ("queued", "due", "processing", "failed"):
            one[name] = sum(each[name] for each in rest)
        for name in ("paused", "oldest_due_age"):
            one[name] = max(each[name] for each in rest)
        queues.append(one)
    return queues


class _Server(ThreadingWSGIServer):
    """A thread for each request; where there are more, the client that has been there for longest
    has to go. A forked child does not listen, which would keep the port from the next worker."""

    request_queue_size = CLIENTS

    def __init__(self, host: str, port: int, page: Callable[..., Any]) -> None:
        self._clients: dict[Any, None] = {}
        found: Any = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self.address_family, *_, address = found[0]
        super().__init__(address, _Request)
        self.set_app(page)
        calls.not_for_children.add(self)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        self._clients[request] = None
        if len(self._clients) > CLIENTS:
            with suppress(OSError, RuntimeError):  # some may just be going
                oldest = next(iter(self._clients))
                self._clients.pop(oldest, None)
                oldest.shutdown(socket.SHUT_RDWR)
        return True

    def shutdown_request(self, request: Any) -> None:
        self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("metrics page: client=%s", client_address, exc_info=True)


class _Request(WSGIRequestHandler):
    timeout = CLIENT_SECONDS

    def log_message(self, text: str, *values: Any) -> None:
        log.debug("metrics page: %s", text % values)
