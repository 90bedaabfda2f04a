"""Where the server is, and whether something that speaks our language listens there."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError

PORT = 9092
_HELLO = b"GET /v1/fleet/ HTTP/1.0\r\nHost: perada\r\n\r\n"  # nothing is there; 503 says that it is starting


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class NoAnswer(Exception):
    """Nobody there now; may be later."""


class Starting(NoAnswer):
    """Somebody there, who does not let sites in yet."""


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """`host`, `host:port`, `1.2.3.4:port` or `[::1]:port`."""
        host, colon, port = text.strip().rpartition(":")
        if not colon or (text.count(":") > 1 and not host.endswith("]")):
            host, port = text.strip(), str(PORT)
        host = host.removeprefix("[").removesuffix("]")
        if ":" in host and not _is_address(host):
            host = ""
        if not host or "/" in host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise InputError(f"server address {text!r}: write it as host:port, such as fl.example.org:{PORT}")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def from_here(self) -> Address:
        """What to dial on the very machine that listens there."""
        return Address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host), self.port)

    @property
    def loopback(self) -> bool:
        """Whether it is this machine and nobody else can listen on the way."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() in ("localhost", "localhost.localdomain")


def check_plain(address: Address, insecure: bool, knows: bool) -> None:
    """Refuse an unencrypted connection that leaves this machine, unless it is asked for twice."""
    if knows and not insecure:
        raise InputError("--i-know-this-is-not-encrypted means something only with --insecure")
    if insecure and not address.loopback and not knows:
        raise InputError(
            f"--insecure with {address.host}: whoever is on the way can read and change everything, and anybody can "
            "take part; make certificates (perada flower certs), or add --i-know-this-is-not-encrypted"
        )


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


def check_free(address: Address) -> None:
    """Refuse to listen where somebody does, or where we may not."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((address.host, address.port))
        except OSError as error:
            why = error.strerror or str(error)
            raise InputError(f"cannot listen on {address}: {why}; choose another --host or --port") from error


def probe(address: Address, ca: Path | None, timeout: float = 5.0, starting: bool = False) -> None:
    """Speak to the server as a site will: TLS checked by `ca`, or plain HTTP where that is None.

    NoAnswer where nobody listens, or (unless `starting` will do) does not let sites in yet; InputError where it is the
    wrong server, or the wrong language.
    """
    try:
        with socket.create_connection((address.host, address.port), timeout) as plain:
            if ca is None:
                _plain(plain, address)
            else:
                _secure(plain, address, ca)
    except Starting:
        if not starting:
            raise
    except (InputError, NoAnswer):
        raise
    except OSError as error:
        raise NoAnswer(error.strerror or str(error)) from error


def _secure(plain: socket.socket, address: Address, ca: Path) -> None:
    try:
        context = ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as error:
        raise InputError(f"cannot read the federation's certificate {ca}: missing, or no certificate") from error
    try:
        with context.wrap_socket(plain, server_hostname=address.host) as secure:
            secure.sendall(_HELLO)
            _check_ready(secure.recv(16))
    except ssl.SSLCertVerificationError as error:
        why = error.verify_message or str(error)
        raise InputError(f"refused: the certificate of {address} is not one that {ca} vouches for ({why})") from error
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:  # something on the way that has no server yet
        raise NoAnswer("it hung up") from error
    except ssl.SSLError as error:
        raise InputError(
            f"refused: {address} does not speak TLS ({error.reason}): another service, or a server with --insecure?"
        ) from error


def _plain(plain: socket.socket, address: Address) -> None:
    plain.sendall(_HELLO)
    try:
        answer = plain.recv(16)
    except ConnectionResetError:
        answer = b""
    if not answer.startswith(b"HTTP/"):
        raise InputError(f"refused: {address} does not speak plain HTTP: it wants TLS, so leave out --insecure")
    _check_ready(answer)


def _check_ready(answer: bytes) -> None:
    if b" 503" in answer:
        raise Starting("it is starting")
