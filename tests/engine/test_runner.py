"""Options act across a request's life: chunks, batches, a start in the middle; the oracle is the dense model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from sampling_oracle import adjusted, log_softmax
from small_engine import EOS, SmallEngine, TinyModel

from pdjax.engine.plan import PrefillStep, Row
from pdjax.engine.request import OutputToken, Request
from pdjax.engine.unified import Unified
from pdjax.wire import Failed, SamplingParams

sys.path.append(str(Path(__file__).parents[1] / "models"))
from dense_attention import DenseModel  # pyright: ignore[reportMissingImports]

NEAR = 2e-3  # adjusted logits closer than this: either token is right


@pytest.fixture(scope="module")
def dense(tiny: TinyModel) -> DenseModel:
    return DenseModel(tiny.model, 96)


def mixes(seed: int, count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts of one to three chunks, each with some of the options."""
    random = np.random.default_rng(seed)
    asked = []
    for number in range(count):
        options: dict[str, Any] = {}
        if random.random() < 0.4:
            options["repetition_penalty"] = float(random.uniform(1.05, 2))
        if random.random() < 0.4:
            options["presence_penalty"] = float(random.uniform(-1, 2))
        if random.random() < 0.4:
            options["frequency_penalty"] = float(random.uniform(0, 2))
        if random.random() < 0.4:
            biased = random.choice(256, 40, replace=False)
            options["logit_bias"] = tuple((int(token), float(random.normal(0, 3))) for token in biased)
        if random.random() < 0.3:
            options |= {"ignore_eos": False, "min_new_tokens": int(random.integers(1, 12)),
                        "stop_token_ids": tuple(random.choice(256, 12, replace=False).tolist())}  # fmt: skip
        if random.random() < 0.4:
            options["top_logprobs"] = int(random.integers(1, 21))
        if random.random() < 0.3:
            options["prompt_logprobs"] = True
        options["tokens"] = int(random.integers(1, 24))
        asked.append((random.integers(0, 256, random.integers(1, 45)).tolist(), options | {"seed": number}))
    return asked


def assert_greedy(dense: DenseModel, ids: list[int], output: list[int], options: dict[str, Any]) -> None:
    """Each token is the best of the dense model's adjusted logits."""
    names = {name: value for name, value in options.items() if name in SamplingParams.__struct_fields__}
    sampling = SamplingParams(**names)
    logits = dense.logits(ids + output)
    enders = (*sampling.stop_token_ids, *(() if options.get("ignore_eos", True) else (EOS,)))
    for step, token in enumerate(output):
        banned = enders if step < sampling.min_new_tokens else ()
        values = adjusted(logits[len(ids) + step - 1], sampling, prompt=ids, output=output[:step], banned=banned)
        assert values[token] >= values.max() - NEAR, f"step {step}: {token} for {values.argmax()}"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pages", [257, 45])
def test_a_mixed_batch_follows_the_dense_model(tiny: TinyModel, dense: DenseModel, seed: int, pages: int) -> None:
    asked = mixes(seed, 14)
    small = SmallEngine(tiny, pages=pages)
    for number, (ids, options) in enumerate(asked):
        small.send(str(number), ids, **options)
    small.run()
    assert not [end for end in small.ends().values() if isinstance(end, Failed)]
    for number, (ids, options) in enumerate(asked):
        output = small.ids(str(number))
        assert output
        assert_greedy(dense, ids, output, options)


def test_logprobs_are_the_models_own_at_every_position(tiny: TinyModel, dense: DenseModel) -> None:
    """Of a prompt of three chunks and the output, with the best tokens, under options that change the choice."""
    ids = np.random.default_rng(4).integers(0, 256, 41).tolist()
    small = SmallEngine(tiny)
    small.send("warm", ids, 4)  # its pages are cached now, and must not stand for what is asked next
    small.run()
    small.send("a", ids, 6, top_logprobs=7, prompt_logprobs=True, temperature=1.0, repetition_penalty=1.5, seed=3)
    small.run()
    frames = small.frames("a")
    output = small.ids("a")
    truth = log_softmax(dense.logits(ids + output))
    best = np.argsort(-truth, axis=-1)[:, :7]
    told = frames[0].prompt_logprobs
    assert told[0] is None and len(told) == len(ids)
    np.testing.assert_allclose(told[1:], truth[np.arange(len(ids) - 1), ids[1:]], atol=1e-3)  # type: ignore[arg-type]
    assert frames[0].prompt_top_logprobs[0] == [] and len(frames[0].prompt_top_logprobs) == len(ids)
    places = [*frames[0].prompt_top_logprobs[1:], *(frame.top_logprobs[0] for frame in frames)]
    for position, place in enumerate(places):
        np.testing.assert_allclose([value for _, value in place], truth[position][best[position]], atol=1e-3)
        np.testing.assert_allclose(truth[position][[token for token, _ in place]], truth[position][best[position]],
                                   atol=1e-3)  # fmt: skip
    for step, frame in enumerate(frames):
        assert step == 0 or not frame.prompt_logprobs
        np.testing.assert_allclose(frame.logprobs, [truth[len(ids) + step - 1][output[step]]], atol=1e-3)


def test_nobody_is_told_what_they_did_not_ask_for(tiny: TinyModel) -> None:
    small = SmallEngine(tiny)
    small.send("asks", [1, 2, 3], 4, top_logprobs=3)
    small.send("silent", [1, 2, 3], 4)
    small.run()
    assert all(len(frame.top_logprobs[0]) == 3 for frame in small.frames("asks"))
    assert not any(frame.top_logprobs or frame.prompt_logprobs for frame in small.frames("silent"))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_request_gets_the_tokens_it_gets_alone(tiny: TinyModel, temperature: float) -> None:
    asked = mixes(11, 16)
    together = SmallEngine(tiny)
    for number, (ids, options) in enumerate(asked):
        together.send(str(number), ids, temperature=temperature, **options)
        together.turn()
    together.run()
    for number, (ids, options) in enumerate(asked):
        alone = SmallEngine(tiny, prefix_cache=False)
        alone.send("alone", ids, temperature=temperature, **options)
        alone.run()
        assert together.ids(str(number)) == alone.ids("alone"), options


class _HandedOver(Unified):
    """Requests whose prompts were computed elsewhere: here by bare steps, as a transfer would leave the pages."""

    def submit(self, request: Request) -> None:
        engine = self._engine
        grant = engine.prefix.begin(request.rid, [], pages=engine.spec.pages(request.max_tokens), cached=0)
        assert grant is not None
        request.pages = grant.pages
        row = Row(request.rid, grant.pages, SamplingParams(temperature=0.0), 0)
        for start in range(0, request.prompt_tokens, 16):
            engine.runner.run(PrefillStep(row, request.input_ids[start : start + 16], start))
        request.computed = request.prompt_tokens
        engine.start_decoding(request, OutputToken(self.first[request.rid], -1.0))

    first: ClassVar[dict[str, int]]


def test_a_request_handed_over_with_its_first_token_goes_on_as_if_it_had_begun_here(tiny: TinyModel) -> None:
    asked = [(ids, options | {"tokens": 12}) for ids, options in mixes(21, 8)]
    outputs = []
    for role in (Unified, _HandedOver):
        small = SmallEngine(tiny, prefix_cache=False)
        if role is _HandedOver:
            small.engine.role = small.role = _HandedOver(small.engine)
            _HandedOver.first = {str(number): output[0] for number, output in enumerate(outputs[0])}
        for number, (ids, options) in enumerate(asked):
            small.send(str(number), ids, **{k: v for k, v in options.items() if k != "prompt_logprobs"})
        small.run()
        outputs.append([small.ids(str(number)) for number in range(len(asked))])
    assert outputs[0] == outputs[1]


def test_no_option_compiles_anything(tiny: TinyModel) -> None:
    runner = tiny.runner
    runner.warm_up([*runner.prefill_warm_up(), *runner.decode_warm_up()])
    programs: list[Any] = [runner._prefill, runner._decode, runner._write_slot, runner._write_masks]
    before = [program._cache_size() for program in programs]
    small = SmallEngine(tiny)
    for number, (ids, options) in enumerate(mixes(31, 10)):
        small.send(str(number), ids, **options, temperature=number % 2)
    small.run()
    assert [program._cache_size() for program in programs] == before == [1, 1, 1, 1]


def test_too_many_prompt_logprobs_are_refused_in_words(tiny: TinyModel) -> None:
    small = SmallEngine(tiny)
    small.send("a", [1] * 40_000, 1, prompt_logprobs=True, top_logprobs=20)
    small.send("b", [1, 2], 1, top_logprobs=21)
    small.turn()
    ends = small.ends()
    assert all(isinstance(end, Failed) and end.status == 400 for end in ends.values())
    assert "too many for one answer" in ends["a"].message and "0..20" in ends["b"].message  # type: ignore[union-attr]
