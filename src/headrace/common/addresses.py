"""Network addresses: `host:port`, and whether a port is taken."""

import errno
import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Address:
    """A host name or IP address, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True if nothing outside this machine is meant."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def parse_address(text: str) -> Address:
    """The address in `host:port` or `[ipv6]:port`; ValueError says what is allowed."""
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""  # an IPv6 address without brackets: where it ends and the port begins is a guess
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"must be host:port with a port from 1 to 65535, such as 127.0.0.1:50051; got {text!r}")
    return Address(host, int(port))


def is_port_taken(address: Address) -> bool:
    """True if something listens there already; OSError if the host is not one of this machine's addresses."""
    try:
        _bound_socket(address).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return True
        raise
    return False


def free_port(host: str) -> int:
    """A port that nothing listens on now. Another process may take it before the caller does."""
    with _bound_socket(Address(host, 0)) as bound:
        port: int = bound.getsockname()[1]
    return port


def _bound_socket(address: Address) -> socket.socket:
    family, kind, protocol, _, endpoint = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        # Connections of an earlier server that still wait for their end do not make a port taken.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(endpoint)
        # Linux lets two sockets with SO_REUSEADDR bind while neither listens.
        bound.listen(1)
    except OSError:
        bound.close()
        raise
    return bound
