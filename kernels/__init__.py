"""Kernels over pages: moving them, writing into them, attending over them.

| kernel              | does                                     | donated, keeps its address | file                 |
| ------------------- | ---------------------------------------- | -------------------------- | -------------------- |
| `gather_pages`      | pages of a pool → staging slot           | the slot                   | `gather.py`          |
| `scatter_pages`     | staging slot → pages of a pool           | the pool                   | `scatter.py`         |
| `append_pages`      | a step's keys and values → pages         | the pool, by the caller    | `append.py`          |
| `decode_attention`  | one token a request over its pages, split|                            | `paged_attention.py` |
| `prefill_attention` | chunks of any lengths over their pages   |                            | `paged_attention.py` |

| implementation     | what it is                                                          | runs on           |
| ------------------ | ------------------------------------------------------------------- | ----------------- |
| `plain`            | JAX without Pallas                                                  | anything          |
| `native`           | C++, for gather and scatter; `plain` for the others                 | one CPU device    |
| `pallas`           | Pallas through Mosaic GPU; for decode attention that of `hopper.py` | CUDA, from Hopper |
| `pallas_triton`    | the body of the plain Pallas kernel through Triton                  | CUDA              |
| `pallas_interpret` | the same body, interpreted                                          | anything          |
| `auto`             | the best of them for the platform; the default                      | anything          |

On CUDA, `auto` is `pallas` for what moves pages, but `pallas_triton` for `append_pages` with a head_dim that is no
multiple of 128, and for attention. Elsewhere it is `native` where the C++ kernels are loaded, else `plain`.

* Pool: `[layer, page, head, K|V, slot in page, head_dim]`, page 0 is trash.
* Slot: flat; blocks of `[head, page, layer, K|V, slot in page, head_dim]`, each for exactly the pages of its call.
* `gather_pages` and `scatter_pages` check their arguments, are compiled and donate. `gather_pages_body` and
  `scatter_pages_body` are the same without `jax.jit`, for use inside `jax.shard_map` or another jitted function.

Which attention a model's steps use is chosen in `pdjax.layers.attention_backend`. On GPU all kernels are checked to
lower, and have not been run.
"""

from pdjax.kernels.append import append_pages
from pdjax.kernels.gather import gather_pages, gather_pages_body
from pdjax.kernels.geometry import Implementation, RepackGeometry
from pdjax.kernels.paged_attention import decode_attention, prefill_attention
from pdjax.kernels.scatter import scatter_pages, scatter_pages_body

__all__ = [
    "Implementation",
    "RepackGeometry",
    "append_pages",
    "decode_attention",
    "gather_pages",
    "gather_pages_body",
    "prefill_attention",
    "scatter_pages",
    "scatter_pages_body",
]
