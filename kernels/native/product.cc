// x [M, K] float32 times w [N, K] float32 or bfloat16 words, contracted on K: float32 [M, N].
//
// A row's result does not depend on how many rows there are: each is summed in the same order.

#include "common.h"

namespace pdjax {
namespace {

constexpr int kRows = 4;          // rows of x in a tile
constexpr int kOuts = 3;          // rows of w in a tile: 12 sums, 4 + 1 operands
constexpr int kDepth = 576;       // of K at a time: what a tile reads stays in the first cache
constexpr int kStrip = 3 * kOuts; // rows of w that a thread holds in the first cache
constexpr int kBlockRows = 64;    // rows of x that a thread holds in the second
constexpr int64_t kTaskBytes = 96 << 10;

template <int M, int N>
void Tile(const float* x, int64_t x_stride, const float* w, int64_t w_stride, int64_t depth, float* out,
          int64_t out_stride, bool add) {
  Vec sums[M][N] = {};
  int64_t k = 0;
  for (; k + kLanes <= depth; k += kLanes) {
    Vec left[M];
    for (int m = 0; m < M; ++m) left[m] = Load(x + m * x_stride + k);
    for (int n = 0; n < N; ++n) {
      Vec right = Load(w + n * w_stride + k);
      __builtin_prefetch(w + (n + N) * w_stride + k);
      for (int m = 0; m < M; ++m) sums[m][n] += left[m] * right;
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) {
      float sum = Sum(sums[m][n]);
      for (int64_t rest = k; rest < depth; ++rest) sum += x[m * x_stride + rest] * w[n * w_stride + rest];
      float* to = out + m * out_stride + n;
      *to = add ? *to + sum : sum;
    }
  }
}

template <int N>
void TileRows(int rows, const float* x, int64_t x_stride, const float* w, int64_t w_stride, int64_t depth, float* out,
              int64_t out_stride, bool add) {
  switch (rows) {
    case 1: return Tile<1, N>(x, x_stride, w, w_stride, depth, out, out_stride, add);
    case 2: return Tile<2, N>(x, x_stride, w, w_stride, depth, out, out_stride, add);
    case 3: return Tile<3, N>(x, x_stride, w, w_stride, depth, out, out_stride, add);
    default: return Tile<4, N>(x, x_stride, w, w_stride, depth, out, out_stride, add);
  }
}

// A strip of w, as float32: where it lies, or widened into `buffer`.
const float* Strip(const float* w, int, int64_t k_size, int64_t, float*, int64_t* stride) {
  *stride = k_size;
  return w;
}

const float* Strip(const uint16_t* w, int outs, int64_t k_size, int64_t depth, float* buffer, int64_t* stride) {
  for (int n = 0; n < outs; ++n) {
    const uint16_t* from = w + n * k_size;
    float* to = buffer + n * kDepth;
    int64_t k = 0;
    for (; k + kLanes <= depth; k += kLanes) {
      __builtin_prefetch(from + kStrip * k_size + k);
      Store(to + k, Load(from + k));
    }
    for (; k < depth; ++k) to[k] = Widen(from[k]);
  }
  *stride = kDepth;
  return buffer;
}

template <typename Weight>
void Block(const float* x, const Weight* w, float* out, int64_t rows, int64_t outs, int64_t k_size, int64_t n_size) {
  alignas(64) float buffer[sizeof(Weight) == 2 ? kStrip * kDepth : 1];
  for (int64_t k = 0; k < k_size; k += kDepth) {
    int64_t depth = std::min<int64_t>(kDepth, k_size - k);
    for (int64_t n = 0; n < outs; n += kStrip) {
      int strip_outs = static_cast<int>(std::min<int64_t>(kStrip, outs - n));
      int64_t stride;
      const float* strip = Strip(w + n * k_size + k, strip_outs, k_size, depth, buffer, &stride);
      for (int64_t m = 0; m < rows; m += kRows) {
        int tile_rows = static_cast<int>(std::min<int64_t>(kRows, rows - m));
        for (int tile = 0; tile < strip_outs; tile += kOuts) {
          const float* left = x + m * k_size + k;
          const float* right = strip + tile * stride;
          float* to = out + m * n_size + n + tile;
          switch (std::min(kOuts, strip_outs - tile)) {
            case 1: TileRows<1>(tile_rows, left, k_size, right, stride, depth, to, n_size, k > 0); break;
            case 2: TileRows<2>(tile_rows, left, k_size, right, stride, depth, to, n_size, k > 0); break;
            default: TileRows<3>(tile_rows, left, k_size, right, stride, depth, to, n_size, k > 0);
          }
        }
      }
    }
  }
}

template <typename Weight>
void Product(ffi::ThreadPool& threads, const float* x, const Weight* w, float* out, int64_t m_size, int64_t n_size,
             int64_t k_size) {
  int64_t row_blocks = (m_size + kBlockRows - 1) / kBlockRows;
  int64_t outs = kTaskBytes / (k_size * static_cast<int64_t>(sizeof(Weight)));
  outs = std::max<int64_t>(1, outs / kStrip) * kStrip;
  int64_t out_blocks = (n_size + outs - 1) / outs;
  ParallelFor(threads, row_blocks * out_blocks, [&](int64_t task) {
    int64_t m = task / out_blocks * kBlockRows, n = task % out_blocks * outs;
    Block(x + m * k_size, w + n * k_size, out + m * n_size + n, std::min<int64_t>(kBlockRows, m_size - m),
          std::min(outs, n_size - n), k_size, n_size);
  });
}

ffi::Error Run(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w,
               ffi::Result<ffi::Buffer<ffi::F32>> out) {
  auto left = x.dimensions(), right = w.dimensions(), shape = out->dimensions();
  if (left.size() != 2 || right.size() != 2 || shape.size() != 2 || left[1] != right[1] || shape[0] != left[0] ||
      shape[1] != right[0]) {
    return ffi::Error::InvalidArgument("pdjax_product takes x [M, K] and w [N, K] and gives [M, N]");
  }
  float* to = out->typed_data();
  if (w.element_type() == ffi::F32) {
    Product(threads, x.typed_data(), static_cast<const float*>(w.untyped_data()), to, left[0], right[0], left[1]);
  } else if (w.element_type() == ffi::BF16) {
    Product(threads, x.typed_data(), static_cast<const uint16_t*>(w.untyped_data()), to, left[0], right[0], left[1]);
  } else {
    return ffi::Error::InvalidArgument("pdjax_product takes weights in float32 or bfloat16");
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace pdjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(pdjax_product, pdjax::Run,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
