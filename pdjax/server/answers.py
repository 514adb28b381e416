"""What routes answer, as types: the OpenAPI document is made from them, and tests hold real answers against them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Entry = tuple[float | None, int, str | None]  # log-probability, token id, text


class _Answer(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """No answer has fields that are not written down here."""


class ErrorDetail(_Answer):
    """What was wrong, in a sentence; `code` is the HTTP status."""

    message: str
    type: str
    code: int


class ErrorAnswer(_Answer):
    """Any answer that is not a success."""

    error: ErrorDetail


class Finish(_Answer):
    """Why a sample ended: a stop string or token (`matched`), its limit (`length`), or another client's abort."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None


class GenerateMeta(_Answer):
    """`meta_info` of ``/generate``; log-probabilities are there if they were asked for."""

    id: str
    finish_reason: Finish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float
    input_token_logprobs: list[Entry] | None = None
    output_token_logprobs: list[Entry] | None = None
    input_top_logprobs: list[list[Entry] | None] | None = None
    output_top_logprobs: list[list[Entry] | None] | None = None
    timeline: dict[str, float] | None = None


class GenerateAnswer(_Answer):
    """A sample of ``/generate``; text and ids are from its start. Events of several samples have `index`."""

    text: str
    output_ids: list[int]
    meta_info: GenerateMeta
    index: int | None = None


class PromptDetails(_Answer):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int


class Usage(_Answer):
    """Token counts; a prompt counts once, however many samples it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class OpenAIMeta(_Answer):
    """What is told beside OpenAI's answer, of the first sample."""

    id: str
    e2e_latency: float
    timeline: dict[str, float] | None = None


class CompletionLogprobs(_Answer):
    """`logprobs` of a completion."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(_Answer):
    """A sample of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"] | None
    matched_stop: int | str | None


class CompletionAnswer(_Answer):
    """``/v1/completions``, whole; events of a stream are alike, the last may have `usage`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    meta_info: OpenAIMeta | None = None


class TopLogprob(_Answer):
    """A token in another's place."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(_Answer):
    """A token of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    """`logprobs` of a chat's choice."""

    content: list[ChatLogprob]
    refusal: None


class FunctionCall(_Answer):
    """A call; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class ToolCallAnswer(_Answer):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(_Answer):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[ToolCallAnswer] | None = None


class ChatChoice(_Answer):
    """A sample of a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"] | None
    matched_stop: int | str | None


class ChatAnswer(_Answer):
    """``/v1/chat/completions``, whole."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    meta_info: OpenAIMeta


class Model(_Answer):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(_Answer):
    """``/v1/models``."""

    object: Literal["list"]
    data: list[Model]


class ModelInfo(_Answer):
    """``/model_info``."""

    model_path: str | None
    tokenizer_path: str | None
    is_generation: bool
    model_type: str | None
    served_model_name: str


class Load(_Answer):
    """Load of one scheduler; tokens are whole pages."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


class Aborted(_Answer):
    """``/abort_request``: how many samples were stopped."""

    aborted: int


class Tokenized(_Answer):
    """``/tokenize``: lists of lists for a list of texts."""

    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int | None


class Detokenized(_Answer):
    """``/detokenize``."""

    text: str


ServerInfo = dict[str, Any]


class TraceClock(msgspec.Struct):
    """When the trace was made, in seconds since the epoch by the instance's clock."""

    now: float


class Trace(msgspec.Struct):
    """``/trace``, in Chrome's format: complete events in microseconds since the epoch, and names of their tracks."""

    traceEvents: list[dict[str, Any]]
    displayTimeUnit: str
    otherData: TraceClock
