"""``POST /v1/completions``."""

from __future__ import annotations

import time
from typing import Any

from pdjax.server.jobs import Job, make_jobs, new_rid
from pdjax.server.native import token_prompts
from pdjax.server.openai_fields import CommonFields, check_common, finish_reason, meta_info, usage
from pdjax.server.parse import read
from pdjax.server.run import Output, Run
from pdjax.server.service import Service
from pdjax.web import DONE, Exchange, HttpError, encode_json, event

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(CommonFields, forbid_unknown_fields=True, kw_only=True):
    """The body of ``/v1/completions``."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


async def completions(service: Service, exchange: Exchange, body: bytes) -> None:
    """Answer one request.

    Raises:
        HttpError: it can't be answered.
    """
    request = read(body, CompletionRequest)
    check_common(request, {"best_of": (1,), "suffix": ("",)})
    if request.logprobs is not None and not 0 <= request.logprobs <= 1:
        raise HttpError(400, f"logprobs: {request.logprobs}; only those of the chosen tokens are given yet: 0 or 1")
    if request.echo and request.logprobs is not None:
        raise HttpError(400, "logprobs: those of the prompt are not given yet; leave out echo or logprobs")
    service.check_model(request.model)
    jobs, echoes = await _jobs(service, request)
    answer = _Answer(service, request, echoes)
    with service.run(jobs) as run:
        if request.stream and service.leader.role != "prefill":
            await answer.stream(exchange, run)
        else:
            await exchange.answer(200, encode_json(answer.whole(await run.finish())))


async def _jobs(service: Service, request: CompletionRequest) -> tuple[list[Job], list[str]]:
    """The jobs, and the text that each answer starts with."""
    prompts = await _prompts(service, request.prompt)
    rids = request.rid if isinstance(request.rid, list) else [f"{request.rid or new_rid('cmpl')}"]
    if len(rids) == 1 and len(prompts) > 1:
        rids = [f"{rids[0]}_{i}" for i in range(len(prompts))]
    if len(rids) != len(prompts):
        raise HttpError(400, f"rid: a list of {len(rids)} for {len(prompts)} prompts; give one each")
    jobs = make_jobs(
        service.instance,
        prompts,
        [request.sampling(request.max_tokens)] * len(prompts),
        rids=rids,
        bootstrap=request.bootstrap,
        default_max=DEFAULT_MAX_TOKENS,
        max_name="max_tokens",
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
    """The two forms of an answer."""

    def __init__(self, service: Service, request: CompletionRequest, echoes: list[str]) -> None:
        self._service = service
        self._request = request
        self._echoes = echoes
        self._offsets = [len(echo) for echo in echoes]
        self._head: dict[str, Any] = {
            "id": new_rid("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model_name,
        }

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [
            self._choice(output, self._echoes[output.index] + output.text, output.token_ids, output.logprobs)
            for output in outputs
        ]
        return self._head | {"choices": choices, "usage": usage(outputs), "meta_info": meta_info(outputs)}

    async def stream(self, exchange: Exchange, run: Run) -> None:
        """The answer as it comes."""
        unsaid = dict(enumerate(self._echoes))
        while not run.done:
            delta = await run.next()
            if not exchange.status:
                await exchange.begin(200)
            output = delta.output
            text = unsaid.pop(output.index, "") + delta.text
            if text or output.finish is not None or self._request.logprobs is not None:
                choice = self._choice(output, text, delta.token_ids, delta.logprobs)
                await exchange.write(event(self._head | {"choices": [choice]}))
        if self._request.wants_usage:
            last = {"choices": [], "usage": usage(run.outputs), "meta_info": meta_info(run.outputs)}
            await exchange.write(event(self._head | last))
        await exchange.end(DONE)

    def _choice(self, output: Output, text: str, token_ids: list[int], logprobs: list[float]) -> dict[str, Any]:
        return {
            "index": output.index,
            "text": text,
            "logprobs": None if self._request.logprobs is None else self._logprobs(output, token_ids, logprobs),
            "finish_reason": finish_reason(output),
            "matched_stop": (output.finish or {}).get("matched"),
        }

    def _logprobs(self, output: Output, token_ids: list[int], logprobs: list[float]) -> dict[str, Any]:
        tokens = [self._service.vocabulary.token_text(token) for token in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[output.index])
            self._offsets[output.index] += len(token)
        top = [{token: logprob} for token, logprob in zip(tokens, logprobs, strict=True)]
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": top if self._request.logprobs else None,
            "text_offset": offsets,
        }
