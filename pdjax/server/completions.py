"""``POST /v1/completions``."""

from __future__ import annotations

from typing import Any

from pdjax.server.jobs import MAX_TOP_LOGPROBS, Ask, Job, make_jobs, new_rid
from pdjax.server.logprobs import CompletionLogprobs
from pdjax.server.native import token_prompts
from pdjax.server.openai_fields import (
    CommonFields,
    check_common,
    end_of_stream,
    finish_reason,
    meta_info,
    running_usage,
    usage,
)
from pdjax.server.output import Delta, Output, Top
from pdjax.server.parse import read
from pdjax.server.ranges import AtLeastZero, Samples, TopCount
from pdjax.server.run import Run
from pdjax.server.service import Service
from pdjax.server.streaming import Opening, send_stream
from pdjax.server.structured import response_grammar
from pdjax.web import Exchange, HttpError, encode_json, event

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
    prompts = await _prompts(service, request.prompt)
    rids = _rids(request.rid, len(prompts))
    jobs, echoes = _jobs(service, request, prompts, rids)
    run = service.run(jobs, resume=request.pdjax_resume, stream=request.stream)
    opening = Opening.of(rids, request.pdjax_resume, id=new_rid("cmpl"))
    answer = _Answer(service, request, opening, run, [echoes[job.prompt] for job in jobs])
    if service.streams(request.stream):
        await send_stream(exchange, run, opening, say=answer.say, close=answer.close, recall=answer.say)
    else:
        await exchange.answer(200, encode_json(answer.whole(await run.finish())))


def _rids(rid: str | list[str] | None, count: int) -> list[str]:
    rids = rid if isinstance(rid, list) else [f"{rid or new_rid('cmpl')}"]
    if len(rids) == 1 and count > 1:
        rids = [f"{rids[0]}_{i}" for i in range(count)]
    if len(rids) != count:
        raise HttpError(400, f"rid: a list of {len(rids)} for {count} prompts; give one each")
    return rids


def _jobs(
    service: Service, request: CompletionRequest, prompts: list[list[int]], rids: list[str]
) -> tuple[list[Job], list[str]]:
    """The jobs, and the text that the answers to each prompt start with."""
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

    def __init__(
        self, service: Service, request: CompletionRequest, opening: Opening, run: Run, echoes: list[str]
    ) -> None:
        self._run = run
        self._begun: set[int] = set()
        self._wants_usage = request.wants_usage
        self._wants_running_usage = request.wants_running_usage
        self._echoes = echoes
        self._logprobs = None
        if request.logprobs is not None:
            self._logprobs = CompletionLogprobs(service.vocabulary, top=request.logprobs)
        self._head: dict[str, Any] = {
            "id": opening.id,
            "object": "text_completion",
            "created": int(opening.began),
            "model": service.model_name,
        }

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [
            self._choice(output, output.text, output.token_ids, output.logprobs, output.top_logprobs)
            for output in outputs
        ]
        return self._head | {"choices": choices, "usage": usage(outputs), "meta_info": meta_info(outputs)}

    def say(self, delta: Delta) -> bytes:
        """The event of what has come, if there is anything to say."""
        output, frame = delta.output, delta.frame
        first = output.index not in self._begun
        self._begun.add(output.index)
        if delta.text or output.finish is not None or self._logprobs or (first and self._echoes[output.index]):
            choice = self._choice(output, delta.text, frame.token_ids, frame.logprobs, frame.top_logprobs, first=first)
            so_far = {"usage": running_usage(output)} if self._wants_running_usage else {}
            return event(self._head | {"choices": [choice]} | so_far)
        return b""

    def close(self) -> bytes:
        """The end of a stream."""
        return end_of_stream(self._head, self._run.outputs, with_usage=self._wants_usage)

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
