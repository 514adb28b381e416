"""A Slurm cluster of a test's own: a controller, and a node on each host."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from tests.hosts import Hosts, can_make_hosts
from tests.jobs import REPOSITORY

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "squeue", "sinfo")
_CONFIGURATION = """ClusterName=test
SlurmctldHost=controller(10.77.0.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""
# Slurm leaves its steps to the first process of the node to wait for.
_NODE = 'slurmd -D -N "$1" & while :; do wait; sleep 0.2; done'
_START_SECONDS = 60.0


def can_run_slurm() -> bool:
    """Whether it is installed, and hosts can be made for it."""
    return all(map(shutil.which, _PROGRAMS)) and can_make_hosts()


class Slurm:
    """To be made, and used, where `Hosts.joined`."""

    def __init__(self, hosts: Hosts, count: int, folder: Path) -> None:
        names = [hosts.name(host) for host in range(1, count + 1)]
        nodes = [f"NodeName={hosts.name(host)} NodeAddr={hosts.address(host)} CPUs=2" for host in range(1, count + 1)]
        for each in ("state", *(f"spool-{name}" for name in names)):
            (folder / each).mkdir(parents=True)
        (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, nodes="\n".join(nodes)))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o400)
        self._folder = folder
        self._env = dict(os.environ) | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._parts: list[subprocess.Popen[bytes]] = []
        try:
            files = {"socket": "munge", "key-file": "key", "pid-file": "munge.pid", "seed-file": "seed"}
            files["log-file"] = "munge.log"
            self._start("munged", "-F", "-f", *(f"--{option}={folder / name}" for option, name in files.items()))
            self._start("unshare", "--uts", "sh", "-c", "hostname controller; exec slurmctld -D -c")
            for host, name in enumerate(names, 1):
                self._start(*hosts.on(host), "bash", "-c", _NODE, "bash", name)
            self._wait_until_idle(count)
        except BaseException:
            self.close()
            raise

    def run(self, *command: str, timeout: float = 60.0) -> tuple[int, str]:
        """A command of Slurm's, in the repository; returns its exit code and all that it has printed."""
        ended = subprocess.run(
            command, env=self._env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=timeout, check=False, cwd=REPOSITORY,
        )  # fmt: skip
        return ended.returncode, ended.stdout

    def close(self) -> None:
        """End all of it."""
        for part in reversed(self._parts):
            part.kill()
            part.wait(10)

    def _start(self, *command: str) -> None:
        with (self._folder / "parts.log").open("ab") as log:
            self._parts.append(
                subprocess.Popen(command, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def _wait_until_idle(self, count: int) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while (said := self.run("sinfo", "--noheader", "--format=%T %D")[1].strip()) != f"idle {count}":
            assert time.monotonic() < deadline, said
            time.sleep(0.5)
