"""From a request's prompts to the jobs that the engine runs: ids, limits and the room of each."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pdjax import wire
from pdjax.server.sampling import SamplingFields, TextRules, check_sampling, for_engine, text_rules
from pdjax.web import HttpError

MAX_ROOM = 2**63 - 1
MAX_BATCH = 1024  # samples of one request
MAX_TOP_LOGPROBS = 20


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
        """New tokens of a chat that names no limit: a quarter of the context, since pages may be reserved for all."""
        return max(1, self.max_context // 4)


@dataclass(frozen=True)
class Bootstrap:
    """`bootstrap_host`, `bootstrap_port` and `bootstrap_room` as a request gives them: one for all, or one each."""

    host: str | list[str] | None = None
    port: int | list[int | None] | None = None
    room: int | list[int] | None = None


@dataclass(frozen=True)
class Ask:
    """One prompt and what is asked of it. `grammar` goes before the one in `sampling`."""

    ids: list[int]
    rid: str
    sampling: SamplingFields
    grammar: wire.Grammar | None = None
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    priority: int | None = None
    deadline_s: float | None = None
    dp_rank: int | None = None

    @property
    def samples(self) -> int:
        """How many answers are wanted."""
        return self.sampling.n or 1


@dataclass(frozen=True)
class Job:
    """One sample of a request.

    Attributes:
        prompt: which of the request's prompts it belongs to.
        sample: which of that prompt's samples it is.
        prompt_only: no new token is wanted. The engine makes one all the same, which is not told.
    """

    generate: wire.Generate
    rules: TextRules
    prompt: int = 0
    sample: int = 0
    prompt_only: bool = False

    @property
    def rid(self) -> str:
        """Its id."""
        return self.generate.rid


def make_jobs(
    instance: Instance,
    asks: Sequence[Ask],
    *,
    bootstrap: Bootstrap,
    default_max: int,
    max_name: str = "max_new_tokens",
) -> list[Job]:
    """One job a sample, prompt by prompt. Sample i of a prompt with a seed has the seed + i.

    Args:
        default_max: new tokens, if a request does not say.
        max_name: what the client calls the limit on new tokens.

    Raises:
        HttpError: 400, in words.
    """
    if not 1 <= len(asks) <= MAX_BATCH:
        raise HttpError(400, f"a request takes 1 to {MAX_BATCH} prompts, not {len(asks)}")
    for ask in asks:
        _check(instance, ask, max_name)
    total = sum(ask.samples for ask in asks)
    if total > MAX_BATCH:
        raise HttpError(400, f"n: {total} samples of {len(asks)} prompts are over the {MAX_BATCH} of one request")
    meetings = iter(rendezvous(instance, bootstrap, [ask.samples for ask in asks]))
    return [
        _job(instance, ask, prompt, sample, next(meetings), default_max)
        for prompt, ask in enumerate(asks)
        for sample in range(ask.samples)
    ]


def _job(
    instance: Instance, ask: Ask, prompt: int, sample: int, meeting: wire.Rendezvous | None, default_max: int
) -> Job:
    limit = default_max if ask.sampling.max_new_tokens is None else ask.sampling.max_new_tokens
    wanted = 1 if instance.role == "prefill" else max(1, limit)
    engine = for_engine(
        ask.sampling, max_new_tokens=min(wanted, instance.max_context - len(ask.ids)), seed_offset=sample
    )
    if ask.grammar is not None:
        engine = msgspec.structs.replace(engine, grammar=ask.grammar)
    generate = wire.Generate(
        ask.rid if ask.samples == 1 else f"{ask.rid}-{sample}",
        ask.ids,
        engine,
        meeting,
        top_logprobs=ask.top_logprobs,
        prompt_logprobs=ask.prompt_logprobs,
        priority=ask.priority or 0,
        deadline_s=ask.deadline_s,
        sample_of=f"{ask.rid}-0" if sample else "",
        # In a pair the other samples are where their own rooms say.
        dp_rank=None if sample and meeting else ask.dp_rank,
    )
    return Job(generate, text_rules(ask.sampling), prompt, sample, prompt_only=limit == 0)


def wanted_rank(instance: Instance, named: int | None, routed: int | None, prefill: int | None) -> int | None:
    """The dp rank that a request asks for: `data_parallel_rank`, or `routed_dp_rank`, which is its newer name; and of
    the prefill side alone `disagg_prefill_dp_rank`.

    Raises:
        HttpError: 400, they contradict each other.
    """
    given = {each for each in (named, routed, prefill if instance.role == "prefill" else None) if each is not None}
    if len(given) > 1:
        raise HttpError(400, f"data_parallel_rank: the request asks for several dp ranks: {sorted(given)}")
    return given.pop() if given else None


def new_rid(prefix: str) -> str:
    """An id that nobody else has."""
    return f"{prefix}-{uuid.uuid4().hex}"


def rendezvous(instance: Instance, bootstrap: Bootstrap, samples: Sequence[int]) -> Sequence[wire.Rendezvous | None]:
    """Where each sample meets its other half; `samples` are their numbers by prompt.

    Both halves of a request derive the same rooms from the same body: a single room r stands for r, r + 1... over all
    samples; one room a prompt stands for r, r + 1... over that prompt's samples; one room a sample stands for itself.

    Raises:
        HttpError: 400, what is needed is missing or out of range.
    """
    total = sum(samples)
    if instance.role == "unified":
        return [None] * total
    if bootstrap.room is None:
        raise HttpError(
            400,
            f"bootstrap_room: a {instance.role} instance takes no request without one; "
            "send requests to the router in front of it",
        )
    if isinstance(bootstrap.room, list):
        first = _each("bootstrap_room", bootstrap.room, samples)
        steps = [i for n in samples for i in range(n)] if len(bootstrap.room) != total else [0] * total
        rooms = [room + step for room, step in zip(first, steps, strict=True)]
    else:
        rooms = [bootstrap.room + i for i in range(total)]
    hosts = _each("bootstrap_host", bootstrap.host, samples)
    ports = _each("bootstrap_port", bootstrap.port, samples)
    return [_meeting(instance, *each) for each in zip(hosts, ports, rooms, strict=True)]


def _meeting(instance: Instance, host: str | None, port: int | None, room: int) -> wire.Rendezvous:
    host = host if host is not None else instance.bootstrap_host
    port = port if port is not None else instance.bootstrap_port
    if host == wire.NO_PARTNER:
        port = port or 1
    if host is None:
        raise HttpError(400, "bootstrap_host: the prefill instance's address is missing")
    if port is None:
        raise HttpError(400, "bootstrap_port: null, and this instance knows no default; give the router the port")
    if not 1 <= port <= 65535:
        raise HttpError(400, f"bootstrap_port must lie in 1..65535, not {port}")
    if not 0 <= room <= MAX_ROOM:
        raise HttpError(400, f"bootstrap_room must lie in 0..2^63-1, not {room}")
    return wire.Rendezvous(host, port, room)


def _each(name: str, value: Any, samples: Sequence[int]) -> list[Any]:
    """One value a sample, from one for all, one a prompt, or one a sample."""
    total = sum(samples)
    if not isinstance(value, list):
        return [value] * total
    if len(value) == total:
        return value
    if len(value) == len(samples):
        return [each for each, n in zip(value, samples, strict=True) for _ in range(n)]
    raise HttpError(400, f"{name}: a list of {len(value)} for {len(samples)} prompts; give one each, or one for all")


def _check(instance: Instance, ask: Ask, max_name: str) -> None:
    check_sampling(ask.sampling, vocabulary_size=instance.vocabulary_size, max_name=max_name)
    if ask.grammar is not None and for_engine(ask.sampling, max_new_tokens=1).grammar is not None:
        raise HttpError(400, "an answer can follow one grammar only, and the request gives two")
    if not 0 <= ask.top_logprobs <= MAX_TOP_LOGPROBS:
        raise HttpError(400, f"top log-probabilities: 0 to {MAX_TOP_LOGPROBS} can be told, not {ask.top_logprobs}")
    if ask.priority is not None and not -(2**31) <= ask.priority < 2**31:
        raise HttpError(400, f"priority must fit in 32 bits, which {ask.priority} does not")
    if ask.deadline_s is not None and not ask.deadline_s > 0:
        raise HttpError(400, f"deadline_s must be above 0 seconds, not {ask.deadline_s:g}")
    _check_prompt(instance, ask.ids)


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
