"""A frontend's life beside its leader: starting, health, clients that leave, and both kinds of end."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from scripted_leader import PATIENCE, FrontendProcess, ScriptedLeader, write_model_folder

from pdjax import wire
from pdjax.engine.frontend import Frontend, FrontendError


class Client:
    """A connection that is read as bytes come."""

    def __init__(self, process: FrontendProcess, path: str, body: dict) -> None:
        host, port = process.url.removeprefix("http://").split(":")
        self.connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
        self.connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})

    def leave(self) -> None:
        if self.connection.sock is not None:
            self.connection.sock.shutdown(socket.SHUT_RDWR)
        self.connection.close()


@pytest.fixture
def own(tmp_path) -> Iterator[FrontendProcess]:
    """A frontend that the test may end."""
    process = FrontendProcess(tmp_path, "decode", disaggregation_bootstrap_host="h", disaggregation_bootstrap_port=1)
    yield process
    process.close()


def test_nothing_is_served_before_the_engine_is_ready_and_that_is_said(tmp_path):
    process = FrontendProcess(tmp_path, ready=False)
    try:
        for status, answer in (process.get("/health"), process.post("/generate", {"text": "x"})):
            said = answer if isinstance(answer, dict) else json.loads(answer)
            assert status == 503
            assert "the engine is starting" in said["error"]["message"]
        process.make_ready()
        assert process.get("/health")[0] == 200
    finally:
        process.close()


def test_health_is_the_schedulers_own_answer(own):
    own.leader.answers_queries = False
    started = time.monotonic()
    status, body = own.get("/health")
    assert status == 504
    assert b"has not answered for 5 s" in body
    assert time.monotonic() - started < 15
    own.leader.answers_queries = True
    query = [each for each in own.leader.received if isinstance(each, wire.Query)][-1]
    own.leader.send(wire.Stats(query.id, {}))
    own.leader.wait_for(wire.Query)
    deadline = time.monotonic() + PATIENCE
    while own.get("/health")[0] != 200:
        assert time.monotonic() < deadline


def test_what_an_instance_tells_about_itself(unified):
    info = json.loads(unified.get("/server_info")[1])
    assert (info["engine_type"], info["max_context"], info["served_model_name"]) == ("unified", 200, "tiny")
    assert unified.get("/get_server_info")[1] == unified.get("/server_info")[1]
    assert json.loads(unified.get("/get_model_info")[1])["is_generation"] is True
    assert json.loads(unified.get("/get_load")[1])[0]["num_tokens"] == 6 * 16
    assert unified.get("/health_generate")[0] == 200
    assert unified.get("/nowhere")[0] == 404


def test_the_prefix_cache_is_flushed_by_the_engine(unified):
    words = "Cache flushed: 3 pages are free again; running requests hold 1.\n"
    assert unified.post("/flush_cache", {}) == (200, words)
    assert unified.get("/flush_cache") == (200, words.encode())
    unified.leader.wait_for(wire.Flush)


def test_metrics_tell_of_the_scheduler_and_of_requests(unified):
    unified.post("/generate", {"text": "x"})
    text = unified.get("/metrics")[1].decode()
    assert "# TYPE pdjax_steps_total counter\npdjax_steps_total 7.0" in text
    assert "# TYPE pdjax_running_requests gauge\npdjax_running_requests 2.0" in text
    assert 'pdjax_frontend_requests_total{route="/generate",status="200"}' in text
    assert "pdjax_time_to_first_token_seconds_bucket" in text


def test_a_decode_instance_tells_times_and_bytes_of_its_rooms(decode, unified):
    timeline = {
        "queue_s": 0.1, "handshake_s": 0.2, "prefill_queue_s": 0.0, "prefill_s": 0.3, "transfer_s": 0.5,
        "transfer_bytes": 2e9, "transfer_resends": 1.0, "total_s": 1.0,
    }  # fmt: skip
    decode.leader.on_generate = lambda request: decode.leader.send(
        wire.Tokens(request.rid, [1], [0.0], finish_reason="length", timeline=timeline)
    )
    room = {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 3}
    assert decode.post("/generate", {"text": "x"} | room)[0] == 200
    told = decode.get("/metrics")[1].decode()
    assert "pdjax_room_transfer_seconds_sum 0.5" in told
    assert 'pdjax_room_transfer_gb_per_second_bucket{le="5.0"} 1.0' in told
    assert 'pdjax_room_transfer_gb_per_second_bucket{le="2.0"} 0.0' in told
    assert unified.post("/generate", {"text": "x"})[0] == 200
    assert "pdjax_room_" not in unified.get("/metrics")[1].decode()


def test_tokenize_and_back(unified):
    status, answer = unified.post("/tokenize", {"prompt": "hello world €"})
    assert (status, answer["count"]) == (200, len(answer["tokens"]))
    assert unified.post("/detokenize", {"tokens": answer["tokens"]})[1] == {"text": "hello world €"}
    assert unified.post("/detokenize", {"tokens": [10**6]})[0] == 400


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request_in_the_engine(unified, path, stream):
    unified.leader.on_generate = lambda request: unified.leader.send(wire.Tokens(request.rid, [258], [0.0]))
    body = {"text": "x", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    wanted = {"/generate": "text", "/v1/completions": "prompt"}.get(path, "messages")
    client = Client(unified, path, {wanted: body[wanted], "stream": stream})
    if stream:
        assert client.connection.getresponse().readline().startswith(b"data: ")
    request = unified.leader.wait_for(wire.Generate)
    client.leave()
    abort = unified.leader.wait_for(wire.Abort)
    assert (abort.rid, abort.reason) == (request.rid, "the client has gone")


def test_a_client_that_leaves_before_the_first_token_of_a_stream_ends_its_request(unified):
    unified.leader.on_generate = lambda request: None
    client = Client(unified, "/generate", {"text": "x", "stream": True})
    request = unified.leader.wait_for(wire.Generate)
    client.leave()
    assert unified.leader.wait_for(wire.Abort).rid == request.rid


def test_abort_request_ends_a_request_of_another_client(unified):
    unified.leader.on_generate = lambda request: unified.leader.send(wire.Tokens(request.rid, [258], [0.0]))
    client = Client(unified, "/generate", {"text": "x", "rid": "mine", "stream": True})
    response = client.connection.getresponse()
    response.readline()
    assert unified.post("/generate", {"text": "x", "rid": "mine"})[0] == 400
    assert unified.post("/abort_request", {"rid": "mine"}) == (200, {"aborted": 1})
    assert b'"finish_reason":{"type":"abort"' in response.read()
    assert unified.leader.wait_for(wire.Abort).rid == "mine"
    assert unified.post("/abort_request", {"rid": "mine"}) == (200, {"aborted": 0})
    assert unified.post("/abort_request", {})[0] == 400


def test_an_id_stands_for_all_samples_of_its_request_and_for_no_other_request(unified):
    unified.leader.on_generate = lambda request: unified.leader.send(wire.Tokens(request.rid, [258], [0.0]))
    body = {"text": ["a", "b"], "rid": "mine", "sampling_params": {"n": 2}, "stream": True}
    samples = Client(unified, "/generate", body).connection.getresponse()
    others = Client(unified, "/generate", {"text": "x", "rid": "mine_too", "stream": True}).connection.getresponse()
    samples.readline()
    others.readline()
    assert unified.post("/abort_request", {"rid": "mine"}) == (200, {"aborted": 4})
    samples.read()
    assert unified.post("/abort_request", {"rid": "mine_too"}) == (200, {"aborted": 1})
    others.read()


def test_when_the_leader_ends_all_are_told_and_the_process_ends(own):
    def one_token(request: wire.Generate) -> None:
        if request.rid == "streams":
            own.leader.send(wire.Tokens(request.rid, [258], [0.0]))

    own.leader.on_generate = one_token
    meeting = {"bootstrap_room": 5}
    waiting = Client(own, "/generate", {"text": "x", "rid": "waits"} | meeting)
    streaming = Client(own, "/generate", {"text": "x", "rid": "streams", "stream": True} | meeting)
    stream = streaming.connection.getresponse()
    stream.readline()
    own.leader.wait_for(wire.Generate, lambda request: request.rid == "waits")
    started = time.monotonic()
    own.leader.close()
    sentence = b"the engine process of this decode instance has ended"
    answer = waiting.connection.getresponse()
    assert answer.status == 503
    assert sentence in answer.read()
    last = stream.read().decode().strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == sentence.decode()
    assert own.process.wait(PATIENCE) == 1
    assert time.monotonic() - started < 10


def test_a_leader_that_talks_nonsense_is_left(own):
    own.leader.send_raw(b"\x05\x00\x00\x00nonsense!")
    assert own.process.wait(PATIENCE) == 1
    assert own.process.stderr is not None
    assert "can't be understood any more" in own.process.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_lets_requests_end(own, number):
    client = Client(own, "/generate", {"text": "x", "bootstrap_room": 5})
    request = own.leader.wait_for(wire.Generate)
    own.process.send_signal(number)
    deadline = time.monotonic() + PATIENCE
    while connects(own):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    own.leader.reply(request, "hello")
    assert json.loads(client.connection.getresponse().read())["text"] == "hello"
    assert own.process.wait(PATIENCE) == 0


def connects(process: FrontendProcess) -> bool:
    host, port = process.url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()
    except ConnectionError:  # refused, or reset where it was closed while we came
        return False
    return True


def test_told_to_stop_it_ends_requests_in_words_when_they_take_too_long(own):
    client = Client(own, "/generate", {"text": "x", "bootstrap_room": 5})
    own.leader.wait_for(wire.Generate)
    own.process.send_signal(signal.SIGTERM)
    answer = client.connection.getresponse()
    assert (answer.status, b"is stopping" in answer.read()) == (503, True)
    own.leader.wait_for(wire.Abort)
    assert own.process.wait(PATIENCE) == 0


def test_an_http2_preface_is_answered_at_once(unified):
    host, port = unified.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


def start(tmp_path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pdjax.server", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=tmp_path)


def test_a_port_that_is_taken_is_said_with_exit_code_2(tmp_path):
    model, leader = write_model_folder(tmp_path / "model"), ScriptedLeader(tmp_path / "leader.sock")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        ended = start(tmp_path, "--socket", str(tmp_path / "leader.sock"), "--port", port, "--model-folder", str(model))
    leader.close()
    assert ended.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_folder_without_a_tokenizer_is_said_with_exit_code_2(tmp_path):
    leader = ScriptedLeader(tmp_path / "leader.sock")
    ended = start(tmp_path, "--socket", "leader.sock", "--port", "0", "--model-folder", str(tmp_path))
    leader.close()
    assert ended.returncode == 2
    assert "tokenizer.json does not exist" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_leader_that_is_not_there_is_said_with_exit_code_2(tmp_path):
    ended = start(tmp_path, "--socket", str(tmp_path / "none.sock"), "--model-folder", str(tmp_path))
    assert ended.returncode == 2
    assert "cannot connect to the leader" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_leader_that_still_starts_learns_that_its_frontend_cannot_serve(tmp_path):
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        frontend = Frontend(
            ["--port", str(port), "--model-folder", str(write_model_folder(tmp_path / "model"))],
            on_message=lambda message: None,
            on_end=lambda reason: ended.set(),
        )
        try:
            frontend.check()
            assert ended.wait(PATIENCE)
            with pytest.raises(FrontendError, match="the frontend process has ended"):
                frontend.check()
        finally:
            frontend.stop()
