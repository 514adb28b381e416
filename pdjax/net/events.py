"""What the control network tells the engine about its links to other instances' leaders."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinkUp:
    """A link is open and both sides have said hello. `hello` is the peer's registration record, as it sent it."""

    link: str
    hello: bytes
    incoming: bool


@dataclass(frozen=True)
class LinkFailed:
    """A link that was asked for did not come up; `reason` is a sentence. `gone`: nobody listens there any more.
    `unreachable`: not even the host has answered."""

    link: str
    reason: str
    gone: bool = False
    unreachable: bool = False


@dataclass(frozen=True)
class LinkDown:
    """An open link has ended: the peer died, closed it, or broke the protocol. `gone`: its process has ended, which a
    connection that was given up does not prove."""

    link: str
    reason: str
    gone: bool = False


@dataclass(frozen=True)
class Frame:
    """A message from a peer, whole, not yet parsed."""

    link: str
    body: bytes


NetEvent = LinkUp | LinkFailed | LinkDown | Frame
