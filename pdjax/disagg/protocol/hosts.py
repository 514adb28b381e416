"""What the instance machines ask of whoever runs them: an engine and a network, or a simulated world.

A room machine returns its actions; an instance machine calls its host instead, since some of what it asks for is
answered at once: whether there are pages, which slot is free. No call may wait.
"""

from __future__ import annotations

from typing import Protocol

from pdjax.disagg.protocol.messages import ChunkNotice, Handoff, PromptLogprobs, Registration


class Given:
    """Pages that a request was given in one dp rank; `filled` of them, from the first on, hold its prompt already."""

    def __init__(self, filled: int, dp_rank: int = 0) -> None:
        self.filled = filled
        self.dp_rank = dp_rank


class Host(Protocol):
    """Both sides."""

    def send(self, link: str, body: bytes) -> None:
        """Put a frame on a link; if the link is gone, drop it."""
        ...

    def close(self, link: str) -> None:
        """End a link, or an attempt at one; its name is free at once. Unknown names are ignored."""
        ...

    def take_slot(self) -> int | None:
        """A free staging slot of this side, or None."""
        ...

    def free_slot(self, slot: int) -> None:
        """Give a staging slot back."""
        ...

    def fail(self, rid: str, status: int, reason: str) -> None:
        """A request has failed: tell its client, give back its pages."""
        ...

    def say(self, text: str) -> None:
        """A line for whoever watches the instance."""
        ...


class PrefillHost(Host, Protocol):
    """A prefill instance."""

    def open_path(self, link: str, peer: Registration) -> str | None:
        """Connect the transfer backend to the ranks of a peer. Returns a sentence if that fails."""
        ...

    def close_path(self, link: str) -> None:
        """Disconnect it; open writes end, in failure."""
        ...

    def rebootstrap(self, rid: str, room: int, token_ids: list[int], priority: int) -> tuple[int, str] | None:
        """Take in a request for these tokens' keys and values, whose end nobody is told. Returns status and sentence if
        it can't be taken."""
        ...

    def begin_prompt(self, rid: str) -> Given | None:
        """Give a request the pages of its prompt and queue it for computing; of the prefix cache's, all but the last
        page may be filled. None: there is no room now."""
        ...

    def write(self, id: int, link: str, slot: int, rid: str, notice: ChunkNotice, deadline: float) -> None:
        """Copy the pages that the notice names of a request into a staging slot, and send them into the slot that it
        names of the peer. That all of it has ended is reported."""
        ...

    def test_path(self, id: int, link: str, number: int, deadline: float) -> None:
        """Send a test message over the data path, from every process to every process of the peer. Their end is
        reported like a write's."""
        ...

    def finish(self, rid: str) -> None:
        """A request is served: answer its client."""
        ...


class DecodeHost(Host, Protocol):
    """A decode instance."""

    def connect(self, link: str, host: str, port: int) -> None:
        """Open a link; ends in `link_up` or `link_failed` within `Timeouts.link`."""
        ...

    def draw(self) -> int:
        """A random number of 63 bits."""
        ...

    def reserve(self, rid: str, *, share: bool) -> Given | None:
        """Give a request the pages of its prompt. Without `share` none of them may hold it already. None: there is no
        room now."""
        ...

    def landed(self, rid: str, notice: ChunkNotice, *, damaged: bool) -> None:
        """A chunk of a request has landed; `damaged`: not as it was sent."""
        ...

    def scatter(self, rid: str, slot: int, first_page: int, pages: int) -> None:
        """Copy a slot into pages of a request."""
        ...

    def drain(self, id: int, cut_off: tuple[bytes, ...]) -> None:
        """Report `drained` once all that peers who are gone had sent has landed or is dropped. `cut_off`: processes, as
        they describe themselves, whose host is out of reach and of which nothing may come any more; if that cannot be
        had, an error is reported."""
        ...

    def start(self, rid: str, handoff: Handoff, prompt: tuple[PromptLogprobs, ...], met: float) -> None:
        """A request's prompt is in its pages: generate. `prompt`: what was asked to be known of its tokens; `met`: when
        the prefill side first spoke of it."""
        ...
