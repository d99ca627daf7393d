"""What a running worker serves, read over HTTP as Prometheus and Kubernetes do."""

import socket
import threading
import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families
from workers import PATIENCE

Page = dict[tuple[str, ...], float]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
        assert isinstance(number, int)
        return number


def get(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    """The status and the text of an answer; 0: nobody listens, or the connection broke."""
    try:
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=PATIENCE) as response:
            assert response.headers["Content-Type"].startswith("text/plain")
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def served() -> int:
    """How many requests workers of this process answer now."""
    return sum("process_request" in thread.name for thread in threading.enumerate())


def answers(port: int, host: str = "127.0.0.1") -> bool:
    """Whether the worker's metrics are there."""
    return get(port, "/metrics", host)[0] == 200


def scrape(port: int) -> Page:
    """Each sample by its name and the values of its labels, in the order of their names.

    Empty while nobody listens.
    """
    status, text = get(port, "/metrics")
    assert status in (0, 200), text
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text if status else "")
        for sample in family.samples
    }
