"""``POST /generate``: SGLang's own request and answer."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from pdjax.server.jobs import Ask, Bootstrap, make_jobs, new_rid, wanted_rank
from pdjax.server.logprobs import NativeLogprobs
from pdjax.server.output import Delta, Output
from pdjax.server.parse import convert, read, refuse_unsupported
from pdjax.server.ranges import Priority, Seconds
from pdjax.server.sampling import SamplingFields
from pdjax.server.service import Service
from pdjax.server.streaming import Opening, Resume, send_stream
from pdjax.web import DONE, Exchange, HttpError, encode_json, event

DEFAULT_MAX_TOKENS = 128

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "input_embeds": ([],),
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "lora_path": (),
    "session_params": (),
    "custom_logit_processor": (),
    "token_ids_logprob": ([],),
    "return_hidden_states": (False,),
}


# Read in a second step, which knows the nearest right name of a wrong one; documented by its own schema all the same.
_SAMPLING_SCHEMA = {"$ref": "#/components/schemas/SamplingFields"}
_SAMPLING = msgspec.Meta(
    extra_json_schema={
        "anyOf": [_SAMPLING_SCHEMA, {"type": "array", "items": _SAMPLING_SCHEMA}, {"type": "null"}],
    }
)


class GenerateRequest(msgspec.Struct):
    """The body of ``/generate``; fields that are not named here are tolerated, since routers send many."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: Annotated[dict[str, Any] | list[dict[str, Any]] | None, _SAMPLING] = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool | None = None
    priority: Priority = None
    deadline_s: Seconds = None
    rid: str | list[str] | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None
    data_parallel_rank: int | None = None
    routed_dp_rank: int | None = None
    disagg_prefill_dp_rank: int | None = None
    pdjax_resume: Resume | None = None
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    token_ids_logprob: Any = None
    return_hidden_states: Any = None


async def generate(service: Service, exchange: Exchange, body: bytes) -> None:
    """Answer one request.

    Raises:
        HttpError: it can't be answered.
    """
    request = read(body, GenerateRequest)
    batch, asks, shown = await _asks(service, request)
    jobs = make_jobs(
        service.instance,
        asks,
        bootstrap=Bootstrap(request.bootstrap_host, request.bootstrap_port, request.bootstrap_room),
        default_max=DEFAULT_MAX_TOKENS,
    )
    run = service.run(jobs, resume=request.pdjax_resume, stream=request.stream)
    several = batch or len(jobs) > 1
    logprobs = [shown[job.prompt] for job in jobs]

    def say(delta: Delta) -> bytes:
        index = delta.output.index
        piece = answer(delta.output, logprobs[index])
        return event(piece | {"index": index} if several else piece)

    if service.streams(request.stream):
        opening = Opening.of([ask.rid for ask in asks], request.pdjax_resume)
        await send_stream(exchange, run, opening, say=say, close=lambda: DONE)
    else:
        outputs = await run.finish()
        answers = [answer(output, logprobs[output.index]) for output in outputs]
        await exchange.answer(200, encode_json(answers if several else answers[0]))


def answer(output: Output, logprobs: NativeLogprobs | None) -> dict[str, Any]:
    """A sample as SGLang shows it: text and ids from the start, and what is known about it."""
    meta: dict[str, Any] = {
        "id": output.job.rid,
        "finish_reason": output.finish,
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": len(output.token_ids),
        "cached_tokens": output.cached_tokens,
        "e2e_latency": output.seconds,
    }
    if logprobs is not None:
        meta |= logprobs.fields(output)
    if output.timeline is not None and output.finish is not None:
        meta["timeline"] = output.timeline
    return {"text": output.text, "output_ids": output.token_ids, "meta_info": meta}


async def _asks(service: Service, request: GenerateRequest) -> tuple[bool, list[Ask], list[NativeLogprobs | None]]:
    """Whether prompts came in a list, what is asked of each, and how its log-probabilities are shown."""
    refuse_unsupported(request, NEUTRAL)
    batch, prompts = await _prompts(service, request)
    count = len(prompts)
    sampling = _sampling(request.sampling_params or {}, count)
    rids = _rids(request.rid, count, batch=batch)
    wanted = _each("return_logprob", request.return_logprob, count)
    starts = _each("logprob_start_len", request.logprob_start_len, count)
    tops = _each("top_logprobs_num", request.top_logprobs_num, count)
    rank = wanted_rank(
        service.instance, request.data_parallel_rank, request.routed_dp_rank, request.disagg_prefill_dp_rank
    )
    asks: list[Ask] = []
    shown: list[NativeLogprobs | None] = []
    for i, ids in enumerate(prompts):
        start, top = (starts[i], tops[i] or 0) if wanted[i] else (None, 0)
        start = None if start == -1 else start
        if start is not None and not 0 <= start < max(1, len(ids)):
            raise HttpError(
                400, f"logprob_start_len must lie in -1..{len(ids) - 1} for a prompt of {len(ids)} tokens, not {start}"
            )
        # Routers put the prefill half's in front of the decode half's, which tells all of them.
        show_from = None if service.leader.role == "prefill" else start
        texts = bool(request.return_text_in_logprobs)
        shown.append(NativeLogprobs(service.vocabulary, start=show_from, top=top, texts=texts) if wanted[i] else None)
        asks.append(
            Ask(
                ids,
                rids[i],
                sampling[i],
                top_logprobs=top,
                prompt_logprobs=start is not None,
                priority=request.priority,
                deadline_s=request.deadline_s,
                dp_rank=rank,
            )
        )
    return batch, asks, shown


def _sampling(params: dict[str, Any] | list[dict[str, Any]], count: int) -> list[SamplingFields]:
    if not isinstance(params, list):
        return [convert(params, SamplingFields, inside="sampling_params")] * count
    if len(params) != count:
        raise HttpError(400, f"sampling_params: a list of {len(params)} for {count} prompts; give one each")
    return [convert(each, SamplingFields, inside=f"sampling_params[{i}]") for i, each in enumerate(params)]


def _each(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise HttpError(400, f"{name}: a list of {len(value)} for {count} prompts; give one each, or one for all")
    return value


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
