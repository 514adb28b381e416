"""Gather and scatter move exactly the named pages, in place, whichever implementation runs."""

from __future__ import annotations

from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import export
from jax.sharding import AxisType, PartitionSpec

from pdjax.kernels import Implementation, gather_pages, gather_pages_body, native, scatter_pages, scatter_pages_body
from pdjax.launch.cache_folder import cache_root

RUNNABLE = ("plain", "native", "pallas_interpret", "auto")
# (layers, pages, heads, page size, head_dim), most pages of a slot
SHAPES = [((3, 9, 4, 4, 8), 6), ((1, 5, 1, 16, 64), 4), ((2, 12, 6, 2, 24), 11)]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    if not native.load(cache_root() / "native"):
        pytest.skip("this machine has no C++ compiler")


def make_pool(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    layers, pages, heads, page_size, head_dim = shape
    words = np.random.default_rng(seed).integers(0, 1 << 16, (layers, pages, heads, 2, page_size, head_dim))
    return words.astype(dtype)


def pick_pages(pages: int, slot_pages: int, seed: int = 1) -> np.ndarray:
    """Different pages in no order, without the trash page."""
    return (np.random.default_rng(seed).permutation(pages - 1)[:slot_pages] + 1).astype(np.int32)


def expected_words(pool: np.ndarray, page_ids: np.ndarray, first_head: int, heads: int) -> np.ndarray:
    taken = pool[:, page_ids, first_head : first_head + heads]  # [layer, page, head, K|V, slot, head_dim]
    return taken.transpose(2, 1, 0, 3, 4, 5).reshape(-1)


def slot_words(shape: tuple[int, ...], heads: int, slot_pages: int) -> int:
    layers, _, _, page_size, head_dim = shape
    return heads * slot_pages * layers * 2 * page_size * head_dim


@pytest.mark.parametrize("implementation", RUNNABLE)
@pytest.mark.parametrize("dtype", ["uint16", "float32"])
@pytest.mark.parametrize("shape, slot_pages", SHAPES)
def test_the_named_pages_move_in_place_and_nothing_else_does(
    shape: tuple[int, ...], slot_pages: int, dtype: str, implementation: Implementation
) -> None:
    host = make_pool(shape, dtype)
    incoming = make_pool(shape, dtype, seed=2)
    page_ids = pick_pages(shape[1], slot_pages)
    all_heads = shape[2]
    for heads, first_head in {(all_heads, 0), (max(1, all_heads // 2), all_heads - max(1, all_heads // 2))}:
        for page_count in (0, 1, slot_pages - 1, slot_pages):
            named = page_ids[:page_count]
            words = slot_words(shape, heads, slot_pages)
            pool, staging = jnp.array(host), jnp.full(words, 7, dtype)
            staging_address, pool_address = staging.unsafe_buffer_pointer(), pool.unsafe_buffer_pointer()
            where = {"first_head": first_head, "heads": heads, "implementation": implementation}

            staging = gather_pages(pool, page_ids, page_count, staging, **where)
            assert staging.unsafe_buffer_pointer() == staging_address
            expected = np.full(words, 7, dtype)
            moved = expected_words(host, named, first_head, heads)
            expected[: moved.size] = moved
            np.testing.assert_array_equal(staging, expected)

            moved = expected_words(incoming, named, first_head, heads)
            expected[: moved.size] = moved
            pool = scatter_pages(pool, jnp.array(expected), page_ids, page_count, **where)
            assert pool.unsafe_buffer_pointer() == pool_address
            changed = host.copy()
            touched = np.s_[:, named, first_head : first_head + heads]
            changed[touched] = incoming[touched]
            np.testing.assert_array_equal(pool, changed)


@pytest.mark.parametrize("implementation", RUNNABLE)
def test_some_layers_move_to_and_from_anywhere_in_staging(implementation: Implementation) -> None:
    shape = (5, 9, 4, 4, 32)
    host, incoming, page_ids = make_pool(shape, "uint16"), make_pool(shape, "uint16", seed=2), pick_pages(9, 3)
    run = 2 * 4 * 32
    where = {"first_layer": 2, "layers": 2, "first_head": 1, "heads": 3, "first_run": 7}
    staging = jnp.full(40 * run, 7, "uint16")
    pool = jnp.array(host)
    staging = gather_pages(pool, page_ids, 3, staging, implementation=implementation, **where)
    expected = np.full(40 * run, 7, "uint16")
    taken = slice(7 * run, (7 + 3 * 3 * 2) * run)
    expected[taken] = expected_words(host[2:4], page_ids, 1, 3)
    np.testing.assert_array_equal(staging, expected)
    expected[taken] = expected_words(incoming[2:4], page_ids, 1, 3)
    pool = scatter_pages(pool, jnp.array(expected), page_ids, 3, implementation=implementation, **where)
    host[2:4, page_ids, 1:4] = incoming[2:4, page_ids, 1:4]
    np.testing.assert_array_equal(pool, host)


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_large_blocks_of_a_latent_or_of_keys_and_values_move_past_the_caches(planes: int, head_dim: int) -> None:
    words = np.random.default_rng(0).integers(0, 1 << 16, (8, 70, 2, planes, 64, head_dim)).astype("uint16")
    page_ids = pick_pages(70, 69)
    pool = jnp.array(words)
    staging = jnp.zeros(words[:, 1:].size, "uint16")
    staging = gather_pages(pool, page_ids, 69, staging, implementation="native")
    np.testing.assert_array_equal(staging, expected_words(words, page_ids, 0, 2))
    elsewhere = np.zeros(staging.size, "uint16")
    native.gather_to(elsewhere.ctypes.data, pool, page_ids[:69], heads=range(2), layers=range(8))
    np.testing.assert_array_equal(elsewhere, staging)
    back = scatter_pages(jnp.zeros(words.shape, "uint16"), staging, page_ids, 69, implementation="native")
    np.testing.assert_array_equal(back[:, 1:], words[:, 1:])


@pytest.mark.parametrize("offset", [0, 64, 4032, 2048, 8])
def test_a_gather_to_an_address_fills_exactly_its_range_wherever_it_lies(offset: int) -> None:
    words = np.random.default_rng(0).integers(0, 1 << 16, (4, 40, 6, 2, 32, 64)).astype("uint16")
    page_ids, pool = pick_pages(40, 39), jnp.array(words)
    expected = expected_words(words[1:3], page_ids, 2, 3)
    memory = np.full(expected.size + 8192, 7, "uint16")
    start = (-memory.ctypes.data % 4096 + offset) // 2
    place = {"heads": range(2, 5), "layers": range(1, 3)}
    assert native.gather_to(memory[start:].ctypes.data, pool, page_ids, **place) == expected.nbytes
    end = start + expected.size
    np.testing.assert_array_equal(memory[start:end], expected)
    assert (memory[:start] == 7).all() and (memory[end:] == 7).all()
    for wrong in ({"heads": range(2, 7)}, {"layers": range(-1, 3)}):
        with pytest.raises(ValueError, match="the pool has"):
            native.gather_to(memory.ctypes.data, pool, page_ids, **(place | wrong))
    with pytest.raises(ValueError, match="pages 0 to 39"):
        native.gather_to(memory.ctypes.data, pool, np.array([40]), **place)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_chunk_scattered_elsewhere_is_the_chunk_that_was_gathered(data: st.DataObject) -> None:
    shape, slot_pages = data.draw(st.sampled_from(SHAPES))
    dtype = data.draw(st.sampled_from(["uint16", "float32"]))
    gather_with, scatter_with = data.draw(st.tuples(st.sampled_from(RUNNABLE), st.sampled_from(RUNNABLE)))
    page_count = data.draw(st.integers(0, slot_pages))
    others = st.permutations(range(1, shape[1])).map(lambda order: np.array(order[:slot_pages], np.int32))
    source_ids, target_ids = data.draw(others), data.draw(others)
    source_head, target_head = data.draw(st.tuples(*[st.integers(0, shape[2] - 1)] * 2))
    source = make_pool(shape, dtype, seed=data.draw(st.integers(0, 9)))
    target = make_pool(shape, dtype, seed=10)

    staging = jnp.zeros(slot_words(shape, 1, slot_pages), dtype)
    staging = gather_pages(
        jnp.array(source), source_ids, page_count, staging, first_head=source_head, heads=1, implementation=gather_with
    )
    result = scatter_pages(
        jnp.array(target), staging, target_ids, page_count, first_head=target_head, heads=1, implementation=scatter_with
    )
    target[:, target_ids[:page_count], target_head] = source[:, source_ids[:page_count], source_head]
    np.testing.assert_array_equal(result, target)


def test_bits_survive_that_are_no_ordinary_floats() -> None:
    shape, slot_pages = SHAPES[0]
    patterns = np.random.default_rng(3).integers(0, 1 << 32, make_pool(shape, "uint16").shape, dtype=np.uint32)
    page_ids = pick_pages(shape[1], slot_pages)
    patterns[0, page_ids[0]] = 0x7F800001  # a signalling NaN, which arithmetic would turn into a quiet one
    staging = jnp.zeros(slot_words(shape, shape[2], slot_pages), "float32")
    staging = gather_pages(jnp.array(patterns.view("float32")), page_ids, slot_pages, staging)
    empty = jnp.zeros(patterns.shape, "float32")
    moved = np.asarray(scatter_pages(empty, staging, page_ids, slot_pages)).view("uint32")
    np.testing.assert_array_equal(moved[:, page_ids], patterns[:, page_ids])


@pytest.mark.parametrize("implementation", ["plain", "native", "pallas_interpret"])
def test_another_page_count_or_first_head_compiles_nothing(implementation: Implementation) -> None:
    shape, slot_pages = (2, 7, 3, 4, 8), 5
    pool, staging = jnp.array(make_pool(shape, "uint16")), jnp.zeros(slot_words(shape, 2, slot_pages), "uint16")
    page_ids = pick_pages(shape[1], slot_pages)
    compiled: list[str] = []

    def on_duration(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(on_duration)
    try:
        for call, (page_count, first_head) in enumerate([(5, 0), (0, 1), (3, 0), (1, 1)]):
            where = {"first_head": first_head, "heads": 2, "implementation": implementation}
            staging = gather_pages(pool, page_ids, page_count, staging, **where)
            pool = scatter_pages(pool, staging, page_ids, page_count, **where)
            if call == 0:
                assert compiled, "the first call compiles: otherwise this test sees nothing"
                compiled.clear()
        assert not compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(on_duration)


@pytest.mark.parametrize("implementation", RUNNABLE)
def test_inside_shard_map_each_device_moves_its_own_heads(implementation: Implementation) -> None:
    devices = jax.devices()[:2]
    pages, heads = 6, 4
    shape = (2, pages, heads, 4, 8)
    slot_pages, page_count = 4, 3
    host, page_ids = make_pool(shape, "uint16"), pick_pages(pages, slot_pages)
    mesh = jax.make_mesh((len(devices),), ("tp",), devices=devices, axis_types=(AxisType.Auto,))
    on_heads, flat = PartitionSpec(None, None, "tp"), PartitionSpec("tp")
    everywhere = PartitionSpec()

    @partial(jax.jit, donate_argnums=(0, 1))
    def move(pool: jax.Array, staging: jax.Array, page_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        def local(pool: jax.Array, staging: jax.Array, page_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
            staging = gather_pages_body(pool, page_ids, page_count, staging, implementation=implementation)
            to_next = page_ids % (pages - 1) + 1
            return scatter_pages_body(pool, staging, to_next, page_count, implementation=implementation), staging

        return jax.shard_map(
            local, mesh=mesh, in_specs=(on_heads, flat, everywhere), out_specs=(on_heads, flat), check_vma=False
        )(pool, staging, page_ids)

    pool = jax.device_put(host, jax.NamedSharding(mesh, on_heads))
    words = slot_words(shape, heads, slot_pages)
    pool, staging = move(pool, jax.device_put(np.zeros(words, "uint16"), jax.NamedSharding(mesh, flat)), page_ids)

    local_heads = heads // len(devices)
    named = page_ids[:page_count]
    for rank, shard in enumerate(staging.addressable_shards):
        moved = expected_words(host, named, rank * local_heads, local_heads)
        np.testing.assert_array_equal(np.asarray(shard.data)[: moved.size], moved)
    host[:, named % (pages - 1) + 1] = host[:, named].copy()
    np.testing.assert_array_equal(pool, host)


@pytest.mark.filterwarnings("ignore:.*pallas_call.*:DeprecationWarning")
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "uint16"), (80, "uint16"), (128, "float32")])
@pytest.mark.parametrize(
    "implementation, custom_call",
    [("pallas", "mosaic_gpu_v2"), ("pallas_triton", "__gpu$xla.gpu.triton"), ("auto", "mosaic_gpu_v2")],
)
def test_both_kernels_lower_for_cuda_without_a_gpu(
    implementation: Implementation, custom_call: str, head_dim: int, dtype: str
) -> None:
    shape, slot_pages = (2, 5, 4, 16, head_dim), 4
    pool = jax.ShapeDtypeStruct((2, 5, 4, 2, 16, head_dim), dtype)
    staging = jax.ShapeDtypeStruct((slot_words(shape, 2, slot_pages),), dtype)
    page_ids, scalar = jax.ShapeDtypeStruct((slot_pages,), "int32"), jax.ShapeDtypeStruct((), "int32")
    allowed = [export.DisabledSafetyCheck.custom_call(custom_call)]

    def gather(pool: jax.Array, page_ids: jax.Array, count: jax.Array, staging: jax.Array) -> jax.Array:
        return gather_pages_body(pool, page_ids, count, staging, first_head=1, heads=2, implementation=implementation)

    def scatter(pool: jax.Array, staging: jax.Array, page_ids: jax.Array, count: jax.Array) -> jax.Array:
        return scatter_pages_body(pool, staging, page_ids, count, first_head=1, heads=2, implementation=implementation)

    for kernel, arguments in (
        (gather, (pool, page_ids, scalar, staging)),
        (scatter, (pool, staging, page_ids, scalar)),
    ):
        lowered = export.export(jax.jit(kernel), platforms=["cuda"], disabled_checks=allowed)(*arguments)
        assert custom_call in lowered.mlir_module()
        assert "stablehlo.while" not in lowered.mlir_module()


def test_values_out_of_range_inside_a_compiled_function_harm_no_page_but_the_trash_page() -> None:
    shape, slot_pages = SHAPES[0]
    host = make_pool(shape, "uint16")
    pool, staging = jnp.array(host), jnp.zeros(slot_words(shape, shape[2], slot_pages), "uint16")
    page_ids = jnp.array([-1, shape[1], shape[1] + 5, 1 << 30, -(1 << 30), -2], jnp.int32)
    pool = scatter_pages(pool, staging, page_ids, jnp.int32(slot_pages + 3))
    np.testing.assert_array_equal(np.asarray(pool)[:, 1:], host[:, 1:])


@pytest.mark.parametrize(
    "change, says",
    [
        ({"page_count": 5}, "page_count is 5; page_ids has room for 0 to 4"),
        ({"page_count": -1}, "page_count is -1"),
        ({"page_ids": np.array([1, 9, 2, 3], np.int32)}, "names page 9; the pool has pages 0 to 4"),
        ({"page_ids": np.array([1, 2], np.int64)}, "page_ids is int64; expected int32"),
        ({"page_ids": np.ones((2, 2), np.int32)}, "expected flat arrays"),
        ({"page_ids": np.ones(5, np.int32)}, "make the slot larger or page_ids shorter"),
        ({"words": 1030}, "staging has 1030 words; 2 heads of 4 pages need 1024, in a multiple of 64"),
        ({"heads": 3}, "3 heads asked for; the pool has 2"),
        ({"layers": 3}, "3 layers asked for; the pool has 2"),
        ({"layers": 1, "first_layer": 2}, "layers 2 to 2 asked for; the pool has 0 to 1"),
        ({"first_run": 1}, "runs 1 to 16 of staging asked for; it has 16"),
        ({"heads": 1, "first_head": 2}, "heads 2 to 2 asked for; the pool has 0 to 1"),
        ({"staging_dtype": "float32"}, "the pool holds uint16 words and staging float32"),
        ({"pool_dtype": "bfloat16", "staging_dtype": "bfloat16"}, "stored as uint16"),
        ({"pool_shape": (2, 5, 2, 3, 4, 8)}, "expected [layer, page, head, 2, slot in page, head_dim]"),
        ({"implementation": "fast"}, "expected one of auto, plain, native, pallas"),
    ],
)
@pytest.mark.parametrize("kernel", ["gather", "scatter"])
def test_a_wrong_call_is_refused_in_words_and_donates_nothing(kernel: str, change: dict, says: str) -> None:
    call = {"pool_shape": (2, 5, 2, 2, 4, 8), "pool_dtype": "uint16", "staging_dtype": "uint16", "words": 1024}
    call |= {"page_ids": np.array([1, 2, 3, 4], np.int32), "page_count": 4} | change
    pool = jnp.zeros(call.pop("pool_shape"), call.pop("pool_dtype"))
    staging = jnp.zeros(call.pop("words"), call.pop("staging_dtype"))
    page_ids, page_count = call.pop("page_ids"), call.pop("page_count")
    with pytest.raises((ValueError, TypeError)) as refused:
        if kernel == "gather":
            gather_pages(pool, page_ids, page_count, staging, **call)
        else:
            scatter_pages(pool, staging, page_ids, page_count, **call)
    assert says in str(refused.value)
    assert not pool.is_deleted() and not staging.is_deleted()
