"""One sample's way from tokens to text: detokenised, cut at stop strings, its end noted."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from pdjax import wire
from pdjax.server.detokenize import Detokenizer
from pdjax.server.jobs import Job
from pdjax.server.stop import StopFinder
from pdjax.server.vocabulary import Vocabulary

Top = list[tuple[int, float]]  # tokens and their log-probabilities, best first


@dataclass
class Output:
    """What a sample has given so far. `finish` is its `finish_reason`, once it has ended.

    `logprobs` and `top_logprobs` have an entry a token, `prompt_logprobs` and `prompt_top_logprobs` one a token of
    the prompt; they are empty where they were not asked for.
    """

    index: int
    job: Job
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Top] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top_logprobs: list[Top] = field(default_factory=list)
    cached_tokens: int = 0
    finish: dict[str, Any] | None = None
    timeline: dict[str, float] | None = None
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None
    last_token: float | None = None

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.job.generate.input_ids)

    @property
    def seconds(self) -> float:
        """Time since the request was sent to the engine, until its end."""
        return (self.ended or time.monotonic()) - self.started


@dataclass(frozen=True)
class Delta:
    """What is new in `output`: text, which may be empty, and the frame that it came by."""

    output: Output
    text: str
    frame: wire.Tokens


class SampleText:
    """Turns a sample's frames into its `Output`."""

    def __init__(self, output: Output, vocabulary: Vocabulary) -> None:
        self.output = output
        rules = output.job.rules
        self._detokenizer = Detokenizer(partial(vocabulary.decode, skip_special=rules.skip_special_tokens))
        self._stop = StopFinder(rules.stop, keep=rules.no_stop_trim)

    def add(self, frame: wire.Tokens) -> Delta:
        """Take a frame; sets `output.finish` at the end."""
        output, rules = self.output, self.output.job.rules
        if output.job.prompt_only:
            frame = msgspec.structs.replace(frame, token_ids=[], logprobs=[], top_logprobs=[])
            if frame.finish_reason == "stop":
                frame = msgspec.structs.replace(frame, finish_reason="length", matched=None)
        output.token_ids += frame.token_ids
        output.logprobs += frame.logprobs
        output.top_logprobs += frame.top_logprobs
        output.prompt_logprobs += frame.prompt_logprobs
        output.prompt_top_logprobs += frame.prompt_top_logprobs
        output.cached_tokens = frame.cached_tokens or output.cached_tokens
        output.timeline = frame.timeline or output.timeline
        shown = frame.token_ids
        if frame.matched is not None and shown and not rules.no_stop_trim:
            shown = shown[:-1]
        piece = self._detokenizer.add(shown)
        if frame.finish_reason is not None:
            piece += self._detokenizer.finish()
        if len(output.token_ids) > output.job.generate.sampling.min_new_tokens:
            piece = self._stop.add(piece)
        if self._stop.matched is not None:
            output.finish = {"type": "stop", "matched": self._stop.matched}
            if output.timeline is not None:
                output.timeline = output.timeline | {"total_s": output.seconds}
        elif frame.finish_reason is not None:
            piece += self._stop.finish()
            output.finish = _finish(frame, len(output.token_ids))
        output.text += piece
        return Delta(output, piece, frame)


def _finish(frame: wire.Tokens, tokens: int) -> dict[str, Any]:
    match frame.finish_reason:
        case "stop":
            return {"type": "stop", "matched": frame.matched}
        case "abort":
            return {"type": "abort", "message": "aborted by /abort_request"}
        case _:
            return {"type": "length", "length": tokens}
