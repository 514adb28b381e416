"""What a prefill or decode instance has beside its core: the network, the data plane, and the role that uses them."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass

from pdjax.config import Config
from pdjax.disagg.decode import Decode
from pdjax.disagg.prefill import Prefill
from pdjax.disagg.protocol import messages
from pdjax.disagg.protocol.prefill_room import Timeouts
from pdjax.disagg.protocol.topology import Rank
from pdjax.engine.engine import Engine
from pdjax.engine.roles import Role
from pdjax.launch.core import Core
from pdjax.launch.data_plane import read_secret, start_backend
from pdjax.net.network import Network
from pdjax.transfer.backend import TransferBackend
from pdjax.transfer.path_test import PathTestCells
from pdjax.transfer.staging import LandingRing, SourceStaging


@dataclass(frozen=True)
class Pair:
    """The instance's half of every pair it makes with another instance."""

    network: Network
    backend: TransferBackend
    staging: SourceStaging | LandingRing
    make_role: Callable[[Engine], Role]

    def warm_up(self, engine: Engine) -> None:
        """Compile the repacking of chunks."""
        engine.runner.pool = self.staging.warm_up(engine.runner.pool)

    def close(self) -> None:
        """Tell peers, close links and release the data plane."""
        self.network.stop()
        self.backend.close()


def make_pair(role: str, config: Config, core: Core, post: Callable[[object], None]) -> Pair:
    """Build network, backend, staging and role; nothing listens yet.

    Raises:
        TransferError: the backend cannot start or has no place for staging.
    """
    network = Network(post, secret=read_secret(config))
    backend = start_backend(config, post)
    print(f"pdjax {role}: transfer: {backend.summary}", file=sys.stderr, flush=True)
    sizes = {"slots": config.transfer.slots, "slot_pages": core.slot_pages, "backend": backend}
    if role == "prefill":
        staging = SourceStaging(core.spec, core.mesh, **sizes)
    else:
        staging = LandingRing(core.spec, **sizes)
    test_cells = PathTestCells(backend, receives=role == "decode")
    registration = messages.Registration(
        protocol_version=messages.PROTOCOL_VERSION,
        layout_version=messages.LAYOUT_VERSION,
        role=role,
        instance=secrets.randbits(63),
        model=core.identity,
        state=core.spec,
        backend=config.transfer.backend,
        ranks=[Rank(backend.describe())],
        slots=config.transfer.slots,
        slot_pages=core.slot_pages,
        # The fake backend moves no bytes, so there is nothing to verify.
        verify=config.transfer.verify and config.transfer.backend != "fake",
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
    shared = {
        "network": network,
        "backend": backend,
        "test_cells": test_cells,
        "registration": registration,
        "timeouts": timeouts,
    }

    def make_role(engine: Engine) -> Role:
        if isinstance(staging, SourceStaging):
            return Prefill(engine, staging=staging, **shared)
        return Decode(engine, ring=staging, **shared)

    return Pair(network, backend, staging, make_role)
