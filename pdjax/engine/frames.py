"""What the frontend is told of a request's tokens."""

from __future__ import annotations

from pdjax.engine.request import Finish, OutputToken, Request
from pdjax.wire import Tokens


def tokens_frame(request: Request, token: OutputToken, finish: Finish | None = None) -> Tokens:
    """The newest token; with the first come those of the prompt that were asked for, with the last why it ended. Both
    have the timeline: whoever finds a stop string ends a request by itself."""
    first = len(request.output_ids) <= 1
    return Tokens(
        request.rid,
        [token.id],
        [token.logprob],
        finish_reason=None if finish is None else finish.reason,
        matched=None if finish is None else finish.matched,
        cached_tokens=request.cached_tokens,
        timeline=request.timeline if first or finish is not None else None,
        top_logprobs=[token.top] if request.top_logprobs else [],
        prompt_logprobs=request.prompt_logprobs if first else [],
        prompt_top_logprobs=request.prompt_top if first and request.top_logprobs else [],
    )
