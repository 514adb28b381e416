"""One request as the engine sees it: token ids in, token ids out."""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, field

import msgspec

from pdjax.engine.grammar import Matcher
from pdjax.wire import NO_PARTNER, Generate, Rendezvous, SamplingParams

Top = list[tuple[int, float]]  # tokens and their log-probabilities, best first


class OutputToken(msgspec.Struct, frozen=True):
    """A picked token with its log-probability, and the best tokens in its place, as many as were asked for."""

    id: int
    logprob: float
    top: Top = []


@dataclass(slots=True)  # a step looks at each of many, and most are out of the caches by then
class Request:
    """A request's life in this instance. Times are in seconds of `time.monotonic`."""

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    seed: int
    rendezvous: Rendezvous | None = None
    priority: int = 0
    deadline_s: float | None = None  # seconds from `arrived`
    sample_of: str = ""  # another request with the same prompt
    has_begun: bool = False  # its answer has, at another instance
    use_cache: bool = True  # whether pages of the prefix cache may stand for the prompt's
    wanted_rank: int | None = None  # the dp rank that the client asks for
    dp_rank: int = 0  # whose pages it has
    pages: list[int] = field(default_factory=list)
    computed: int = 0  # of `prefill_ids`, those whose keys and values are in the pages
    cached_tokens: int = 0  # of the prompt, those that the prefix cache had when the request was admitted
    output_ids: list[int] = field(default_factory=list)
    pending: int = 0  # output tokens that the device has picked or will pick, and that are not in `output_ids` yet
    top_logprobs: int = 0
    wants_prompt_logprobs: bool = False
    prompt_logprobs: list[float | None] = field(default_factory=list)  # as far as computed; None for the first token
    prompt_top: list[Top] = field(default_factory=list)
    matcher: Matcher | None = None  # where the output stands in its grammar, if it has one
    mask: bytes = b""  # the tokens that the grammar allows next
    arrived: float = field(default_factory=time.monotonic)
    timeline: dict[str, float] = field(default_factory=dict)
    prompt_tokens: int = field(init=False)
    max_tokens: int = field(init=False)  # the most that its keys and values can take: the last output token has none
    prefill_ids: list[int] = field(init=False)  # what is computed before it decodes: its prompt; see also `start_over`

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.input_ids)
        self.max_tokens = self.prompt_tokens + self.sampling.max_new_tokens - 1
        self.prefill_ids = self.input_ids
        if self.output_ids:
            self.start_over()

    def start_over(self) -> None:
        """It has no pages. All its tokens but the newest, which the next step computes, are computed (again)."""
        self.prefill_ids = self.input_ids + self.output_ids[:-1]
        self.computed = 0

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
            priority=message.priority,
            deadline_s=message.deadline_s,
            sample_of=message.sample_of,
            has_begun=bool(message.output_ids),
            output_ids=list(message.output_ids),
            wanted_rank=message.dp_rank,
            # Log-probabilities of a prompt's tokens come from computing them.
            use_cache=not message.prompt_logprobs,
            top_logprobs=message.top_logprobs,
            wants_prompt_logprobs=message.prompt_logprobs,
        )

    @property
    def alone(self) -> bool:
        """Whether it has no other half, although its instance has a role: see `pdjax.disagg.alone`."""
        return self.rendezvous is not None and self.rendezvous.host == NO_PARTNER

    @property
    def tokens_to_begin(self) -> int:
        """How many it must have room for to decode: two steps are planned before the first of them is read."""
        return min(len(self.prefill_ids) + 2, self.max_tokens)

    @property
    def computed_ids(self) -> list[int]:
        """The tokens, from the first on, whose keys and values are in the pages."""
        if self.alone:
            return []  # there may be zeros
        if not self.output_ids or self.computed < len(self.prefill_ids):
            return self.prefill_ids[: self.computed]
        return (self.input_ids + self.output_ids)[: self.next_position]

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
    if len(request.output_ids) + request.pending >= request.sampling.min_new_tokens:
        return ()
    return request.sampling.stop_token_ids + (() if request.sampling.ignore_eos else eos_token_ids)
