"""The server's address, and whether a server of ours answers there."""

import ipaddress
import socket
import ssl
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Self

from ..errors import InputError

PORT = 9092


class NoAnswer(Exception):
    """No server answers now; one may answer later."""


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `host`, `host:port`, `1.2.3.4:port` or `[::1]:port`."""
        host, colon, port = text.strip().rpartition(":")
        if not colon or (text.count(":") > 1 and not host.endswith("]")):
            host, port = text.strip(), str(PORT)
        host = host.removeprefix("[").removesuffix("]")
        if ":" in host and not _is_ip(host):
            host = ""
        if not host or "/" in host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise InputError(f"server address {text!r}: write it as host:port, such as fl.example.org:{PORT}")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def local(self) -> "Address":
        """The address to dial from the machine that listens on this one."""
        return Address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host), self.port)

    @property
    def loopback(self) -> bool:
        """Whether the traffic never leaves this machine."""
        if _is_ip(self.host):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host.lower() in ("localhost", "localhost.localdomain")


def check_plain(address: Address, insecure: bool, confirmed: bool) -> None:
    """Refuses an unencrypted connection that leaves this machine, unless the user confirmed it."""
    if confirmed and not insecure:
        raise InputError("--i-know-this-is-not-encrypted needs --insecure")
    if insecure and not address.loopback and not confirmed:
        raise InputError(
            f"--insecure with {address.host}: anybody on the network can read and change everything, and take part: "
            "make certificates (perada flower certs), or add --i-know-this-is-not-encrypted"
        )


def free_port() -> int:
    """Returns a local port on which nothing listens at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def check_free(address: Address) -> None:
    """Refuses an address on which another process listens, or on which we may not listen."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        socket.create_server((address.host, address.port), family=family).close()
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (")[0]
        raise InputError(f"cannot listen on {address}: {why}; choose another --host or --port") from error


def probe(address: Address, ca: Path | None, timeout: float = 5.0, starting: bool = False) -> None:
    """Sends one request as a site does: over TLS checked by `ca`, or over plain HTTP if `ca` is None.

    Raises NoAnswer if no server answers, or if it does not let sites in yet (unless `starting` is true). Raises
    InputError if the server has another certificate or does not speak this protocol.
    """
    try:
        context = ssl.create_default_context(cafile=str(ca)) if ca else None
    except OSError as error:
        raise InputError(f"cannot read the federation's certificate {ca}: missing or damaged") from error
    connection = HTTPConnection(address.host, address.port, timeout=timeout)
    if context:
        connection = HTTPSConnection(address.host, address.port, timeout=timeout, context=context)
    with closing(connection):
        try:
            connection.request("GET", "/v1/fleet/")  # no such page: any answer will do
            status = connection.getresponse().status
        except ssl.SSLCertVerificationError as error:
            why = error.verify_message or str(error)
            raise InputError(f"refused: {ca} does not vouch for the certificate of {address} ({why})") from error
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:  # a forwarder whose server is away
            raise NoAnswer("it closed the connection") from error
        except ssl.SSLError as error:
            hint = "is it another service, or run with --insecure?"
            raise InputError(f"refused: {address} does not speak TLS ({error.reason}): {hint}") from error
        except (HTTPException, ConnectionResetError) as error:
            if context:
                raise NoAnswer("it closed the connection") from error
            raise InputError(
                f"refused: {address} does not speak plain HTTP: it wants TLS, so leave out --insecure"
            ) from error
        except OSError as error:
            raise NoAnswer(error.strerror or str(error)) from error
    if status == 503 and not starting:
        raise NoAnswer("it is starting")
