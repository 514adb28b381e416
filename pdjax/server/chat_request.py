"""The body of ``POST /v1/chat/completions``, and its messages as a chat template reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pdjax.server.chat_template import ChatTemplate
from pdjax.server.openai_fields import CommonFields
from pdjax.server.ranges import AtLeastOne, TopCount
from pdjax.server.tool_choice import NamedTool, Tool, ToolUse, for_plain_template
from pdjax.web import HttpError

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
}


class Part(msgspec.Struct):
    """A part of a message's content."""

    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct):
    """A function that an earlier answer has called; `arguments` are a JSON object or its text."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CalledTool(msgspec.Struct):
    """A tool that an earlier answer has called."""

    function: CalledFunction
    type: str = "function"
    id: str | None = None


class Message(msgspec.Struct):
    """A message of the conversation; fields that are not named here are tolerated, since answers are sent back."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
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
        message: dict[str, Any] = {"role": self.role, "content": content or ""}
        if self.tool_calls:
            message["tool_calls"] = [_called(call, index) for call in self.tool_calls]
        others = {name: getattr(self, name) for name in ("name", "tool_call_id", "reasoning_content")}
        return message | {name: value for name, value in others.items() if value is not None}


class ChatRequest(CommonFields, forbid_unknown_fields=True, kw_only=True):
    """The body of ``/v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: AtLeastOne = None
    logprobs: bool | None = None
    top_logprobs: TopCount = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
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

    @property
    def template_options(self) -> dict[str, Any]:
        """Further variables for the template."""
        prompted = self.add_generation_prompt
        return (self.chat_template_kwargs or {}) | ({} if prompted is None else {"add_generation_prompt": prompted})


def conversation_text(
    template: ChatTemplate,
    messages: Sequence[Message],
    use: ToolUse,
    options: Mapping[str, Any] | None = None,
    *,
    go_on: bool = False,
) -> str:
    """The prompt of a conversation; `options` are further variables for the template. With `go_on` it ends where the
    last message does, which is the assistant's and is to be continued.

    Raises:
        HttpError: 400.
    """
    if not messages:
        raise HttpError(400, "messages: empty; give at least one")
    told = [message.for_template(i) for i, message in enumerate(messages)]
    if go_on and (told[-1]["role"] != "assistant" or not told[-1]["content"].strip() or "tool_calls" in told[-1]):
        raise HttpError(400, "continue_final_message: the last message must be a text of the assistant")
    if not template.reads_tools:
        told, use = for_plain_template(told, use), ToolUse()
    if not go_on:
        return template.render(told, options, tools=use.tools)
    text = template.render(told, {**(options or {}), "add_generation_prompt": False}, tools=use.tools)
    begun = told[-1]["content"]
    # Templates may strip what they are given.
    ends = [text.rindex(part) + len(part) for part in (begun, begun.strip()) if part in text]
    if not ends:
        raise HttpError(400, "continue_final_message: the model's chat template does not show messages as they are")
    return text[: ends[0]]


def _called(call: CalledTool, index: int) -> dict[str, Any]:
    """Templates write the arguments out themselves, so they get the object and not its text."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise HttpError(400, f"messages[{index}].tool_calls: arguments are not JSON: {error}") from error
    call_id = {} if call.id is None else {"id": call.id}
    return call_id | {"type": "function", "function": {"name": call.function.name, "arguments": arguments or {}}}
