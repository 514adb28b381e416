// Paged attention: q [B, T, heads, D] float32 over the pages [L, P, H, 2, S, D] of each request; float32 like q.
//
// Query t of row b sees the positions up to positions[b, t]. Keys and values are read where they lie, once a block of
// queries. A prompt's queries are taken many at a time, one in each lane (`AttendMany`); a decode step has too few a
// key-value head for that, and there the lanes are those of head_dim (`AttendFew`).

#include <cmath>
#include <limits>
#include <vector>

#include "common.h"

namespace pdjax {
namespace {

// exp for x <= 0, to about 1e-7, and 0 below -87: 2^n times a polynomial for the rest (Cephes' coefficients).
inline Vec Exp(Vec x) {
  IntVec counts = x >= -87.0f;
  x = counts ? x : Vec{};
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
  return (Vec)((IntVec)(sum * (Vec)((n + 127) << 23)) & counts);
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
      for (int i = 0; i < 4; ++i) sums[i] = AddProduct(sums[i], part, Load(at + i * head_dim + d));
    }
    for (int i = 0; i < 4; ++i) scores[key + i] = Sum(sums[i]);
  }
  for (; key < count; ++key) {
    Vec sum = {};
    const Word* at = keys + key * head_dim;
    for (int64_t d = 0; d < head_dim; d += kLanes) sum = AddProduct(sum, Load(query + d), Load(at + d));
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
    Vec weight = Splat(weights[i]);
    for (int c = 0; c < C; ++c) sums[c] = AddProduct(sums[c], weight, Load(values + i * head_dim + c * kLanes));
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
void AttendFew(const Shape& s, const float* q, const Word* layer, const int32_t* table, const int32_t* positions,
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

constexpr int kPanel = 2 * kLanes;  // queries that are taken together
constexpr int kRows = 6;            // keys or value columns: 12 sums

// sums [N, kPanel] = or += the sum over `depth` of panel [depth, kPanel] times weights, N rows of them.
template <int N>
void Columns(const float* panel, int64_t depth, const float* weights, int64_t row_stride, int64_t depth_stride,
             float* sums, bool add) {
  Vec first[N], second[N];
  for (int n = 0; n < N; ++n) {
    first[n] = add ? Load(sums + n * kPanel) : Vec{};
    second[n] = add ? Load(sums + n * kPanel + kLanes) : Vec{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vec left = Load(panel + k * kPanel), right = Load(panel + k * kPanel + kLanes);
    for (int n = 0; n < N; ++n) {
      Vec weight = Splat(weights[n * row_stride + k * depth_stride]);
      first[n] = AddProduct(first[n], left, weight);
      second[n] = AddProduct(second[n], right, weight);
    }
  }
  for (int n = 0; n < N; ++n) {
    Store(sums + n * kPanel, first[n]);
    Store(sums + n * kPanel + kLanes, second[n]);
  }
}

void AllColumns(const float* panel, int64_t depth, const float* weights, int64_t rows, int64_t row_stride,
                int64_t depth_stride, float* sums, bool add) {
  int64_t n = 0;
  for (; n + kRows <= rows; n += kRows) {
    Columns<kRows>(panel, depth, weights + n * row_stride, row_stride, depth_stride, sums + n * kPanel, add);
  }
  for (; n + 2 <= rows; n += 2) {
    Columns<2>(panel, depth, weights + n * row_stride, row_stride, depth_stride, sums + n * kPanel, add);
  }
  if (n < rows) Columns<1>(panel, depth, weights + n * row_stride, row_stride, depth_stride, sums + n * kPanel, add);
}

// Turns scores [count, kPanel] of queries that see the keys up to seen [kPanel] into weights, all to be multiplied by
// factors [kPanel].
void SoftmaxColumns(float* scores, int64_t count, const int32_t* seen, float* factors) {
  int32_t least = *std::min_element(seen, seen + kPanel);
  for (int lane = 0; lane < kPanel; lane += kLanes) {
    IntVec limit;
    std::memcpy(&limit, seen + lane, sizeof limit);
    Vec highest = Load(scores + lane), total = {};  // every query sees key 0
    for (int64_t key = 0; key < count; ++key) {
      Vec score = Load(scores + key * kPanel + lane);
      if (key > least) {
        score = limit >= static_cast<int32_t>(key) ? score : Vec{} - std::numeric_limits<float>::infinity();
        Store(scores + key * kPanel + lane, score);
      }
      highest = score > highest ? score : highest;
    }
    for (int64_t key = 0; key < count; ++key) {
      Vec weight = Exp(Load(scores + key * kPanel + lane) - highest);
      Store(scores + key * kPanel + lane, weight);
      total += weight;
    }
    Store(factors + lane, 1.0f / total);
  }
}

// Words as float32: where they lie, or widened into `buffer`.
const float* Floats(const float* words, int64_t, float*) { return words; }

const float* Floats(const uint16_t* words, int64_t count, float* buffer) {
  for (int64_t i = 0; i < count; i += kLanes) Store(buffer + i, Load(words + i));
  return buffer;
}

// As AttendFew.
template <typename Word>
void AttendMany(const Shape& s, const float* q, const Word* layer, const int32_t* table, const int32_t* positions,
                int64_t head, int64_t tokens, float* out) {
  int64_t queries = tokens * s.group(), panels = (queries + kPanel - 1) / kPanel;
  int64_t page_words = s.page_size * s.head_dim;
  int64_t keys = *std::max_element(positions, positions + tokens) + 1;
  static thread_local std::vector<float> storage;
  storage.resize(panels * kPanel * (2 * s.head_dim + keys) + page_words + 16);
  float* packed = storage.data() + (-reinterpret_cast<uintptr_t>(storage.data()) / sizeof(float)) % 16;
  float* sums = packed + panels * kPanel * s.head_dim;
  float* scores = sums + panels * kPanel * s.head_dim;
  float* buffer = scores + panels * kPanel * keys;
  static thread_local std::vector<int32_t> seen;
  seen.assign(panels * kPanel, 0);
  std::fill_n(packed, panels * kPanel * s.head_dim, 0.0f);
  float scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  auto at = [&](int64_t query) {
    return (query / s.group() * s.heads + head * s.group() + query % s.group()) * s.head_dim;
  };
  auto page = [&](int64_t index) { return layer + (table[index] * s.kv_heads + head) * 2 * page_words; };
  for (int64_t query = 0; query < queries; ++query) {
    float* to = packed + query / kPanel * kPanel * s.head_dim + query % kPanel;
    for (int64_t d = 0; d < s.head_dim; ++d) to[d * kPanel] = q[at(query) + d] * scale;
    seen[query] = positions[query / s.group()];
  }
  for (int64_t start = 0; start < keys; start += s.page_size) {
    int64_t count = std::min(s.page_size, keys - start);
    const float* lines = Floats(page(start / s.page_size), count * s.head_dim, buffer);
    for (int64_t p = 0; p < panels; ++p) {
      AllColumns(packed + p * kPanel * s.head_dim, s.head_dim, lines, count, s.head_dim, 1,
                 scores + (p * keys + start) * kPanel, false);
    }
  }
  alignas(64) float factors[kPanel];
  for (int64_t p = 0; p < panels; ++p) {
    SoftmaxColumns(scores + p * keys * kPanel, keys, seen.data() + p * kPanel, factors);
    // Into the packed queries' place, which are done with.
    std::memcpy(packed + p * kPanel, factors, sizeof factors);
  }
  for (int64_t start = 0; start < keys; start += s.page_size) {
    int64_t count = std::min(s.page_size, keys - start);
    const float* lines = Floats(page(start / s.page_size) + page_words, count * s.head_dim, buffer);
    for (int64_t p = 0; p < panels; ++p) {
      AllColumns(scores + (p * keys + start) * kPanel, count, lines, s.head_dim, 1, s.head_dim,
                 sums + p * kPanel * s.head_dim, start > 0);
    }
  }
  for (int64_t query = 0; query < queries; ++query) {
    const float* from = sums + query / kPanel * kPanel * s.head_dim + query % kPanel;
    for (int64_t d = 0; d < s.head_dim; ++d) out[at(query) + d] = from[d * kPanel] * packed[query];
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
    auto attend = s.tokens > 1 ? AttendMany<Word> : AttendFew<Word>;
    attend(s, q + offset, pages, table + row * s.width, positions + first, head,
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
