// Gather and scatter: pages of a pool [L, P, H, 1|2, S, D] into a flat staging slot, and back. Both in place.
//
// Large copies are stored past the caches, as memcpy does with them: a chunk is read next by the network or by a later
// step, and what a plain store costs is that each line is read before it is overwritten.

#include "common.h"

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace pdjax {
namespace {

constexpr int64_t kStreamBytes = 4 << 20;  // from here on past the caches
constexpr int64_t kTaskBytes = 256 << 10;
constexpr int64_t kSplitBytes = 8 << 10;
constexpr int64_t kAheadBytes = 1 << 10;

// Copies `bytes`, and lets the first of those at `next`, where the thread goes on, come in meanwhile: the hardware's own
// prefetch starts anew with each memory page, and runs lie far apart. A large run is copied as two streams, as memcpy
// does it. Of one core, runs of 4 KiB reach 30 GB/s so, and 15 without; of 16 KiB 24 (gather) and 27 (scatter), and 18 and
// 23 as one stream without.
template <int kStreams>
void CopyPast(char* to, const char* from, int64_t bytes, const char* next) {
#if defined(__AVX__)
  int64_t part = bytes / kStreams, ahead = std::min(part, kAheadBytes / kStreams);
  auto copy = [&](int64_t i) {
    for (int64_t at = i, k = 0; k < kStreams; ++k, at += part) {
      __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at));
      __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at + 32));
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at), first);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at + 32), second);
    }
  };
  for (int64_t i = 0; i < part - ahead; i += 64) copy(i);
  for (int64_t i = part - ahead; i < part; i += 64) {
    for (int k = 0; k < kStreams; ++k) _mm_prefetch(next + k * part + i - (part - ahead), _MM_HINT_T0);
    copy(i);
  }
#else
  std::memcpy(to, from, bytes);
#endif
}

void Fence() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

bool CanStream(const void* to, int64_t run_bytes) {
#if defined(__AVX__)
  return reinterpret_cast<uintptr_t>(to) % 32 == 0 && run_bytes % 64 == 0;
#else
  return false;
#endif
}

template <bool kGather>
ffi::Error Repack(ffi::ThreadPool threads, ffi::AnyBuffer pool, ffi::Buffer<ffi::S32> ids,
                  ffi::Buffer<ffi::S32> origin, ffi::AnyBuffer slot, int64_t heads, int64_t layers,
                  ffi::Result<ffi::AnyBuffer> out) {
  auto a = pool.dimensions(), b = slot.dimensions(), c = ids.dimensions(), d = origin.dimensions();
  if (a.size() != 6 || b.size() != 1 || c.size() != 1 || d.size() != 1 || d[0] != 4 ||
      pool.element_type() != slot.element_type()) {
    return ffi::Error::InvalidArgument("repacking takes a pool [L, P, H, 1|2, S, D], page ids, an origin [4] and a slot");
  }
  int64_t run = a[3] * a[4] * a[5], rows = b[0] / run;
  const auto& target = kGather ? slot : pool;
  if (out->untyped_data() != target.untyped_data()) {
    return ffi::Error::InvalidArgument("repacking is in place: what is written into must be donated");
  }
  const int32_t *where = ids.typed_data(), *first = origin.typed_data();
  int64_t count = first[0], first_head = first[1], first_layer = first[2], first_row = first[3];
  if (count < 0 || count > c[0] || first_head < 0 || first_head + heads > a[2] || first_layer < 0 ||
      first_layer + layers > a[0] || first_row < 0 || first_row + heads * count * layers > rows) {
    return ffi::Error::InvalidArgument("repacking: pages, heads, layers or rows out of range");
  }
  for (int64_t i = 0; i < count; ++i) {
    if (where[i] < 0 || where[i] >= a[1]) return ffi::Error::InvalidArgument("repacking: no such page");
  }
  int64_t run_bytes = run * static_cast<int64_t>(ffi::ByteWidth(pool.element_type()));
  char* pages = static_cast<char*>(pool.untyped_data());
  char* staged = static_cast<char*>(slot.untyped_data());
  int64_t blocks = heads * count;  // each [layer, run]
  bool stream = blocks * layers * run_bytes >= kStreamBytes && CanStream(target.untyped_data(), run_bytes);
  int64_t each = std::max<int64_t>(1, kTaskBytes / (layers * run_bytes));
  ParallelFor(threads, (blocks + each - 1) / each, [&](int64_t task) {
    for (int64_t block = task * each; block < std::min(blocks, (task + 1) * each); ++block) {
      int64_t head = first_head + block / count, page = where[block % count];
      for (int64_t layer = 0; layer < layers; ++layer) {
        char* in_pool = pages + (((first_layer + layer) * a[1] + page) * a[2] + head) * run_bytes;
        char* in_slot = staged + (first_row + block * layers + layer) * run_bytes;
        char *to = kGather ? in_slot : in_pool, *from = kGather ? in_pool : in_slot;
        if (stream) {
          auto copy = run_bytes >= kSplitBytes && run_bytes % 128 == 0 ? CopyPast<2> : CopyPast<1>;
          copy(to, from, run_bytes, from + (kGather ? a[1] * a[2] : 1) * run_bytes);
        } else {
          std::memcpy(to, from, run_bytes);
        }
      }
    }
    Fence();
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace pdjax

#define PDJAX_REPACK(name, gather)                                                    \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, pdjax::Repack<gather>,                          \
                                xla::ffi::Ffi::Bind()                                 \
                                    .Ctx<xla::ffi::ThreadPool>()                      \
                                    .Arg<xla::ffi::AnyBuffer>()                       \
                                    .Arg<xla::ffi::Buffer<xla::ffi::S32>>()           \
                                    .Arg<xla::ffi::Buffer<xla::ffi::S32>>()           \
                                    .Arg<xla::ffi::AnyBuffer>()                       \
                                    .Attr<int64_t>("heads")                           \
                                    .Attr<int64_t>("layers")                          \
                                    .Ret<xla::ffi::AnyBuffer>())

PDJAX_REPACK(pdjax_gather, true);
PDJAX_REPACK(pdjax_scatter, false);
