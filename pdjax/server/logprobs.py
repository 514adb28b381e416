"""Log-probabilities in the forms that clients know: SGLang's, and OpenAI's for chats and for completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdjax.server.output import Output, Top
from pdjax.server.vocabulary import Vocabulary


class NativeLogprobs:
    """SGLang's: `[log-probability, token id, text or null]` a token.

    Args:
        start: the prompt position from which those of the prompt are shown; None for none.
        top: how many of the best tokens are shown at each position.
        texts: whether tokens' texts are shown.
    """

    def __init__(self, vocabulary: Vocabulary, *, start: int | None, top: int, texts: bool) -> None:
        self._vocabulary = vocabulary
        self._start = start
        self._top = top
        self._texts = texts

    def fields(self, output: Output) -> dict[str, Any]:
        """What `meta_info` has of them."""
        ids, start = output.job.generate.input_ids, self._start
        shown = [] if start is None or not output.prompt_logprobs else list(
            zip(output.prompt_logprobs[start:], ids[start:], strict=True))  # fmt: skip
        fields: dict[str, Any] = {
            "input_token_logprobs": [self._entry(token, logprob) for logprob, token in shown],
            "output_token_logprobs": [
                self._entry(token, logprob)
                for token, logprob in zip(output.token_ids, output.logprobs, strict=True)
            ],
        }  # fmt: skip
        if self._top:
            prompt = output.prompt_top_logprobs[start:] if shown else []
            fields["input_top_logprobs"] = [self._best(best) for best in prompt]
            fields["output_top_logprobs"] = [self._best(best) for best in output.top_logprobs]
        return fields

    def _best(self, best: Top) -> list[Any] | None:
        return [self._entry(token, logprob) for token, logprob in best[: self._top]] or None

    def _entry(self, token: int, logprob: float | None) -> tuple[float | None, int, str | None]:
        return logprob, token, self._vocabulary.token_text(token) if self._texts else None


def chat_logprobs(
    vocabulary: Vocabulary, token_ids: Sequence[int], logprobs: Sequence[float], top: Sequence[Top]
) -> dict[str, Any]:
    """`logprobs` of a chat's choice: an entry a token, with its bytes, and the best tokens in its place."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, raw = vocabulary.token_text(token), vocabulary.token_bytes(token)
        return {"token": text, "logprob": logprob, "bytes": raw}

    best = top if len(top) == len(token_ids) else [[]] * len(token_ids)
    return {
        "content": [
            entry(token, logprob) | {"top_logprobs": [entry(*each) for each in others]}
            for token, logprob, others in zip(token_ids, logprobs, best, strict=True)
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """OpenAI's for completions: lists with an entry a token, and where each token's text begins.

    Args:
        top: how many of the best tokens are shown; the chosen one is always among them.
    """

    def __init__(self, vocabulary: Vocabulary, *, top: int) -> None:
        self._vocabulary = vocabulary
        self._top = top
        self._offsets: dict[int, int] = {}

    def begin_at(self, index: int, offset: int) -> None:
        """The text of choice `index` begins after `offset` characters that have no tokens here."""
        self._offsets[index] = offset

    def piece(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[float | None], top: Sequence[Top]
    ) -> dict[str, Any]:
        """The next tokens of choice `index`."""
        tokens = [self._vocabulary.token_text(token) for token in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(token)
        best = top if len(top) == len(tokens) else [[]] * len(tokens)
        shown = [self._best(*each) for each in zip(tokens, logprobs, best, strict=True)]
        return {
            "tokens": tokens,
            "token_logprobs": list(logprobs),
            "top_logprobs": shown if self._top else None,
            "text_offset": offsets,
        }

    def _best(self, chosen: str, logprob: float | None, best: Top) -> dict[str, float] | None:
        if logprob is None:
            return None
        texts: dict[str, float] = {}
        for token, value in best[: self._top]:  # two ids may have one text: the better one stays
            texts.setdefault(self._vocabulary.token_text(token), value)
        texts.setdefault(chosen, logprob)
        return texts
