"""A program of its own: loads a model over all devices of the job and prints the logits after a text as JSON.

python sharded_logits.py FOLDER TOKEN_IDS PROCESSES PROCESS PORT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from dense_attention import attend
from jax.sharding import NamedSharding, PartitionSpec

from pdjax.layers.sharding import tensor_mesh
from pdjax.models.checkpoint import load_model


def main(folder: str, token_ids: list[int], processes: int, process: int, port: int) -> None:
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    mesh = tensor_mesh()
    model = load_model(Path(folder), dtype="float32", mesh=mesh)
    tokens = jnp.array([token_ids], jnp.int32)

    def run(leaves: list[jax.Array]) -> jax.Array:
        module = model.merge(leaves)
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        return module.logits(module(tokens, positions, None, attend)[0])[0, -1]

    step = jax.jit(run, out_shardings=NamedSharding(mesh, PartitionSpec())).lower(model.leaves).compile()
    logits = step(model.leaves)
    held = sum(shard.data.nbytes for leaf in model.leaves for shard in leaf.addressable_shards)
    answer = {
        "logits": np.asarray(logits.addressable_data(0)).tolist(),
        "held_bytes": held,
        "gathers": [line.strip()[:200] for line in (step.as_text() or "").splitlines() if " all-gather" in line],
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), *map(int, sys.argv[3:6]))
