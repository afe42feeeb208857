"""HTTPS server on loopback with a self-signed certificate, and a fake DNS lookup."""

import datetime
import ipaddress
import socket
import ssl
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

NAMES = ("allowed.test", "other.test", "inner.test", "localhost")


class Server(ThreadingHTTPServer):
    """Context manager: `with Server(folder, image) as server`: server.port;

    `image(number)` returns the bytes of /N.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder, image):
        super().__init__(("127.0.0.1", 0), Handler)
        self.image, self.requests, self.active, self.max_active = image, Counter(), 0, 0
        self.changed, self.stopping = threading.Condition(), threading.Event()
        self.trusted = ssl.create_default_context(cafile=write_certificate(folder))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
        self.socket = context.wrap_socket(
            self.socket, server_side=True, do_handshake_on_connect=False
        )
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def port(self):
        return self.server_address[1]

    def address(self, path, host="allowed.test"):
        return f"https://{host}:{self.port}/{path}"

    def __exit__(self, *_):
        self.stopping.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *_):
        """Ignore disconnected clients: the tests cause them."""


class Handler(BaseHTTPRequestHandler):
    """/N: an image; /slow/N: the same, once five requests were active at the same time;
    /to?at=ADDRESS: a redirect; /busy/M/N: refused M times; /404 etc.
    """

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        with self.server.changed:
            self.server.requests[self.path] += 1
            self.server.active += 1
            self.server.max_active = max(self.server.max_active, self.server.active)
            self.server.changed.notify_all()
        try:
            self._answer(*urlsplit(self.path).path.strip("/").split("/"))
        finally:
            with self.server.changed:
                self.server.active -= 1

    def _answer(self, kind, *rest):
        if kind == "slow":
            with self.server.changed:
                self.server.changed.wait_for(lambda: self.server.max_active >= 5, 20)
            self._send(200, self.server.image(int(rest[0])))
        elif kind == "to":
            self._send(
                302, b"", Location=parse_qs(urlsplit(self.path).query, encoding="latin-1")["at"][0]
            )
        elif kind == "busy":
            busy = self.server.requests[self.path] <= int(rest[0])
            self._send(503 if busy else 200, b"" if busy else self.server.image(int(rest[1])))
        elif kind == "endless":  # no Content-Length
            self._send(200, None)
            while not self.server.stopping.is_set():
                self.wfile.write(bytes(65536))
        elif kind == "drip":
            self._send(200, b"", **{"Content-Length": "200000"})
            while not self.server.stopping.wait(0.05):
                self.wfile.write(b"x")
        elif kind == "cut":
            self._send(200, b"half", **{"Content-Length": "1000"})
            self.close_connection = True
        elif kind == "large":
            self._send(200, b"", **{"Content-Length": str(10**12)})
        else:
            number = int(kind)
            self._send(
                number if number >= 400 else 200,
                b"" if number >= 400 else self.server.image(number),
            )

    def _send(self, status, body, **headers):
        self.send_response(status)
        for name, value in (
            {} if body is None else {"Content-Length": str(len(body))} | headers
        ).items():
            self.send_header(name, value)
        self.close_connection = body is None
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *_):
        """Log nothing."""


def dns_table(**names):
    """`resolve` of a resolver that maps each name to a list of numeric addresses."""

    async def resolve(self, host, port=0, family=socket.AF_INET):
        if host.replace(".", "_") not in names:
            raise OSError(f"{host} is not known")
        return [
            {
                "hostname": host,
                "host": each,
                "port": port,
                "family": family_of(each),
                "proto": 0,
                "flags": 0,
            }
            for each in names[host.replace(".", "_")]
        ]

    return resolve


def family_of(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def write_certificate(folder):
    """Write a self-signed certificate.pem and its key.pem; return the path of the first."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")])
    names = [x509.DNSName(each) for each in NAMES] + [
        x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    ]
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(
        now + datetime.timedelta(days=1)
    )
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    certificate = builder.add_extension(
        x509.BasicConstraints(ca=True, path_length=None), True
    ).sign(key, hashes.SHA256())
    encoding = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(encoding))
    (folder / "key.pem").write_bytes(
        key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain)
    )
    return folder / "certificate.pem"
