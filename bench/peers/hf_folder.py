"""Write a model folder of pdjax as a Hugging Face directory, for peers that read those: hf_folder.py FOLDER OUT."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from pdjax.models import weights
from pdjax.models.folder import WEIGHTS, read_config, read_record
from pdjax.models.names import parameter_sources

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


def write(folder: Path, out: Path) -> None:
    """Fused parameters are cut into the tensors that they were made of."""
    config, record = read_config(folder), read_record(folder)
    whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        name: jax.ShapeDtypeStruct(tuple(stored.shape), jnp.dtype(stored.dtype), sharding=whole)
        for name, stored in record.parameters.items()
    }
    parameters = weights.load(folder / WEIGHTS, wanted)
    tensors: dict[str, np.ndarray] = {}
    for name, source in parameter_sources(config).items():
        values, names = np.asarray(parameters[name]), list(source.tensors)
        if len(names) == 3:  # query, key and value
            parts = [values[:, :-2], values[:, -2], values[:, -1]]
        elif len(names) == 2:  # gate and up
            parts = [values[:, 0], values[:, 1]]
        else:
            parts = [values]
        for tensor, part in zip(names, parts, strict=True):
            tensors[tensor] = np.ascontiguousarray(part.reshape(source.tensors[tensor]))
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, partial / name)
    settings = json.loads((folder / "config.json").read_bytes())
    settings["architectures"] = [_ARCHITECTURES[config.model_type]]
    (partial / "config.json").write_text(json.dumps(settings, indent=2))
    partial.rename(out)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
