"""What every route needs: the leader, the tokenizer, the metrics and the served model's name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdjax.server.chat_template import ChatTemplate
from pdjax.server.jobs import Instance, Job
from pdjax.server.leader import Leader
from pdjax.server.metrics import Metrics
from pdjax.server.run import Run
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

    def run(self, jobs: Sequence[Job]) -> Run:
        """Jobs to run."""
        return Run(self.leader, self.vocabulary, self.metrics, jobs)

    def check_model(self, name: str | None) -> None:
        """Raise `HttpError` 404 if a request asks for another model."""
        if name not in ANY_MODEL and name != self.model_name:
            raise HttpError(404, f"model: {name!r} is not served here; the model is {self.model_name!r}")
