"""The gateway's metrics over HTTP: `GET /metrics`, as Prometheus reads it.

Owns: the server, its one thread, and how it gets the event loop's figures without a lock on the path of any object.
Must not know: what the figures say, or the loop.

One request at a time: it makes the loop's eventfd readable, the loop hands a snapshot over, the thread writes it.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from contextlib import suppress
from functools import partial
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from .errors import UserError
from .metric_families import families

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client.core import Metric

    from .figures import Figures

PATH: Final = "/metrics"
FIGURES_S_MAX: Final = 5.0  # a loop that opens a card of a million entries comes round within that
REQUEST_S_MAX: Final = 5.0  # a client that does not say what it wants, or does not read, keeps others waiting no longer
WHOLE_REQUEST_S_MAX: Final = 15.0  # nor does one that says it letter by letter
END_LOOKED_FOR_S: Final = 0.25  # the thread looks so often whether it shall end
JOIN_S_MAX: Final = 2 * REQUEST_S_MAX
_TEXT: Final = "text/plain; charset=utf-8"


class Exporter:
    """Made on the loop's thread, where `fileno`, `take_wish` and `give` are called; `start` begins to serve."""

    def __init__(self, host: str, port: int) -> None:
        """Listen; UserError where that cannot be."""
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self._server = _server(family, (str(address[0]), port), self._application)
        except (OSError, UnicodeError) as error:
            raise UserError(
                f"cannot serve metrics on {host} port {port}: {error}; give another --metrics-port or --metrics-host"
            ) from error
        self._wish = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._snapshots: queue.SimpleQueue[Figures | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """What to give to Prometheus."""
        host, port = self._server.server_address[:2]
        name = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{name}:{port}{PATH}"

    def start(self) -> None:
        """Serve from now on; the loop must turn."""
        serve = partial(self._server.serve_forever, END_LOOKED_FOR_S)
        self._thread = threading.Thread(target=serve, name="xkv-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Serve no more."""
        if self._thread is not None:
            self._snapshots.put(None)  # whoever waits for one gets none
            self._server.shutdown()
            self._thread.join(JOIN_S_MAX)
        self._server.server_close()
        if self._thread is None or not self._thread.is_alive():
            os.close(self._wish)

    # --- the loop's thread -------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Readable when a snapshot is wanted."""
        return self._wish

    def give(self, figures: Callable[[], Figures]) -> None:
        """Somebody wants a snapshot: hand one over."""
        os.eventfd_read(self._wish)
        self._snapshots.put(figures())

    # --- the server's thread -----------------------------------------------------------------------------

    def _figures(self) -> Figures | None:
        while not self._snapshots.empty():
            self._snapshots.get()  # of one who did not wait so long
        os.eventfd_write(self._wish, 1)
        try:
            return self._snapshots.get(timeout=FIGURES_S_MAX)
        except queue.Empty:
            return None

    def _application(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] not in (PATH, "/") or environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            start_response("404 Not Found", [("Content-Type", _TEXT)])
            return [f"metrics are at {PATH}\n".encode()]
        figures = self._figures()
        if figures is None:
            start_response("503 Service Unavailable", [("Content-Type", _TEXT)])
            return [b"the gateway does not answer; see its log\n"]
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Snapshot(figures))
        start_response("200 OK", [("Content-Type", CONTENT_TYPE_LATEST)])
        return [generate_latest(registry)]


class _Snapshot:
    """What the library asks for its metrics."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        return families(self._figures)


class _Request(WSGIRequestHandler):
    timeout = REQUEST_S_MAX

    def handle(self) -> None:
        """One request, within its time: the thread is needed for the next."""
        over = threading.Timer(WHOLE_REQUEST_S_MAX, _hang_up, (self.connection,))
        over.daemon = True
        over.start()
        try:
            super().handle()
        finally:
            over.cancel()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
        """A scrape every few seconds is no news."""


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):  # it has just ended
        connection.shutdown(socket.SHUT_RDWR)


def _server(family: int, address: tuple[str, int], application: Callable[..., Iterable[bytes]]) -> WSGIServer:
    class Server(WSGIServer):
        address_family = family
        request_queue_size = 8

        def server_bind(self) -> None:
            """Without the base class's search for this machine's name, which may wait for a name server."""
            TCPServer.server_bind(self)
            self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
            self.setup_environ()

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that went away, or took too long."""

    server = Server(address, _Request)
    server.set_app(application)
    return server
