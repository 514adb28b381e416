"""Which of the network's links an instance means by a peer's address. No I/O."""

from __future__ import annotations

import itertools


class LinkNames:
    """An instance has one link to an address at a time, and may ask for the next as soon as it has given one up. What
    the network has said of the first may still lie in the engine's inbox then, so each has a name of its own there."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._links: dict[str, str] = {}  # by address

    def open(self, address: str) -> str:
        """The name of a new link, which the address stands for from now on."""
        link = self._links[address] = f"{address}#{next(self._numbers)}"
        return link

    def link(self, address: str) -> str | None:
        """The link that an address stands for, if any."""
        return self._links.get(address)

    def address(self, link: str) -> str | None:
        """The address that stands for a link. None: it was given up, and nobody wants to hear of it."""
        address = link.rpartition("#")[0]
        return address if self._links.get(address) == link else None

    def close(self, address: str) -> str | None:
        """The address stands for no link any more. Returns the one that it did stand for."""
        return self._links.pop(address, None)
