"""Connections of the desk's server, none of which can keep others waiting."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0  # time in which a connection sends the head of a request
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})  # addresses that only this machine reaches
MAX_CONNECTIONS = 100  # of one address; a browser opens six
MAX_LOCAL_CONNECTIONS = 400  # of this machine, where a reverse proxy may speak for many people


class Connection(H11Protocol):
    """An HTTP connection with a limit of time for the head of a request, and of number for its
    address.

    uvicorn itself limits how long a connection may be idle after an answer, but not before the
    first request, or with half a head. Its `limit_concurrency` counts such connections, so that
    they would shut everyone out.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse a connection whose address has too many, or watch it."""
        super().connection_made(transport)
        address = _address(self)
        addresses = [_address(connection) for connection in self.connections]
        max_connections = MAX_LOCAL_CONNECTIONS if address in LOOPBACK else MAX_CONNECTIONS
        if addresses.count(address) > max_connections:
            transport.abort()
        else:
            self.loop.call_later(HEAD_SECONDS, self._check, self._waited_after())

    def _waited_after(self) -> str | None:
        """Return which request the client has sent last, if it has begun another or none at all;
        None if it waits.
        """
        is_answered = self.cycle is None or self.cycle.response_complete
        is_idle = self.timeout_keep_alive_task is not None  # for which uvicorn has a limit
        if is_idle or not is_answered:
            return None
        return str(id(self.cycle))

    def _check(self, before: str | None) -> None:
        """Close a connection that has sent no whole head since the last check."""
        if self.transport.is_closing():
            return
        now = self._waited_after()
        if now is not None and now == before:
            self.transport.abort()
        else:
            self.loop.call_later(HEAD_SECONDS, self._check, now)


def _address(connection: object) -> str | None:
    """Return the address of the other end of a connection of uvicorn."""
    client = getattr(connection, "client", None)
    return client[0] if client else None
