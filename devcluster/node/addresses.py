"""Addresses for pods: each its own in 127.0.0.0/8, from a network that no other agent uses.

A network is claimed by a socket bound in it, so the claim ends with the agent however that ends.
Everything in 127.0.0.0/8 is this machine's loopback on Linux; nothing has to be set up.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

NETWORKS = range(64, 128)  # 127.64.0.0/16 to 127.127.0.0/16: away from 127.0.0.1 and 127.0.0.53
CLAIM_PORT = 10249


class Addresses:
    """The addresses of one agent's pods."""

    def __init__(self) -> None:
        self._claim, self.network = _claim()
        self._used: set[str] = set()
        self._next = self._candidates()

    def take(self) -> str:
        """An address that was not used for as long as possible."""
        for _ in range(1 << 16):
            address = next(self._next)
            if address not in self._used:
                self._used.add(address)
                return address
        raise RuntimeError("no pod address is left")

    def give_back(self, address: str) -> None:
        """The pod that had it is gone."""
        self._used.discard(address)

    def close(self) -> None:
        """Give the network up."""
        self._claim.close()

    def _candidates(self) -> Iterator[str]:
        while True:
            for third in range(256):
                for fourth in range(1, 255):
                    if (third, fourth) != (0, 1):  # the claim's own
                        yield f"127.{self.network}.{third}.{fourth}"


def _claim() -> tuple[socket.socket, int]:
    for network in NETWORKS:
        claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            claim.bind((f"127.{network}.0.1", CLAIM_PORT))
        except OSError:
            claim.close()
            continue
        return claim, network
    raise RuntimeError("all loopback networks for pods are taken by other node agents")
