"""Writes a model folder: whole, or not at all."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import msgspec
import numpy as np
from tokenizers import Tokenizer

from pdjax.models import weights
from pdjax.models.config import ModelConfig
from pdjax.models.errors import ModelError
from pdjax.models.folder import CONFIG, FORMAT, RECORD, WEIGHTS, FolderRecord, ParameterRecord, weight_files
from pdjax.models.names import TensorSource, assemble
from pdjax.models.publishing import published
from pdjax.models.registry import model_class
from pdjax.models.tokenizer_text import TokenizerFiles


@dataclass(frozen=True)
class Origin:
    """What a model folder was made from."""

    name: str
    sha256: str


def write_model(
    destination: Path,
    *,
    config: ModelConfig,
    tensors: TensorSource,
    tokenizer: TokenizerFiles,
    origin: Origin,
    dtype: str | None = None,
    force: bool = False,
    on_parameter: Callable[[str], object] = lambda name: None,
) -> None:
    """Make the model folder `destination`. It appears by a rename, so a half-written one is never taken for whole.

    All parameters are held in memory until they are written.

    Args:
        dtype: float32 or bfloat16 to store weights so; None keeps what the source has.
        force: replace a model folder that is there already.
        on_parameter: told of each parameter as it is read.

    Raises:
        ModelError: the destination is taken, or the source is not a whole model of a known kind.
    """
    model_class(config.model_type)  # refuses an unknown kind before anything is read
    _check_tokenizer(tokenizer, config)
    with published(destination, force=force) as folder:
        parameters: dict[str, np.ndarray] = {}
        for name, values in assemble(config, tensors):
            parameters[name] = values if dtype is None else values.astype(jnp.dtype(dtype), copy=False)
            on_parameter(name)
        weights.save(folder / WEIGHTS, parameters)
        tokenizer.write(folder)
        _write_json(folder / CONFIG, json.dumps(config.to_huggingface()).encode())
        record = FolderRecord(
            format=FORMAT,
            pdjax_version=_version(),
            source=origin.name,
            source_sha256=origin.sha256,
            weights_sha256=_digest(parameters),
            parameters={name: ParameterRecord(str(a.dtype), a.shape) for name, a in parameters.items()},
            files=weight_files(folder),
        )
        _write_json(folder / RECORD, msgspec.json.encode(record))


def _check_tokenizer(files: TokenizerFiles, config: ModelConfig) -> None:
    try:
        vocabulary = Tokenizer.from_str(files.tokenizer).get_vocab()
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"the tokenizer does not parse: {error}") from error
    beyond = [token for token, id in vocabulary.items() if id >= config.vocab_size]
    if beyond:
        raise ModelError(
            f"the tokenizer has {len(beyond)} tokens beyond the model's vocabulary of {config.vocab_size}, "
            f"for instance {beyond[0]!r}"
        )


def _digest(parameters: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(parameters):
        values = np.ascontiguousarray(parameters[name])
        digest.update(f"{name} {values.dtype} {values.shape}\n".encode())
        digest.update(values.view(np.uint8).data)
    return digest.hexdigest()


def _write_json(file: Path, body: bytes) -> None:
    file.write_bytes(msgspec.json.format(body, indent=2) + b"\n")


def _version() -> str:
    try:
        return importlib.metadata.version("pdjax")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (run from a source tree)"
