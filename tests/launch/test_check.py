"""``check`` between real processes: what is fine is measured, and what is wrong is said."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from pdjax.net.mpi import environment

pytestmark = pytest.mark.e2e
PATIENCE = 60
Start = Callable[..., subprocess.Popen]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts ``check`` with some arguments, and with environment variables as keywords."""
    started: list[subprocess.Popen] = []

    def start_one(*arguments: str, **variables: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "pdjax.launch", "check", *arguments]
        env = environment(dict(os.environ)) | variables
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
        )
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.kill()
        process.communicate(timeout=PATIENCE)


def port_of(serving: subprocess.Popen) -> str:
    assert serving.stdout is not None
    for line in serving.stdout:
        if found := re.search(r"waiting for checks at (\S+);", line):
            return found[1]
    raise AssertionError("the serving side has ended")


def answer(checking: subprocess.Popen) -> tuple[int, str]:
    output, _ = checking.communicate(timeout=PATIENCE)
    return checking.returncode, output


@pytest.mark.parametrize(("options", "path"), [((), "mapped"), (("--gin.Transfer.mapped=False",), "tcp/")])
def test_a_good_path_is_named_and_measured_both_ways(start: Start, options: tuple[str, ...], path: str) -> None:
    address = port_of(start("--serve", "127.0.0.1:0", *options))
    code, output = answer(start("--prefill", address, *options))
    assert code == 0, output
    assert f"data path from there to here: {path}" in output
    assert re.search(r"latency .*: \d+ us", output)
    assert len(re.findall(r"\d GB/s, every byte verified", output)) == 2
    assert output.rstrip().endswith("OK")


def test_what_keeps_two_sides_apart_is_said_in_words(start: Start) -> None:
    address = port_of(start("--serve", "127.0.0.1:0", "--gin.Transfer.backend=fake", PDJAX_SECRET="one"))
    code, output = answer(start("--prefill", address, "--gin.Transfer.backend=fake", PDJAX_SECRET="two"))
    assert code == 1 and "secret" in output
    code, output = answer(start("--prefill", address, PDJAX_SECRET="one"))
    assert code == 1 and "backend differs: this side has 'ucx', the other 'fake'" in output


def test_a_port_where_nothing_or_something_else_listens_is_said_in_words(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code, output = answer(start("--prefill", f"127.0.0.1:{port}"))
    assert code == 1 and "Nothing listens there" in output


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--gin.Transfer.ib_device=eth77",), "UCX sees no network device 'eth77'"),
        (("--gin.Transfer.ib_device=eth77", "--gin.Transfer.backend=nixl"), "UCX sees no network device 'eth77'"),
        (("--gin.Transfer.backend=pigeons",), "there is no transfer backend 'pigeons'"),
    ],
    ids=["device", "device-nixl", "backend"],
)
def test_what_this_side_does_not_have_is_said_before_anything_is_tried(
    start: Start, options: tuple[str, ...], sentence: str
) -> None:
    code, output = answer(start("--prefill", "127.0.0.1:1", *options))
    assert code == 1 and sentence in output
