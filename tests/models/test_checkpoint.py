from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_attention import DenseModel

from pdjax.kernels import native
from pdjax.launch.cache_folder import cache_root
from pdjax.layers.sharding import instance_mesh, tensor_mesh
from pdjax.models.checkpoint import LoadedModel, load_model, model_identity
from pdjax.models.errors import ModelError
from pdjax.models.names import assemble
from pdjax.models.random import RandomTensors, byte_tokenizer, tiny_config, write_random_model
from pdjax.models.writing import Origin, write_model

TEXT = list(b"Rooms are claimed once.")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_random_model(folder, tiny_config(), 3)
    return folder


def load(folder: Path, dtype: str = "float32") -> LoadedModel:
    return load_model(folder, dtype=dtype, mesh=tensor_mesh(jax.devices()[:1]))


def test_parameters_come_back_as_they_were_written(tiny: Path):
    model = load(tiny)
    written = dict(assemble(tiny_config(), RandomTensors(tiny_config(), 3)))
    module = model.merge(model.leaves)
    assert model.config == tiny_config() and sum(leaf.size for leaf in model.leaves) == sum(
        values.size for values in written.values()
    )
    for index, layer in enumerate(module.layers):
        name = f"layers.{index}.attention_norm.weight"
        np.testing.assert_array_equal(layer.attention_norm.weight[...], written[name])
    np.testing.assert_array_equal(module.embed.weight[...], written["embed.weight"])
    np.testing.assert_array_equal(module.layers[1].mlp.down.weight[...], written["layers.1.mlp.down.weight"])
    np.testing.assert_array_equal(module.layers[0].attention.qkv.weight[...], written["layers.0.attention.qkv.weight"])


def test_layers_are_few_arrays_where_the_kernels_take_a_layer_where_it_lies(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
):
    if not native.load(cache_root() / "native"):
        pytest.skip("this machine has no C++ compiler")
    stacked = load(tiny, "bfloat16")
    monkeypatch.setattr(native, "in_use", lambda: False)
    apart = load(tiny, "bfloat16")
    assert len(stacked.leaves) == 6  # embedding, norms, four kinds of products
    for one, other in zip(stacked.places, apart.places, strict=True):
        np.testing.assert_array_equal(one.of(stacked.leaves)[...], other.of(apart.leaves)[...])


def test_layers_that_pp_does_not_divide_are_refused_with_both_numbers(tiny: Path):
    mesh = instance_mesh(range(3), kv_heads=4, pp=3)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="pp=3 does not divide its 2 layers"):
        load_model(tiny, dtype="float32", mesh=mesh)


def test_bfloat16_is_a_matter_of_loading_and_norms_stay_float32(tiny: Path):
    module = load(tiny, "bfloat16").merge(load(tiny, "bfloat16").leaves)
    written = dict(assemble(tiny_config(), RandomTensors(tiny_config(), 3)))
    assert module.norm.weight[...].dtype == jnp.float32
    np.testing.assert_array_equal(module.embed.weight[...], written["embed.weight"].astype(jnp.bfloat16))


def test_bfloat16_logits_stay_near_float32_ones(tiny: Path):
    exact, rough = (DenseModel(load(tiny, dtype), len(TEXT)).logits(TEXT) for dtype in ("float32", "bfloat16"))
    np.testing.assert_allclose(rough, exact, atol=0.15)


@pytest.mark.parametrize(("processes", "devices"), [(1, 4), (2, 2)])
def test_a_model_cut_over_four_devices_says_the_same(tiny: Path, processes: int, devices: int):
    answers = run_sharded(tiny, processes, devices)
    alone = DenseModel(load(tiny), len(TEXT)).logits(TEXT)[-1]
    for answer in answers:
        np.testing.assert_allclose(np.array(answer["logits"]), alone, atol=1e-4)
        assert all("f32[260]" in gather for gather in answer["gathers"]), "only logits are gathered, never weights"
    whole = sum(leaf.nbytes for leaf in load(tiny).leaves)
    assert answers[0]["held_bytes"] < 1.02 * whole / processes, "only norms are held more than once"


def run_sharded(folder: Path, processes: int, devices: int) -> list[dict[str, Any]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
    }
    script = Path(__file__).with_name("sharded_logits.py")
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder), json.dumps(TEXT), str(processes), str(process), str(port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(processes)
    ]
    try:
        ended = [process.communicate(timeout=100) for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(process.returncode for process in started), "\n".join(errors for _, errors in ended)
    return [json.loads(output.splitlines()[-1]) for output, _ in ended]


def test_a_mesh_that_does_not_divide_the_heads_is_refused(tmp_path: Path):
    write_random_model(tmp_path / "model", tiny_config(num_heads=3, num_kv_heads=3), 0)
    code = (
        "import jax; from pathlib import Path; from pdjax.layers.sharding import tensor_mesh\n"
        "from pdjax.models.checkpoint import load_model\n"
        f"load_model(Path({str(tmp_path / 'model')!r}), dtype='float32', mesh=tensor_mesh())"
    )
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode and "tp=2 does not divide its 3 kv_heads" in done.stderr


def test_identity_is_of_config_and_weights_not_of_the_folder(tmp_path: Path, tiny: Path):
    write_random_model(tmp_path / "same", tiny_config(), 3)
    write_random_model(tmp_path / "other_weights", tiny_config(), 4)
    write_random_model(tmp_path / "other_config", tiny_config(rope_theta=5e5), 3)
    assert model_identity(tmp_path / "same") == model_identity(tiny)
    assert len({model_identity(folder) for folder in tmp_path.iterdir()}) == 3


class Interrupted(RandomTensors):
    """Breaks in the middle."""

    def read(self, name: str) -> np.ndarray:
        if name.startswith("model.layers.1"):
            raise KeyboardInterrupt
        return super().read(name)


def write(folder: Path, *, tensors: RandomTensors | None = None, force: bool = False) -> None:
    config = tiny_config()
    write_model(
        folder,
        config=config,
        tensors=tensors or RandomTensors(config, 3),
        tokenizer=byte_tokenizer(config),
        origin=Origin("test", "0" * 64),
        force=force,
    )


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "model", tensors=Interrupted(tiny_config(), 3))
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_replacement_leaves_the_old_model(tmp_path: Path):
    write(tmp_path / "model")
    before = model_identity(tmp_path / "model")
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "model", tensors=Interrupted(tiny_config(), 3), force=True)
    assert model_identity(tmp_path / "model") == before and len(list(tmp_path.iterdir())) == 1
    load(tmp_path / "model")


def test_what_exists_is_replaced_only_by_force_and_only_if_it_is_a_model(tmp_path: Path):
    write(tmp_path / "model")
    with pytest.raises(ModelError, match="exists already"):
        write(tmp_path / "model")
    write(tmp_path / "model", force=True)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter_1").touch()
    with pytest.raises(ModelError, match="not a model folder"):
        write(tmp_path / "thesis", force=True)
    assert (tmp_path / "thesis" / "chapter_1").exists()


def test_a_folder_that_is_no_model_is_refused_with_the_way_to_make_one(tmp_path: Path):
    with pytest.raises(ModelError, match=r"not a model folder.*convert"):
        load(tmp_path)


def test_a_folder_of_another_format_is_refused(tmp_path: Path, tiny: Path):
    shutil.copytree(tiny, tmp_path / "model")
    record = tmp_path / "model" / "pdjax.json"
    record.write_text(record.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(ModelError, match=r"format 99.*fetch the model again"):
        load(tmp_path / "model")


def test_a_config_that_does_not_fit_the_weights_is_refused_by_name(tmp_path: Path, tiny: Path):
    shutil.copytree(tiny, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(tiny_config(vocab_size=300).to_huggingface()))
    with pytest.raises(ModelError, match=r"embed\.weight is stored as \(260, 64\).*\(300, 64\)"):
        load(tmp_path / "model")


def test_lost_and_shortened_weights_are_named(tmp_path: Path, tiny: Path):
    shutil.copytree(tiny, tmp_path / "model")
    chunk = next(file for file in (tmp_path / "model/weights/embed.weight/c").rglob("*") if file.is_file())
    size = chunk.stat().st_size
    chunk.write_bytes(chunk.read_bytes()[:-1])
    with pytest.raises(ModelError, match=rf"embed\.weight/c.* has {size - 1} bytes instead of {size}"):
        load(tmp_path / "model")
    chunk.unlink()
    with pytest.raises(ModelError, match=r"embed\.weight/c.* is missing"):
        load(tmp_path / "model")


def test_an_unknown_dtype_is_refused(tiny: Path):
    with pytest.raises(ModelError, match="float32, bfloat16, not 'int8'"):
        load(tiny, "int8")


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path):
    config = tiny_config()
    with pytest.raises(ModelError, match="beyond the model's vocabulary of 260"):
        write_model(
            tmp_path / "model",
            config=config,
            tensors=RandomTensors(config, 0),
            tokenizer=byte_tokenizer(tiny_config(vocab_size=300)),
            origin=Origin("test", ""),
        )
