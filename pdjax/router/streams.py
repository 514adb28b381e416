"""What the client of a stream has been told so far, and what another instance needs to go on from there. No I/O.

An instance that is asked for it puts blocks between its events, see `pdjax.server.streaming`: an opening, and after the
events of each frame of tokens the frame. Only events whose frame is known are let out, so that a stream never breaks
off within what a frame has to tell. The frames are kept as they come, and are not looked into.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdjax.web import OPENING, TOLD, HttpError, decode_object

_END = b"\n\n"  # of a block
_ERROR = b'data: {"error":'


class StreamSoFar:
    """One client's stream, through one instance after the other.

    Attributes:
        writing: the client is being told something, which must not be broken off.
    """

    def __init__(self) -> None:
        self.writing = False
        self._opening = b""
        self._told = bytearray()  # frames, each after a comma
        self._noted: bool | None = None  # whether the instance puts blocks of its own between the events
        self._unread = b""
        self._held: list[bytes] = []  # events whose frame is not known yet

    @property
    def can_go_on(self) -> bool:
        """Whether another instance can go on with it."""
        return bool(self._opening)

    @property
    def accepted(self) -> bool:
        """Whether the instance that is asked now has begun with it, or goes on with it."""
        return bool(self._noted)

    def begin(self) -> None:
        """An instance is asked, from the start or from where the stream stands."""
        self.writing, self._noted, self._unread, self._held = False, None, b"", []

    def take(self, chunk: bytes) -> bytes:
        """Take what the instance sends; returns what the client is told now.

        Raises:
            HttpError: 501, the stream has begun elsewhere, and the instance begins anew.
        """
        data = self._unread + chunk
        if self._noted is None:
            self._unread = data
            if len(data) < len(OPENING) and OPENING.startswith(data):
                return b""
            self._noted = data.startswith(OPENING)
            if self.can_go_on and not self._noted:
                raise HttpError(501, "the instance does not go on with another's stream")
        if not self._noted:
            self._unread = b""
            return data
        *blocks, self._unread = data.split(_END)
        out: list[bytes] = []
        for block in blocks:
            if block.startswith(TOLD):
                self._told += b"," + block[len(TOLD) :]
                out += self._held
                self._held = []
            elif block.startswith(OPENING):
                self._opening = self._opening or block[len(OPENING) :]
            else:
                self._held.append(block)
        return b"".join(block + _END for block in out)

    def finish(self) -> bytes:
        """The instance has ended its answer; returns the rest for the client.

        Raises:
            HttpError: with the instance's own status and words, if a stream that could go on has ended by an error.
        """
        if self._noted and self._held and self._held[-1].startswith(_ERROR):
            error = decode_object(self._held[-1].removeprefix(b"data: "))["error"]
            raise HttpError(error["code"], error["message"])
        return b"".join(block + _END for block in self._held) + self._unread

    def resumed(self, body: dict[str, Any]) -> dict[str, Any]:
        """The request by which an instance goes on with the stream; as it is, if nothing was told."""
        if not self.can_go_on:
            return body
        opening = decode_object(self._opening)
        told = msgspec.Raw(b"[%b]" % self._told[1:])
        return {**body, "rid": opening.pop("rid"), "pdjax_resume": {**opening, "told": told}}
