"""``POST /generate``: SGLang's own request and answer."""

from __future__ import annotations

from typing import Any

import msgspec

from pdjax.server.jobs import Bootstrap, Job, make_jobs, new_rid
from pdjax.server.parse import convert, read, refuse_unsupported
from pdjax.server.run import Output, Run
from pdjax.server.sampling import SamplingFields
from pdjax.server.service import Service
from pdjax.web import DONE, Exchange, HttpError, encode_json, event

DEFAULT_MAX_TOKENS = 128

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "input_embeds": ([],),
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "lora_path": (),
    "session_params": (),
    "custom_logit_processor": (),
    "top_logprobs_num": (0,),
    "token_ids_logprob": ([],),
    "return_hidden_states": (False,),
}


class GenerateRequest(msgspec.Struct):
    """The body of ``/generate``; fields that are not named here are tolerated, since routers send many."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    rid: str | list[str] | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    top_logprobs_num: Any = None
    token_ids_logprob: Any = None
    return_hidden_states: Any = None


async def generate(service: Service, exchange: Exchange, body: bytes) -> None:
    """Answer one request.

    Raises:
        HttpError: it can't be answered.
    """
    request = read(body, GenerateRequest)
    batch, jobs = await _jobs(service, request)
    logprobs = bool(request.return_logprob)
    with service.run(jobs) as run:
        if request.stream and service.leader.role != "prefill":
            await _stream(exchange, run, batch=batch, logprobs=logprobs)
        else:
            answers = [answer(output, logprobs=logprobs) for output in await run.finish()]
            await exchange.answer(200, encode_json(answers if batch else answers[0]))


def answer(output: Output, *, logprobs: bool) -> dict[str, Any]:
    """A sample as SGLang shows it: text and ids from the start, and what is known about it."""
    meta: dict[str, Any] = {
        "id": output.job.rid,
        "finish_reason": output.finish,
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": len(output.token_ids),
        "cached_tokens": output.cached_tokens,
        "e2e_latency": output.seconds,
    }
    if logprobs:
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [
            (logprob, token, None) for logprob, token in zip(output.logprobs, output.token_ids, strict=True)
        ]
    if output.timeline is not None:
        meta["timeline"] = output.timeline
    return {"text": output.text, "output_ids": output.token_ids, "meta_info": meta}


async def _stream(exchange: Exchange, run: Run, *, batch: bool, logprobs: bool) -> None:
    while not run.done:
        delta = await run.next()
        if not exchange.status:
            await exchange.begin(200)
        piece = answer(delta.output, logprobs=logprobs)
        await exchange.write(event(piece | {"index": delta.output.index} if batch else piece))
    await exchange.end(DONE)


async def _jobs(service: Service, request: GenerateRequest) -> tuple[bool, list[Job]]:
    refuse_unsupported(request, _NEUTRAL)
    batch, prompts = await _prompts(service, request)
    count = len(prompts)
    params = request.sampling_params or {}
    if isinstance(params, list):
        if len(params) != count:
            raise HttpError(400, f"sampling_params: a list of {len(params)} for {count} prompts; give one each")
        sampling = [convert(each, SamplingFields, inside=f"sampling_params[{i}]") for i, each in enumerate(params)]
    else:
        sampling = [convert(params, SamplingFields, inside="sampling_params")] * count
    return batch, make_jobs(
        service.instance,
        prompts,
        sampling,
        rids=_rids(request.rid, count, batch=batch),
        bootstrap=Bootstrap(request.bootstrap_host, request.bootstrap_port, request.bootstrap_room),
        default_max=DEFAULT_MAX_TOKENS,
    )


async def _prompts(service: Service, request: GenerateRequest) -> tuple[bool, list[list[int]]]:
    if (request.text is None) == (request.input_ids is None):
        raise HttpError(400, "give either text or input_ids")
    if request.input_ids is not None:
        return token_prompts("input_ids", request.input_ids)
    texts = [request.text] if isinstance(request.text, str) else request.text or []
    return isinstance(request.text, list), [await service.vocabulary.encode(text, special=True) for text in texts]


def token_prompts(name: str, value: list[int | list[int]]) -> tuple[bool, list[list[int]]]:
    """Prompts given as ids, one or a list of them; and whether it is a list of them.

    Raises:
        HttpError: 400, ids and lists are mixed.
    """
    flat = [each for each in value if isinstance(each, int)]
    lists = [each for each in value if isinstance(each, list)]
    if flat and lists:
        raise HttpError(400, f"{name} must be a list of token ids or a list of such lists, not both")
    return (True, lists) if lists else (False, [flat])


def _rids(rid: str | list[str] | None, count: int, *, batch: bool) -> list[str]:
    if rid is None or rid == "":
        return [new_rid("gen") for _ in range(count)]
    if isinstance(rid, list):
        if len(rid) != count:
            raise HttpError(400, f"rid: a list of {len(rid)} for {count} prompts; give one each")
        return rid
    return [f"{rid}_{i}" for i in range(count)] if batch else [rid]
