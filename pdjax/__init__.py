"""Serve large language models from JAX meshes with prefill and decode apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdjax.llm import LLM
    from pdjax.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Offline use is imported when it is asked for: it brings JAX, and a server or a router must start without."""
    if name == "LLM":
        from pdjax.llm import LLM

        return LLM
    if name == "SamplingParams":
        from pdjax.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'pdjax' has no attribute {name!r}")
