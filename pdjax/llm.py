"""Offline use: a model in this process, without HTTP or MPI, by the names that vLLM's and SGLang's users know."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import queue
import threading
import uuid
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from tqdm import tqdm

from pdjax.config import SECTIONS, Config
from pdjax.engine_thread import EngineError, EngineThread
from pdjax.launch.fetch import fetch
from pdjax.sampling_params import SamplingParams
from pdjax.server.chat_request import Message, conversation_text
from pdjax.server.chat_template import ChatTemplate
from pdjax.server.jobs import Ask, Bootstrap, Instance, Job, make_jobs
from pdjax.server.output import Output, SampleText, Top
from pdjax.server.parse import convert
from pdjax.server.sampling import SamplingFields
from pdjax.server.tool_choice import ToolUse
from pdjax.server.vocabulary import Vocabulary, read_settings
from pdjax.web import HttpError
from pdjax.wire import Failed, Tokens

_OPTION_SECTIONS = ("Model", "Instance", "Cache", "Engine")
Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True)
class CompletionOutput:
    """One sample.

    Attributes:
        token_ids: a stop token that ended it is the last; it is not in the text.
        finish_reason: stop or length.
        stop_reason: the stop string or token, if there was one.
        logprobs: a mapping a token, from ids to log-probabilities: of the chosen one and the best. None if not asked
            for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: list[dict[int, float]] | None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its samples; `text`, `token_ids`, `finish_reason` and `logprobs` are the first sample's."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, float] | None] | None
    num_cached_tokens: int

    @property
    def text(self) -> str:
        """What was said."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """As ids."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why it ended: stop or length."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[dict[int, float]] | None:
        """A mapping a token, or None."""
        return self.outputs[0].logprobs


class LLM:
    """A model that answers prompts. Close it by `shutdown`, or use it as a context manager.

    Args:
        model: a model folder, the name of one that `fetch` knows, or a whole `Config`.
        options: options of the sections Model, Instance, Cache and Engine by name, as in
            ``LLM(folder, dtype="bfloat16", max_context=4096, warmup=False)``.

    Raises:
        ValueError: an option is wrong.
        EngineError: the engine can't start.
    """

    def __init__(self, model: str | Path | Config, **options: Any) -> None:
        config = _config(model, options)
        if config.instance.processes > 1:
            raise ValueError("processes: offline use has one process; serve over HTTP for more")
        folder = Path(config.model.folder).expanduser()
        folder = folder.resolve() if folder.is_dir() else fetch(config.model.folder)
        self.config = config
        self._vocabulary = Vocabulary.load(folder)
        self._template = ChatTemplate.load(folder, read_settings(folder))
        self._engine = EngineThread(config, folder)
        self._instance = Instance.from_info(self._engine.info, self._vocabulary.size)
        self._busy = threading.Lock()
        # Also at the interpreter's end: a thread inside JAX must not outlive it.
        self._finalizer = weakref.finalize(self, self._engine.stop)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End the engine; a second time does nothing."""
        self._finalizer()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams
        | Mapping[str, Any]
        | Sequence[SamplingParams | Mapping[str, Any]]
        | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer prompts, together.

        Args:
            prompts: texts or lists of token ids (or arrays of them), or mappings with `prompt` or `prompt_token_ids`;
                one or several.
            sampling_params: for all, or one for each prompt: `SamplingParams`, or a mapping with SGLang's names.
            use_tqdm: show a progress bar.

        Returns:
            An output for each prompt, in order.

        Raises:
            ValueError: a prompt or an option can't be; the sentence says what and why.
            EngineError: the engine has ended or can't take the request.
        """
        given = [_plain(each) if isinstance(each, Mapping) else each for each in _several(prompts)]
        wanted = _for_each(sampling_params, len(given))
        texts = [each if isinstance(each, str) else None for each in given]
        try:
            ids = [self._vocabulary.encode_now(each) if isinstance(each, str) else _ids(each) for each in given]
            return self._run(texts, ids, wanted, use_tqdm=use_tqdm)
        except HttpError as error:
            raise _in_words(error) from error

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several together: lists of mappings with `role` and `content`.

        Returns and raises as `generate`.
        """
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations = list(messages) if several else [messages]
        try:
            texts = [self._conversation(each, chat_template_kwargs) for each in conversations]
            ids = [self._vocabulary.encode_now(text, special=False) for text in texts]
            return self._run(texts, ids, _for_each(sampling_params, len(ids)), use_tqdm=use_tqdm)
        except HttpError as error:
            raise _in_words(error) from error

    def _conversation(self, messages: Any, options: Mapping[str, Any] | None) -> str:
        read = [convert(dict(each), Message, inside=f"messages[{i}]") for i, each in enumerate(messages)]
        return conversation_text(self._template, read, ToolUse(), options)

    def _run(
        self,
        texts: Sequence[str | None],
        prompts: Sequence[list[int]],
        wanted: Sequence[SamplingParams | Mapping],
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        self._engine.check()
        if not prompts:
            return []
        sampling = [each if isinstance(each, SamplingParams) else None for each in wanted]
        asks = [
            _ask(ids, params, each) for ids, params, each in zip(prompts, wanted, sampling, strict=True)
        ]  # fmt: skip
        jobs: list[Job] = []
        for ask in asks:  # one by one: a batch here may be longer than an HTTP request's
            jobs += make_jobs(
                self._instance, [ask], bootstrap=Bootstrap(), default_max=SamplingParams.max_tokens
            )  # fmt: skip
        with self._busy, tqdm(total=len(jobs), unit="answer", disable=not use_tqdm) as bar:
            outputs = iter(self._finish(jobs, bar))
        results = []
        for text, ask, params in zip(texts, asks, sampling, strict=True):
            results.append(_result(text, [next(outputs) for _ in range(ask.samples)], params))
        return results

    def _finish(self, jobs: Sequence[Job], bar: tqdm) -> list[Output]:
        """Run jobs, as many at once as the engine takes; `bar` counts those that have ended."""
        outputs = [Output(i, job) for i, job in enumerate(jobs)]
        texts = {output.job.rid: SampleText(output, self._vocabulary) for output in outputs}
        window = self.config.engine.max_running_requests + self.config.engine.max_queued_requests
        replies: queue.SimpleQueue[Tokens | Failed] = queue.SimpleQueue()
        waiting = iter(jobs)
        open_rids: set[str] = set()
        try:
            while True:
                for job in itertools.islice(waiting, window - len(open_rids)):
                    open_rids.add(job.rid)
                    self._engine.submit([job.generate], replies)
                if not open_rids:
                    return outputs
                frame = self._engine.next(replies)
                if frame.rid not in open_rids:  # what was on its way when a stop string was found
                    continue
                if isinstance(frame, Failed):
                    raise HttpError(frame.status, frame.message)
                text = texts[frame.rid]
                text.add(frame)
                if text.output.finish is not None:
                    open_rids.remove(frame.rid)
                    bar.update()
                    self._engine.forget(frame.rid, abort=frame.finish_reason is None)
        finally:
            for rid in open_rids:
                self._engine.forget(rid, abort=True)


def _config(model: str | Path | Config, options: Mapping[str, Any]) -> Config:
    config = model if isinstance(model, Config) else Config()
    if not isinstance(model, Config):
        options = {"folder": str(model), **options}
    places = {
        field.name: section for section in _OPTION_SECTIONS for field in dataclasses.fields(SECTIONS[section])
    }  # fmt: skip
    changes: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        if name not in places:
            near = difflib.get_close_matches(name, places, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(places))}"
            raise ValueError(f"there is no option {name!r}; {hint}")
        section = places[name].lower()
        kept = getattr(getattr(config, section), name)
        if type(value) is not type(kept):
            raise ValueError(f"{name}: expected {type(kept).__name__}, not {value!r}")
        changes.setdefault(section, {})[name] = value
    sections = {name: dataclasses.replace(getattr(config, name), **values) for name, values in changes.items()}
    return dataclasses.replace(config, **sections)


def _ask(ids: list[int], params: SamplingParams | Mapping[str, Any], own: SamplingParams | None) -> Ask:
    rid = f"llm-{uuid.uuid4().hex}"
    if own is None:
        return Ask(ids, rid, convert(dict(params), SamplingFields, inside="sampling_params"))  # type: ignore[arg-type]
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(own, name) or 0) < 0:
            raise HttpError(400, f"{name} must be at least 0, not {getattr(own, name)}")
    return Ask(
        ids,
        rid,
        convert(msgspec.to_builtins(own.fields()), SamplingFields, inside="sampling_params"),
        top_logprobs=max(own.logprobs or 0, own.prompt_logprobs or 0),
        prompt_logprobs=own.prompt_logprobs is not None,
    )


def _result(text: str | None, samples: Sequence[Output], params: SamplingParams | None) -> RequestOutput:
    first, prompt_top = samples[0], None if params is None else params.prompt_logprobs
    ids = first.job.generate.input_ids
    prompt_logprobs: list[dict[int, float] | None] | None = None
    if prompt_top is not None:
        known = zip(ids, first.prompt_logprobs, first.prompt_top_logprobs or [[]] * len(ids), strict=True)
        prompt_logprobs = [
            None if logprob is None else _best(token, logprob, top[:prompt_top]) for token, logprob, top in known
        ]
    wanted = None if params is None else params.logprobs
    outputs = [_sample(output, wanted) for output in samples]
    return RequestOutput(text, ids, outputs, prompt_logprobs, first.cached_tokens)


def _sample(output: Output, wanted: int | None) -> CompletionOutput:
    finish = output.finish or {}
    logprobs = None
    if wanted is not None:
        tops = output.top_logprobs or [[]] * len(output.token_ids)
        known = zip(output.token_ids, output.logprobs, tops, strict=True)
        logprobs = [_best(token, logprob, top[:wanted]) for token, logprob, top in known]
    return CompletionOutput(
        index=output.job.sample,
        text=output.text,
        token_ids=output.token_ids,
        finish_reason=finish["type"],
        stop_reason=finish.get("matched"),
        logprobs=logprobs,
    )


def _best(token: int, logprob: float, top: Top) -> dict[int, float]:
    return {token: logprob} | dict(top)


def _for_each(params: Any, count: int) -> list[SamplingParams | Mapping[str, Any]]:
    params = SamplingParams() if params is None else params
    if isinstance(params, SamplingParams | Mapping):
        return [params] * count
    if len(params) != count:
        raise ValueError(f"sampling_params: a list of {len(params)} for {count} prompts; give one each, or one for all")
    return list(params)


def _several(prompts: Any) -> list[Any]:
    """Prompts as a list, also if there is one only."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts are texts or lists of token ids, not {prompts!r:.80}")
    listed = list(prompts)
    return [listed] if listed and all(isinstance(each, Integral) for each in listed) else listed


def _plain(prompt: Mapping[str, Any]) -> Any:
    """vLLM's mapping as a text or ids."""
    given = [prompt[name] for name in ("prompt_token_ids", "prompt") if prompt.get(name) is not None]
    unknown = set(prompt) - {"prompt", "prompt_token_ids"}
    if not given or unknown:
        raise ValueError(f"a prompt's mapping has prompt or prompt_token_ids, and nothing else; not {sorted(prompt)}")
    return given[0]


def _ids(prompt: Any) -> list[int]:
    ids = list(prompt) if isinstance(prompt, Iterable) else None
    if ids is None or not all(isinstance(each, Integral) for each in ids):
        raise ValueError(f"a prompt is a text or a list of token ids, not {prompt!r:.80}")
    return [int(each) for each in ids]


def _in_words(error: HttpError) -> Exception:
    return ValueError(error.message) if error.status == 400 else EngineError(error.message)
