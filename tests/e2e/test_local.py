"""``local``: everything on this machine, and nothing left of it afterwards."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from processes import CONFIG, START_SECONDS, free_port, get, post
from test_answers import RECORDS, greedy

pytestmark = pytest.mark.e2e


@pytest.fixture
def serving(tmp_path: Path, smollm2: Path) -> Iterator[tuple[subprocess.Popen, int, Path]]:
    """`local` without a prompt, ready to serve: its process, its port and its output."""
    port, log = free_port(), tmp_path / "local.log"
    process = _local(["--port", str(port)], log)
    try:
        deadline = time.monotonic() + START_SECONDS
        while "serving on" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield process, port, log
    finally:
        for child in _family(process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def test_a_prompt_is_answered_with_the_life_of_its_room(tmp_path: Path, smollm2: Path) -> None:
    log = tmp_path / "local.log"
    process = _local(["--port", str(free_port()), "--prompt", "Say hello.", "--max-tokens", "8"], log)
    family = _watch(process)
    text = log.read_text()
    assert process.returncode == 0, text
    for phase in ("queue", "handshake", "prefill", "transfer", "first token", "per token"):
        assert f"\n  {phase}" in text, text
    assert "GB/s" in text and "To keep the servers running: python -m pdjax.launch local" in text
    assert not _alive(family), "processes were left behind"


def test_it_serves_until_it_is_stopped_and_leaves_nothing(serving: tuple[subprocess.Popen, int, Path]) -> None:
    process, port, log = serving
    status, answer = post(f"http://127.0.0.1:{port}/generate", greedy(RECORDS[0]["input_ids"], 8))
    assert status == 200 and answer["output_ids"] == RECORDS[0]["output_ids"][:8]
    family = _family(process.pid)
    assert len(family) >= 8, "local, router, and for each instance mpiexec, its proxy, the leader and the frontend"
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0, log.read_text()
    assert not _alive(family)


@pytest.mark.parametrize("part", ["decode", "router"])
def test_the_death_of_one_part_ends_all_and_shows_its_last_lines(
    serving: tuple[subprocess.Popen, int, Path], part: str
) -> None:
    process, _, log = serving
    family = _family(process.pid)
    victim = next(child for child in family if part in child.cmdline() and "mpiexec" not in child.cmdline()[0])
    victim.kill()
    assert process.wait(30) == 1, log.read_text()
    assert f"{part} ended with code" in log.read_text() and "last lines" in log.read_text()
    assert not _alive(family)


def test_the_death_of_local_itself_ends_all(serving: tuple[subprocess.Popen, int, Path]) -> None:
    process, port, _ = serving
    family = _family(process.pid)
    process.kill()
    process.wait(10)
    deadline = time.monotonic() + 20
    while _alive(family) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not _alive(family)
    with pytest.raises(OSError, match="refused"):
        get(f"http://127.0.0.1:{port}/health")


def _local(arguments: list[str], log: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "pdjax.launch", "local", "--config", str(CONFIG), *arguments]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)


def _family(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _watch(process: subprocess.Popen) -> list[psutil.Process]:
    """Wait for the end of a process; returns every process that was ever seen below it."""
    seen: dict[int, psutil.Process] = {}
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        seen.update((child.pid, child) for child in _family(process.pid))
        time.sleep(0.2)
    return list(seen.values())


def _alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    def lives(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    return [process for process in processes if lives(process)]
