"""``python scripts/slow_store.py FOLDER``: serve a folder over http like a slow store, until Ctrl-C.

Each connection to a path below ``/slow/`` is limited to ``--kilobytes-per-s``. Paths below ``/fast/`` have no
limit. Requests may ask for a range of bytes.
"""

import argparse
import contextlib
import io
import re
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Ranges(SimpleHTTPRequestHandler):
    """An HTTP handler that, unlike the standard library's, also serves byte ranges of files."""

    protocol_version = "HTTP/1.1"  # keep connections open for the next range

    def do_GET(self) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if found is None or not path.is_file():
            return super().do_GET()
        size = path.stat().st_size
        start, end = int(found[1]), min(int(found[2] or size), size - 1)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{end}/{size}")
        self.send_header("Content-Length", str(end + 1 - start))
        self.end_headers()
        self.copyfile(io.BytesIO(path.read_bytes()[start : end + 1]), self.wfile)

    def end_headers(self) -> None:
        self.send_header("Accept-Ranges", "bytes")
        super().end_headers()

    def log_message(self, *args: object) -> None:
        pass


class _Paced(Ranges):
    """An HTTP handler that serves files at a limited rate below ``/slow/``, and at full speed elsewhere."""

    bytes_per_s = 0

    def translate_path(self, path: str) -> str:
        return super().translate_path("/" + path.lstrip("/").partition("/")[2])

    def copyfile(self, source: Any, outputfile: Any) -> None:
        """Send a file. Below ``/slow/``, send it in small pieces at the limited rate."""
        with contextlib.suppress(ConnectionError):  # the client may close the connection early
            if not self.path.startswith("/slow/"):
                return super().copyfile(source, outputfile)
            due = time.monotonic()
            while content := source.read(max(self.bytes_per_s // 50, 1)):  # 50 pieces per second
                outputfile.write(content)
                due = max(due, time.monotonic() - 1) + len(content) / self.bytes_per_s
                time.sleep(max(due - time.monotonic(), 0))


def make_server(folder: Path, port: int, kilobytes_per_s: int) -> ThreadingHTTPServer:
    """Return a server that is bound to its port but is not serving yet. A kilobyte is 1,024 bytes."""
    handler = type("Paced", (_Paced,), {"bytes_per_s": kilobytes_per_s * 1024})
    many = type("Server", (ThreadingHTTPServer,), {"request_queue_size": 128, "daemon_threads": True})
    server: ThreadingHTTPServer = many(("127.0.0.1", port), partial(handler, directory=str(folder)))
    return server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder to serve, e.g. from scripts/cifar10_shards.py")
    parser.add_argument("--kilobytes-per-s", type=int, default=500, help="rate of a slow connection (500)")
    parser.add_argument("--port", type=int, default=8765, help="port on 127.0.0.1 (8765)")
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(f"{options.folder}: no such folder")
    print(f"{options.folder} at http://127.0.0.1:{options.port}/slow/ and /fast/; Ctrl-C ends it", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        make_server(options.folder, options.port, options.kilobytes_per_s).serve_forever()


if __name__ == "__main__":
    main()
