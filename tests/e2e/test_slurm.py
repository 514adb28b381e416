"""The job script for Slurm, on nodes of a test's own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
from far import Answer
from processes import get, post
from tiny_pair import CONFIG, START_SECONDS, prompt

from tests.hosts import Hosts
from tests.slurm import Slurm, can_run_slurm

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not can_run_slurm(), reason="Slurm, munge and root are needed")]
NODES = 2
END_SECONDS = 20.0


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with closing(Hosts(NODES, tmp_path_factory.mktemp("hosts"))) as hosts, hosts.joined():
        yield hosts


@pytest.fixture(scope="module")
def slurm(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with closing(Slurm(hosts, NODES, tmp_path_factory.mktemp("slurm"))) as slurm:
        yield slurm


def wait_for_health(url: str, status: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            if get(f"{url}/health")[0] == status:
                return
        assert time.monotonic() < deadline
        time.sleep(0.2)


def answer_of(url: str, input_ids: list[int]) -> list[int]:
    sampling = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0}
    status, said = post(f"{url}/generate", {"input_ids": input_ids, "sampling_params": sampling})
    assert status == 200, said
    return said["output_ids"]


def instances(role: str, model: Path) -> list[psutil.Process]:
    """Those that serve this model."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or [""]
        if Path(command[0]).name == "python" and role in command and f"--gin.Model.folder={model}" in command:
            found.append(process)
    return found


def submit(slurm: Slurm, log: Path, model: Path) -> str:
    """Returns the job's number."""
    job = ["launch/slurm.sh", "--config", str(CONFIG), f"--gin.Model.folder={model}"]
    code, said = slurm.run("sbatch", "--parsable", f"--nodes={NODES}", f"--output={log}", *job)
    assert code == 0, said
    return said.strip()


def wait_until_over(slurm: Slurm, log: Path) -> None:
    deadline = time.monotonic() + END_SECONDS
    while slurm.run("squeue", "--noheader")[1].strip():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.5)


def test_one_job_is_a_whole_deployment_that_mends_itself_and_ends_in_order(
    slurm: Slurm, hosts: Hosts, tiny_model: Path, tiny_answer: Answer, tmp_path: Path
) -> None:
    log, url, asked = tmp_path / "job.log", f"http://{hosts.address(1)}:8000", prompt(200)
    number = submit(slurm, log, tiny_model)
    wait_for_health(url, 200, START_SECONDS)
    assert answer_of(url, asked) == tiny_answer(asked, 8)

    (decode,) = instances("decode", tiny_model)
    decode.kill()
    wait_for_health(url, 503, END_SECONDS)
    wait_for_health(url, 200, START_SECONDS)
    assert answer_of(url, asked) == tiny_answer(asked, 8), log.read_text()

    slurm.run("scancel", "--batch", "--signal=TERM", number)
    wait_until_over(slurm, log)


def test_a_job_that_cannot_start_as_it_is_ends_and_says_why(slurm: Slurm, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    submit(slurm, log, tmp_path / "nowhere")
    wait_until_over(slurm, log)
    assert "nowhere' is neither a folder nor a model to fetch" in log.read_text()


def test_tasks_that_know_nothing_of_each_other_are_told_what_is_missing(slurm: Slurm) -> None:
    launch = ["python", "-m", "pdjax.launch", "unified", "--nproc", "2"]
    code, said = slurm.run("srun", "--mpi=none", "--nodes=2", "--ntasks=2", *launch)
    assert code == 2 and "srun started 2 processes without MPI: give it --mpi=pmi2" in said
