"""What a request may say about sampling, and the sentence for what it may not."""

from __future__ import annotations

import numpy as np
import pytest

from pdjax import wire
from pdjax.server.parse import convert
from pdjax.server.sampling import SamplingFields, check_sampling, for_engine, text_rules
from pdjax.web import HttpError


def refusal(**fields) -> str:
    with pytest.raises(HttpError) as caught:
        check_sampling(convert(fields, SamplingFields, inside="sampling_params"), vocabulary_size=100)
    assert caught.value.status == 400
    return caught.value.message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_p": -1}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"max_new_tokens": -5}, "max_new_tokens must be at least 0, not -5"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens (5) is over max_new_tokens (4)"),
        ({"stop": ["x"] * 17}, "17 stop strings"),
        ({"stop_token_ids": [100]}, "100 is not in the vocabulary of 100 tokens"),
        ({"sampling_seed": 2**63}, "64 bits"),
        ({"n": 0}, "n must lie in 1..128, not 0"),
        ({"n": 129}, "n must lie in 1..128"),
        ({"frequency_penalty": 2.5}, "frequency_penalty must lie in -2..2, not 2.5"),
        ({"presence_penalty": -3}, "presence_penalty must lie in -2..2"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"repetition_penalty": 11}, "repetition_penalty must be above 0 and at most 10"),
        ({"logit_bias": {"100": 1}}, "logit_bias: '100' is no token id of the vocabulary of 100 tokens"),
        ({"logit_bias": {"-1": 1}}, "logit_bias: '-1' is no token id"),
        ({"logit_bias": {"the": 1}}, "logit_bias: 'the' is no token id"),
        ({"logit_bias": {"1": 101}}, "logit_bias: the value of 1 must lie in -100..100, not 101"),
        ({"logit_bias": [1]}, "sampling_params.logit_bias: expected object"),
        ({"json_schema": "{"}, "json_schema: the text is not JSON"),
        ({"json_schema": False}, "json_schema: false allows no answer"),
        ({"json_schema": "[]"}, "json_schema: a schema is a JSON object, not list"),
        ({"regex": "a", "ebnf": "b"}, "regex and ebnf: an answer can follow only one of them"),
        ({"structural_tag": "x"}, "structural_tag: this option is not supported"),
        ({"temprature": 1}, "unknown field 'temprature' in sampling_params; did you mean 'temperature'?"),
        ({"top_k": "3"}, "sampling_params.top_k: expected int or null, got str"),
        ({"max_new_tokens": 1.5}, "expected int"),
        ({"ignore_eos": 1}, "expected bool"),
    ],
)
def test_what_can_not_be_done_is_refused_in_words(fields, words):
    assert words in refusal(**fields)


def test_neutral_values_change_nothing():
    fields = SamplingFields(
        n=1,
        frequency_penalty=0.0,
        presence_penalty=0,
        repetition_penalty=1.0,
        logit_bias={},
        json_schema=None,
        regex="",
    )
    check_sampling(fields, vocabulary_size=1)
    assert for_engine(fields, max_new_tokens=128) == wire.SamplingParams()


def test_penalties_and_biases_reach_the_engine():
    fields = SamplingFields(
        frequency_penalty=0.5, presence_penalty=-1, repetition_penalty=1.2, logit_bias={"7": -100, "8": 2.5}
    )
    assert for_engine(fields, max_new_tokens=128) == wire.SamplingParams(
        frequency_penalty=0.5, presence_penalty=-1, repetition_penalty=1.2, logit_bias=((7, -100), (8, 2.5))
    )


def test_what_float32_can_not_hold_is_cut_to_what_it_can():
    fields = SamplingFields(top_p=1e-300, temperature=1e300, repetition_penalty=1e-300)
    check_sampling(fields, vocabulary_size=1)
    sampling = for_engine(fields, max_new_tokens=1)
    with np.errstate(all="raise"):
        values = (sampling.top_p, sampling.temperature, sampling.repetition_penalty)
        top_p, temperature, penalty = (np.float32(value) for value in values)
        assert top_p > 0
        assert np.float32(100) / temperature > 0
        assert np.isfinite(np.float32(1000) / penalty)


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"json_schema": '{"type": "object"}'}, wire.Grammar("json_schema", '{"type":"object"}')),
        ({"json_schema": {"type": "string"}}, wire.Grammar("json_schema", '{"type":"string"}')),
        ({"json_schema": True}, wire.Grammar("json_schema", "{}")),
        ({"regex": "a+"}, wire.Grammar("regex", "a+")),
        ({"ebnf": 'root ::= "a"'}, wire.Grammar("ebnf", 'root ::= "a"')),
    ],
)
def test_a_form_of_the_answer_reaches_the_engine(fields, grammar):
    assert for_engine(convert(fields, SamplingFields), max_new_tokens=1).grammar == grammar


def test_not_a_number_is_refused():
    with pytest.raises(HttpError, match="temperature"):
        check_sampling(SamplingFields(temperature=float("nan")), vocabulary_size=1)


def test_defaults_are_sglangs():
    assert for_engine(SamplingFields(), max_new_tokens=128) == wire.SamplingParams()
    assert text_rules(SamplingFields()).skip_special_tokens


@pytest.mark.parametrize("off", [-1, 0])
def test_top_k_has_two_ways_to_be_off(off):
    assert for_engine(SamplingFields(top_k=off), max_new_tokens=1).top_k == 0


def test_samples_of_one_seed_differ_and_both_names_of_the_seed_are_one():
    first = for_engine(SamplingFields(seed=7), max_new_tokens=1, seed_offset=0)
    second = for_engine(SamplingFields(sampling_seed=7), max_new_tokens=1, seed_offset=1)
    assert (first.seed, second.seed) == (7, 8)


def test_any_64_bit_seed_fits_into_a_frame():
    for seed in (-(2**63), -1, 2**63 - 1):
        sampling = for_engine(SamplingFields(seed=seed), max_new_tokens=1, seed_offset=5)
        assert wire.encode(wire.Generate("r", [1], sampling))
