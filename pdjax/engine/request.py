"""One request as the engine sees it: token ids in, token ids out."""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, field

from pdjax.wire import Generate, Rendezvous, SamplingParams


@dataclass
class Request:
    """A request's life in this instance. Times are in seconds of `time.monotonic`."""

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    seed: int
    rendezvous: Rendezvous | None = None
    pages: list[int] = field(default_factory=list)
    computed: int = 0  # prompt tokens whose keys and values are in the pages
    output_ids: list[int] = field(default_factory=list)
    arrived: float = field(default_factory=time.monotonic)
    timeline: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_wire(cls, message: Generate) -> Request:
        """A request without a seed gets one of its own, from its id: a batch must not draw the same noise twice."""
        seed = message.sampling.seed
        return cls(
            rid=message.rid,
            input_ids=message.input_ids,
            sampling=message.sampling,
            seed=zlib.crc32(message.rid.encode()) if seed is None else seed,
            rendezvous=message.rendezvous,
        )

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.input_ids)

    @property
    def max_tokens(self) -> int:
        """The most tokens that this request's keys and values can take.

        The last output token is never computed on, so it needs no place.
        """
        return self.prompt_tokens + self.sampling.max_new_tokens - 1

    @property
    def next_position(self) -> int:
        """Position of the newest token, whose keys and values the next decode step writes."""
        return self.prompt_tokens + len(self.output_ids) - 1


@dataclass(frozen=True)
class Finish:
    """Why a request has ended: `reason` is stop or length, `matched` the stop token."""

    reason: str
    matched: int | None = None


def finish_of(request: Request, eos_token_ids: tuple[int, ...]) -> Finish | None:
    """Whether the newest output token ends the request."""
    token, sampling = request.output_ids[-1], request.sampling
    if token in sampling.stop_token_ids or (not sampling.ignore_eos and token in eos_token_ids):
        return Finish("stop", token)
    if len(request.output_ids) >= sampling.max_new_tokens:
        return Finish("length")
    return None


def banned_tokens(request: Request, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens that may not be picked next: those that would end the request before `min_new_tokens`."""
    if len(request.output_ids) >= request.sampling.min_new_tokens:
        return ()
    return request.sampling.stop_token_ids + (() if request.sampling.ignore_eos else eos_token_ids)
