"""Sampling options for offline use, by the names that OpenAI's and vLLM's users know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdjax.server.sampling import SamplingFields


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are picked, and when an answer ends.

    Attributes:
        n: samples of each prompt.
        max_tokens: the most new tokens of a sample.
        min_tokens: so many new tokens before anything but `max_tokens` ends it.
        temperature: 0 is greedy.
        top_k: 0 or -1 is off.
        repetition_penalty: over prompt and output; 1 is off. The other penalties are over the output; 0 is off.
        logit_bias: what is added to the logits of tokens, by id.
        stop: texts that end an answer, and are cut from it unless `include_stop_str_in_output`.
        stop_token_ids: tokens that do.
        seed: with it, the same prompt gives the same tokens; sample i has the seed + i.
        logprobs: at each token, tell its log-probability and that of so many best tokens (0 to 20).
        prompt_logprobs: the same for the tokens of the prompt.
        json_schema: a schema that the answer follows, as an object or its text; or `regex`, or `ebnf`.
    """

    n: int = 1
    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None

    def fields(self) -> SamplingFields:
        """The same by SGLang's names, as the server has it."""
        return SamplingFields(
            n=self.n,
            max_new_tokens=self.max_tokens,
            min_new_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={str(token): bias for token, bias in (self.logit_bias or {}).items()},
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            no_stop_trim=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            seed=self.seed,
            json_schema=self.json_schema,
            regex=self.regex,
            ebnf=self.ebnf,
        )
