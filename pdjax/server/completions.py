"""``POST /v1/completions``."""

from __future__ import annotations

import time
from typing import Any

from pdjax.server.jobs import MAX_TOP_LOGPROBS, Ask, Job, make_jobs, new_rid
from pdjax.server.logprobs import CompletionLogprobs
from pdjax.server.native import token_prompts
from pdjax.server.openai_fields import CommonFields, check_common, finish_reason, meta_info, running_usage, usage
from pdjax.server.output import Output, Top
from pdjax.server.parse import read
from pdjax.server.ranges import AtLeastZero, Samples, TopCount
from pdjax.server.run import Run
from pdjax.server.service import Service
from pdjax.server.structured import response_grammar
from pdjax.web import DONE, Exchange, HttpError, encode_json, event

DEFAULT_MAX_TOKENS = 16
NEUTRAL: dict[str, tuple[Any, ...]] = {"suffix": ("",)}


class CompletionRequest(CommonFields, forbid_unknown_fields=True, kw_only=True):
    """The body of ``/v1/completions``."""

    prompt: str | list[str | int | list[int]] | None = None
    max_tokens: AtLeastZero = None
    echo: bool | None = None
    logprobs: TopCount = None
    best_of: Samples = None
    suffix: str | None = None


async def completions(service: Service, exchange: Exchange, body: bytes) -> None:
    """Answer one request.

    Raises:
        HttpError: it can't be answered.
    """
    request = read(body, CompletionRequest)
    check_common(request, NEUTRAL)
    if request.logprobs is not None and not 0 <= request.logprobs <= MAX_TOP_LOGPROBS:
        raise HttpError(400, f"logprobs must lie in 0..{MAX_TOP_LOGPROBS}, not {request.logprobs}")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise HttpError(400, f"best_of: only the same as n ({request.n or 1}) is supported, not {request.best_of}")
    service.check_model(request.model)
    jobs, echoes = await _jobs(service, request)
    answer = _Answer(service, request, [echoes[job.prompt] for job in jobs])
    with service.run(jobs) as run:
        if request.stream and service.leader.role != "prefill":
            await answer.stream(exchange, run)
        else:
            await exchange.answer(200, encode_json(answer.whole(await run.finish())))


async def _jobs(service: Service, request: CompletionRequest) -> tuple[list[Job], list[str]]:
    """The jobs, and the text that the answers to each prompt start with."""
    prompts = await _prompts(service, request.prompt)
    rids = request.rid if isinstance(request.rid, list) else [f"{request.rid or new_rid('cmpl')}"]
    if len(rids) == 1 and len(prompts) > 1:
        rids = [f"{rids[0]}_{i}" for i in range(len(prompts))]
    if len(rids) != len(prompts):
        raise HttpError(400, f"rid: a list of {len(rids)} for {len(prompts)} prompts; give one each")
    sampling, grammar = request.sampling(request.max_tokens), response_grammar(request.response_format)
    rank = request.dp_rank(service.instance)
    asks = [
        Ask(
            ids,
            rid,
            sampling,
            grammar=grammar,
            top_logprobs=request.logprobs or 0,
            prompt_logprobs=bool(request.echo) and request.logprobs is not None,
            priority=request.priority,
            deadline_s=request.deadline_s,
            dp_rank=rank,
        )
        for ids, rid in zip(prompts, rids, strict=True)
    ]
    jobs = make_jobs(
        service.instance, asks, bootstrap=request.bootstrap, default_max=DEFAULT_MAX_TOKENS, max_name="max_tokens"
    )
    if not request.echo:
        return jobs, [""] * len(prompts)
    given = [request.prompt] if isinstance(request.prompt, str) else request.prompt or []
    texts = [each for each in given if isinstance(each, str)]
    return jobs, texts or [service.vocabulary.decode(ids, skip_special=True) for ids in prompts]


async def _prompts(service: Service, prompt: str | list[str | int | list[int]] | None) -> list[list[int]]:
    if prompt is None:
        raise HttpError(400, "prompt: missing; give a text or token ids")
    given = [prompt] if isinstance(prompt, str) else prompt
    texts = [each for each in given if isinstance(each, str)]
    ids = [each for each in given if not isinstance(each, str)]
    if texts and ids:
        raise HttpError(400, "prompt: a list holds either texts or token ids, not both")
    if ids or not texts:
        return token_prompts("prompt", ids)[1]
    return [await service.vocabulary.encode(text, special=True) for text in texts]


class _Answer:
    """The two forms of an answer. `echoes` are the texts that the choices start with."""

    def __init__(self, service: Service, request: CompletionRequest, echoes: list[str]) -> None:
        self._wants_usage = request.wants_usage
        self._wants_running_usage = request.wants_running_usage
        self._echoes = echoes
        self._logprobs = None
        if request.logprobs is not None:
            self._logprobs = CompletionLogprobs(service.vocabulary, top=request.logprobs)
        self._head: dict[str, Any] = {
            "id": new_rid("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model_name,
        }

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [
            self._choice(output, output.text, output.token_ids, output.logprobs, output.top_logprobs)
            for output in outputs
        ]
        return self._head | {"choices": choices, "usage": usage(outputs), "meta_info": meta_info(outputs)}

    async def stream(self, exchange: Exchange, run: Run) -> None:
        """The answer as it comes."""
        begun: set[int] = set()
        while not run.done:
            delta = await run.next()
            if not exchange.status:
                await exchange.begin(200)
            output = delta.output
            first = output.index not in begun
            begun.add(output.index)
            if delta.text or output.finish is not None or self._logprobs or (first and self._echoes[output.index]):
                choice = self._choice(
                    output, delta.text, delta.token_ids, delta.logprobs, delta.top_logprobs, first=first
                )
                so_far = {"usage": running_usage(output)} if self._wants_running_usage else {}
                await exchange.write(event(self._head | {"choices": [choice]} | so_far))
        if self._wants_usage:
            last = {"choices": [], "usage": usage(run.outputs), "meta_info": meta_info(run.outputs)}
            await exchange.write(event(self._head | last))
        await exchange.end(DONE)

    def _choice(
        self,
        output: Output,
        text: str,
        token_ids: list[int],
        logprobs: list[float],
        top: list[Top],
        *,
        first: bool = True,
    ) -> dict[str, Any]:
        return {
            "index": output.index,
            "text": (self._echoes[output.index] if first else "") + text,
            "logprobs": self._piece(output, token_ids, logprobs, top, first=first),
            "finish_reason": finish_reason(output),
            "matched_stop": (output.finish or {}).get("matched"),
        }

    def _piece(
        self, output: Output, token_ids: list[int], logprobs: list[float], top: list[Top], *, first: bool
    ) -> dict[str, Any] | None:
        """Log-probabilities of a choice's next tokens; the first piece begins with those of the echoed prompt."""
        if self._logprobs is None:
            return None
        if not first:
            return self._logprobs.piece(output.index, token_ids, logprobs, top)
        if not output.prompt_logprobs:
            self._logprobs.begin_at(output.index, len(self._echoes[output.index]))
            return self._logprobs.piece(output.index, token_ids, logprobs, top)
        return self._logprobs.piece(
            output.index,
            [*output.job.generate.input_ids, *token_ids],
            [*output.prompt_logprobs, *logprobs],
            [*output.prompt_top_logprobs, *top],
        )
