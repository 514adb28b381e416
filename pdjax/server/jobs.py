"""From a request's prompts to the jobs that the engine runs: ids, limits and the room of each."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdjax import wire
from pdjax.server.sampling import SamplingFields, TextRules, check_sampling, for_engine, text_rules
from pdjax.web import HttpError

MAX_ROOM = 2**63 - 1
MAX_BATCH = 1024


@dataclass(frozen=True)
class Instance:
    """What the frontend knows about its instance. `max_context` is in tokens, prompt and output together."""

    role: str
    max_context: int
    vocabulary_size: int
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None

    @classmethod
    def from_info(cls, info: dict[str, Any], tokenizer_size: int) -> Instance:
        """From what the leader said when it became ready."""
        return cls(
            role=str(info.get("engine_type", "unified")),
            max_context=int(info["max_context"]),
            vocabulary_size=int(info.get("vocab_size", tokenizer_size)),
            bootstrap_host=info.get("disaggregation_bootstrap_host"),
            bootstrap_port=info.get("disaggregation_bootstrap_port"),
        )

    @property
    def default_chat_tokens(self) -> int:
        """New tokens of a chat that names no limit: a quarter of the context, since pages for all are reserved."""
        return max(1, self.max_context // 4)


@dataclass(frozen=True)
class Bootstrap:
    """`bootstrap_host`, `bootstrap_port` and `bootstrap_room` as a request gives them: one for all, or one each."""

    host: str | list[str] | None = None
    port: int | list[int | None] | None = None
    room: int | list[int] | None = None


@dataclass(frozen=True)
class Job:
    """One sample of a request."""

    generate: wire.Generate
    rules: TextRules

    @property
    def rid(self) -> str:
        """Its id."""
        return self.generate.rid


def make_jobs(
    instance: Instance,
    prompts: Sequence[list[int]],
    sampling: Sequence[SamplingFields],
    *,
    rids: Sequence[str],
    bootstrap: Bootstrap,
    default_max: int,
    max_name: str = "max_new_tokens",
) -> list[Job]:
    """One job a prompt.

    Args:
        prompts: token ids.
        sampling: one for each prompt.
        default_max: new tokens, if a request does not say.
        max_name: what the client calls the limit on new tokens.

    Raises:
        HttpError: 400, in words.
    """
    if not 1 <= len(prompts) <= MAX_BATCH:
        raise HttpError(400, f"a request takes 1 to {MAX_BATCH} prompts, not {len(prompts)}")
    meetings = rendezvous(instance, bootstrap, len(prompts))
    jobs = []
    for i, (ids, fields) in enumerate(zip(prompts, sampling, strict=True)):
        check_sampling(fields, vocabulary_size=instance.vocabulary_size, max_name=max_name)
        _check_prompt(instance, ids)
        wanted = 1 if instance.role == "prefill" else fields.max_new_tokens or default_max
        engine = for_engine(
            fields, max_new_tokens=min(wanted, instance.max_context - len(ids)), seed_offset=i
        )  # fmt: skip
        jobs.append(Job(wire.Generate(rids[i], ids, engine, meetings[i]), text_rules(fields)))
    return jobs


def new_rid(prefix: str) -> str:
    """An id that nobody else has."""
    return f"{prefix}-{uuid.uuid4().hex}"


def rendezvous(instance: Instance, bootstrap: Bootstrap, count: int) -> list[wire.Rendezvous] | list[None]:
    """Where each of a request's `count` samples meets its other half. Sample i of a single room r has room r + i.

    Raises:
        HttpError: 400, what is needed is missing or out of range.
    """
    if instance.role == "unified":
        return [None] * count
    if bootstrap.room is None:
        raise HttpError(
            400,
            f"bootstrap_room: a {instance.role} instance takes no request without one; "
            "send requests to the router in front of it",
        )
    if isinstance(bootstrap.room, list):
        rooms = _each("bootstrap_room", bootstrap.room, count)
    else:
        rooms = [bootstrap.room + i for i in range(count)]
    hosts = _each("bootstrap_host", bootstrap.host, count)
    ports = _each("bootstrap_port", bootstrap.port, count)
    return [_meeting(instance, *each) for each in zip(hosts, ports, rooms, strict=True)]


def _meeting(instance: Instance, host: str | None, port: int | None, room: int) -> wire.Rendezvous:
    host = host if host is not None else instance.bootstrap_host
    port = port if port is not None else instance.bootstrap_port
    if host is None:
        raise HttpError(400, "bootstrap_host: the prefill instance's address is missing")
    if port is None:
        raise HttpError(400, "bootstrap_port: null, and this instance knows no default; give the router the port")
    if not 1 <= port <= 65535:
        raise HttpError(400, f"bootstrap_port must lie in 1..65535, not {port}")
    if not 0 <= room <= MAX_ROOM:
        raise HttpError(400, f"bootstrap_room must lie in 0..2^63-1, not {room}")
    return wire.Rendezvous(host, port, room)


def _each(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise HttpError(400, f"{name}: a list of {len(value)} for {count} prompts; give one each, or one for all")
    return value


def _check_prompt(instance: Instance, ids: list[int]) -> None:
    if not ids:
        raise HttpError(400, "the prompt is empty; give at least one token")
    if len(ids) + 1 > instance.max_context:
        raise HttpError(
            400,
            f"the prompt has {len(ids)} tokens; with at least one new token that is over this instance's context of "
            f"{instance.max_context} tokens",
        )
    if min(ids) < 0 or max(ids) >= instance.vocabulary_size:
        wrong = next(token for token in ids if not 0 <= token < instance.vocabulary_size)
        raise HttpError(400, f"token id {wrong} is not in the vocabulary of {instance.vocabulary_size} tokens")
