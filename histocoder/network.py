"""The network between nodes."""

from __future__ import annotations

import socket
import struct

_SIOCGIFADDR = 0x8915
"""Of Linux: the IPv4 address of an interface."""
_FAR_AWAY = "198.51.100.1"
"""Of a block that is kept for documents, so that the default route leads there."""


def interface_towards(host: str) -> str | None:
    """The network interface over which a host is reached, or that has the host's own address; None where unknown.

    A name that stands for the loopback here, as a machine's own does in Debian's /etc/hosts, stands for another address
    elsewhere; it is taken for that of the default route.

    Examples
    --------
    >>> interface_towards("127.0.0.1")
    'lo'
    """
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return None
    if address.startswith("127.") and host not in (address, "localhost"):
        address = _FAR_AWAY
    return _interface_to(address)


def _interface_to(address: str) -> str | None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == own), None)


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            import fcntl  # which Windows lacks

            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except (OSError, ImportError):  # it has none, or this is no Linux
            return None
    return socket.inet_ntoa(answer[20:24])
