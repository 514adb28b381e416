// Paged attention: q [B, T, heads, D] float32 over the pages [L, P, H, 2, S, D] of each request; float32 like q.
//
// Query t of row b sees the positions up to positions[b, t]. Keys and values are read where they lie, once a block of
// queries.

#include <cmath>
#include <limits>
#include <vector>

#include "common.h"

namespace pdjax {
namespace {

// exp for x <= 0, to about 1e-7: 2^n times a polynomial for the rest (Cephes' coefficients).
inline Vec Exp(Vec x) {
  x = x < -87.0f ? Vec{} - 87.0f : x;
  Vec scaled = x * 1.44269504088896341f - 0.5f;
  IntVec n = __builtin_convertvector(scaled, IntVec);  // truncation: towards zero, so to nearest for x <= 0
  Vec whole = __builtin_convertvector(n, Vec);
  Vec rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  Vec sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  return sum * (Vec)((n + 127) << 23);
}

struct Shape {
  int64_t rows, tokens, heads, head_dim, layers, pages, kv_heads, page_size, width;
  int64_t group() const { return heads / kv_heads; }
};

// Scores of one query against keys [count, D].
template <typename Word>
void Scores(const float* query, const Word* keys, int64_t count, int64_t head_dim, float* scores) {
  int64_t key = 0;
  for (; key + 4 <= count; key += 4) {
    const Word* at = keys + key * head_dim;
    Vec sums[4] = {};
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      Vec part = Load(query + d);
      for (int i = 0; i < 4; ++i) sums[i] += part * Load(at + i * head_dim + d);
    }
    for (int i = 0; i < 4; ++i) scores[key + i] = Sum(sums[i]);
  }
  for (; key < count; ++key) {
    Vec sum = {};
    for (int64_t d = 0; d < head_dim; d += kLanes) sum += Load(query + d) * Load(keys + key * head_dim + d);
    scores[key] = Sum(sum);
  }
}

// Turns scores [count] into weights and returns 1 / their sum. Room for a whole vector past the last is needed.
float Softmax(float* scores, int64_t count) {
  float highest = *std::max_element(scores, scores + count);
  std::fill(scores + count, scores + (count + kLanes - 1) / kLanes * kLanes, -std::numeric_limits<float>::infinity());
  Vec total = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    Vec weight = Exp(Load(scores + i) - highest);
    Store(scores + i, weight);
    total += weight;
  }
  for (int64_t i = count; i % kLanes; ++i) total[0] -= scores[i];
  return 1.0f / Sum(total);
}

// Adds weights [count] times values [count, D] to out [D], `C` vectors of it at a time.
template <int C, typename Word>
void AddValues(const float* weights, const Word* values, int64_t count, int64_t head_dim, float* out) {
  Vec sums[C];
  for (int c = 0; c < C; ++c) sums[c] = Load(out + c * kLanes);
  for (int64_t i = 0; i < count; ++i) {
    Vec weight = Vec{} + weights[i];
    for (int c = 0; c < C; ++c) sums[c] += weight * Load(values + i * head_dim + c * kLanes);
  }
  for (int c = 0; c < C; ++c) Store(out + c * kLanes, sums[c]);
}

template <typename Word>
void Values(const float* weights, const Word* values, int64_t count, int64_t head_dim, float* out) {
  int64_t d = 0;
  for (; d + 8 * kLanes <= head_dim; d += 8 * kLanes) AddValues<8>(weights, values + d, count, head_dim, out + d);
  for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes) AddValues<4>(weights, values + d, count, head_dim, out + d);
  for (; d < head_dim; d += kLanes) AddValues<1>(weights, values + d, count, head_dim, out + d);
}

// The queries of one row's token block that read one key-value head.
template <typename Word>
void Attend(const Shape& s, const float* q, const Word* layer, const int32_t* table, const int32_t* positions,
            int64_t head, int64_t tokens, float* out) {
  int64_t queries = tokens * s.group(), page_words = s.page_size * s.head_dim;
  int32_t last = *std::max_element(positions, positions + tokens);
  int64_t stride = (last + 1 + kLanes - 1) / kLanes * kLanes;
  static thread_local std::vector<float> storage;
  storage.resize(queries * stride);
  float* scores = storage.data();
  float scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  auto at = [&](int64_t query) {
    return (query / s.group() * s.heads + head * s.group() + query % s.group()) * s.head_dim;
  };
  auto page = [&](int64_t index) { return layer + (table[index] * s.kv_heads + head) * 2 * page_words; };
  auto seen = [&](int64_t query, int64_t start) {
    return std::clamp<int64_t>(positions[query / s.group()] + 1 - start, 0, s.page_size);
  };
  for (int64_t start = 0; start <= last; start += s.page_size) {
    const Word* keys = page(start / s.page_size);
    for (int64_t query = 0; query < queries; ++query) {
      Scores(q + at(query), keys, seen(query, start), s.head_dim, scores + query * stride + start);
    }
  }
  for (int64_t query = 0; query < queries; ++query) {
    int64_t count = positions[query / s.group()] + 1;
    float* row = scores + query * stride;
    for (int64_t i = 0; i < count; ++i) row[i] *= scale;
    float factor = Softmax(row, count);
    for (int64_t i = 0; i < count; ++i) row[i] *= factor;
    std::fill_n(out + at(query), s.head_dim, 0.0f);
  }
  for (int64_t start = 0; start <= last; start += s.page_size) {
    const Word* values = page(start / s.page_size) + page_words;
    for (int64_t query = 0; query < queries; ++query) {
      Values(scores + query * stride + start, values, seen(query, start), s.head_dim, out + at(query));
    }
  }
}

template <typename Word>
void AttendAll(ffi::ThreadPool& threads, const Shape& s, const float* q, const Word* pool, int32_t layer,
               const int32_t* table, const int32_t* positions, float* out) {
  constexpr int64_t kBlockTokens = 16;
  int64_t blocks = (s.tokens + kBlockTokens - 1) / kBlockTokens;
  const Word* pages = pool + layer * s.pages * s.kv_heads * 2 * s.page_size * s.head_dim;
  ParallelFor(threads, s.rows * blocks * s.kv_heads, [&](int64_t task) {
    int64_t head = task % s.kv_heads, block = task / s.kv_heads % blocks, row = task / s.kv_heads / blocks;
    int64_t first = row * s.tokens + block * kBlockTokens, offset = first * s.heads * s.head_dim;
    Attend(s, q + offset, pages, table + row * s.width, positions + first, head,
           std::min(kBlockTokens, s.tokens - block * kBlockTokens), out + offset);
  });
}

ffi::Error Run(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> q, ffi::AnyBuffer pool, ffi::Buffer<ffi::S32> layer,
               ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> positions, ffi::Result<ffi::Buffer<ffi::F32>> out) {
  auto a = q.dimensions(), b = pool.dimensions(), c = table.dimensions(), d = positions.dimensions();
  if (a.size() != 4 || b.size() != 6 || c.size() != 2 || d.size() != 2 || b[3] != 2 || a[3] != b[5] ||
      a[2] % b[2] != 0 || a[3] % kLanes != 0 || c[0] != a[0] || d[0] != a[0] || d[1] != a[1]) {
    return ffi::Error::InvalidArgument(
        "pdjax_attention takes q [B, T, heads, D], pool [L, P, H, 2, S, D], a layer, a page table [B, W] and positions "
        "[B, T], with D a multiple of a vector");
  }
  Shape shape{a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[4], c[1]};
  const int32_t *pages = table.typed_data(), *where = positions.typed_data();
  int32_t index = *layer.typed_data();
  if (index < 0 || index >= shape.layers) return ffi::Error::InvalidArgument("pdjax_attention: no such layer");
  // Out of range is a fault of the plan: refused here, because it would read foreign memory.
  for (int64_t i = 0; i < shape.rows * shape.width; ++i) {
    if (pages[i] < 0 || pages[i] >= shape.pages) return ffi::Error::InvalidArgument("pdjax_attention: no such page");
  }
  for (int64_t i = 0; i < shape.rows * shape.tokens; ++i) {
    if (where[i] < 0 || where[i] >= shape.width * shape.page_size) {
      return ffi::Error::InvalidArgument("pdjax_attention: a position lies past its page table");
    }
  }
  const void* words = pool.untyped_data();
  if (pool.element_type() == ffi::F32) {
    AttendAll(threads, shape, q.typed_data(), static_cast<const float*>(words), index, pages, where, out->typed_data());
  } else if (pool.element_type() == ffi::U16) {
    AttendAll(threads, shape, q.typed_data(), static_cast<const uint16_t*>(words), index, pages, where,
              out->typed_data());
  } else {
    return ffi::Error::InvalidArgument("pdjax_attention takes a pool of float32 or of bfloat16 words");
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace pdjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(pdjax_attention, pdjax::Run,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
