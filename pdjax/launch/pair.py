"""What a prefill or decode instance has beside its core: the network, the data plane, and the role that uses them."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass

from pdjax.config import Config
from pdjax.disagg.decode import Decode
from pdjax.disagg.part import Part
from pdjax.disagg.prefill import Prefill
from pdjax.disagg.protocol import messages
from pdjax.disagg.protocol.prefill_room import Timeouts
from pdjax.disagg.protocol.topology import ranks_of
from pdjax.disagg.receiver import Receiver
from pdjax.disagg.sender import Sender
from pdjax.engine.engine import Engine
from pdjax.engine.roles import Role
from pdjax.launch.core import Core
from pdjax.launch.data_plane import read_secret, start_backend
from pdjax.net.network import Network
from pdjax.transfer.staging import Slots


@dataclass(frozen=True)
class Pair:
    """The instance's half of every pair it makes with another instance, as its leader has it."""

    network: Network
    part: Sender | Receiver
    make_role: Callable[[Engine], Role]

    def close(self) -> None:
        """Tell peers, close links and release the data plane."""
        self.network.stop()
        self.part.backend.close()


def make_part(role: str, config: Config, core: Core, post: Callable[[object], None]) -> Sender | Receiver:
    """A process's part of the data plane: its backend, and staging for each of its ranks.

    Args:
        post: takes the backend's events, on the backend's thread.

    Raises:
        TransferError: the backend cannot start or has no place for staging.
    """
    backend, summary = start_backend(config, post, list(core.local_devices.values()))
    print(f"pdjax {role}: transfer: {summary}", file=sys.stderr, flush=True)
    own = Part(
        core.runner,
        layout=core.layout,
        devices=core.local_devices,
        slots=config.transfer.slots,
        chunk_pages=core.chunk_pages,
        backend=backend,
        verify=_verify(config),
    )
    return Sender(own) if role == "prefill" else Receiver(own)


def make_pair(
    role: str,
    config: Config,
    core: Core,
    part: Sender | Receiver,
    *,
    descriptions: list[bytes],
    post: Callable[[object], None],
) -> Pair:
    """Build the leader's network and role; nothing listens yet.

    Args:
        descriptions: how the memory of each process is reached, by the number of the process.
        post: takes the network's events.
    """
    network = Network(post, secret=read_secret(config))
    registration = messages.Registration(
        protocol_version=messages.PROTOCOL_VERSION,
        layout_version=messages.LAYOUT_VERSION,
        role=role,
        instance=secrets.randbits(63),
        model=core.identity,
        state=core.layout.state(core.spec),
        backend=config.transfer.backend,
        ranks=ranks_of(core.layout, [descriptions[device.process_index] for device in core.mesh.devices.flat]),
        slots=config.transfer.slots,
        slot_pages=core.chunk_pages,
        verify=_verify(config),
        layout=core.layout,
        http_port=config.server.port,
        allocation=config.disagg.allocation,
    )
    network.set_hello(messages.encode(registration))
    timeouts = Timeouts(
        bootstrap=config.disagg.bootstrap_timeout,
        waiting=config.disagg.waiting_timeout,
        transfer=config.disagg.transfer_timeout,
        alloc=config.disagg.alloc_timeout,
        link=config.disagg.link_timeout,
        peer=config.disagg.peer_timeout,
        heartbeat=min(1.0, config.disagg.peer_timeout / 4),
    )

    def make_role(engine: Engine) -> Role:
        shared = {
            "network": network,
            "slots": Slots(config.transfer.slots),
            "processes": len(descriptions),
            "registration": registration,
            "timeouts": timeouts,
            "dp_policy": config.disagg.dp_policy,
        }
        if isinstance(part, Sender):
            return Prefill(engine, sender=part, post=post, **shared)
        return Decode(engine, receiver=part, **shared)

    return Pair(network, part, make_role)


def _verify(config: Config) -> bool:
    """The fake backend moves no bytes, so there is nothing to verify."""
    return config.transfer.verify and config.transfer.backend != "fake"
