"""Offline use: the model in this process, by the names that vLLM's and SGLang's users know."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from models.dense_attention import DenseModel

import pdjax
from pdjax import LLM, SamplingParams
from pdjax.engine_thread import EngineError
from pdjax.layers.sharding import tensor_mesh
from pdjax.models.checkpoint import load_model
from pdjax.models.random import tiny_config, write_random_model

SMALL = {"max_context": 256, "max_running_requests": 4, "prefill_tokens": 32, "warmup": False}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[1, 2, 3], list(range(40, 90)), [7], [200, 5, 9, 9]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llm") / "tiny"
    write_random_model(path, tiny_config(), seed=1)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def dense(folder: Path) -> DenseModel:
    return DenseModel(load_model(folder, dtype="float32", mesh=tensor_mesh(jax.devices()[:1])), 128)


def test_a_batch_gives_what_the_dense_model_gives(llm, dense):
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [each.token_ids for each in outputs] == [dense.greedy(prompt, 8) for prompt in PROMPTS]
    assert {each.finish_reason for each in outputs} == {"length"}
    assert [each.prompt_token_ids for each in outputs] == PROMPTS


def test_more_prompts_than_the_engine_takes_at_once_are_answered_in_order(folder):
    with LLM(folder, **SMALL | {"max_queued_requests": 1}) as llm:
        prompts = [[i, i + 1] for i in range(12)]
        together = [each.token_ids for each in llm.generate(prompts, GREEDY)]
        alone = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts[:3]]
    assert len(together) == 12
    assert together[:3] == alone


def test_a_text_is_a_prompt_and_its_output_is_text(llm):
    (output,) = llm.generate("hello", GREEDY)
    assert output.prompt == "hello"
    assert output.prompt_token_ids == llm.generate(["hello"], GREEDY)[0].prompt_token_ids
    assert len(output.token_ids) == 8
    assert isinstance(output.text, str)
    assert output.outputs[0].text == output.text


def test_prompts_may_be_mappings_as_vllm_has_them_and_a_bar_counts_answers(llm, capsys):
    prompts = [{"prompt": "hello"}, {"prompt_token_ids": [1, 2, 3]}]
    first, second = llm.generate(prompts, GREEDY, use_tqdm=True)
    assert "2/2" in capsys.readouterr().err
    assert (first.prompt, first.token_ids) == ("hello", llm.generate("hello", GREEDY)[0].token_ids)
    assert (second.prompt, second.prompt_token_ids) == (None, [1, 2, 3])
    (alone,) = llm.generate(prompts[1], GREEDY)
    assert alone.token_ids == second.token_ids
    assert not capsys.readouterr().err


def test_ids_may_be_arrays_and_prompts_may_come_from_anything_that_lists_them(llm):
    (expected,) = llm.generate([1, 2, 3], GREEDY)
    for prompts in (np.array([1, 2, 3]), [np.array([1, 2, 3], np.int32)], (1, 2, 3), iter([[1, 2, 3]])):
        (output,) = llm.generate(prompts, GREEDY)
        assert (output.prompt_token_ids, output.token_ids) == ([1, 2, 3], expected.token_ids)


def test_a_prompt_can_be_scored_without_a_new_token(llm):
    params = SamplingParams(max_tokens=0, prompt_logprobs=2)
    (scored,) = llm.generate([1, 2, 3], params)
    (known,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=1, prompt_logprobs=2))
    assert (scored.token_ids, scored.text, scored.finish_reason) == ([], "", "length")
    assert scored.prompt_logprobs == known.prompt_logprobs and len(known.prompt_logprobs or []) == 3


def test_a_conversation_goes_through_the_models_template(llm):
    (output,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert output.prompt == "user: hi\nassistant: "
    both = llm.chat([[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]], GREEDY)
    assert [each.prompt for each in both] == ["user: hi\nassistant: ", "user: ho\nassistant: "]
    assert both[0].token_ids == output.token_ids


def test_samples_of_a_seed_differ_and_come_again(llm):
    params = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True)
    first, again = (llm.generate([1, 2, 3], params)[0] for _ in range(2))
    tokens = [each.token_ids for each in first.outputs]
    assert [each.index for each in first.outputs] == [0, 1, 2]
    assert len({tuple(each) for each in tokens}) == 3
    assert tokens == [each.token_ids for each in again.outputs]


def test_stops_end_an_answer(llm, dense):
    tokens = dense.greedy(PROMPTS[0], 8)
    first = tokens.index(tokens[3])
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[tokens[3]])
    (output,) = llm.generate(PROMPTS[0], params)
    assert output.token_ids == tokens[: first + 1]
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", tokens[3])
    text = llm.generate(PROMPTS[0], GREEDY)[0].text
    letter = next(each for each in text if each != "\ufffd")
    for shown in (0, 1):
        params = SamplingParams(
            temperature=0, max_tokens=8, ignore_eos=True, stop=letter, include_stop_str_in_output=bool(shown)
        )
        (output,) = llm.generate(PROMPTS[0], params)
        assert output.text == text[: text.index(letter) + shown]
        assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", letter)


def test_an_answer_can_be_held_to_a_form(llm):
    params = [SamplingParams(temperature=0, regex="yes|no"), SamplingParams(seed=3, json_schema={"type": "boolean"})]
    first, second = llm.generate([[1, 2], [3, 4]], params)
    assert first.text in ("yes", "no")
    assert second.text.strip() in ("true", "false")
    with pytest.raises(ValueError, match="regex: does not compile"):
        llm.generate("x", SamplingParams(regex="("))


def test_parameters_may_be_one_for_each_prompt_and_have_sglangs_names(llm):
    params = [GREEDY, {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}]
    assert [len(each.token_ids) for each in llm.generate([[1], [2]], params)] == [8, 2]


def test_log_probabilities_are_the_dense_models(llm, dense):
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate(PROMPTS[3], params)
    whole = [*PROMPTS[3], *output.token_ids]
    logits = dense.logits(whole).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert output.logprobs is not None and output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for position, told in enumerate([*output.prompt_logprobs[1:], *output.logprobs], start=1):
        assert told is not None and whole[position] in told
        assert 1 <= len(told) <= 3
        for token, logprob in told.items():
            assert logprob == pytest.approx(expected[position - 1, token], abs=1e-3)
    best = np.argsort(-expected[len(PROMPTS[3]) - 1])[:2]
    assert set(output.logprobs[0]) == set(best.tolist())


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ([], {"temperature": -1}, ""),
        ([[]], None, "the prompt is empty"),
        ([[1], "a", 5], None, "a prompt is a text or a list of token ids, not 5"),
        (None, None, "prompts are texts or lists of token ids, not None"),
        ([[1.5]], None, "a prompt is a text or a list of token ids, not [1.5]"),
        ({"text": "x"}, None, "a prompt's mapping has prompt or prompt_token_ids, and nothing else; not ['text']"),
        ([[999]], None, "token id 999 is not in the vocabulary of 260"),
        (["x" * 300], None, "300 tokens"),
        ("x", SamplingParams(temperature=-1), "temperature must be at least 0"),
        ("x", SamplingParams(max_tokens=-1), "max_new_tokens must be at least 0"),
        ("x", SamplingParams(logprobs=21), "0 to 20 can be told, not 21"),
        ("x", SamplingParams(n="2"), "sampling_params.n: expected int"),  # type: ignore[arg-type]
        ("x", {"max_token": 1}, "unknown field 'max_token' in sampling_params; did you mean 'max_new_tokens'"),
        (["x", "y"], [GREEDY], "a list of 1 for 2 prompts"),
    ],
)
def test_what_can_not_be_is_refused_in_words(llm, prompts, params, words):
    if prompts == []:
        assert llm.generate(prompts) == []
        return
    with pytest.raises(ValueError) as caught:
        llm.generate(prompts, params)
    assert words in str(caught.value)
    assert len(llm.generate([1], GREEDY)[0].token_ids) == 8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_contxt": 5}, "there is no option 'max_contxt'; did you mean 'max_context'?"),
        ({"max_context": "5"}, "max_context: expected int, not '5'"),
        ({"dtype": "float8"}, "float32 or bfloat16"),
        ({"processes": 2}, "offline use has one process"),
    ],
)
def test_a_wrong_option_is_refused_in_words(folder, options, words):
    with pytest.raises(ValueError) as caught:
        LLM(folder, **options)
    assert words in str(caught.value)


def test_an_engine_that_can_not_start_says_why(folder):
    with pytest.raises(EngineError, match="the engine has ended"):
        LLM(folder, tp=64, **SMALL)


def test_after_its_end_it_says_so(folder):
    llm = LLM(folder, **SMALL)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineError, match="has been shut down"):
        llm.generate("x", GREEDY)


def test_threads_may_share_it(llm):
    results: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        results[i] = llm.generate(PROMPTS[i], GREEDY)[0].token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {i: llm.generate(PROMPTS[i], GREEDY)[0].token_ids for i in range(3)}


def test_importing_the_package_brings_nothing_heavy():
    code = "import sys, pdjax; sys.exit('jax' in sys.modules or 'uvicorn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'LLN'"):
        _ = pdjax.LLN  # type: ignore[attr-defined]
