"""SGLang's own router in front of a prefill and a decode instance: its users change the engine, nothing else."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from processes import Deployment, free_port, get, post, stream

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("sglang_router") is None, reason="sglang-router is not installed"),
]

RECORD = json.loads((Path(__file__).parent.parent / "data" / "smollm2_reference.json").read_text())["records"][0]
PROMPT = RECORD["input_ids"]
READY_SECONDS = 60.0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, pair: Deployment) -> Iterator[str]:
    """sglang-router over the pair, without its retries, which would hide an error of ours."""
    port = free_port()
    bootstrap = json.loads(get(f"{pair.prefill.url}/server_info")[1])["disaggregation_bootstrap_port"]
    command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    command += ["--policy", "round_robin", "--disable-retries", "--disable-circuit-breaker"]
    command += ["--prefill", pair.prefill.url, str(bootstrap), "--decode", pair.decode.url]
    log = tmp_path_factory.mktemp("sglang-router") / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not _is_ready(f"http://127.0.0.1:{port}/readiness"):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(10)


def _is_ready(url: str) -> bool:
    with contextlib.suppress(OSError):
        return get(url, timeout=5)[0] == 200
    return False


def greedy(tokens: int) -> dict:
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}


def test_generate_gives_the_reference_tokens(url: str) -> None:
    status, answer = post(f"{url}/generate", {"input_ids": PROMPT, "sampling_params": greedy(16)})
    assert status == 200, answer
    assert answer["output_ids"] == RECORD["output_ids"][:16]
    assert answer["meta_info"]["completion_tokens"] == 16


def test_a_stream_ends_with_the_same_tokens(url: str) -> None:
    body = {"input_ids": PROMPT, "sampling_params": greedy(16), "stream": True}
    *_, last = stream(f"{url}/generate", body)
    assert last["output_ids"] == RECORD["output_ids"][:16]


def test_a_batch_gets_an_answer_a_prompt(url: str) -> None:
    prompts = [PROMPT, PROMPT[:3], PROMPT[:1]]
    status, answers = post(f"{url}/generate", {"input_ids": prompts, "sampling_params": greedy(4)})
    assert status == 200, answers
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [len(prompt) for prompt in prompts]
    assert answers[0]["output_ids"] == RECORD["output_ids"][:4]


def test_prompt_and_output_logprobs_come_merged(url: str) -> None:
    body = {"input_ids": PROMPT, "sampling_params": greedy(4), "return_logprob": True, "logprob_start_len": 0}
    status, answer = post(f"{url}/generate", body)
    assert status == 200, answer
    told = answer["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in told] == PROMPT
    assert told[0][0] is None and all(logprob <= 0 for logprob, _, _ in told[1:])
    assert len(answer["meta_info"]["output_token_logprobs"]) == 4


def test_samples_of_one_prompt_are_all_there(url: str) -> None:
    params = {"temperature": 1.0, "max_new_tokens": 6, "ignore_eos": True, "n": 3}
    status, answers = post(f"{url}/generate", {"input_ids": PROMPT, "sampling_params": params})
    assert status == 200, answers
    assert len(answers) == 3 and all(len(answer["output_ids"]) == 6 for answer in answers)


def test_openai_clients_chat_and_complete(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    messages = [{"role": "user", "content": "Say hello."}]
    options = {"model": "smollm2-135m-instruct", "temperature": 0, "max_tokens": 8}
    answer = client.chat.completions.create(messages=messages, **options)  # type: ignore[call-overload]
    assert answer.usage.completion_tokens <= 8 and answer.choices[0].message.content
    pieces = client.chat.completions.create(messages=messages, stream=True, **options)  # type: ignore[call-overload]
    streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert streamed == answer.choices[0].message.content
    both = client.chat.completions.create(messages=messages, n=2, **options)  # type: ignore[call-overload]
    assert [choice.message.content for choice in both.choices] == [streamed, streamed]
    completed = client.completions.create(prompt=["Hello", "Once upon"], **options)
    assert [choice.index for choice in completed.choices] == [0, 1]


def test_what_is_wrong_with_a_request_is_said_once(url: str) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4, "temperature": -1}}
    status, answer = post(f"{url}/generate", body)
    assert status == 400, answer
    assert "temperature" in json.dumps(answer)


def test_the_caches_of_both_are_flushed_and_their_loads_told(url: str, pair: Deployment) -> None:
    status, answer = post(f"{url}/flush_cache", {})
    assert status == 200 and answer["workers_flushed"] == 2, answer
    loads = json.loads(get(f"{url}/get_loads")[1])["workers"]
    assert len(loads) == 2 and all(worker["load"] >= 0 for worker in loads)
