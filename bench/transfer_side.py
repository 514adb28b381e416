"""One process of `bench/transfer.py`: commands come in as JSON lines, answers leave as JSON lines."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from bench.transfer_work import WORKS

CPU_CLOCK = time.process_time


def main(row: str, work: str, role: str, options: list[str]) -> None:
    """Be one side of a row until the input ends."""
    sys.setswitchinterval(1e-4)  # as instances have it
    side = _make(row, work, role, options)
    say(ready=True, pid=os.getpid())
    for line in sys.stdin:
        command = json.loads(line)
        match command["op"]:
            case "describe":
                say(**side.describe())
            case "connect":
                side.connect(command["peer"])
                say(first_transfer_s=getattr(side, "first_transfer_s", None), path=getattr(side, "path", None))
            case "run":
                if role == "target":
                    say(waiting=True)
                began, cpu = time.monotonic(), CPU_CLOCK()
                side.send() if role == "source" else side.receive()
                say(began=began, ended=time.monotonic(), cpu_ms=1e3 * (CPU_CLOCK() - cpu))
            case "digest":
                say(digest=side.digest(command["of"]))
    os._exit(0)  # libraries of half a dozen makers need not end in order


def _make(row: str, work: str, role: str, options: list[str]) -> Any:
    if row == "pdjax":
        from bench.transfer_pdjax import Pdjax

        return Pdjax(WORKS[work], role, options)
    from bench import transfer_bare

    return getattr(transfer_bare, row)(WORKS[work], role, options)


def say(**answer: Any) -> None:
    """Answer the harness; at once, since libraries print too."""
    os.write(1, f"{json.dumps(answer)}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
