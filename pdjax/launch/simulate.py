"""``python -m pdjax.launch simulate``: the room protocol in seeded worlds that break everything, many of them."""

from __future__ import annotations

import argparse
import gc
import inspect
import sys
import time
from collections import Counter

from pdjax.launch import compiled
from pdjax.launch.cache_folder import cache_root


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--seeds", type=_seeds, default=range(1, 201), metavar="FIRST:LAST",
                        help="seeds to play, both ends included, or one seed (default: 1:200)")  # fmt: skip
    parser.add_argument("--instances", type=_instances, default=(4, 8), metavar="PxD",
                        help="prefill and decode instances (default: 4x8)")  # fmt: skip
    parser.add_argument("--rooms", type=int, default=200, help="requests a seed (default: %(default)s)")
    parser.add_argument("--faults", type=int, default=12, help="faults a seed (default: %(default)s)")
    parser.add_argument("--compiled", action="store_true",
                        help="play by machine code, twice as fast; compiling takes a minute, once")  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Play; returns 1 after the first seed in which something happened that must never happen, with its log."""
    if args.compiled:
        try:
            compiled.use(cache_root() / "native")
        except compiled.NotCompiled as error:
            print(f"pdjax: {error}", file=sys.stderr)
            return 2
    from pdjax.disagg.simulate import Settings, run_seed  # only now is it known which

    how = "interpreted" if inspect.isfunction(run_seed) else "compiled"
    prefill, decode = args.instances
    settings = Settings(prefill=prefill, decode=decode, rooms=args.rooms, faults=args.faults)
    total: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    started = time.process_time()
    # A world is thrown away whole: looking for garbage costs a tenth of the time while it is played, and a fiftieth
    # between two worlds, if what outlives them is not looked at again.
    gc.disable()
    for seed in args.seeds:
        outcome = run_seed(seed, settings)
        total.update(seeds=1, rooms=outcome.rooms, served=outcome.served, events=outcome.events)
        total["recomputed"] += outcome.recomputed
        faults.update(outcome.faults)
        if outcome.problem is not None:
            print("\n".join(outcome.log))
            print(f"seed {seed}: {outcome.problem}")
            print(f"once more: python -m pdjax.launch simulate --seeds {seed} --instances {prefill}x{decode} "
                  f"--rooms {args.rooms} --faults {args.faults}")  # fmt: skip
            return 1
        gc.collect()
        gc.freeze()
    seconds = time.process_time() - started
    print(f"{total['seeds']} seeds, {total['rooms']} rooms ({total['served']} served, {total['recomputed']} in place "
          f"of lost ones), {total['events']} events")  # fmt: skip
    print(f"faults: {', '.join(f'{kind} {count}' for kind, count in sorted(faults.items())) or 'none'}")
    print(f"{total['rooms'] / seconds:,.0f} rooms/s, {total['events'] / seconds:,.0f} events/s of processor time, "
          f"{how}; nothing happened that must never happen")  # fmt: skip
    return 0


def _seeds(text: str) -> range:
    first, colon, last = text.partition(":")
    seeds = range(int(first), (int(last) if colon else int(first)) + 1)
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text!r} holds no seed")
    return seeds


def _instances(text: str) -> tuple[int, int]:
    prefill, _, decode = text.partition("x")
    if not (prefill.isdigit() and decode.isdigit() and int(prefill) and int(decode)):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form PxD, for example 4x8")
    return int(prefill), int(decode)
