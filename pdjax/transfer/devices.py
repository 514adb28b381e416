"""``Transfer.ib_device``: a device's name, several with commas, or a JSON map of ranks to either, or its file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pdjax.transfer.backend import TransferError

_Map = dict[str, str | list[str]]


def devices_for(text: str, rank: int) -> tuple[str, ...]:
    """The names of the devices that a rank (or its GPU, which has the same number) is to use; () for no choice.

    Raises:
        TransferError: it is none of the forms, or the map lacks the rank.
    """
    text = text.strip()
    if not text:
        return ()
    if text.endswith(".json"):
        try:
            text = Path(text).expanduser().read_text().strip()
        except OSError as error:
            raise TransferError(f"ib_device: {text} cannot be read: {error.strerror}") from error
    if not text.startswith("{"):
        return _names(text.split(","))
    try:
        ranks = msgspec.json.decode(text, type=_Map)
    except msgspec.DecodeError as error:
        raise TransferError(
            f'ib_device: expected a name, a list with commas, or a map such as {{"0": "mlx5_0"}}: {error}'
        ) from error
    if str(rank) not in ranks:
        raise TransferError(f"ib_device: the map has no entry for rank {rank}; it has {', '.join(ranks) or 'none'}")
    named = ranks[str(rank)]
    return _names(named.split(",") if isinstance(named, str) else named)


def _names(parts: list[str]) -> tuple[str, ...]:
    names = tuple(part.strip() for part in parts)
    if not names or not all(names):
        raise TransferError(f"ib_device: an empty name in {', '.join(parts)!r}")
    return names
