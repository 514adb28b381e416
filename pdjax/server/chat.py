"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from pdjax.server.detokenize import REPLACEMENT
from pdjax.server.jobs import Job, make_jobs, new_rid
from pdjax.server.openai_fields import CommonFields, check_common, finish_reason, meta_info, usage
from pdjax.server.parse import read
from pdjax.server.run import Output, Run
from pdjax.server.service import Service
from pdjax.web import DONE, Exchange, HttpError, encode_json, event

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "continue_final_message": (False,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
}


class Part(msgspec.Struct):
    """A part of a message's content."""

    type: str
    text: str | None = None


class Message(msgspec.Struct):
    """A message of the conversation; fields that are not named here are tolerated, since answers are sent back."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: Any = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def for_template(self, index: int) -> dict[str, Any]:
        """What a chat template reads. Raises `HttpError` 400 for content that is not text."""
        content = self.content
        if isinstance(content, list):
            for part in content:
                if part.type != "text" or part.text is None:
                    raise HttpError(400, f"messages[{index}].content: only text parts are supported, not {part.type!r}")
            content = "".join(part.text or "" for part in content)
        if content is None and not self.tool_calls:
            raise HttpError(400, f"messages[{index}].content: missing; give a text")
        others = {name: getattr(self, name) for name in ("name", "tool_calls", "tool_call_id", "reasoning_content")}
        return {"role": self.role, "content": content or ""} | {k: v for k, v in others.items() if v is not None}


class ChatRequest(CommonFields, forbid_unknown_fields=True, kw_only=True):
    """The body of ``/v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    continue_final_message: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    reasoning_effort: str | None = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


async def chat(service: Service, exchange: Exchange, body: bytes) -> None:
    """Answer one request.

    Raises:
        HttpError: it can't be answered.
    """
    request = read(body, ChatRequest)
    check_common(request, _NEUTRAL)
    service.check_model(request.model)
    job = await _job(service, request)
    answer = _Answer(service, request, job.rid)
    with service.run([job]) as run:
        if request.stream and service.leader.role != "prefill":
            await answer.stream(exchange, run)
        else:
            (output,) = await run.finish()
            await exchange.answer(200, encode_json(answer.whole(output)))


async def _job(service: Service, request: ChatRequest) -> Job:
    if not request.messages:
        raise HttpError(400, "messages: empty; give at least one")
    if isinstance(request.rid, list):
        raise HttpError(400, "rid: a list; a chat has one answer, so give a text")
    instance = service.instance
    messages = [message.for_template(i) for i, message in enumerate(request.messages)]
    text = service.template.render(messages, request.chat_template_kwargs)
    limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    (job,) = make_jobs(
        instance,
        [await service.vocabulary.encode(text, special=False)],
        [request.sampling(limit)],
        rids=[request.rid or new_rid("chatcmpl")],
        bootstrap=request.bootstrap,
        default_max=instance.default_chat_tokens,
        max_name="max_tokens" if request.max_completion_tokens is None else "max_completion_tokens",
    )
    return job


class _Answer:
    """The two forms of an answer."""

    def __init__(self, service: Service, request: ChatRequest, rid: str) -> None:
        self._service = service
        self._request = request
        self._head: dict[str, Any] = {
            "id": rid,
            "created": int(time.time()),
            "model": service.model_name,
        }

    def whole(self, output: Output) -> dict[str, Any]:
        """The answer in one piece."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": output.text},
            "logprobs": self._logprobs(output.token_ids, output.logprobs),
            "finish_reason": finish_reason(output),
            "matched_stop": (output.finish or {}).get("matched"),
        }
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": usage([output]),
            "meta_info": meta_info([output]),
        }

    async def stream(self, exchange: Exchange, run: Run) -> None:
        """The answer as it comes: first the role, which also tells of the first token."""
        output = run.outputs[0]
        while not run.done:
            delta = await run.next()
            if not exchange.status:
                await exchange.begin(200)
                await exchange.write(self._event({"role": "assistant", "content": ""}, None, None))
            logprobs = self._logprobs(delta.token_ids, delta.logprobs)
            if delta.text or (logprobs and delta.token_ids):
                await exchange.write(self._event({"content": delta.text}, logprobs, None))
        await exchange.write(self._event({}, None, output))
        if self._request.wants_usage:
            last = {"choices": [], "usage": usage([output]), "meta_info": meta_info([output])}
            await exchange.write(event(self._head | {"object": "chat.completion.chunk"} | last))
        await exchange.end(DONE)

    def _event(self, delta: dict[str, Any], logprobs: dict[str, Any] | None, ended: Output | None) -> bytes:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": None if ended is None else finish_reason(ended),
        }
        if ended is not None:
            choice["matched_stop"] = (ended.finish or {}).get("matched")
        return event(self._head | {"object": "chat.completion.chunk", "choices": [choice]})

    def _logprobs(self, token_ids: list[int], logprobs: list[float]) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        texts = [self._service.vocabulary.token_text(token) for token in token_ids]
        return {
            "content": [
                {"token": text, "logprob": logprob, "bytes": _bytes(text), "top_logprobs": []}
                for text, logprob in zip(texts, logprobs, strict=True)
            ]
        }


def _bytes(text: str) -> list[int] | None:
    """None for a token that holds a part of a character only: its text does not tell its bytes."""
    return None if REPLACEMENT in text else list(text.encode())
