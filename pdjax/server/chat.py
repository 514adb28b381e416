"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from pdjax.server.chat_request import NEUTRAL, ChatRequest, conversation_text
from pdjax.server.jobs import Ask, Job, make_jobs, new_rid
from pdjax.server.logprobs import chat_logprobs
from pdjax.server.openai_fields import check_common, end_of_stream, finish_reason, meta_info, running_usage, usage
from pdjax.server.output import Delta, Output, Top
from pdjax.server.parse import read
from pdjax.server.run import Run
from pdjax.server.service import Service
from pdjax.server.streaming import Opening, send_stream
from pdjax.server.structured import response_grammar
from pdjax.server.tool_choice import ToolUse, tool_use
from pdjax.server.tools import ToolCall, ToolCallFinder, parse
from pdjax.web import Exchange, HttpError, encode_json, event


async def chat(service: Service, exchange: Exchange, body: bytes) -> None:
    """Answer one request.

    Raises:
        HttpError: it can't be answered.
    """
    request = read(body, ChatRequest)
    check_common(request, NEUTRAL)
    service.check_model(request.model)
    if request.top_logprobs and not request.logprobs:
        raise HttpError(400, "top_logprobs: only with logprobs set to true")
    if isinstance(request.rid, list):
        raise HttpError(400, "rid: a list; a chat has one prompt, so give a text")
    use = tool_use(request.tools, request.tool_choice, parallel=request.parallel_tool_calls is not False)
    rid = request.rid or new_rid("chatcmpl")
    jobs = await _jobs(service, request, use, rid)
    run = service.run(jobs, resume=request.pdjax_resume, stream=request.stream)
    opening = Opening.of(rid, request.pdjax_resume, id=rid)
    answer = _Answer(service, request, use, opening, run)
    if service.streams(request.stream):
        await send_stream(exchange, run, opening, say=answer.say, close=answer.close, recall=answer.say)
    else:
        await exchange.answer(200, encode_json(answer.whole(await run.finish())))


async def _jobs(service: Service, request: ChatRequest, use: ToolUse, rid: str) -> list[Job]:
    instance = service.instance
    text = conversation_text(
        service.template,
        request.messages,
        use,
        request.template_options,
        go_on=bool(request.continue_final_message),
    )
    grammar = response_grammar(request.response_format)
    if grammar is not None and use.grammar is not None:
        raise HttpError(400, "response_format: an answer that must call a tool has no other form; leave one out")
    limit, max_name = request.max_completion_tokens, "max_completion_tokens"
    if limit is None:
        limit, max_name = request.max_tokens, "max_tokens"
    if limit == 0:
        raise HttpError(400, f"{max_name} must be at least 1, not 0: a chat has nothing else to tell")
    ask = Ask(
        await service.vocabulary.encode(text, special=False),
        rid,
        request.sampling(limit),
        grammar=grammar or use.grammar,
        top_logprobs=request.top_logprobs or 0,
        priority=request.priority,
        deadline_s=request.deadline_s,
        dp_rank=request.dp_rank(instance),
    )
    return make_jobs(
        instance,
        [ask],
        bootstrap=request.bootstrap,
        default_max=instance.default_chat_tokens,
        max_name=max_name,
    )


class _Answer:
    """The two forms of an answer."""

    def __init__(self, service: Service, request: ChatRequest, use: ToolUse, opening: Opening, run: Run) -> None:
        self._vocabulary = service.vocabulary
        self._wants_logprobs = bool(request.logprobs)
        self._wants_usage = request.wants_usage
        self._wants_running_usage = request.wants_running_usage
        self._use = use
        self._run = run
        self._finders: dict[int, ToolCallFinder] = {}
        self._begun: set[int] = set()
        self._head: dict[str, Any] = {
            "id": opening.id,
            "created": int(opening.began),
            "model": service.model_name,
        }

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        """The answer in one piece."""
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(output) for output in outputs],
            "usage": usage(outputs),
            "meta_info": meta_info(outputs),
        }

    def _choice(self, output: Output) -> dict[str, Any]:
        content, calls = output.text, []
        if self._use.tools:
            content, calls = parse(output.text, self._use.names, forced=self._use.grammar is not None)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message |= {"content": content or None, "tool_calls": [call.as_openai() for call in calls]}
        return {
            "index": output.index,
            "message": message,
            "logprobs": self._logprobs(output.token_ids, output.logprobs, output.top_logprobs),
            "finish_reason": _finish_reason(output, calls),
            "matched_stop": (output.finish or {}).get("matched"),
        }

    def say(self, delta: Delta) -> bytes:
        """Events of what has come: first the role, which also tells of the first token."""
        output, frame = delta.output, delta.frame
        events: list[bytes] = []
        if output.index not in self._begun:
            self._begun.add(output.index)
            if self._use.tools:
                forced = self._use.grammar is not None
                self._finders[output.index] = ToolCallFinder(self._use.names, forced=forced)
            events.append(self._event(output, {"role": "assistant", "content": ""}))
        finder, text, calls = self._finders.get(output.index), delta.text, []
        if finder is not None:
            text = finder.add(text)
            if output.finish is not None:
                rest, calls = finder.finish()
                text += rest
        logprobs = self._logprobs(frame.token_ids, frame.logprobs, frame.top_logprobs)
        if text or (logprobs and frame.token_ids):
            events.append(self._event(output, {"content": text}, logprobs))
        if calls:
            deltas = [{"index": i} | call.as_openai() for i, call in enumerate(calls)]
            events.append(self._event(output, {"tool_calls": deltas}))
        if output.finish is not None:
            events.append(self._end(output, calls))
        return b"".join(events)

    def close(self) -> bytes:
        """The end of a stream."""
        head = self._head | {"object": "chat.completion.chunk"}
        return end_of_stream(head, self._run.outputs, with_usage=self._wants_usage)

    def _event(
        self, output: Output, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, **end: Any
    ) -> bytes:
        choice = {"index": output.index, "delta": delta, "logprobs": logprobs, "finish_reason": None, **end}
        so_far = {"usage": running_usage(output)} if self._wants_running_usage else {}
        return event(self._head | {"object": "chat.completion.chunk", "choices": [choice]} | so_far)

    def _end(self, output: Output, calls: list[ToolCall]) -> bytes:
        matched = (output.finish or {}).get("matched")
        return self._event(output, {}, finish_reason=_finish_reason(output, calls), matched_stop=matched)

    def _logprobs(self, token_ids: list[int], logprobs: list[float], top: list[Top]) -> dict[str, Any] | None:
        return chat_logprobs(self._vocabulary, token_ids, logprobs, top) if self._wants_logprobs else None


def _finish_reason(output: Output, calls: list[ToolCall]) -> str | None:
    return "tool_calls" if calls and finish_reason(output) == "stop" else finish_reason(output)
