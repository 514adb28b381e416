"""Runs the samples of one HTTP request: frames from the leader become text, until all samples have ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from types import TracebackType

import msgspec

from pdjax.server.jobs import Job
from pdjax.server.leader import Inbox, Leader
from pdjax.server.metrics import Metrics
from pdjax.server.output import Delta, Output, SampleText
from pdjax.server.streaming import Resume
from pdjax.server.vocabulary import Vocabulary


class Run:
    """The samples of one request, running. An async context manager: leaving it aborts what has not ended.

    Args:
        resume: what other instances have told of them; see `replay`.

    Raises:
        HttpError: on entry, if the engine can't take the jobs.
    """

    def __init__(
        self,
        leader: Leader,
        vocabulary: Vocabulary,
        metrics: Metrics,
        jobs: Sequence[Job],
        resume: Resume | None = None,
    ) -> None:
        self.outputs = [Output(i, job) for i, job in enumerate(jobs)]
        self._leader = leader
        self._metrics = metrics
        self._resume = resume
        self._texts = {output.job.rid: SampleText(output, vocabulary) for output in self.outputs}
        self._submitted = self._running = 0
        self._inbox: Inbox

    def replay(self) -> Iterator[Delta]:
        """Take in what other instances have told of the samples, before entering: they go on after it."""
        if self._resume is None:
            return
        ago = time.time() - self._resume.began
        for output in self.outputs:
            output.started -= ago
        for frame in self._resume.told:
            output = self.outputs[int(frame.rid)]
            yield self._texts[output.job.rid].add(frame)
            output.last_token = time.monotonic()

    def _pass_over(self) -> None:
        """On a prefill instance, before entering: run no sample that has begun elsewhere. Its decode instance asks for
        its pages by itself."""
        for frame in self._resume.told if self._resume is not None else ():
            self.outputs[int(frame.rid)].finish = {"type": "length", "length": 0}

    async def __aenter__(self) -> Run:
        left = [output for output in self.outputs if output.finish is None]
        requests = [each.job.generate for each in left]
        if self._resume is not None:
            requests = [msgspec.structs.replace(each.job.generate, output_ids=each.token_ids) for each in left]
        await self._leader.until_free(request.rid for request in requests)
        self._inbox = self._leader.submit(requests)
        self._submitted = self._running = len(left)
        self._metrics.running.inc(self._submitted)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._metrics.running.dec(self._submitted)
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
        """Enter, and wait for the end of all samples.

        Raises:
            HttpError: a sample has failed.
        """
        self._pass_over()
        async with self:
            while not self.done:
                await self.next()
        return self.outputs
