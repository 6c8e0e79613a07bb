"""A local web server that serves one file, with a chosen fault."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """Serve ``data`` under every name; the first folder of the path names the fault.

    Args:
        data: the file.
    """

    daemon_threads = True

    def __init__(self, data: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.data = data
        self.etag = '"1"'
        self.requests: list[str] = []  # the Range headers, "" for none

    def url(self, fault: str = "fine") -> str:
        return f"http://127.0.0.1:{self.server_port}/{fault}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        fault = self.path.strip("/").partition("/")[0]
        wanted = self.headers.get("Range", "")
        self.server.requests.append(wanted)
        data, start = self.server.data, 0
        if fault == "missing":
            self._answer(404, b"")
            return
        if fault == "webpage":
            self._answer(200, b"<html>Please sign in</html>")
            return
        fresh = self.headers.get("If-Range", self.server.etag) == self.server.etag
        if wanted and fresh:
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
        body = data[start:]
        length = len(body) - (1000 if fault == "declares-shorter" else 0)
        sent = body[: len(data) // 3] if fault == "breaks-off" else body
        headers = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        self._answer(206 if start else 200, sent, length, **headers)

    def _answer(self, status: int, body: bytes, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("ETag", self.server.etag)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:
            self.close_connection = True  # the client has enough
        if length not in (None, len(body)):
            self.close_connection = True


@contextmanager
def serving(data: bytes) -> Iterator[Server]:
    """Run the server within a ``with`` statement."""
    with Server(data) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
