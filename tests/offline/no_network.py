"""Keeps a process on this machine: importing this module blocks connections and look-ups beyond loopback.

conftest.py imports it in the tests' own process, sitecustomize.py in every Python process that a test starts. It sees
what goes through Python's `socket`, and so not what a C library such as gRPC's does by itself.
"""

import errno
import functools
import ipaddress
import os
import socket
from typing import Any

LOG = "PERADA_TEST_NETWORK_LOG"  # names a file that gets a line per blocked try, even if the caller hides the error


def stays_here(host: Any) -> bool:
    """Returns whether a host is this machine: localhost, loopback, an address of its own, or none (0.0.0.0, ::)."""
    text = (host.decode("latin1") if isinstance(host, bytes | bytearray) else str(host or "")).partition("%")[0]
    if text in ("", "localhost"):
        return True
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified or _is_own(address)


def _is_own(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Returns whether this machine has the address: only then can a socket be bound to it."""
    if address.is_multicast or str(address) == "255.255.255.255":  # these can be bound to on any machine
        return False
    with socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as s:
        try:
            s.bind((str(address), 0))
        except OSError:
            return False
    return True


def _host(call: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Returns the host that a call of `socket` is about; None without one, as for a socket in the file system."""
    if call.startswith("get"):
        return args[0] if args else named.get("host")
    if call == "sendmsg":  # socket, buffers, ancillary data, flags, address
        args = args[4:]
    return args[-1][0] if args and isinstance(args[-1], tuple) else None


def _guard(owner: Any, call: str) -> None:
    """Makes a function of `socket` refuse other machines."""
    original = getattr(owner, call)

    @functools.wraps(original)
    def guarded(*args: Any, **named: Any) -> Any:
        host = _host(call, args, named)
        if stays_here(host):
            return original(*args, **named)
        line = f"a test may not leave this machine: {call} {host!r}"
        if path := os.environ.get(LOG):
            with open(path, "a") as log:
                log.write(line + "\n")
        raise OSError(errno.ENETUNREACH, line)

    setattr(owner, call, guarded)


for _name in ("connect", "connect_ex", "sendto", "sendmsg"):
    _guard(socket.socket, _name)
for _name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "gethostbyaddr"):
    _guard(socket, _name)
