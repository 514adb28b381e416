"""A leader that speaks the wire and does what a test tells it, and the frontend process beside it."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pdjax import wire

PATIENCE = 30.0  # seconds; for what takes milliseconds on an idle machine
CONTEXT = 200
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
M = TypeVar("M", wire.Generate, wire.Abort, wire.Query, wire.Flush)


def byte_tokenizer() -> Tokenizer:
    """A byte-level BPE: 256 bytes, a few merges that cut characters in two, and two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for pair in (("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("ð", "Ł"), ("ä", "½")):
        merges.append(pair)
        vocabulary["".join(pair)] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    return tokenizer


def write_model_folder(folder: Path) -> Path:
    """A folder with the tokenizer files that a frontend reads."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


class ScriptedLeader:
    """Listens for one frontend. `on_generate` is called, on the reading thread, with each request."""

    def __init__(self, path: Path) -> None:
        self.received: list[wire.ToLeader] = []
        self.on_generate: Callable[[wire.Generate], None] = lambda request: None
        self.answers_queries = True
        self.stats = {"running_requests": 2.0, "steps_total": 7.0, "pages": 10.0, "free_pages": 4.0}
        self.spans: list[wire.Span] = []
        self._changed = threading.Condition()
        self._socket: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._listener.settimeout(PATIENCE)
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, *messages: wire.ToFrontend) -> None:
        self.send_raw(b"".join(wire.encode(message) for message in messages))

    def send_raw(self, data: bytes) -> None:
        assert self._socket is not None
        self._socket.sendall(data)

    def reply(self, request: wire.Generate, text: str, *, finish: str = "length", pieces: int = 1) -> None:
        """Answer a request with a text, a few tokens a frame."""
        ids = byte_tokenizer().encode(text).ids
        for start in range(0, len(ids), pieces):
            part = ids[start : start + pieces]
            last = start + pieces >= len(ids)
            end = {"finish_reason": finish, "timeline": {"total_s": 0.5}} if last else {}
            self.send(wire.Tokens(request.rid, part, [-0.5] * len(part), **end))

    def wait_for(self, kind: type[M], match: Callable[[M], bool] = lambda message: True) -> M:
        """The first message of a kind that matches, received or still to come."""
        with self._changed:
            deadline = time.monotonic() + PATIENCE
            while True:
                for message in self.received:
                    if isinstance(message, kind) and match(message):
                        return message
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"no {kind.__name__} came; received: {self.received}")

    def close(self) -> None:
        """Die, as far as the frontend can see."""
        self._listener.close()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def wait_until_connected(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._socket is not None, PATIENCE), "the frontend did not connect"

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            with self._changed:
                self._socket = connection
                self._changed.notify_all()
            frames = wire.FrameReader()
            while data := connection.recv(1 << 16):
                for body in frames.feed(data):
                    self._take(wire.decode_to_leader(body))

    def _take(self, message: wire.ToLeader) -> None:
        with self._changed:
            self.received.append(message)
            self._changed.notify_all()
        if isinstance(message, wire.Query) and self.answers_queries:
            self.send(wire.Stats(message.id, self.stats))
        if isinstance(message, wire.Flush):
            self.send(wire.Flushed(message.id, freed_pages=3, locked_pages=1))
        if isinstance(message, wire.TraceQuery):
            self.send(wire.Spans(message.id, self.spans))
        if isinstance(message, wire.Abort):
            self.send(wire.Aborted(message.rid))
        if isinstance(message, wire.Generate):
            self.on_generate(message)


class FrontendProcess:
    """``python -m pdjax.server`` with a scripted leader."""

    def __init__(self, folder: Path, role: str = "unified", *, ready: bool = True, **info: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        model = write_model_folder(folder / "model")
        self.leader = ScriptedLeader(folder / "leader.sock")
        command = [sys.executable, "-m", "pdjax.server", "--socket", str(folder / "leader.sock"), "--port", "0"]
        command += ["--model-folder", str(model), "--served-model-name", "tiny"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.leader.wait_until_connected()
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        self.url = line.split()[-1]
        assert self.url.startswith("http://"), line
        self._info = {"engine_type": role, "max_context": CONTEXT, "page_size": 16, "model_path": str(model)} | info
        if ready:
            self.make_ready()

    def make_ready(self) -> None:
        self.leader.send(wire.Ready(self._info))
        deadline = time.monotonic() + PATIENCE
        while self.get("/server_info")[0] != 200:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def get(self, path: str) -> tuple[int, bytes]:
        return fetch(urllib.request.Request(self.url + path))

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and decoded JSON answer, or text."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, answer = fetch(urllib.request.Request(self.url + path, data, {"content-type": "application/json"}))
        try:
            return status, json.loads(answer)
        except ValueError:
            return status, answer.decode()

    def events(self, path: str, body: Any) -> list[Any]:
        """Decoded events of a stream, without the end mark, which must be there."""
        status, text = self.post(path, body)
        assert status == 200, text
        return parse_events(text)

    def close(self) -> None:
        self.leader.close()
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()


def fetch(request: urllib.request.Request) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def parse_events(text: str) -> list[Any]:
    """Events of a complete stream."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]", text
    return [json.loads(block.removeprefix("data: ")) for block in blocks]
