"""Runs the samples of one HTTP request: frames from the leader become text, stop strings are found, ends noted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

from pdjax import wire
from pdjax.server.detokenize import Detokenizer
from pdjax.server.jobs import Job
from pdjax.server.leader import Inbox, Leader
from pdjax.server.metrics import Metrics
from pdjax.server.stop import StopFinder
from pdjax.server.vocabulary import Vocabulary


@dataclass
class Output:
    """What a sample has given so far. `finish` is its `finish_reason`, once it has ended."""

    index: int
    job: Job
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
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
    """What is new in `output`: text, which may be empty, and tokens."""

    output: Output
    text: str
    token_ids: list[int]
    logprobs: list[float]


class Run:
    """The samples of one request, running. A context manager: leaving it aborts what has not ended.

    Raises:
        HttpError: on entry, if the engine can't take the jobs.
    """

    def __init__(self, leader: Leader, vocabulary: Vocabulary, metrics: Metrics, jobs: Sequence[Job]) -> None:
        self.outputs = [Output(i, job) for i, job in enumerate(jobs)]
        self._leader = leader
        self._metrics = metrics
        self._texts = {output.job.rid: _Text(output, vocabulary) for output in self.outputs}
        self._running = len(jobs)
        self._inbox: Inbox

    def __enter__(self) -> Run:
        self._inbox = self._leader.submit([output.job.generate for output in self.outputs])
        self._metrics.running.inc(len(self.outputs))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._metrics.running.dec(len(self.outputs))
        self._inbox.close_all("the client has gone" if isinstance(error, asyncio.CancelledError) else str(error))

    @property
    def done(self) -> bool:
        """Whether all samples have ended."""
        return self._running == 0

    async def next(self) -> Delta:
        """Wait for the next tokens of any sample.

        Raises:
            HttpError: a sample has failed.
        """
        while True:
            frame = await self._inbox.next()
            text = self._texts[frame.rid]
            output = text.output
            if output.finish is not None:  # tokens that were on their way when a stop string was found
                continue
            self._metrics.tokens(output, len(frame.token_ids))
            delta = text.add(frame)
            if output.finish is not None:
                output.ended = time.monotonic()
                self._running -= 1
                self._metrics.finished(output)
                if frame.finish_reason is None:
                    self._inbox.close(frame.rid, "a stop string was found")
            return delta

    async def finish(self) -> list[Output]:
        """Wait for the end of all samples.

        Raises:
            HttpError: a sample has failed.
        """
        while not self.done:
            await self.next()
        return self.outputs


class _Text:
    """One sample's way from tokens to text."""

    def __init__(self, output: Output, vocabulary: Vocabulary) -> None:
        self.output = output
        rules = output.job.rules
        self._detokenizer = Detokenizer(partial(vocabulary.decode, skip_special=rules.skip_special_tokens))
        self._stop = StopFinder(rules.stop, keep=rules.no_stop_trim)

    def add(self, frame: wire.Tokens) -> Delta:
        """Take a frame; sets `output.finish` at the end."""
        output, rules = self.output, self.output.job.rules
        output.token_ids += frame.token_ids
        output.logprobs += frame.logprobs
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
        elif frame.finish_reason is not None:
            piece += self._stop.finish()
            output.finish = _finish(frame, len(output.token_ids))
        output.text += piece
        return Delta(output, piece, frame.token_ids, frame.logprobs)


def _finish(frame: wire.Tokens, tokens: int) -> dict[str, Any]:
    match frame.finish_reason:
        case "stop":
            return {"type": "stop", "matched": frame.matched}
        case "abort":
            return {"type": "abort", "message": "aborted by /abort_request"}
        case _:
            return {"type": "length", "length": tokens}
