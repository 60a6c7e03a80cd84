"""A real nginx on loopback."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.needs import needs
from tests.ports import free_port

_PROGRAM = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")

needs_nginx = needs("nginx", present=_PROGRAM is not None, remedy="on Debian: apt-get install nginx-light")

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
    listen 127.0.0.1:{port};
{server}
  }}
}}
"""
_SERVER = """
    root {root};
    location /slow/ {{ alias {root}/; limit_rate 200k; }}
    location /whole/ {{ alias {root}/; max_ranges 0; }}
    location /broken/ {{ return 503; }}
    location /forbidden/ {{ return 403; }}
    location /faulty/ {{
      alias {root}/;
      if (-f {folder}/503) {{ return 503; }}
      if (-f {folder}/429) {{ return 429; }}
      if (-f {folder}/408) {{ return 408; }}
    }}
"""


@contextmanager
def nginx(folder: Path, root: Path) -> Iterator[str]:
    """The url under which it serves a folder; ``slow/``, ``whole/`` (no ranges), ``broken/`` below it.

    Below ``faulty/`` every answer is a 503, 429 or 408 while its own folder holds a file of that name.
    """
    assert _PROGRAM is not None
    folder.mkdir()
    port = free_port()
    config = folder / "nginx.conf"
    served = _SERVER.format(folder=folder, root=root)
    config.write_text(_CONFIG.format(own=folder, port=port, server=served))
    command = [_PROGRAM, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(config)]
    server = subprocess.Popen(command)
    try:
        wait_until_it_listens(port, server)
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.terminate()
        server.wait(60)


def wait_until_it_listens(port: int, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
