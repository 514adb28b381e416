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
    """A link that was asked for did not come up; `reason` is a sentence."""

    link: str
    reason: str


@dataclass(frozen=True)
class LinkDown:
    """An open link has ended: the peer died, closed it, or broke the protocol."""

    link: str
    reason: str


@dataclass(frozen=True)
class Frame:
    """A message from a peer, whole, not yet parsed."""

    link: str
    body: bytes


NetEvent = LinkUp | LinkFailed | LinkDown | Frame
