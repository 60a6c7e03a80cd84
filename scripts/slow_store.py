"""``python scripts/slow_store.py FOLDER``: a slow store on this machine, until Ctrl-C.

Over http, below ``/slow/`` each connection gives at most ``--kilobytes-per-s``, below ``/fast/`` as much as
there is. nginx serves where it is installed (its ``limit_rate``), and a server of our own elsewhere or with
``--without-nginx``. nginx's send buffers are small, so that little gathers on the way while a client pauses;
they hold also below ``/fast/`` and keep it to some megabytes a second.
"""

import argparse
import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

_CONFIG = """
daemon off;
master_process off;
pid {own}/pid;
error_log {own}/error.log;
events {{ }}
http {{
  access_log off;
  client_body_temp_path {own}/t1; proxy_temp_path {own}/t2; fastcgi_temp_path {own}/t3;
  uwsgi_temp_path {own}/t4; scgi_temp_path {own}/t5;
  server {{
    listen 127.0.0.1:{port} {listen};
{server}
  }}
}}
"""
_SERVER = """
    send_timeout 1h;  # a client that trains meanwhile
    location /slow/ {{ alias "{folder}/"; limit_rate {kilobytes_per_s}k; }}
    location /fast/ {{ alias "{folder}/"; }}
"""
_PIECES_PER_S = 50


def find_nginx() -> str | None:
    """The program's path; Debian keeps it where users don't look."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


def start_nginx(
    program: str, own: Path, port: int, server: str, *, listen: str = ""
) -> "subprocess.Popen[bytes]":
    """nginx as this user, in one process.

    Args:
        program: its path.
        own: a folder for what it writes, ``error.log`` among it.
        port: on 127.0.0.1.
        server: directives of its one server.
        listen: parameters of that directive.
    """
    config = own / "nginx.conf"
    config.write_text(_CONFIG.format(own=own, port=port, server=server, listen=listen))
    return subprocess.Popen([program, "-p", own, "-e", own / "error.log", "-c", config])


def serve_with_nginx(
    program: str, folder: Path, port: int, kilobytes_per_s: int, send_buffer_kilobytes: int
) -> None:
    """Until it is interrupted; 1 kilobyte is 1,024 bytes, as nginx has it."""
    locations = _SERVER.format(folder=folder, kilobytes_per_s=kilobytes_per_s)
    with tempfile.TemporaryDirectory() as temporary:
        own = Path(temporary)
        server = start_nginx(program, own, port, locations, listen=f"sndbuf={send_buffer_kilobytes}k")
        try:
            code = server.wait()
            raise SystemExit(
                f"error: nginx ended with code {code}: {(own / 'error.log').read_text().strip()}"
            )
        finally:
            server.terminate()
            server.wait()


class _Paced(SimpleHTTPRequestHandler):
    """Files below ``slow/`` and ``fast/``; whole ones, ranges are ignored."""

    bytes_per_s = 0

    def translate_path(self, path: str) -> str:
        return super().translate_path("/" + path.lstrip("/").partition("/")[2])

    def copyfile(self, source: Any, outputfile: Any) -> None:
        """Send a file, a slow one in pieces that end no sooner than the rate allows."""
        with contextlib.suppress(ConnectionError):  # the client has what it wanted
            self._send(source, outputfile)

    def _send(self, source: Any, outputfile: Any) -> None:
        if not self.path.startswith("/slow/"):
            super().copyfile(source, outputfile)
            return
        piece = max(self.bytes_per_s // _PIECES_PER_S, 1)
        due = time.monotonic()
        while content := _read(source, piece):
            outputfile.write(content)
            due = max(due, time.monotonic() - 1) + len(content) / self.bytes_per_s
            time.sleep(max(due - time.monotonic(), 0))

    def log_message(self, *args: object) -> None:
        pass


def _read(source: IO[bytes], size: int) -> bytes:
    return source.read(size)


def make_server(folder: Path, port: int, kilobytes_per_s: int) -> ThreadingHTTPServer:
    """Our own, bound and not yet serving."""
    handler = type("Paced", (_Paced,), {"bytes_per_s": kilobytes_per_s * 1024})
    return ThreadingHTTPServer(("127.0.0.1", port), partial(handler, directory=str(folder)))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="what to serve")
    parser.add_argument("--kilobytes-per-s", type=int, default=500, help="of each slow connection (500)")
    parser.add_argument("--port", type=int, default=8765, help="on 127.0.0.1 (8765)")
    parser.add_argument("--send-buffer-kilobytes", type=int, default=16, help="of nginx (16)")
    parser.add_argument("--without-nginx", action="store_true", help="serve with our own server")
    options = parser.parse_args()
    folder = options.folder.resolve()
    if not folder.is_dir():
        raise SystemExit(
            f"error: {options.folder}: there is no such folder; scripts/cifar10_shards.py makes one"
        )
    if options.kilobytes_per_s < 1:
        raise SystemExit(f"error: --kilobytes-per-s={options.kilobytes_per_s}: must be at least 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # through the finally that ends nginx
    program = None if options.without_nginx else find_nginx()
    with_what = "our own server" if program is None else "nginx"
    print(
        f"{with_what} serves {folder} at http://127.0.0.1:{options.port}/slow/ ({options.kilobytes_per_s} "
        "kilobytes a second for each connection) and /fast/; Ctrl-C ends it",
        flush=True,
    )
    try:
        if program is not None:
            serve_with_nginx(
                program, folder, options.port, options.kilobytes_per_s, options.send_buffer_kilobytes
            )
        else:
            make_server(folder, options.port, options.kilobytes_per_s).serve_forever()
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
