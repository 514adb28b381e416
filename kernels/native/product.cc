// x [M, K] float32 times a layer of w [L, N, K] float32 or bfloat16 words, contracted on K: float32 [M, N].
//
// Rows of x are packed into panels [K, rows], so that a vector holds one column of several rows. Weights are copied a
// block at a time, widened if need be, and each is broadcast to meet the vectors of a panel. A row's result does not
// depend on how many rows there are: its sums run over K in order, whatever panel the row lies in.

#include <vector>

#include "common.h"

namespace pdjax {
namespace {

constexpr int kPanel = 2 * kLanes;  // rows of x in a panel; one of up to kLanes rows counts in its first vectors only
#if defined(__AVX__) && !defined(__AVX512F__)
constexpr int kOuts = 6;  // rows of w in a tile of two vectors: 12 of 16 registers hold sums
#else
constexpr int kOuts = 12;
#endif
constexpr int kThinOuts = 12;        // rows of w in a tile of one vector
constexpr int64_t kDepth = 256;      // of K at a time, at most: a panel's part stays in the first cache
constexpr int64_t kStep = 16;        // a depth is a multiple of it: a line of the cache, in float32
constexpr int64_t kFewOuts = 12;     // rows of w that are held for few panels: in the first cache
constexpr int64_t kManyOuts = 48;    // and for many: in the second
constexpr int64_t kBlockPanels = 8;  // panels of a task
constexpr int64_t kLine = 16;        // floats of a line of the cache
constexpr int64_t kTaskBytes = 96 << 10;

// Weights that are wanted next, or none: asking for them a line at a time between the sums, and not all at once, is
// what keeps memory and arithmetic busy together (8 float32 rows: 12 against 6 GB/s a thread).
struct Ahead {
  const char* from;
  int64_t stride, size;  // bytes from row to row, and of a weight
};

// Adds the products of a panel's part [depth, kPanel] with N rows of weights to sums [N, kPanel], `V` vectors of each.
template <int V, int N>
void Tile(const float* panel, const float* weights, int64_t depth, float* sums, bool add, Ahead ahead) {
  Vec sum[N][V];
  for (int n = 0; n < N; ++n) {
    for (int v = 0; v < V; ++v) sum[n][v] = add ? Load(sums + n * kPanel + v * kLanes) : Vec{};
  }
  for (int64_t part = 0; part < depth; part += kStep) {
    if (ahead.from) {
      for (int n = 0; n < N; ++n) __builtin_prefetch(ahead.from + n * ahead.stride + part * ahead.size);
    }
    for (int64_t k = part, end = std::min(depth, part + kStep); k < end; ++k) {
      Vec column[V];
      for (int v = 0; v < V; ++v) column[v] = Load(panel + k * kPanel + v * kLanes);
      for (int n = 0; n < N; ++n) {
        Vec weight = Splat(weights[n * kDepth + k]);
        for (int v = 0; v < V; ++v) sum[n][v] = AddProduct(sum[n][v], column[v], weight);
      }
    }
  }
  for (int n = 0; n < N; ++n) {
    for (int v = 0; v < V; ++v) Store(sums + n * kPanel + v * kLanes, sum[n][v]);
  }
}

template <int V, int N>
void Tiles(const float* panel, const float* weights, int64_t outs, int64_t depth, float* sums, bool add, Ahead ahead) {
  for (; outs >= N; outs -= N, weights += N * kDepth, sums += N * kPanel) {
    Tile<V, N>(panel, weights, depth, sums, add, ahead);
    if (ahead.from) ahead.from += N * ahead.stride;
  }
  if constexpr (N > 1) {
    if (outs > 0) Tiles<V, (N > 4 ? 4 : 1)>(panel, weights, outs, depth, sums, add, ahead);
  }
}

// to [columns, rows] = from [rows, columns], with strides.
void Transpose(const float* from, int64_t from_stride, int64_t rows, int64_t columns, float* to, int64_t to_stride) {
  int64_t whole_rows = rows / 4 * 4, whole_columns = columns / 4 * 4;
  for (int64_t c = 0; c < whole_columns; c += 4) {
    for (int64_t r = 0; r < whole_rows; r += 4) {
      TransposeQuads(from + r * from_stride + c, from_stride, to + c * to_stride + r, to_stride);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = r < whole_rows ? whole_columns : 0; c < columns; ++c) {
      to[c * to_stride + r] = from[r * from_stride + c];
    }
  }
}

// Rows of x as a panel [K, kPanel], zeros past the last.
void Pack(const float* x, int64_t rows, int64_t k_size, float* panel) {
  if (rows < kPanel) std::fill_n(panel, k_size * kPanel, 0.0f);
  Transpose(x, k_size, rows, k_size, panel, kPanel);
}

// Part of some rows of w as float32 [outs, kDepth].
template <typename Weight>
void Hold(const Weight* w, int64_t outs, int64_t k_size, int64_t depth, float* to) {
  for (int64_t n = 0; n < outs; ++n) {
    const Weight* from = w + n * k_size;
    int64_t k = 0;
    for (; k + kLanes <= depth; k += kLanes) Store(to + n * kDepth + k, Load(from + k));
    for (; k < depth; ++k) to[n * kDepth + k] = Widen(from[k]);
  }
}

// One task: panels of `rows` rows by `outs` rows of w.
template <typename Weight>
void Block(const float* panels, const Weight* w, float* out, int64_t rows, int64_t outs, int64_t k_size,
           int64_t n_size) {
  alignas(64) static thread_local float weights[kManyOuts * kDepth];
  alignas(64) static thread_local float sums[kBlockPanels * kManyOuts * kPanel];
  int64_t parts = (k_size + kDepth - 1) / kDepth, part = ((k_size + parts - 1) / parts + kStep - 1) / kStep * kStep;
  int64_t count = (rows + kPanel - 1) / kPanel, held = count > 2 ? kManyOuts : kFewOuts;
  for (int64_t first = 0; first < outs; first += held) {
    int64_t some = std::min(held, outs - first);
    for (int64_t k = 0; k < k_size; k += part) {
      int64_t depth = std::min(part, k_size - k);
      const Weight* next = k + part < k_size ? w + first * k_size + k + part : w + (first + some) * k_size;
      Ahead ahead{reinterpret_cast<const char*>(next), k_size * int64_t{sizeof(Weight)}, sizeof(Weight)};
      Hold(w + first * k_size + k, some, k_size, depth, weights);
      for (int64_t p = 0; p < count; ++p) {
        const float* panel = panels + (p * k_size + k) * kPanel;
        float* to = sums + p * held * kPanel;
        if (rows - p * kPanel > kLanes) {
          Tiles<2, kOuts>(panel, weights, some, depth, to, k > 0, p == 0 ? ahead : Ahead{});
        } else {
          Tiles<1, kThinOuts>(panel, weights, some, depth, to, k > 0, p == 0 ? ahead : Ahead{});
        }
      }
    }
    for (int64_t p = 0; p < count; ++p) {
      Transpose(sums + p * held * kPanel, kPanel, some, std::min<int64_t>(kPanel, rows - p * kPanel),
                out + p * kPanel * n_size + first, n_size);
    }
  }
}

template <typename Weight>
void Product(ffi::ThreadPool& threads, const float* x, const Weight* w, float* out, int64_t m_size, int64_t n_size,
             int64_t k_size) {
  static thread_local std::vector<float> storage;
  int64_t count = (m_size + kPanel - 1) / kPanel;
  storage.resize(count * kPanel * k_size + kLine);
  float* panels = storage.data() + (-reinterpret_cast<uintptr_t>(storage.data()) / sizeof(float)) % kLine;
  auto pack = [&](int64_t p) {
    int64_t m = p * kPanel;
    Pack(x + m * k_size, std::min<int64_t>(kPanel, m_size - m), k_size, panels + m * k_size);
  };
  if (count > 2) {
    ParallelFor(threads, count, pack);
  } else {
    for (int64_t p = 0; p < count; ++p) pack(p);
  }
  int64_t outs = kManyOuts;
  if (count <= 2) {
    outs = kTaskBytes / (k_size * static_cast<int64_t>(sizeof(Weight)));
    outs = std::max<int64_t>(1, outs / kFewOuts) * kFewOuts;
  }
  int64_t row_blocks = (count + kBlockPanels - 1) / kBlockPanels, out_blocks = (n_size + outs - 1) / outs;
  ParallelFor(threads, row_blocks * out_blocks, [&](int64_t task) {
    int64_t m = task / out_blocks * kBlockPanels * kPanel, n = task % out_blocks * outs;
    Block(panels + m * k_size, w + n * k_size, out + m * n_size + n,
          std::min<int64_t>(kBlockPanels * kPanel, m_size - m), std::min(outs, n_size - n), k_size, n_size);
  });
}

template <typename Weight>
void Run(ffi::ThreadPool& threads, const float* x, const void* w, int32_t layer, float* out, int64_t m_size,
         int64_t n_size, int64_t k_size) {
  Product(threads, x, static_cast<const Weight*>(w) + layer * n_size * k_size, out, m_size, n_size, k_size);
}

ffi::Error Call(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w, ffi::Buffer<ffi::S32> layer,
                ffi::Result<ffi::Buffer<ffi::F32>> out) {
  auto left = x.dimensions(), right = w.dimensions(), shape = out->dimensions();
  if (left.size() != 2 || right.size() != 3 || layer.element_count() != 1 || shape.size() != 2 ||
      left[1] != right[2] || left[1] == 0 || shape[0] != left[0] || shape[1] != right[1]) {
    return ffi::Error::InvalidArgument(
        "pdjax_product takes x [M, K] and w [L, N, K], K above 0, and a layer, and gives [M, N]");
  }
  int32_t index = *layer.typed_data();
  if (index < 0 || index >= right[0]) return ffi::Error::InvalidArgument("pdjax_product: no such layer");
  const float* from = x.typed_data();
  float* to = out->typed_data();
  if (w.element_type() == ffi::F32) {
    Run<float>(threads, from, w.untyped_data(), index, to, left[0], right[1], left[1]);
  } else if (w.element_type() == ffi::BF16) {
    Run<uint16_t>(threads, from, w.untyped_data(), index, to, left[0], right[1], left[1]);
  } else {
    return ffi::Error::InvalidArgument("pdjax_product takes weights in float32 or bfloat16");
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace pdjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(pdjax_product, pdjax::Call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
