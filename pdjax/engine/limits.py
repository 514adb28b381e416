"""What one instance takes on, and why it refuses the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdjax.cache.spec import StateSpec
from pdjax.engine.request import Request, finish_of
from pdjax.engine.sampling import problem as sampling_problem
from pdjax.wire import MAX_FRAME


@dataclass(frozen=True)
class Limits:
    """What one instance takes on; see `pdjax.config.Engine`, `Cache` and `Disagg`. 0 host pages: no bound; -1: none."""

    max_context: int
    max_running_requests: int
    max_queued_requests: int
    host_pages: int = 0
    reserved_decode_tokens: int = 0


def refusal(
    request: Request,
    *,
    limits: Limits,
    live: Mapping[str, Request],
    spec: StateSpec,
    pages: int,
    vocab: int,
    grammars: bool,
    eos_token_ids: tuple[int, ...],
    dp: int = 1,
) -> tuple[int, str] | None:
    """Status and sentence for a request that can't be taken, or None.

    Args:
        live: the requests that an instance has, by id.
        spec: the KV state's shape, of which a request can have `pages` pages at most.
        vocab: how many logits the model has.
        grammars: whether grammars can be compiled.
        eos_token_ids: tokens that end a request.
        dp: how many dp ranks there are.
    """
    needed = spec.pages(request.max_tokens)
    if request.rid in live:
        return 400, f"a request with the id {request.rid!r} is running already"
    if not request.input_ids or request.sampling.max_new_tokens < 1:
        return 400, "a request needs at least one prompt token and one new token"
    if request.deadline_s is not None and not request.deadline_s > 0:
        return 400, f"deadline_s must be above 0 seconds, not {request.deadline_s:g}"
    if not 0 <= min(request.input_ids) <= max(request.input_ids) < vocab:
        return 400, f"the prompt has tokens that are not in the vocabulary of {vocab}"
    if request.output_ids:
        if not 0 <= min(request.output_ids) <= max(request.output_ids) < vocab:
            return 400, f"the output so far has tokens that are not in the vocabulary of {vocab}"
        if finish_of(request, eos_token_ids) is not None:
            return 400, f"the output so far, {len(request.output_ids)} tokens, is all that the request may have"
    if request.wanted_rank is not None and not 0 <= request.wanted_rank < dp:
        return 400, f"data_parallel_rank: there is no dp rank {request.wanted_rank}; this instance has {dp}, from 0 on"
    problem = sampling_problem(request.sampling, top=request.top_logprobs, vocab=vocab)
    if problem is not None:
        return 400, problem
    if request.sampling.grammar is not None and not grammars:
        return 400, "this instance has no tokenizer, so an answer can't be led by a grammar"
    if request.wants_prompt_logprobs and request.prompt_tokens * (9 + 15 * request.top_logprobs) > MAX_FRAME // 2:
        return 400, (
            f"the log-probabilities of {request.prompt_tokens} prompt tokens, with {request.top_logprobs} of the "
            "best at each, are too many for one answer"
        )
    if request.prompt_tokens + request.sampling.max_new_tokens > limits.max_context:
        return 400, (
            f"{request.prompt_tokens} prompt tokens and {request.sampling.max_new_tokens} new ones are over the "
            f"{limits.max_context} that a request may have"
        )
    if needed > pages:
        return 400, f"the request needs {needed} pages and this instance has {pages} in all"
    # What has begun elsewhere was taken on once already: a queue that is full of what has not does not turn it away.
    queued = limits.max_queued_requests * (2 if request.has_begun else 1)
    if len(live) >= limits.max_running_requests + queued:
        return 429, f"{len(live)} requests are waiting already; try again later"
    return None
