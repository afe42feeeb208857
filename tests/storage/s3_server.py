"""S3 server on loopback (moto) with fault injection: python -m tests.storage.s3_server SOCKET
FAULTS.

SOCKET is the file descriptor of a listening socket.

The file FAULTS, if present, holds `METHOD TEXT COUNT STATUS`: the next COUNT requests of this
method with TEXT in their path are answered with STATUS, 503 (Slow Down) or 400; COUNT is
decremented in the file. If the file `requests` is next to it, each request is appended as `METHOD
PATH REQUESTED-BYTES`; a file `delay_s` has the seconds that each request takes longer.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from moto.server import create_backend_app
from werkzeug.serving import make_server

BODY = "<?xml version='1.0'?><Error><Code>{}</Code><Message>{}</Message></Error>"
BODIES = {
    "503": BODY.format("SlowDown", "Please reduce your request rate.").encode(),
    "400": BODY.format("InvalidRequest", "Injected fault.").encode(),
}


class FaultInjector:
    def __init__(self, app, faults):
        self.app, self.faults, self.lock = app, faults, threading.Lock()

    def __call__(self, environ, start_response):
        with suppress(FileNotFoundError):
            time.sleep(float((self.faults.parent / "delay_s").read_text()))
        with self.lock:
            self._note(environ)
            status = self._failure(environ)
        if status:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(f"{status} Failing", [("Content-Type", "application/xml")])
            return [BODIES[status]]
        return self.app(environ, start_response)

    def _note(self, environ):
        seen = self.faults.parent / "requests"
        if seen.exists():
            first, _, last = environ.get("HTTP_RANGE", "").removeprefix("bytes=").partition("-")
            asked = int(last) - int(first) + 1 if first and last else 0
            with seen.open("a") as file:
                file.write(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']} {asked}\n")

    def _failure(self, environ):
        """Status of the injected fault for this request; None without a fault."""
        if not self.faults.exists():
            return None
        method, text, count, status = self.faults.read_text().split()
        if (
            environ["REQUEST_METHOD"] != method
            or text not in environ["PATH_INFO"]
            or int(count) == 0
        ):
            return None
        self.faults.write_text(f"{method} {text} {int(count) - 1} {status}")
        return status


if __name__ == "__main__":
    app = create_backend_app("s3")
    injector = FaultInjector(app, Path(sys.argv[2]))
    make_server("127.0.0.1", 0, injector, threaded=True, fd=int(sys.argv[1])).serve_forever()
