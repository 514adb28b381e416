"""Reads Hugging Face model folders: config.json, safetensors (one file, or several with an index), tokenizer files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from pdjax.models.config import ModelConfig
from pdjax.models.digest import sha256_of
from pdjax.models.errors import ModelError
from pdjax.models.folder import read_json
from pdjax.models.tokenizer_text import TokenizerFiles

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = ("F32", "F16", "BF16")


class HuggingFaceModel:
    """One folder, a `TensorSource`. Tensors are read when asked for, in the dtype that the file has.

    Raises:
        ModelError: files are missing, do not parse, or hold what is not supported.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = self._weight_files()
        self._place: dict[str, Path] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for file in self._files:
            for name, shape in _tensor_shapes(file).items():
                if name in self._place:
                    raise ModelError(f"tensor {name} is in both {self._place[name].name} and {file.name}")
                self._place[name] = file
                shapes[name] = shape
        self.shapes: Mapping[str, tuple[int, ...]] = shapes

    @cached_property
    def config(self) -> ModelConfig:
        """``config.json``; the end-of-sequence tokens of ``generation_config.json`` count too."""
        values = dict(read_json(self.folder / "config.json"))
        generation = self.folder / "generation_config.json"
        if generation.is_file():
            more = read_json(generation).get("eos_token_id")
            values["eos_token_id"] = list(dict.fromkeys([*_listed(values.get("eos_token_id")), *_listed(more)]))
        return ModelConfig.from_huggingface(values)

    def read(self, name: str) -> np.ndarray:
        """See `TensorSource`."""
        file = self._place[name]
        try:
            with safe_open(file, framework="numpy") as tensors:
                return tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: tensor {name} cannot be read: {error}") from error

    def sha256(self) -> str:
        """Hex digest of the weight files' digests, in the order of their names."""
        return hashlib.sha256("".join(sha256_of(file) for file in self._files).encode()).hexdigest()

    def tokenizer_files(self) -> TokenizerFiles:
        """``tokenizer.json`` as it is, and what is used of ``tokenizer_config.json`` and ``chat_template.jinja``."""
        file = self.folder / "tokenizer.json"
        try:
            tokenizer = file.read_text(encoding="utf-8")
        except OSError as error:
            raise ModelError(
                f"{file} cannot be read: {error.strerror}; save the model's fast tokenizer there"
            ) from error
        file = self.folder / "tokenizer_config.json"
        return TokenizerFiles(tokenizer, self._settings(read_json(file) if file.is_file() else {}))

    def _settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        settings: dict[str, Any] = {"add_bos_token": bool(values.get("add_bos_token", False))}
        for name in ("bos_token", "eos_token"):
            token = values.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None:
                settings[name] = str(token)
        template = self.folder / "chat_template.jinja"
        if template.is_file():
            settings["chat_template"] = template.read_text(encoding="utf-8")
        elif values.get("chat_template") is not None:
            settings["chat_template"] = _default_template(values["chat_template"])
        return settings

    def _weight_files(self) -> list[Path]:
        index, single = self.folder / _INDEX, self.folder / _SINGLE
        if not index.is_file():
            if not single.is_file():
                raise ModelError(f"{self.folder} has neither {_SINGLE} nor {_INDEX}; only safetensors are read")
            return [single]
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise ModelError(f"{index}: weight_map must name the file of every tensor")
        names = sorted({str(name) for name in places.values()})
        for name in names:
            if Path(name).name != name or not (self.folder / name).is_file():
                raise ModelError(f"{index} names {name!r}, which is not a file of {self.folder}")
        return [self.folder / name for name in names]


def _tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    shapes = {}
    try:
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                view = tensors.get_slice(name)
                if view.get_dtype() not in _DTYPES:
                    raise ModelError(
                        f"{file}: tensor {name} is of type {view.get_dtype()}; supported are {', '.join(_DTYPES)}"
                    )
                shapes[name] = tuple(view.get_shape())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read as safetensors: {error}") from error
    return shapes


def _default_template(template: Any) -> str:
    """A template, or the one named default of a list of named ones."""
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        raise ModelError("tokenizer_config.json: chat_template must be a string, or a list with one named 'default'")
    return template


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]
