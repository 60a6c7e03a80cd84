"""A server that answers what W&B's client asks, fails or hangs; and what it was sent."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from tests.servers import running

FAULTS = ("answers", "errors", "refuses", "hangs", "drops", "nonsense")


class Server(ThreadingHTTPServer):
    """Attributes: ``kind`` of ``FAULTS``; ``sent``: each request's path, headers and content, unpacked."""

    daemon_threads = True

    def __init__(self, kind: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.kind, self.sent = kind, list[bytes]()
        self.ends = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        """A client that was killed is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            content = gzip.decompress(content)
        self.server.sent.append(b"\n".join([unquote(self.path).encode(), bytes(self.headers), content]))
        kind = self.server.kind
        if kind == "hangs":
            self.server.ends.wait()
        if kind in ("hangs", "drops"):
            self.close_connection = True
            return
        status = {"errors": 500, "refuses": 403}.get(kind, 200)
        answer = b"<html>" if kind == "nonsense" else json.dumps(self._answer(content)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_PUT = do_GET = do_POST  # noqa: N815

    def _answer(self, content: bytes) -> dict[str, Any]:
        if not self.path.endswith("/graphql"):
            return {}
        asked = json.loads(content)
        about = asked.get("variables") or {}
        uploads = [(name, f"{self.server.url}/upload/{name}") for name in about.get("files") or []]
        files = [{"name": name, "uploadUrl": url} for name, url in uploads]
        project = {"id": "p", "name": "adaecho", "entity": {"id": "e", "name": "me"}}
        name = about.get("name") or "run"
        bucket = {"id": "b", "name": name, "displayName": name, "config": "{}", "project": project}
        return {
            "data": {
                "viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}"},
                "serverInfo": {"cliVersionInfo": {"max_cli_version": "99"}, "features": []},
                "model": {"bucket": None},
                "upsertBucket": {"bucket": {**bucket, "historyLineCount": 0}, "inserted": True},
                "createRunFiles": {"runID": name, "uploadHeaders": [], "files": files},
            }
        }

    def log_message(self, *_: object) -> None:
        """Nothing on the test's output."""


@contextmanager
def serving(kind: str) -> Iterator[Server]:
    """The server, in a thread."""
    server = Server(kind)
    with running(server):
        try:
            yield server
        finally:
            server.ends.set()
