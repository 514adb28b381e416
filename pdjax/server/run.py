"""Runs the samples of one HTTP request: frames from the leader become text, until all samples have ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType

from pdjax.server.jobs import Job
from pdjax.server.leader import Inbox, Leader
from pdjax.server.metrics import Metrics
from pdjax.server.output import Delta, Output, SampleText
from pdjax.server.vocabulary import Vocabulary


class Run:
    """The samples of one request, running. A context manager: leaving it aborts what has not ended.

    Raises:
        HttpError: on entry, if the engine can't take the jobs.
    """

    def __init__(self, leader: Leader, vocabulary: Vocabulary, metrics: Metrics, jobs: Sequence[Job]) -> None:
        self.outputs = [Output(i, job) for i, job in enumerate(jobs)]
        self._leader = leader
        self._metrics = metrics
        self._texts = {output.job.rid: SampleText(output, vocabulary) for output in self.outputs}
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
