// Vectors of floats in the compiler's own notation, and a parallel loop on XLA's threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>

#if defined(__FMA__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace pdjax {

namespace ffi = xla::ffi;

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef float VecU __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t WordVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfVecU __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));

inline Vec Load(const float* from) { return *reinterpret_cast<const VecU*>(from); }

// bfloat16 is the upper half of a float32.
inline Vec Load(const uint16_t* from) {
  return (Vec)(__builtin_convertvector(*reinterpret_cast<const HalfVecU*>(from), WordVec) << 16);
}

// Not by adding to zero: that is an addition, because of signed zeros.
inline Vec Splat(float value) { return value - Vec{}; }

// sum + a * b, rounded once where the processor can. Left to GCC, some loops would round twice and others once.
inline Vec AddProduct(Vec sum, Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX__) && defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
  return sum + a * b;
#endif
}

inline float Widen(float value) { return value; }

inline float Widen(uint16_t word) {
  uint32_t bits = static_cast<uint32_t>(word) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void Store(float* to, Vec value) { *reinterpret_cast<VecU*>(to) = value; }

typedef float Quad __attribute__((vector_size(16)));
typedef float QuadU __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t IntQuad __attribute__((vector_size(16)));

template <int A, int B, int C, int D>
inline Quad Shuffle(Quad a, Quad b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, A, B, C, D);
#else
  return __builtin_shuffle(a, b, IntQuad{A, B, C, D});
#endif
}

// Four rows of four floats become four rows of what were columns.
inline void TransposeQuads(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  Quad in[4], low[2], high[2];
  for (int i = 0; i < 4; ++i) in[i] = *reinterpret_cast<const QuadU*>(from + i * from_stride);
  for (int i = 0; i < 2; ++i) {
    low[i] = Shuffle<0, 4, 1, 5>(in[2 * i], in[2 * i + 1]);
    high[i] = Shuffle<2, 6, 3, 7>(in[2 * i], in[2 * i + 1]);
  }
  *reinterpret_cast<QuadU*>(to) = Shuffle<0, 1, 4, 5>(low[0], low[1]);
  *reinterpret_cast<QuadU*>(to + to_stride) = Shuffle<2, 3, 6, 7>(low[0], low[1]);
  *reinterpret_cast<QuadU*>(to + 2 * to_stride) = Shuffle<0, 1, 4, 5>(high[0], high[1]);
  *reinterpret_cast<QuadU*>(to + 3 * to_stride) = Shuffle<2, 3, 6, 7>(high[0], high[1]);
}

inline float Sum(Vec value) {
  Quad quad[kLanes / 4];
  std::memcpy(quad, &value, sizeof value);
  for (int width = kLanes / 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) quad[i] += quad[i + width];
  }
  return (quad[0][0] + quad[0][2]) + (quad[0][1] + quad[0][3]);
}

// Runs body(0) ... body(count - 1), each once, on the calling thread and on those of XLA's that are free.
// The caller takes its share and never waits for a task that no thread has begun, so a full pool cannot block it.
template <typename Body>
void ParallelFor(ffi::ThreadPool& threads, int64_t count, const Body& body) {
  struct Job {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };
  int64_t helpers = std::min<int64_t>(threads.num_threads(), count) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  auto job = std::make_shared<Job>();
  const Body* shared = &body;
  auto work = [job, shared, count] {
    for (int64_t i; (i = job->next.fetch_add(1)) < count;) {
      (*shared)(i);
      job->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 0; i < helpers; ++i) threads.Schedule([work] { work(); });
  work();
  for (int spins = 0; job->done.load(std::memory_order_acquire) < count; ++spins) {
    if (spins > 1000) std::this_thread::yield();
  }
}

}  // namespace pdjax
