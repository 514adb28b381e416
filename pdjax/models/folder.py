"""A model folder: what lies where in it, and what it says of itself. No jax here: the frontend reads it too.

::

    config.json            the model's numbers, in Hugging Face's form
    tokenizer.json         the tokenizer
    tokenizer_config.json  chat template, names of the bos and eos tokens
    weights/               an orbax checkpoint of the fused parameters
    pdjax.json             `FolderRecord`: format, origin, digests, every parameter's dtype and shape
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pdjax.models.config import ModelConfig
from pdjax.models.errors import ModelError

FORMAT = 1  # raised when parameters are fused or stored in another way
CONFIG, RECORD, WEIGHTS = "config.json", "pdjax.json", "weights"


class ParameterRecord(msgspec.Struct, frozen=True):
    """A stored parameter."""

    dtype: str
    shape: tuple[int, ...]


class FolderRecord(msgspec.Struct, frozen=True):
    """The contents of ``pdjax.json``. It is written last but for the rename that publishes the folder."""

    format: int
    pdjax_version: str
    source: str  # name of the file or folder that was converted
    source_sha256: str
    weights_sha256: str  # of the stored parameters, see `WeightsDigest`
    parameters: dict[str, ParameterRecord]
    files: dict[str, int]  # every file under weights/, relative to it, and its bytes


def read_record(folder: Path) -> FolderRecord:
    """Read ``pdjax.json``.

    Raises:
        ModelError: this is not a model folder, or one of another format.
    """
    try:
        body = (folder / RECORD).read_bytes()
    except OSError as error:
        raise ModelError(
            f"{folder} is not a model folder: {RECORD} cannot be read ({error.strerror}). "
            "Make one with: python -m pdjax.launch convert --from SOURCE --to FOLDER"
        ) from error
    try:
        record = msgspec.json.decode(body, type=FolderRecord)
    except msgspec.DecodeError as error:
        raise ModelError(f"{folder / RECORD} does not parse: {error}; convert or fetch the model again") from error
    if record.format != FORMAT:
        raise ModelError(
            f"{folder} has format {record.format}, this version of pdjax reads {FORMAT}; "
            "convert or fetch the model again"
        )
    return record


def read_config(folder: Path) -> ModelConfig:
    """Read ``config.json``. Raises ModelError."""
    return ModelConfig.from_huggingface(read_json(folder / CONFIG))


def weight_files(folder: Path) -> dict[str, int]:
    """Every file under ``weights/``, relative to it, and its bytes."""
    weights = folder / WEIGHTS
    return {str(file.relative_to(weights)): file.stat().st_size for file in weights.rglob("*") if file.is_file()}


def check_weight_files(folder: Path, record: FolderRecord) -> None:
    """Compare the files of the weights with the record, by size.

    Raises:
        ModelError: one is missing or of another size; it is named.
    """
    found = weight_files(folder)
    for name, size in record.files.items():
        if found.get(name) != size:
            state = "is missing" if name not in found else f"has {found[name]} bytes instead of {size}"
            raise ModelError(f"{folder / WEIGHTS / name} {state}; convert or fetch the model again")


def model_identity(folder: Path) -> str:
    """Hex digest that two folders share exactly when they hold the same config and the same stored weights."""
    record = read_record(folder)
    identity = {"config": read_config(folder).to_huggingface(), "weights": record.weights_sha256, "format": FORMAT}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def read_json(file: Path) -> Mapping[str, Any]:
    """A JSON file whose top is an object.

    Raises:
        ModelError: it is missing, does not parse or is something else.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{file} does not parse as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{file} must hold a JSON object, not a {type(values).__name__}")
    return values
