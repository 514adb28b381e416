"""What the two OpenAI routes share: fields, their translation, usage and what is told beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pdjax.server.jobs import Bootstrap, Instance, wanted_rank
from pdjax.server.output import Output
from pdjax.server.parse import refuse_unsupported
from pdjax.server.ranges import (
    AtLeastOne,
    AtLeastZero,
    MinP,
    Penalty,
    Priority,
    Repetition,
    Samples,
    Seconds,
    Seed,
    Temperature,
    TopK,
    TopP,
)
from pdjax.server.sampling import SamplingFields
from pdjax.server.streaming import Resume
from pdjax.server.structured import ResponseFormat
from pdjax.web import DONE, HttpError, event

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "lora_path": (),
    "session_params": (),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class CommonFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of both routes: OpenAI's, SGLang's additions, and those that routers add."""

    model: str | None = None
    max_tokens: AtLeastOne = None
    temperature: Temperature = None
    top_p: TopP = None
    stop: str | list[str] | None = None
    seed: Seed = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: Any = None
    n: Samples = None
    frequency_penalty: Penalty = None
    presence_penalty: Penalty = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    top_k: TopK = None
    min_p: MinP = None
    min_tokens: AtLeastZero = None
    repetition_penalty: Repetition = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    rid: str | list[str] | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None
    data_parallel_rank: int | None = None
    routed_dp_rank: int | None = None
    disagg_prefill_dp_rank: int | None = None
    pdjax_resume: Resume | None = None
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    custom_params: Any = None
    return_hidden_states: Any = None
    return_routed_experts: Any = None
    cache_salt: Any = None
    extra_key: Any = None
    priority: Priority = None
    deadline_s: Seconds = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """Whether each event of a stream tells the usage so far, as vLLM and SGLang have it."""
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def bootstrap(self) -> Bootstrap:
        """Where the request's halves meet."""
        return Bootstrap(self.bootstrap_host, self.bootstrap_port, self.bootstrap_room)

    def dp_rank(self, instance: Instance) -> int | None:
        """The dp rank that the request asks for. Raises `HttpError` 400 if it asks for several."""
        return wanted_rank(instance, self.data_parallel_rank, self.routed_dp_rank, self.disagg_prefill_dp_rank)

    def sampling(self, max_new_tokens: int | None) -> SamplingFields:
        """The same in the engine's names."""
        return SamplingFields(
            max_new_tokens=max_new_tokens,
            min_new_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            no_stop_trim=self.no_stop_trim,
            seed=self.seed,
            n=self.n,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            json_schema=self.json_schema,
            regex=self.regex,
            ebnf=self.ebnf,
        )


def check_common(fields: CommonFields, neutral: dict[str, tuple[Any, ...]]) -> None:
    """Raise `HttpError` 400 if something is asked for that is not supported; `neutral` adds a route's own."""
    refuse_unsupported(fields, NEUTRAL | neutral)
    if fields.stream_options is not None and not fields.stream:
        raise HttpError(400, "stream_options: only with stream set to true")


def finish_reason(output: Output) -> str | None:
    """`finish_reason` of a choice."""
    return None if output.finish is None else output.finish["type"]


def usage(outputs: Sequence[Output]) -> dict[str, Any]:
    """Token counts of all samples; a prompt counts once, however many samples it has."""
    first = [output for output in outputs if output.job.sample == 0]
    return _usage(
        prompt=sum(output.prompt_tokens for output in first),
        completion=sum(len(output.token_ids) for output in outputs),
        cached=sum(output.cached_tokens for output in first),
    )


def end_of_stream(head: dict[str, Any], outputs: Sequence[Output], *, with_usage: bool) -> bytes:
    """The last events of a stream, of which the one with the usage begins like all others."""
    if not with_usage:
        return DONE
    return event(head | {"choices": [], "usage": usage(outputs), "meta_info": meta_info(outputs)}) + DONE


def running_usage(output: Output) -> dict[str, Any]:
    """Token counts of one sample so far."""
    return _usage(prompt=output.prompt_tokens, completion=len(output.token_ids), cached=output.cached_tokens)


def meta_info(outputs: Sequence[Output]) -> dict[str, Any]:
    """What is known about the first sample beyond OpenAI's answer: its id, and the times of its life."""
    first = outputs[0]
    meta = {"id": first.job.rid, "e2e_latency": first.seconds}
    return meta if first.timeline is None else meta | {"timeline": first.timeline}


def _usage(*, prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
