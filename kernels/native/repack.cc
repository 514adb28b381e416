// Gather and scatter: pages of a pool [L, P, H, 1|2, S, D] into a flat staging slot, and back. Both in place.
//
// Large copies are stored past the caches, as memcpy does with them: a chunk is read next by the network or by a later
// step, and what a plain store costs is that each line is read before it is overwritten.

#include <system_error>
#include <vector>

#include "common.h"

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace pdjax {
namespace {

constexpr int64_t kStreamBytes = 1 << 20;  // from here on past the caches
constexpr int64_t kTaskBytes = 256 << 10;
constexpr int64_t kSplitBytes = 8 << 10;
constexpr int64_t kAheadBytes = 1 << 10;
constexpr int64_t kRoundBytes = 256;  // that a copy loads before it stores them

// Copies `bytes`, a multiple of kStreams * kRoundBytes, and lets those of `next` that are copied first, where the thread
// goes on, come in meanwhile: the hardware's own prefetch starts anew with each memory page, and runs lie far apart. A
// large run is copied as two streams, as memcpy does it. Of one core, runs of 4 KiB reach 30 GB/s so, and 15 without; of
// 16 KiB 24 (gather) and 27 (scatter), and 18 and 23 as one stream without.
//
// A load is held up by an earlier store to an address that differs from its own by a multiple of 4 KiB: where pool and
// slot lie 64 bytes apart by that measure, which a pool from malloc and a page-aligned ring do, copying upwards line by
// line fell from 20 to 3 GB/s. So the copy runs away from such stores, and a round loads everything before it stores.
template <int kStreams>
void CopyPast(char* to, const char* from, int64_t bytes, const char* next) {
#if defined(__AVX__)
  constexpr int kVectors = kRoundBytes / 32;
  int64_t part = bytes / kStreams, ahead = part - std::min(part, kAheadBytes / kStreams), last = part - kRoundBytes;
  bool down = (reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(from)) % 4096 < 2048;
  for (int64_t done = 0; done < part; done += kRoundBytes) {
    int64_t at = down ? last - done : done;
    __m256i round[kStreams][kVectors];
    for (int k = 0; k < kStreams; ++k) {
      for (int v = 0; v < kVectors; ++v) {
        round[k][v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + k * part + at) + v);
      }
    }
    if (done >= ahead) {
      const char* soon = next + (down ? last - (done - ahead) : done - ahead);
      for (int k = 0; k < kStreams; ++k) {
        for (int64_t line = 0; line < kRoundBytes; line += 64) _mm_prefetch(soon + k * part + line, _MM_HINT_T0);
      }
    }
    for (int k = 0; k < kStreams; ++k) {
      for (int v = 0; v < kVectors; ++v) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + k * part + at) + v, round[k][v]);
      }
    }
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

// Which runs are copied between a pool and the rows of a slot: rows [block, layer] with blocks [head, page].
struct Blocks {
  int64_t pages, pool_heads, run_bytes;  // of the pool
  const int32_t* ids;
  int64_t count, first_head, heads, first_layer, layers;
  char *pool, *rows;

  int64_t size() const { return heads * count; }
  int64_t bytes() const { return layers * run_bytes; }  // of one
};

bool CanStream(const Blocks& all, const void* to) {
#if defined(__AVX__)
  return all.size() * all.bytes() >= kStreamBytes && reinterpret_cast<uintptr_t>(to) % 32 == 0 &&
         all.run_bytes % kRoundBytes == 0;
#else
  return false;
#endif
}

template <bool kGather>
void CopyBlocks(const Blocks& all, int64_t begin, int64_t end, bool stream) {
  int64_t run_bytes = all.run_bytes, layer_bytes = all.pages * all.pool_heads * run_bytes;
  auto copy = run_bytes >= kSplitBytes && run_bytes % (2 * kRoundBytes) == 0 ? CopyPast<2> : CopyPast<1>;
  for (int64_t block = begin; block < end; ++block) {
    int64_t head = all.first_head + block / all.count, page = all.ids[block % all.count];
    char* in_pool = all.pool + all.first_layer * layer_bytes + (page * all.pool_heads + head) * run_bytes;
    char* in_slot = all.rows + block * all.bytes();
    for (int64_t layer = 0; layer < all.layers; ++layer, in_pool += layer_bytes, in_slot += run_bytes) {
      char *to = kGather ? in_slot : in_pool, *from = kGather ? in_pool : in_slot;
      if (stream) {
        copy(to, from, run_bytes, from + (kGather ? layer_bytes : run_bytes));
      } else {
        std::memcpy(to, from, run_bytes);
      }
    }
  }
  if (stream) Fence();
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
  char* staged = static_cast<char*>(slot.untyped_data()) + first_row * run_bytes;
  Blocks all{a[1], a[2], run_bytes, where, count, first_head, heads, first_layer, layers, pages, staged};
  bool stream = CanStream(all, kGather ? staged : pages);
  int64_t each = std::max<int64_t>(1, kTaskBytes / all.bytes());
  ParallelFor(threads, (all.size() + each - 1) / each, [&](int64_t task) {
    CopyBlocks<kGather>(all, task * each, std::min(all.size(), (task + 1) * each), stream);
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

namespace pdjax {
namespace {

constexpr int64_t kThreadBytes = 4 << 20;  // that are worth a thread: to start one takes as long as 0.5 MB
constexpr int64_t kMostThreads = 4;        // the other processors are left to those who compute

// All blocks, on the calling thread and on some that end with the call: there is no pool of XLA's here.
void GatherAll(const Blocks& all, bool stream) {
  int64_t processors = std::thread::hardware_concurrency(), bytes = all.size() * all.bytes();
  std::atomic<int64_t> next{0};
  auto work = [&] {
    for (int64_t block; (block = next.fetch_add(1)) < all.size();) CopyBlocks<true>(all, block, block + 1, stream);
  };
  std::vector<std::thread> helpers;
  try {
    for (int64_t i = std::min({bytes / kThreadBytes, kMostThreads, processors}); i > 1; --i) helpers.emplace_back(work);
  } catch (const std::system_error&) {  // none to be had: those that run do its share
  }
  work();
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace
}  // namespace pdjax

// A gather outside of any compiled program, to wherever the caller may write. The caller has checked everything.
// `shape` is [pages, heads, bytes of a run] of the pool, `origin` [pages, first head, heads, first layer, layers].
extern "C" void pdjax_gather_to(char* pool, const int64_t* shape, const int32_t* ids, const int64_t* origin, char* to) {
  pdjax::Blocks all{shape[0], shape[1], shape[2], ids, origin[0], origin[1], origin[2], origin[3], origin[4], pool, to};
  pdjax::GatherAll(all, pdjax::CanStream(all, to));
}
