"""Which class defines which ``model_type``."""

from __future__ import annotations

from pdjax.models.errors import ModelError
from pdjax.models.llama import Llama

MODELS: dict[str, type[Llama]] = {"llama": Llama, "qwen2": Llama}


def model_class(model_type: str) -> type[Llama]:
    """The class for a ``model_type`` of ``config.json``.

    Raises:
        ModelError: there is none; the known ones are listed.
    """
    if model_type not in MODELS:
        raise ModelError(f"model_type {model_type!r} is not known; known are {', '.join(sorted(MODELS))}")
    return MODELS[model_type]
