"""The routes of an instance's HTTP surface."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import metadata
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdjax import wire
from pdjax.responses import error_handlers, json_response
from pdjax.server import answers
from pdjax.server.chat import chat
from pdjax.server.chat_request import NEUTRAL as chat_neutral
from pdjax.server.chat_request import ChatRequest
from pdjax.server.completions import NEUTRAL as completion_neutral
from pdjax.server.completions import CompletionRequest, completions
from pdjax.server.jobs import Ask, Bootstrap, make_jobs, new_rid
from pdjax.server.native import NEUTRAL as native_neutral
from pdjax.server.native import GenerateRequest, generate
from pdjax.server.openai_fields import NEUTRAL as openai_neutral
from pdjax.server.openapi import Operation, document
from pdjax.server.parse import read
from pdjax.server.sampling import SamplingFields
from pdjax.server.service import Service
from pdjax.server.trace import trace
from pdjax.web import Exchange, ExchangeRoute, HttpError, read_body

GENERATION_CHECK_SECONDS = 20.0


class AbortRequest(msgspec.Struct):
    """The body of ``/abort_request``."""

    rid: str = ""
    abort_all: bool = False


class TokenizeRequest(msgspec.Struct):
    """The body of ``/tokenize``."""

    prompt: str | list[str]
    model: str | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(msgspec.Struct):
    """The body of ``/detokenize``."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool = True


Neutral = dict[str, tuple[Any, ...]]
Handle = Callable[[Service, Request], Awaitable[Response]]
Generation = Callable[[Service, Exchange, bytes], Awaitable[None]]


def make_app(service: Service) -> Starlette:
    """The ASGI application."""
    described = document(operations(), also=[SamplingFields], version=version())

    async def openapi(_: Request) -> Response:
        return json_response(described)

    routes = [
        Route(path, ExchangeRoute(partial(handle, service), service.metrics.request), methods=[operation.method])
        for operation, handle in _generations()
        for path in operation.paths
    ]
    routes += [
        Route(path, _endpoint(handle, service), methods=[operation.method])
        for operation, handle in _others()
        for path in operation.paths
    ]
    routes.append(Route("/openapi.json", openapi, methods=["GET"]))
    return Starlette(routes=routes, exception_handlers=error_handlers("frontend"))


def operations() -> list[Operation]:
    """All routes, as the OpenAPI document tells of them."""
    return [*(each for each, _ in _generations()), *(each for each, _ in _others())]


def _generations() -> list[tuple[Operation, Generation]]:
    def post(path: str, summary: str, answer: Any, body: type[msgspec.Struct], neutral: Neutral) -> Operation:
        return Operation("POST", (path,), summary, answer, body, streams=True, neutral=neutral)

    native = answers.GenerateAnswer | list[answers.GenerateAnswer]
    return [
        (post("/generate", "SGLang's own", native, GenerateRequest, native_neutral), generate),
        (
            post(
                "/v1/completions",
                "OpenAI's completions",
                answers.CompletionAnswer,
                CompletionRequest,
                openai_neutral | completion_neutral,
            ),
            completions,
        ),
        (
            post(
                "/v1/chat/completions", "OpenAI's chats", answers.ChatAnswer, ChatRequest, openai_neutral | chat_neutral
            ),
            chat,
        ),
    ]


def _others() -> list[tuple[Operation, Handle]]:
    info = answers.ServerInfo
    return [
        (Operation("GET", ("/health",), "200 if the scheduler answers and the data path works"), _health),
        (Operation("GET", ("/health_generate",), "200 if a token can be made"), _health_generate),
        (Operation("GET", ("/v1/models",), "the served model", answers.ModelList), _models),
        (Operation("GET", ("/v1/models/{model:path}",), "the served model, by its name", answers.Model), _model),
        (Operation("GET", ("/server_info", "/get_server_info"), "what this instance is", info), _server_info),
        (Operation("GET", ("/model_info", "/get_model_info"), "what is served", answers.ModelInfo), _model_info),
        (Operation("GET", ("/get_load",), "load by scheduler", list[answers.Load]), _load),
        (Operation("GET", ("/metrics",), "Prometheus' text format"), _metrics),
        (Operation("GET", ("/trace",), "what was done lately, as Chrome trace events", answers.Trace), _trace),
        (Operation("POST", ("/flush_cache",), "drop the prefix cache"), _flush_cache),
        (Operation("GET", ("/flush_cache",), "the same, for SGLang's clients"), _flush_cache),
        (Operation("POST", ("/abort_request",), "stop a request", answers.Aborted, AbortRequest), _abort_request),
        (Operation("POST", ("/tokenize",), "text to ids", answers.Tokenized, TokenizeRequest), _tokenize),
        (Operation("POST", ("/detokenize",), "ids to text", answers.Detokenized, DetokenizeRequest), _detokenize),
    ]


def version() -> str:
    """This package's version."""
    try:
        return metadata.version("pdjax")
    except metadata.PackageNotFoundError:
        return "unknown"


def _endpoint(
    handle: Callable[[Service, Request], Awaitable[Response]], service: Service
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handle(service, request)

    return endpoint


async def _health(service: Service, _: Request) -> Response:
    await service.leader.check_health()
    return Response("OK", media_type="text/plain")


async def _health_generate(service: Service, _: Request) -> Response:
    """Has the engine make a token, without a partner. A decode instance is given its first one: it makes the second."""
    await service.leader.check_health()
    greedy = SamplingFields(max_new_tokens=2, temperature=0, ignore_eos=True)
    alone = Bootstrap(wire.NO_PARTNER, room=0)
    jobs = make_jobs(service.instance, [Ask([0], new_rid("health"), greedy)], bootstrap=alone, default_max=1)
    try:
        async with asyncio.timeout(GENERATION_CHECK_SECONDS):
            await service.run(jobs).finish()
    except TimeoutError as error:
        raise HttpError(503, f"the engine made no token within {GENERATION_CHECK_SECONDS:g} s") from error
    return Response("OK", media_type="text/plain")


async def _models(service: Service, _: Request) -> Response:
    return json_response({"object": "list", "data": [_served(service)]})


async def _model(service: Service, request: Request) -> Response:
    service.check_model(request.path_params["model"])
    return json_response(_served(service))


def _served(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "pdjax",
        "max_model_len": (service.leader.info or {}).get("max_context"),
    }


async def _server_info(service: Service, _: Request) -> Response:
    service.leader.check()
    return json_response({"version": version(), "served_model_name": service.model_name, **(service.leader.info or {})})


async def _model_info(service: Service, _: Request) -> Response:
    service.leader.check()
    info = service.leader.info or {}
    return json_response(
        {
            "model_path": info.get("model_path"),
            "tokenizer_path": info.get("model_path"),
            "is_generation": True,
            "model_type": info.get("model_type"),
            "served_model_name": service.model_name,
        }
    )


async def _load(service: Service, _: Request) -> Response:
    """One entry, since an instance has one scheduler. Tokens are whole pages."""
    stats = await service.leader.stats()
    page_size = (service.leader.info or {}).get("page_size", 1)
    used = stats.get("pages", 0) - stats.get("free_pages", 0)
    load = {
        "dp_rank": 0,
        "num_reqs": int(stats.get("live_requests", 0)),
        "num_waiting_reqs": int(stats.get("waiting_requests", 0)),
        "num_tokens": int(used * page_size),
    }
    return json_response([load])


async def _metrics(service: Service, _: Request) -> Response:
    try:
        stats = await service.leader.stats()
    except HttpError:
        stats = None  # shown as pdjax_up 0
    return Response(service.metrics.text(stats), headers={"content-type": CONTENT_TYPE_LATEST})


async def _trace(service: Service, request: Request) -> Response:
    """`?spans=0` leaves out all but the clock, for those who want to set theirs by it."""
    spans = [] if request.query_params.get("spans") == "0" else await service.leader.spans()
    return json_response(trace(spans, process=f"{service.leader.role} {service.model_name}"))


async def _flush_cache(service: Service, _: Request) -> Response:
    flushed = await service.leader.flush()
    held = f"; running requests hold {flushed.locked_pages}" if flushed.locked_pages else ""
    return Response(f"Cache flushed: {flushed.freed_pages} pages are free again{held}.\n", media_type="text/plain")


async def _abort_request(service: Service, request: Request) -> Response:
    wanted = read(await read_body(request.receive), AbortRequest)
    if not wanted.rid and not wanted.abort_all:
        raise HttpError(400, "rid: missing; give the id of the request to abort, or abort_all")
    aborted = service.leader.abort_matching(None if wanted.abort_all else wanted.rid, "aborted by /abort_request")
    return json_response({"aborted": aborted})


async def _tokenize(service: Service, request: Request) -> Response:
    wanted = read(await read_body(request.receive), TokenizeRequest)
    texts = [wanted.prompt] if isinstance(wanted.prompt, str) else wanted.prompt
    ids = [await service.vocabulary.encode(text, special=wanted.add_special_tokens) for text in texts]
    counts = [len(each) for each in ids]
    single = isinstance(wanted.prompt, str)
    most = (service.leader.info or {}).get("max_context")
    tokens, count = (ids[0], counts[0]) if single else (ids, counts)
    return json_response({"tokens": tokens, "count": count, "max_model_len": most})


async def _detokenize(service: Service, request: Request) -> Response:
    wanted = read(await read_body(request.receive), DetokenizeRequest)
    for token in wanted.tokens:
        if not 0 <= token < service.vocabulary.size:
            raise HttpError(400, f"tokens: {token} is not in the vocabulary of {service.vocabulary.size} tokens")
    return json_response({"text": service.vocabulary.decode(wanted.tokens, skip_special=wanted.skip_special_tokens)})
