"""What a request may say about sampling: checked, and cut to what the context leaves room for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from pdjax import wire
from pdjax.server.parse import refuse_unsupported
from pdjax.server.ranges import (
    AtLeastZero,
    MinP,
    Penalty,
    Repetition,
    Samples,
    Seed,
    Temperature,
    TopK,
    TopP,
)
from pdjax.server.structured import grammar
from pdjax.web import HttpError

MAX_STOPS = 16
MAX_SAMPLES = 128  # of one prompt
MAX_BIAS = 100.0
MAX_REPETITION = 10.0
MAX_INT32 = 2**31 - 1
# In float32 a smaller top_p is 0, a larger temperature infinite, and logits over a smaller penalty infinite.
LEAST_TOP_P = 1e-37
MOST_TEMPERATURE = 1e37
LEAST_REPETITION = 1e-30


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True):
    """`sampling_params` of ``/generate``, and what the OpenAI routes are translated to. None is the default."""

    max_new_tokens: AtLeastZero = None
    min_new_tokens: AtLeastZero = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: Seed = None
    seed: Seed = None
    n: Samples = None
    frequency_penalty: Penalty = None
    presence_penalty: Penalty = None
    repetition_penalty: Repetition = None
    logit_bias: dict[str, float] | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Any = None
    custom_params: Any = None
    stop_regex: Any = None


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "structural_tag": (),
    "custom_params": ({},),
    "stop_regex": ([],),
}


@dataclass(frozen=True)
class TextRules:
    """How output ids become text."""

    stop: tuple[str, ...] = ()
    no_stop_trim: bool = False
    skip_special_tokens: bool = True


def check_sampling(fields: SamplingFields, *, vocabulary_size: int, max_name: str = "max_new_tokens") -> None:
    """Raise `HttpError` 400, with a sentence, if a value is out of range or an option is not supported.

    `max_name` is what the client calls the limit on new tokens.
    """
    refuse_unsupported(fields, NEUTRAL)
    if fields.n is not None and not 1 <= fields.n <= MAX_SAMPLES:
        raise HttpError(400, f"n must lie in 1..{MAX_SAMPLES}, not {fields.n}")
    _at_least(max_name, fields.max_new_tokens, 0)
    _at_least("min_new_tokens", fields.min_new_tokens, 0)
    _at_least("temperature", fields.temperature, 0)
    if fields.top_p is not None and not 0 < fields.top_p <= 1:
        raise HttpError(400, f"top_p must be above 0 and at most 1, not {fields.top_p:g}")
    if fields.min_p is not None and not 0 <= fields.min_p <= 1:
        raise HttpError(400, f"min_p must be at least 0 and at most 1, not {fields.min_p:g}")
    if fields.top_k is not None and not -1 <= fields.top_k <= MAX_INT32:
        raise HttpError(400, f"top_k must be at least 1, or -1 or 0 for off, not {fields.top_k}")
    if fields.min_new_tokens and fields.max_new_tokens is not None and fields.min_new_tokens > fields.max_new_tokens:
        raise HttpError(400, f"min_new_tokens ({fields.min_new_tokens}) is over {max_name} ({fields.max_new_tokens})")
    for name in ("frequency_penalty", "presence_penalty"):
        value = getattr(fields, name)
        if value is not None and not -2 <= value <= 2:
            raise HttpError(400, f"{name} must lie in -2..2, not {value:g}")
    if fields.repetition_penalty is not None and not 0 < fields.repetition_penalty <= MAX_REPETITION:
        raise HttpError(
            400, f"repetition_penalty must be above 0 and at most {MAX_REPETITION:g}, not {fields.repetition_penalty:g}"
        )
    _bias(fields.logit_bias, vocabulary_size)
    grammar(json_schema=fields.json_schema, regex=fields.regex, ebnf=fields.ebnf)
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if len(stops) > MAX_STOPS:
        raise HttpError(400, f"stop: {len(stops)} stop strings are over the {MAX_STOPS} that are taken")
    for token in fields.stop_token_ids or ():
        if not 0 <= token < vocabulary_size:
            raise HttpError(400, f"stop_token_ids: {token} is not in the vocabulary of {vocabulary_size} tokens")
    seed = seed_of(fields)
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise HttpError(400, f"seed must fit in 64 bits, which {seed} does not")


def seed_of(fields: SamplingFields) -> int | None:
    """The seed, under either of its names."""
    return fields.sampling_seed if fields.sampling_seed is not None else fields.seed


def text_rules(fields: SamplingFields) -> TextRules:
    """How this request's output becomes text."""
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    return TextRules(
        stop=tuple(stop for stop in stops if stop),
        no_stop_trim=bool(fields.no_stop_trim),
        skip_special_tokens=fields.skip_special_tokens is not False,
    )


def for_engine(fields: SamplingFields, *, max_new_tokens: int, seed_offset: int = 0) -> wire.SamplingParams:
    """The engine's parameters for checked fields. Samples of one prompt differ by `seed_offset`."""
    seed = seed_of(fields)
    top_k = fields.top_k or 0
    repetition = 1.0 if fields.repetition_penalty is None else max(fields.repetition_penalty, LEAST_REPETITION)
    return wire.SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min(fields.min_new_tokens or 0, max_new_tokens),
        temperature=1.0 if fields.temperature is None else min(fields.temperature, MOST_TEMPERATURE),
        top_k=max(0, top_k),
        top_p=1.0 if fields.top_p is None else max(fields.top_p, LEAST_TOP_P),
        min_p=fields.min_p or 0.0,
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        repetition_penalty=repetition,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=tuple((int(token), bias) for token, bias in (fields.logit_bias or {}).items()),
        grammar=grammar(json_schema=fields.json_schema, regex=fields.regex, ebnf=fields.ebnf),
        # MessagePack integers end at 2^64; the engine uses the low bits.
        seed=None if seed is None else (seed + seed_offset) & (2**63 - 1),
    )


def _bias(bias: dict[str, float] | None, vocabulary_size: int) -> None:
    for token, value in (bias or {}).items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10 and int(token) < vocabulary_size):
            raise HttpError(400, f"logit_bias: {token!r} is no token id of the vocabulary of {vocabulary_size} tokens")
        if not -MAX_BIAS <= value <= MAX_BIAS:
            raise HttpError(400, f"logit_bias: the value of {token} must lie in -100..100, not {value:g}")


def _at_least(name: str, value: float | None, least: int) -> None:
    if value is not None and not value >= least:
        raise HttpError(400, f"{name} must be at least {least}, not {value:g}")
