"""What every route needs: the leader, the tokenizer, the metrics and the served model's name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdjax.server.chat_template import ChatTemplate
from pdjax.server.jobs import Instance, Job
from pdjax.server.leader import Leader
from pdjax.server.metrics import Metrics
from pdjax.server.run import Run
from pdjax.server.streaming import Resume, check_resume
from pdjax.server.vocabulary import Vocabulary
from pdjax.web import HttpError

ANY_MODEL = (None, "", "default", "unknown")  # routers put these where a client named no model


@dataclass(frozen=True)
class Service:
    """The parts of a frontend process. `created` is when it started, in seconds of the epoch."""

    leader: Leader
    vocabulary: Vocabulary
    template: ChatTemplate
    metrics: Metrics
    model_name: str
    created: int

    @property
    def instance(self) -> Instance:
        """The instance's limits.

        Raises:
            HttpError: 503, it is not ready.
        """
        self.leader.check()
        assert self.leader.info is not None, "a leader without a problem has said what it is"
        return Instance.from_info(self.leader.info, self.vocabulary.size)

    def run(self, jobs: Sequence[Job], *, resume: Resume | None = None, stream: bool | None = None) -> Run:
        """Jobs to run; with `resume`, a `stream` goes on that has begun elsewhere.

        Raises:
            HttpError: 400, it can't go on.
        """
        if resume is not None:
            check_resume(resume, samples=len(jobs), vocabulary=self.instance.vocabulary_size, stream=stream)
        return Run(self.leader, self.vocabulary, self.metrics, jobs, resume)

    def streams(self, wanted: bool | None) -> bool:
        """Whether an answer is a stream, if one is wanted: a prefill instance has but one token to tell."""
        return bool(wanted) and self.leader.role != "prefill"

    def check_model(self, name: str | None) -> None:
        """Raise `HttpError` 404 if a request asks for another model."""
        if name not in ANY_MODEL and name != self.model_name:
            raise HttpError(404, f"model: {name!r} is not served here; the model is {self.model_name!r}")
