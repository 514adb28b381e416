"""What a client gets, unified and apart: the right tokens, whoever else is being served."""

from __future__ import annotations

import concurrent.futures
import json
import time
from pathlib import Path

import psutil
import pytest
from processes import Deployment, Part, get, post, stream

REFERENCE = json.loads((Path(__file__).parent.parent / "data" / "smollm2_reference.json").read_text())
RECORDS = REFERENCE["records"]
NEAR = 1e-3  # logits closer than this: either token is right

pytestmark = pytest.mark.e2e


@pytest.fixture(params=["unified", "pair"])
def url(request: pytest.FixtureRequest) -> str:
    """A unified instance, and the router in front of a pair."""
    fixture = request.getfixturevalue(request.param)
    return fixture.url if isinstance(fixture, Part) else fixture.router.url


def greedy(ids: list[int], tokens: int = 64, **more: object) -> dict:
    return {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        **more,
    }


def assert_as_reference(record: dict, output_ids: list[int]) -> None:
    """Equal up to the first step at which the reference's best two logits are a tie."""
    assert len(output_ids) == len(record["output_ids"])
    for step, (got, expected) in enumerate(zip(output_ids, record["output_ids"], strict=True)):
        if got != expected:
            assert record["margins"][step] < NEAR, f"step {step}: {got} for {expected}"
            return  # either token is right, and what follows it differs


@pytest.mark.parametrize("record", RECORDS, ids=[str(number) for number in range(len(RECORDS))])
def test_greedy_tokens_equal_the_reference(url: str, record: dict) -> None:
    status, answer = post(f"{url}/generate", greedy(record["input_ids"]))
    assert status == 200, answer
    assert_as_reference(record, answer["output_ids"])
    assert answer["meta_info"]["prompt_tokens"] == len(record["input_ids"])
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 64}


@pytest.mark.parametrize("record", [r for r in RECORDS if r["kind"] == "raw"], ids=lambda record: record["prompt"][:20])
def test_text_is_tokenised_and_detokenised_as_the_reference(url: str, record: dict) -> None:
    body = greedy(record["input_ids"])
    del body["input_ids"]
    body["sampling_params"]["skip_special_tokens"] = False
    status, answer = post(f"{url}/generate", body | {"text": record["text"]})
    assert status == 200, answer
    assert answer["text"] == record["output_text"]


def test_decode_computes_no_prompt_and_gets_exactly_the_predicted_bytes(pair: Deployment) -> None:
    time.sleep(0.6)  # a frontend may show the scheduler's last values again for half a second
    before = pair.decode.metrics()
    page_bytes = 30 * 3 * 2 * 16 * 64 * 4  # layers, heads, K and V, tokens, head_dim, float32
    lengths = [1, 15, 16, 17, 128, 129, 300]
    for length in lengths:
        ids = [1000 + length, *(RECORDS[0]["input_ids"][i % 5] for i in range(length - 1))]  # nothing is there already
        status, answer = post(f"{pair.router.url}/generate", greedy(ids, 3))
        assert status == 200, answer
        pages = -(-length // 16)
        assert answer["meta_info"]["timeline"]["transfer_bytes"] == pages * page_bytes
    time.sleep(0.6)
    after = pair.decode.metrics()
    assert after["pdjax_prompt_tokens_computed_total"] == 0
    received = after["pdjax_received_bytes_total"] - before["pdjax_received_bytes_total"]
    assert received == sum(-(-length // 16) for length in lengths) * after["pdjax_page_bytes"]
    assert after["pdjax_page_bytes"] == page_bytes


def test_concurrent_clients_each_get_what_they_would_get_alone(url: str) -> None:
    """16 clients, mixed lengths, streams and not."""
    bodies = []
    for client in range(16):
        record = RECORDS[client % len(RECORDS)]
        ids = (record["input_ids"] * 6)[: 3 + 17 * client]
        bodies.append(greedy(ids, 5 + 3 * client))
    alone = [post(f"{url}/generate", body)[1]["output_ids"] for body in bodies]

    def ask(client: int) -> list[int]:
        if client % 2:
            *_, last = stream(f"{url}/generate", bodies[client] | {"stream": True})
            return last["output_ids"]
        return post(f"{url}/generate", bodies[client])[1]["output_ids"]

    with concurrent.futures.ThreadPoolExecutor(16) as clients:
        together = list(clients.map(ask, range(16)))
    assert together == alone


def test_the_openai_client_works(url: str) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Say hello."}]
    whole = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=12)  # type: ignore
    assert whole.choices[0].message.content and whole.usage and whole.usage.completion_tokens <= 12
    pieces = client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=12, stream=True  # type: ignore
    )  # fmt: skip
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content
    completion = client.completions.create(model=model, prompt="The capital of France is", temperature=0, max_tokens=1)
    assert completion.choices[0].text == " Paris"


BAD = [
    ("generate", {"text": "word " * 600}, "512"),
    ("generate", b'{"text": "half', "JSON"),
    ("generate", {"text": "hi", "sampling_params": {"temprature": 1}}, "temperature"),
    ("generate", {"text": "hi", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
    ("generate", {"input_ids": []}, "empty"),
    ("generate", {"input_ids": [10**6]}, "49152"),
    ("v1/completions", {"prompt": "hi", "max_tokens": -5}, "max_tokens"),
    ("v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": -5}, "max_tokens"),
    ("v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "top_q": 1}, "top_p"),
]


@pytest.mark.parametrize(("path", "body", "said"), BAD, ids=[f"{path}-{said}" for path, _, said in BAD])
def test_a_bad_request_gets_400_with_a_sentence_and_leaks_nothing(url: str, path: str, body: object, said: str) -> None:
    status, answer = post(f"{url}/{path}", body)
    assert status == 400, answer
    assert said in answer["error"]["message"] and len(answer["error"]["message"].split()) > 3


def test_another_model_is_not_found_and_the_answer_names_the_one_that_is(url: str) -> None:
    status, answer = post(f"{url}/v1/completions", {"model": "gpt-17", "prompt": "hi"})
    assert status == 404 and "smollm2" in answer["error"]["message"]


def test_after_all_that_every_page_is_home(unified: Part, pair: Deployment) -> None:
    for part in (unified, pair.prefill, pair.decode):
        metrics = at_rest(part)
        assert metrics["pdjax_free_pages"] == metrics["pdjax_pages"] == 256
        assert metrics["pdjax_live_requests"] == 0
        assert metrics["pdjax_compiles_after_warmup_total"] == 0
    assert at_rest(pair.decode)["pdjax_staging_slots_free"] == at_rest(pair.prefill)["pdjax_staging_slots_free"] == 4


def test_at_rest_everything_together_uses_under_5_percent_of_a_core(unified: Part, pair: Deployment) -> None:
    for part in (unified, *pair.parts):
        assert get(f"{part.url}/health")[0] == 200
    time.sleep(3)
    processes = [process for part in pair.parts for process in part.processes()]
    before = sum(_cpu_seconds(process) for process in processes)
    time.sleep(6)
    used = sum(_cpu_seconds(process) for process in processes) - before
    assert used / 6 < 0.05


def at_rest(part: Part, seconds: float = 10.0) -> dict[str, float]:
    """Metrics once no request is live; the last ones if that does not come."""
    deadline = time.monotonic() + seconds
    while True:
        metrics = part.metrics()
        if (metrics["pdjax_live_requests"] == 0 and metrics.get("pdjax_rooms", 0) == 0) or time.monotonic() > deadline:
            return metrics
        time.sleep(0.1)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
