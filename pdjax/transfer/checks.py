"""What every backend refuses in the same words: impossible writes, and descriptions that are damaged."""

from __future__ import annotations

import hashlib

from pdjax.transfer.backend import MAX_NOTICE, TransferError, Write

_DIGEST = 16


def problem_with(write: Write, source: int | None, target: int | None) -> str | None:
    """What makes a write impossible, as a sentence. `source` and `target` are its regions' bytes, None if unknown."""
    if source is None:
        return f"region {write.region} is not registered here"
    if target is None:
        return f"the peer has no region {write.peer_region}"
    if write.nbytes < 0 or write.offset < 0 or write.offset + write.nbytes > source:
        return f"[{write.offset}, +{write.nbytes}) is not within region {write.region} of {source} bytes"
    if write.peer_offset < 0 or write.peer_offset + write.nbytes > target:
        return (
            f"[{write.peer_offset}, +{write.nbytes}) is not within the peer's region {write.peer_region} of "
            f"{target} bytes"
        )
    if len(write.notice) > MAX_NOTICE:
        return f"a notice of {len(write.notice)} bytes is over the limit of {MAX_NOTICE}"
    return None


def check_region(region: int, nbytes: int, known: bool) -> None:
    """Raise `TransferError` if a region cannot be made."""
    if known:
        raise TransferError(f"region {region} exists already")
    if nbytes <= 0:
        raise TransferError(f"region {region} would have {nbytes} bytes")


def seal(body: bytes) -> bytes:
    """A description with its digest: the libraries below trust addresses and keys blindly."""
    return hashlib.blake2b(body, digest_size=_DIGEST).digest() + body


def unseal(data: bytes) -> bytes:
    """What was sealed. Raises `TransferError`."""
    digest, body = data[:_DIGEST], data[_DIGEST:]
    if hashlib.blake2b(body, digest_size=_DIGEST).digest() != digest:
        raise TransferError("the peer's transfer description is damaged, or of another backend")
    return body
