"""Hosts of a test's own on this machine: each with its own network, name, processes and shared memory, all of them
behind a bridge. Nothing of the machine's own network is touched."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pdjax.launch.mpiexec import find_mpiexec

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_START = 'hostname "$1"; mount -t tmpfs shm /dev/shm; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'
_APART = ["unshare", "--fork", "--kill-child", "--pid", "--mount-proc", "--uts", "--ipc", "--mount"]


def can_make_hosts() -> bool:
    """Whether this machine lets us."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "tc", "unshare"))):
        return False
    name = f"pdjax-{os.getpid()}-look"
    with contextlib.suppress(subprocess.CalledProcessError):
        _ip("netns", "add", name)
        _ip("netns", "delete", name)
        return True
    return False


class Hosts:
    """So many of them, numbered from 1, with the addresses 10.77.0.N; the bridge is 10.77.0.254.

    Args:
        own_name_is_local: each takes its own name for a loopback address, as Debian has it.

    Attributes:
        ssh: a program that takes the place of ssh between them.
    """

    def __init__(self, count: int, folder: Path, *, own_name_is_local: bool = False) -> None:
        self._tag = f"pdjax-{os.getpid()}"
        self._folder = folder
        self._all = range(1, count + 1)
        addresses = "".join(f"{self.address(host)} {self.name(host)}\n" for host in self._all)
        for host in self._all:
            own = f"127.0.1.1 {self.name(host)}\n" if own_name_is_local else ""
            self._names(host).write_text("127.0.0.1 localhost\n" + own + addresses)
        self.ssh = folder / "ssh"
        self.ssh.write_text(self._script())
        self.ssh.chmod(0o700)
        _ip("netns", "add", self._bridge)
        try:
            _ip("-n", self._bridge, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._bridge, "address", "add", "10.77.0.254/24", "dev", "bridge")
            for device in ("bridge", "lo"):
                _ip("-n", self._bridge, "link", "set", device, "up")
            for host in self._all:
                self._add(host)
        except BaseException:
            self.close()
            raise

    @property
    def _bridge(self) -> str:
        return f"{self._tag}-bridge"

    def _add(self, host: int) -> None:
        space, port = self._space(host), f"port{host}"
        _ip("netns", "add", space)
        _ip("-n", self._bridge, "link", "add", port, "type", "veth", "peer", "name", "net0", "netns", space)
        _ip("-n", self._bridge, "link", "set", port, "master", "bridge", "up")
        _ip("-n", space, "address", "add", f"{self.address(host)}/24", "dev", "net0")
        for device in ("net0", "lo"):
            _ip("-n", space, "link", "set", device, "up")

    def _space(self, host: int) -> str:
        return f"{self._tag}-{host}"

    def _names(self, host: int) -> Path:
        """Its /etc/hosts."""
        return self._folder / f"names{host}"

    def name(self, host: int) -> str:
        return f"host{host}"

    def address(self, host: int) -> str:
        return f"10.77.0.{host}"

    def on(self, host: int) -> list[str]:
        """What comes before a command that is to run there."""
        start = ["sh", "-c", _START, "sh", self.name(host), str(self._names(host))]
        return ["ip", "netns", "exec", self._space(host), *_APART, *start]

    def mpiexec(self, hosts: Sequence[int]) -> list[str]:
        """What comes before a command that is to run once on each of these, as a cluster's users start it."""
        names = ",".join(map(self.name, hosts))
        return [
            *self.on(hosts[0]), find_mpiexec(), "-launcher", "ssh", "-launcher-exec", str(self.ssh),
            "-hosts", names, "-n", str(len(hosts)), "-ppn", "1",
        ]  # fmt: skip

    def _script(self) -> str:
        """What process managers take for ssh: it is given options, a host's name and a command."""
        cases = (f'{self.name(host)}) exec {shlex.join(self.on(host))} sh -c "$*" ;;' for host in self._all)
        options = 'while [ "${1#-}" != "$1" ]; do shift; done'
        return "\n".join(["#!/bin/sh", options, "host=$1; shift", "case $host in", *cases, "esac"])

    def cut(self, host: int) -> None:
        """Pull its cable: nobody is told anything."""
        _ip("-n", self._bridge, "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        """Put it back in."""
        _ip("-n", self._bridge, "link", "set", f"port{host}", "up")

    @contextlib.contextmanager
    def slow(self, host: int, megabits: int) -> Iterator[None]:
        """What it sends leaves at so many megabits a second."""
        device = ("-n", self._space(host), "qdisc", "{}", "dev", "net0", "root")
        _run("tc", *(each.format("add") for each in device), *f"tbf rate {megabits}mbit burst 64kb latency 1s".split())
        try:
            yield
        finally:
            _run("tc", *(each.format("delete") for each in device))

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """This thread, and those that it starts within, are at the bridge."""
        with open("/proc/thread-self/ns/net") as own, open(f"/run/netns/{self._bridge}") as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(own.fileno())

    def close(self) -> None:
        """Take all of it away."""
        for space in (self._bridge, *(self._space(host) for host in self._all)):
            if Path("/run/netns", space).exists():
                _ip("netns", "delete", space)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


def _enter(network: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(network, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "a thread could not enter a network")


needs_hosts = pytest.mark.skipif(not can_make_hosts(), reason="hosts are made as root, with ip and unshare")
