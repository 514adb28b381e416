"""The router process: its routes, its command line, and its run."""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import Iterable, Sequence
from typing import Any

import aiohttp
import uvloop
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdjax.responses import error_handlers, error_response, json_response
from pdjax.router.dispatch import CONNECT_SECONDS, RECOMPUTES, Dispatcher
from pdjax.router.fan_out import Reply, aborted_of, ask, ask_all, tokens_of
from pdjax.router.fleet import Fleet, FleetError, Instance, parse_instance
from pdjax.web import (
    MAX_BODY,
    ExchangeRoute,
    bind,
    decode_object,
    encode_json,
    error_payload,
    read_body,
    say,
)
from pdjax.web import serve as serve_app

POOL_SECONDS = 30.0  # instances keep idle connections for longer, so that none closes under a request
GENERATION_CHECK_SECONDS = 20.0
TOKENIZE_SECONDS = 60.0
_TOKENIZED_BYTES = 4 * MAX_BODY  # a byte of text is a token of a few digits at most
_ONE_TOKEN = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}}
GENERATION_ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")


class Router:
    """The routes in front of a fleet, and what runs beside them."""

    def __init__(self, fleet: Fleet, dispatcher: Dispatcher, session: aiohttp.ClientSession) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._session = session
        self._started = int(time.time())
        self._registry = CollectorRegistry()
        self._registry.register(_FleetMetrics(fleet, dispatcher))
        self._requests = Counter(
            "pdjax_router_requests", "HTTP requests that have ended", ["route", "status"], registry=self._registry
        )

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route(path, ExchangeRoute(self._dispatcher, self._observe), methods=["POST"]) for path in GENERATION_ROUTES
        ]
        for paths, endpoint in (
            (("/health", "/readiness"), self._health),
            (("/v1/models",), self._models),
            (("/v1/models/{model:path}",), self._model),
            (("/server_info", "/get_server_info"), self._server_info),
            (("/model_info", "/get_model_info"), self._model_info),
            (("/metrics",), self._metrics),
            (("/health_generate",), self._health_generate),
            (("/get_loads",), self._loads),
        ):
            routes += [Route(path, endpoint, methods=["GET"]) for path in paths]
        routes.append(Route("/flush_cache", self._flush_cache, methods=["GET", "POST"]))
        routes.append(Route("/abort_request", self._abort_request, methods=["POST"]))
        routes += [Route(path, self._by_any, methods=["POST"]) for path in ("/tokenize", "/detokenize")]
        return Starlette(routes=routes, exception_handlers=error_handlers("router"))

    async def run(self) -> str | None:
        """Watch the fleet, for ever."""
        return await self._fleet.run()

    def abandon(self, reason: str) -> None:
        """End all open requests with an error."""
        self._dispatcher.abandon(reason)

    def _observe(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    async def _health(self, _: Request) -> Response:
        missing = self._fleet.missing()
        if missing is not None:
            return error_response(503, missing)
        return Response("OK", media_type="text/plain")

    async def _models(self, _: Request) -> Response:
        return json_response({"object": "list", "data": self._served()})

    async def _model(self, request: Request) -> Response:
        name, served = request.path_params["model"], self._served()
        for model in served:
            if model["id"] == name:
                return json_response(model)
        known = ", ".join(repr(model["id"]) for model in served) or "none"
        return error_response(404, f"model: {name!r} is not served here; served now: {known}")

    def _served(self) -> list[dict[str, Any]]:
        """Models of the instances that serve, with the context that all of a model's instances have room for."""
        contexts: dict[str, list[int]] = {}
        for info in (each.info for each in self._serving()):
            if info.get("served_model_name"):
                contexts.setdefault(info["served_model_name"], []).append(info.get("max_context") or 0)
        return [
            {
                "id": name,
                "object": "model",
                "created": self._started,
                "owned_by": "pdjax",
                "max_model_len": min(contexts[name]) or None,
            }
            for name in sorted(contexts)
        ]

    async def _server_info(self, _: Request) -> Response:
        return json_response(
            {
                "engine_type": "router",
                "prefill": [_describe(each) for each in self._fleet.prefill],
                "decode": [_describe(each) for each in self._fleet.decode],
            }
        )

    async def _model_info(self, _: Request) -> Response:
        serving = self._serving()
        if not serving:
            return self._nobody()
        info = serving[0].info
        return json_response(
            {
                "model_path": info.get("model_path"),
                "tokenizer_path": info.get("model_path"),
                "is_generation": True,
                "model_type": info.get("model_type"),
                "served_model_name": info.get("served_model_name"),
            }
        )

    async def _health_generate(self, _: Request) -> Response:
        """Has the next pair make a token."""
        try:
            async with asyncio.timeout(GENERATION_CHECK_SECONDS):
                status, body = await self._dispatcher.ask("/generate", _ONE_TOKEN)
        except TimeoutError:
            status, body = (
                503,
                encode_json(error_payload(503, f"no pair made a token within {GENERATION_CHECK_SECONDS:g} s")),
            )
        if status != 200:
            return Response(body, status, media_type="application/json")
        return Response("OK", media_type="text/plain")

    async def _loads(self, _: Request) -> Response:
        """Load of each instance in tokens; -1 if it does not say."""
        replies = await self._ask_all("GET", "/get_load")
        return json_response({"workers": [{"worker": each.instance.url, "load": tokens_of(each)} for each in replies]})

    async def _flush_cache(self, _: Request) -> Response:
        replies = await self._ask_all("POST", "/flush_cache")
        failed = {each.instance.url: each.words for each in replies if each.status != 200}
        flushed = len(replies) - len(failed)
        said = {"status": "partial" if failed else "success", "workers_flushed": flushed, "failed": failed}
        return json_response(said, 206 if failed and flushed else 503 if failed else 200)

    async def _abort_request(self, request: Request) -> Response:
        """Both halves of a request have the id that its client gave it."""
        body = await read_body(request.receive)
        decode_object(body)
        replies = await self._ask_all("POST", "/abort_request", body)
        refusals = [each for each in replies if each.status == 400]
        if refusals:
            return error_response(400, refusals[0].words)
        return json_response({"aborted": sum(aborted_of(each) for each in replies)})

    async def _by_any(self, request: Request) -> Response:
        """What every instance answers alike: the first that serves is asked."""
        serving = self._serving()
        if not serving:
            return self._nobody()
        asked, path, body = serving[0], request.url.path, await read_body(request.receive)
        reply = await ask(self._session, asked, "POST", path, body, seconds=TOKENIZE_SECONDS, most=_TOKENIZED_BYTES)
        if not reply.status:
            return error_response(502, f"{asked.name} did not answer: {reply.reason}")
        return Response(reply.body, reply.status, media_type="application/json")

    def _nobody(self) -> Response:
        return error_response(503, self._fleet.missing() or "no instance serves now")

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _ask_all(self, method: str, path: str, body: bytes = b"") -> list[Reply]:
        return await ask_all(self._session, [*self._fleet.prefill, *self._fleet.decode], method, path, body)

    def _serving(self) -> list[Instance]:
        return [each for each in (*self._fleet.prefill, *self._fleet.decode) if each.problem is None]


class _FleetMetrics(Collector):
    """State of the instances."""

    def __init__(self, fleet: Fleet, dispatcher: Dispatcher) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """The values as metrics."""
        up = GaugeMetricFamily("pdjax_router_instance_up", "1 if it serves", labels=["role", "url"])
        calls = GaugeMetricFamily("pdjax_router_outstanding", "calls in progress", labels=["role", "url"])
        for each in (*self._fleet.prefill, *self._fleet.decode):
            up.add_metric([each.role, each.url], float(each.problem is None))
            calls.add_metric([each.role, each.url], each.outstanding)
        yield up
        yield calls
        yield CounterMetricFamily(
            "pdjax_router_retries", "requests sent to another pair", value=self._dispatcher.retries
        )  # fmt: skip
        yield CounterMetricFamily(
            "pdjax_recomputed_rooms", "rooms that took the place of lost ones", value=self._dispatcher.recomputed_rooms
        )
        yield CounterMetricFamily(
            "pdjax_router_resumed_streams",
            "streams that had begun and were given to another pair",
            value=self._dispatcher.resumed_streams,
        )


def serve(
    prefill_urls: Sequence[str],
    decode_urls: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    request_timeout: float = 1800.0,
    idle_timeout: float = 300.0,
    recomputes: int = RECOMPUTES,
) -> int:
    """Route until SIGTERM or SIGINT.

    Args:
        prefill_urls: ``URL`` or ``URL,BOOTSTRAP_PORT`` each; they need not be up yet.
        decode_urls: ``URL`` each.
        request_timeout: seconds for a whole request.
        idle_timeout: seconds between two pieces of a stream.
        recomputes: how often a request that was lost is computed anew before its client is told.

    Returns:
        The exit code: 0, or 2 if it could not start.
    """
    try:
        prefill = [parse_instance(url, "prefill") for url in prefill_urls]
        decode = [parse_instance(url, "decode") for url in decode_urls]
        return uvloop.run(_run(prefill, decode, host, port, request_timeout, idle_timeout, recomputes))
    except (FleetError, OSError) as error:
        say("router", str(error))
        return 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the router."""
    parser.add_argument(
        "--prefill", action="extend", nargs="+", required=True, metavar="URL[,BOOTSTRAP_PORT]",
        help="prefill instances; may be given more than once",
    )  # fmt: skip
    parser.add_argument(
        "--decode", action="extend", nargs="+", required=True, metavar="URL",
        help="decode instances; may be given more than once",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to bind; 0: any (default: %(default)s)")
    parser.add_argument(
        "--request-timeout", type=_seconds, default=1800.0, metavar="SECONDS",
        help="the longest that a whole request may take (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--idle-timeout", type=_seconds, default=300.0, metavar="SECONDS",
        help="the longest pause between two pieces of a stream (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--recomputes", type=_count, default=RECOMPUTES, metavar="N",
        help="how often a request that an instance or a transfer has lost is computed anew, by others if there are "
             "any, before its client is told (default: %(default)s)",
    )  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Run the router for parsed arguments; returns the exit code."""
    return serve(
        args.prefill,
        args.decode,
        host=args.host,
        port=args.port,
        request_timeout=args.request_timeout,
        idle_timeout=args.idle_timeout,
        recomputes=args.recomputes,
    )


async def _run(
    prefill: list[Instance],
    decode: list[Instance],
    host: str,
    port: int,
    request_timeout: float,
    idle_timeout: float,
    recomputes: int,
) -> int:
    listener = bind(host, port)
    timeout = aiohttp.ClientTimeout(total=request_timeout, sock_connect=CONNECT_SECONDS)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=POOL_SECONDS),
        timeout=timeout,
        auto_decompress=False,
        skip_auto_headers=["Accept-Encoding", "User-Agent"],
    ) as session:
        fleet = Fleet(prefill, decode, session)
        dispatcher = Dispatcher(
            fleet, session, request_seconds=request_timeout, idle_seconds=idle_timeout, recomputes=recomputes
        )
        router = Router(fleet, dispatcher, session)
        bound, bound_port = listener.getsockname()[:2]
        say("router", f"listening on http://{bound}:{bound_port}")
        gc.freeze()
        code = await serve_app(router.app(), listener, router, name="router")
        await asyncio.sleep(0)  # let cancelled calls close their connections
        return code


def _seconds(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, not {text}")
    return value


def _describe(instance: Instance) -> dict[str, Any]:
    return {"url": instance.url, "healthy": instance.problem is None, "problem": instance.problem, **instance.info}
