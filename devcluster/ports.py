"""Ports that stay ours: a free one is held by a socket that never listens.

Asking the kernel for a free port and letting go of it would leave a gap in which anyone may take it, at the
start and at each restart. All components can share a port with such a socket (SO_REUSEPORT), and connections
only ever go to the one that listens.
"""

from __future__ import annotations

import socket

LOOPBACK = "127.0.0.1"


class Port:
    """A TCP port of the loopback interface, held until closed."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind((LOOPBACK, 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()
