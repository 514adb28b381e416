"""Whole deployments under a seeded clock and network: what must never happen does not, and planted bugs are found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdjax.disagg.simulate import Settings, run_seed
from pdjax.disagg.simulate.plants import PLANTS

FEW = Settings(prefill=2, decode=3, rooms=60, faults=8)

# Pages are plenty: whoever waits for them behind requests of an instance that hangs may overrun its bounds.
ONE_BAD = Settings(prefill=2, decode=2, rooms=60, faults=6, spares=True, decode_pages=2000)


# Of bugs that seldom show, the worlds in which they do soonest: without faults, or all with several ranks.
SHOWN_BY = {
    "double_claim": FEW,
    "forgotten_tombstones": replace(FEW, calm_every=1),
    "workers_that_end_with_their_leader": replace(FEW, ranks_every=1),
}


def test_nothing_that_must_never_happen_happens_in_200_seeds() -> None:
    faults: set[str] = set()
    for seed in range(200):
        outcome = run_seed(seed, FEW)
        assert outcome.problem is None, "\n".join([*outcome.log, f"seed {seed}: {outcome.problem}"])
        faults.update(outcome.faults)
    assert faults >= {"kill", "worker lost", "stop", "long stop", "clock jump", "link cut", "path lost", "frame",
                      "damage", "write", "abort", "duplicate room", "room number reused", "half a request",
                      "slow consumer", "pages lost", "host out of reach"}  # fmt: skip


def test_whatever_happens_to_one_of_two_prefill_instances_no_request_is_lost() -> None:
    recomputed = 0
    for seed in range(60):
        outcome = run_seed(seed, ONE_BAD)
        assert outcome.problem is None, "\n".join([*outcome.log, f"seed {seed}: {outcome.problem}"])
        recomputed += outcome.recomputed
    assert recomputed > 100


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_found_within_200_seeds(plant: str) -> None:
    with PLANTS[plant]():
        assert any(run_seed(seed, SHOWN_BY.get(plant), explain=False).problem is not None for seed in range(1, 200))


def test_a_seed_is_the_same_world_each_time_and_its_failure_says_what_happened() -> None:
    assert run_seed(7, FEW) == run_seed(7, FEW)
    with PLANTS["success_on_a_missing_chunk"]():
        outcome = run_seed(1)
        assert outcome.problem is not None and "not its own" in outcome.problem
        assert outcome == run_seed(1)
    assert any("Claim" in line for line in outcome.log) and "Violation" in outcome.log[-1]


def test_without_faults_every_request_that_its_client_waits_for_is_served() -> None:
    outcome = run_seed(10, Settings(rooms=100))  # every tenth seed is calm
    assert outcome.problem is None
    assert set(outcome.faults) <= {"abort", "duplicate room", "room number reused", "slow consumer", "pages lost"}
    assert outcome.served > 100 and outcome.recomputed == 0
