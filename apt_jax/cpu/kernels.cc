// Kernels for CPUs, called by XLA through its foreign function interface; `ops.py` wraps them.
//
// XLA's own code for CPUs repacks weights at every product and copies blocks out of the pool before it attends to them.
// These read every weight and every cached element once:
//   dense      rows times a matrix, in bfloat16 on AMX tiles where the CPU has them, else in vector registers
//   decode_kv  one query a row over the keys and values of the block pool
//   prefill    chunks of prompts over their cached prefix and themselves, bfloat16 on AMX tiles alone
// Sums and softmax are float32. What a row gives depends on that row alone, not on how many others there are.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define APT_PAIRS 1  // dot products of pairs of bfloat16
#include <immintrin.h>
#endif

#if defined(APT_PAIRS) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define APT_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ffi = xla::ffi;

// Whether products of bfloat16 use matrix tiles here.
extern "C" int apt_has_tiles();

namespace {

constexpr int kLanes = 16;
typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IntVec __attribute__((vector_size(64)));
typedef uint32_t UintVec __attribute__((vector_size(64)));
typedef uint16_t HalfVec __attribute__((vector_size(32)));

struct Bf16 {
  uint16_t bits;
};

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Vec load(const Bf16* p) {
  HalfVec h;
  std::memcpy(&h, p, sizeof h);
  UintVec wide = __builtin_convertvector(h, UintVec) << 16;
  Vec v;
  std::memcpy(&v, &wide, sizeof v);
  return v;
}

inline Vec load(const int8_t* p) {
  typedef int8_t ByteVec __attribute__((vector_size(16)));
  ByteVec bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, Vec);
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline float to_float(float x) { return x; }

inline float to_float(int8_t x) { return x; }

inline float to_float(Bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

inline void from_float(float x, float& out) { out = x; }

inline void from_float(float x, Bf16& out) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  out.bits = x == x ? static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : 0x7fc0;
}

inline void store(Bf16* p, Vec v) {
  UintVec bits;
  std::memcpy(&bits, &v, sizeof bits);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  bits = v == v ? bits : UintVec{} + 0x7fc0;
  HalfVec h = __builtin_convertvector(bits, HalfVec);
  std::memcpy(p, &h, sizeof h);
}

inline Vec splat(float x) { return Vec{} + x; }

inline float sum(Vec v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int h = kLanes / 2; h; h /= 2)
    for (int i = 0; i < h; ++i) lanes[i] += lanes[i + h];
  return lanes[0];
}

inline float max(Vec v) {
  float lanes[kLanes];
  store(lanes, v);
  return *std::max_element(lanes, lanes + kLanes);
}

inline Vec max(Vec a, Vec b) { return a > b ? a : b; }

// Lane i of the result is the sum of v[i]. Each step halves the number of vectors: they are cut in groups, one a sum, and
// halves of groups are added.
inline Vec sums(const Vec* v) {
  Vec a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i)
    a[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(v[2 * i], v[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  for (int i = 0; i < 4; ++i)
    b[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(a[2 * i], a[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  for (int i = 0; i < 2; ++i)
    c[i] = __builtin_shufflevector(b[2 * i], b[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
           __builtin_shufflevector(b[2 * i], b[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
  return __builtin_shufflevector(c[0], c[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         __builtin_shufflevector(c[0], c[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

// e^x to about one unit in the last place: 2^n times a polynomial of the rest, |rest| <= ln(2) / 2. From 88 on it is infinite, up
// to -87 it is e^-87; NaN stays NaN.
inline Vec exp(Vec given) {
  Vec x = max(given, splat(-87.0f));
  x = x < 88.0f ? x : splat(88.0f);
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  Vec n = x * 1.44269504088896341f + magic;
  IntVec exponent;
  std::memcpy(&exponent, &n, sizeof n);
  n -= magic;
  Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  exponent <<= 23;  // the bits of `magic` above the exponent are shifted out
  IntVec bits;
  std::memcpy(&bits, &p, sizeof p);
  bits += exponent;
  std::memcpy(&p, &bits, sizeof p);
  p = given < 88.0f ? p : splat(INFINITY);
  return given == given ? p : given;
}

// Calls f(i) for 0 <= i < n on this thread and those of the pool that are free; returns when all calls have returned.
template <typename F>
void parallel_for(ffi::ThreadPool& pool, int64_t n, const F& f) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable all_done;
  };
  int64_t helpers = std::min<int64_t>(pool.num_threads(), n) - 1;
  if (helpers < 1) {
    for (int64_t i = 0; i < n; ++i) f(i);
    return;
  }
  auto shared = std::make_shared<Shared>();
  const F* call = &f;  // not touched by a helper that comes when all is taken
  auto work = [shared, call, n] {
    for (int64_t i; (i = shared->next.fetch_add(1, std::memory_order_relaxed)) < n;) {
      (*call)(i);
      if (shared->done.fetch_add(1, std::memory_order_acq_rel) + 1 == n) {
        std::lock_guard<std::mutex> lock(shared->mutex);
        shared->all_done.notify_one();
      }
    }
  };
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(decltype(work)(work));
  work();
  auto is_done = [&] { return shared->done.load(std::memory_order_acquire) >= n; };
  for (int spins = 0; spins < 1000; ++spins) {
    if (is_done()) return;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  // A helper that lost its core to another thread is moved to this one at once if nothing runs here.
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->all_done.wait(lock, is_done);
}

// The greatest of a row's scores so far, and the first place where it is.
struct Best {
  float score = -INFINITY;
  int32_t index = 0;
  bool has_nan = false;

  void add(const Best& later) {
    if (later.score > score) score = later.score, index = later.index;
    has_nan |= later.has_nan;
  }
};

Best best_of(const float* scores, int64_t count, int64_t first) {
  Best best;
  best.index = static_cast<int32_t>(first);
  const int64_t even = count / kLanes * kLanes;
  if (even) {
    Vec top = splat(-INFINITY);
    IntVec place{}, nan{};
    for (int64_t i = 0; i < even; i += kLanes) {
      const Vec v = load(scores + i);
      const IntVec more = v > top;
      top = more ? v : top;
      place = more ? IntVec{} + static_cast<int32_t>(i) : place;
      nan |= v != v;
    }
    for (int i = 0; i < kLanes; ++i) {
      const int32_t at = static_cast<int32_t>(first) + place[i] + i;
      if (top[i] > best.score || (top[i] == best.score && at < best.index)) best.score = top[i], best.index = at;
      best.has_nan |= nan[i] != 0;
    }
  }
  for (int64_t i = even; i < count; ++i) {
    if (scores[i] > best.score) best.score = scores[i], best.index = static_cast<int32_t>(first + i);
    best.has_nan |= scores[i] != scores[i];
  }
  return best;
}

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Memory that a thread keeps for its next call: fresh memory of this size costs a page fault every 4 KiB. One for each `slot`.
template <typename T, int slot>
T* scratch(int64_t n) {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  static thread_local std::unique_ptr<void, Free> memory;
  static thread_local size_t bytes = 0;
  const size_t wanted = n * sizeof(T);
  if (wanted > bytes) {
    bytes = std::max(wanted + 63, bytes * 2) / 64 * 64;
    memory.reset(std::aligned_alloc(64, bytes));
    if (!memory) throw std::bad_alloc();
  }
  return static_cast<T*>(memory.get());
}

enum Slots { kPacked, kMade, kWide, kQueries, kWeights, kScores, kBest, kScales };

constexpr int64_t kMostLanes = 1024;  // of a head

// ---- AMX

#ifdef APT_AMX

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  TileConfig() {
    for (int i = 0; i < 8; ++i) row_bytes[i] = 64, rows[i] = 16;
  }
};

// Whether the kernel lets this process use the tiles; asked once.
bool has_tiles() {
  static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
  return granted;
}

// All eight tiles hold 16 rows of 64 bytes for as long as it lives; on the thread that made it.
struct Tiles {
  Tiles() {
    static const TileConfig config;
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
};

// The first `count` lanes, at most all.
inline __mmask16 lanes_of(int64_t count) { return count >= 16 ? 0xffff : static_cast<__mmask16>((1u << count) - 1); }

inline void transpose(const float* in, __m512 (&out)[16]) {
  __m512 a[16];
  for (int i = 0; i < 16; ++i) out[i] = _mm512_loadu_ps(in + 16 * i);
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_ps(out[2 * i], out[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_ps(out[2 * i], out[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    auto d = [&](int k) { return _mm512_castps_pd(a[4 * i + k]); };
    out[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(d(0), d(2)));
    out[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(d(0), d(2)));
    out[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(d(1), d(3)));
    out[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(d(1), d(3)));
  }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_f32x4(out[i], out[i + 4], 0x88);
    a[i + 4] = _mm512_shuffle_f32x4(out[i], out[i + 4], 0xdd);
    a[i + 8] = _mm512_shuffle_f32x4(out[i + 8], out[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_f32x4(out[i + 8], out[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    out[i] = _mm512_shuffle_f32x4(a[i], a[i + 8], 0x88);
    out[i + 8] = _mm512_shuffle_f32x4(a[i], a[i + 8], 0xdd);
  }
}

// At most 16 rows of bfloat16 as right-hand tiles: tile k holds of all rows the elements 32 k to 32 k + 31, pairs of elements side
// by side: 32-bit word (i, j) is the i-th pair of row j. Rows that there are not are zeros.
void pack_rows(const Bf16* x, int64_t rows, int64_t width, int64_t stride, uint32_t* out) {
  for (int64_t k = 0; k < width; k += 32, out += 256) {
    alignas(64) float in[256];
    for (int64_t j = 0; j < rows; ++j) std::memcpy(in + 16 * j, x + j * stride + k, 64);
    std::memset(in + 16 * rows, 0, (16 - rows) * 64);
    __m512 columns[16];
    transpose(in, columns);
    for (int i = 0; i < 16; ++i) _mm512_storeu_ps(reinterpret_cast<float*>(out) + 16 * i, columns[i]);
  }
}

constexpr int64_t kTileElements = 512;  // of bfloat16 in a tile, of int8 in half of one

// A matrix as right-hand tiles: of 16 outputs after 16 others, of 32 inputs after 32 others, 16 pairs of inputs times 16
// outputs. `halves` matrices of `blocks` times 16 outputs lie behind one another.
template <typename W>
struct TiledWeights {
  const W* values;
  const float* scales;  // of outputs, or nullptr
  int64_t outputs, blocks, steps;

  const W* tiles(int64_t block, int half) const { return values + (half * blocks + block) * steps * kTileElements; }
};

// Rows of x as left-hand tiles, zeros where there are no more rows or inputs.
void tile_rows(const Bf16* x, int64_t rows, int64_t width, int64_t steps, Bf16* out) {
  for (int64_t s = 0; s < steps; ++s) {
    const int64_t count = std::min<int64_t>(32, width - s * 32);
    for (int64_t i = 0; i < 16; ++i, out += 32) {
      if (i < rows && count == 32) {
        std::memcpy(out, x + i * width + s * 32, 64);
      } else {
        std::memset(out, 0, 64);
        if (i < rows) std::memcpy(out, x + i * width + s * 32, count * 2);
      }
    }
  }
}

// Products of TB tiles of rows with OB * 16 outputs; OB * TB = 4 accumulators, as the latency of a product is that of four. The
// sums of tile t with outputs o go to out[t * OB + o], rows `stride` bytes apart. Meanwhile weights some tiles ahead are fetched:
// of these outputs, behind their last tile of those from `ahead` on.
template <int OB, int TB>
inline void multiply_tiles(const Bf16* x, const Bf16* const* w, int64_t steps, const Bf16* const* ahead, float* const* out,
                           int64_t stride) {
  constexpr int64_t kDistance = 4;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < steps; ++k) {
    if (ahead)
      for (int o = 0; o < OB; ++o) {
        const int64_t later = k + kDistance;
        const Bf16* at = later < steps ? w[o] + later * kTileElements : ahead[o] + std::min(later - steps, steps - 1) * kTileElements;
        for (int b = 0; b < kTileElements; b += 32) _mm_prefetch(reinterpret_cast<const char*>(at + b), _MM_HINT_T0);
      }
    const auto weights = [&](int o) { return w[o] + k * kTileElements; };
    const auto rows = [&](int t) { return x + (t * steps + k) * kTileElements; };
    if constexpr (OB == 4) {
      static_assert(TB == 1);
      _tile_loadd(4, rows(0), 64);
      _tile_loadd(5, weights(0), 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, weights(1), 64);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, weights(2), 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, weights(3), 64);
      _tile_dpbf16ps(3, 4, 5);
    } else {
      static_assert(OB == 2 && TB == 2);
      _tile_loadd(4, rows(0), 64);
      _tile_loadd(6, weights(0), 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, weights(1), 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, rows(1), 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out[0], stride);
  _tile_stored(1, out[1], stride);
  _tile_stored(2, out[2], stride);
  _tile_stored(3, out[3], stride);
}

enum Activation : int64_t { kNone, kSilu, kGeluTanh };

inline __m512 activate(__m512 gate, Activation activation) {
  Vec g;
  std::memcpy(&g, &gate, sizeof g);
  const Vec z = activation == kSilu ? g : 1.5957691216f * (g + 0.044715f * g * g * g);  // gelu: tanh(z / 2) by sigmoid(z)
  g = g / (1.0f + exp(-z));
  std::memcpy(&gate, &g, sizeof g);
  return gate;
}

inline void store_lanes(Bf16* to, __mmask16 mask, __m512 v) {
  __m256bh half = _mm512_cvtneps_pbh(v);
  __m256i bits;
  std::memcpy(&bits, &half, sizeof bits);
  _mm256_mask_storeu_epi16(to, mask, bits);
}

// Integers are exact in bfloat16.
const Bf16* widen(const int8_t* w, int64_t count, Bf16* out) {
  for (int64_t i = 0; i < count; i += 32) {
    _mm_prefetch(reinterpret_cast<const char*>(w + i + 8192), _MM_HINT_T0);
    const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + i)));
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(words)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(words, 1)));
    const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
    std::memcpy(out + i, &both, sizeof both);
  }
  return out;
}

// Copies part of a row of a result; past the cache where the result would not fit in it.
struct Rows {
  char* out;
  int64_t row_bytes;
  bool past_cache;

  Rows(void* to, int64_t rows, int64_t row_size)
      : out(static_cast<char*>(to)),
        row_bytes(row_size),
        past_cache(rows * row_size > (1 << 20) && reinterpret_cast<uintptr_t>(to) % 64 == 0 && row_size % 64 == 0) {}

  template <typename T>
  void put(int64_t row, int64_t first, const T* values, int64_t count) const {
    char* to = out + row * row_bytes + first * sizeof(T);
    const int64_t bytes = count * sizeof(T);
    const char* from = reinterpret_cast<const char*>(values);
    if (bytes % 64 || (past_cache && reinterpret_cast<uintptr_t>(to) % 64)) {
      std::memcpy(to, from, bytes);
      return;
    }
    for (int64_t i = 0; i < bytes; i += 64) {
      const __m512i v = _mm512_loadu_si512(from + i);
      if (past_cache)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), v);
      else
        _mm512_storeu_si512(to + i, v);
    }
  }
};

constexpr int64_t kTaskBytes = 1 << 20;  // of tiled rows that a task goes through for every few outputs: they stay in the cache
constexpr int64_t kTaskOutputs = 64, kFewestOutputs = 32;

// Products of `rows` rows, tiled, OB blocks of 16 outputs and TB tiles of rows at a time. With an activation there are two
// matrices, and what comes out is activate(x w_gate) * (x w_up).
// A task's outputs are made in a buffer: written where they belong at once, the 16 of every row would fall into the same few
// sets of the cache. `take(row, first, values, count)` is given them: outputs [first, first + count) of a row, where first is a
// multiple of kFewestOutputs.
template <typename Out, int OB, int TB, bool kGated, typename W, typename Take>
void dense_tiled(ffi::ThreadPool& pool, const Bf16* x, int64_t rows, const TiledWeights<W>& w, Activation activation,
                 const Take& take) {
  constexpr int kBlocks = kGated ? OB / 2 : OB;
  const int64_t steps = w.steps, tile_bytes = steps * kTileElements * sizeof(Bf16);
  const int64_t parts = (rows / 16 * tile_bytes + kTaskBytes) / kTaskBytes;
  const int64_t task_rows = round_up((rows + parts - 1) / parts, TB * 16);
  const int64_t row_tasks = (rows + task_rows - 1) / task_rows;
  int64_t per_task = kTaskOutputs;
  const int64_t fewest = std::max<int64_t>(kFewestOutputs, kBlocks * 16);
  while (per_task > fewest && row_tasks * ((w.outputs + per_task - 1) / per_task) < 8 * pool.num_threads()) per_task /= 2;
  const int64_t ranges = (w.outputs + per_task - 1) / per_task;
  parallel_for(pool, row_tasks * ranges, [&](int64_t task) {
    Tiles tiles;
    const int64_t begin = task % ranges * per_task, end = std::min(w.outputs, begin + per_task);
    const int64_t first_row = task / ranges * task_rows, last_row = std::min(rows, first_row + task_rows);
    const int64_t made_rows = round_up(last_row - first_row, TB * 16);
    auto* made = scratch<Out, kMade>(made_rows * kTaskOutputs);
    alignas(64) float result[4][256];
    for (int64_t first = begin; first < end; first += kBlocks * 16) {
      const Bf16 *starts[OB], *ahead[OB];
      int64_t block[OB];
      for (int i = 0; i < OB; ++i) {
        const int64_t mine = first / 16 + (kGated ? i / 2 : i);
        const int half = kGated ? i % 2 : 0;
        block[i] = std::min(mine, w.blocks - 1);
        const W* values = w.tiles(block[i], half);
        if constexpr (std::is_same_v<W, Bf16>) {
          starts[i] = values;
          ahead[i] = w.tiles(std::min(mine + kBlocks, w.blocks - 1), half);
        } else {
          const int64_t count = steps * kTileElements;
          starts[i] = widen(values, count, scratch<Bf16, kWeights>(OB * count) + i * count);
        }
      }
      const bool reads_ahead = std::is_same_v<W, Bf16>;
      for (int64_t row = first_row; row < last_row; row += TB * 16) {
        float* out[4];
        int64_t stride = 64;
        if constexpr (kGated) {
          for (int i = 0; i < 4; ++i) out[i] = result[i];
        } else {
          stride = kTaskOutputs * sizeof(float);
          for (int t = 0; t < TB; ++t)
            for (int i = 0; i < OB; ++i) out[t * OB + i] = made + (row - first_row + t * 16) * kTaskOutputs + first - begin + i * 16;
        }
        multiply_tiles<OB, TB>(x + row / 16 * steps * kTileElements, starts, steps,
                               reads_ahead && row == first_row ? ahead : nullptr, out, stride);
        if constexpr (kGated) {
          for (int t = 0; t < TB; ++t)
            for (int i = 0; i < kBlocks && first + i * 16 < end; ++i) {
              const float *gate = result[t * OB + 2 * i], *up = result[t * OB + 2 * i + 1];
              __m512 scales[2] = {_mm512_set1_ps(1), _mm512_set1_ps(1)};
              if (w.scales)
                for (int half = 0; half < 2; ++half)
                  scales[half] = _mm512_maskz_loadu_ps(lanes_of(w.outputs - first - i * 16), w.scales + half * w.outputs + first + i * 16);
              Out* to = made + (row - first_row + t * 16) * kTaskOutputs + first - begin + i * 16;
              for (int r = 0; r < 16; ++r) {
                const __m512 g = activate(_mm512_mul_ps(_mm512_load_ps(gate + r * 16), scales[0]), activation);
                store_lanes(to + r * kTaskOutputs, 0xffff, _mm512_mul_ps(g, _mm512_mul_ps(_mm512_load_ps(up + r * 16), scales[1])));
              }
            }
        }
      }
      if constexpr (!kGated)
        if (w.scales)
          for (int64_t i = first; i < std::min(end, first + kBlocks * 16); i += 16) {
            const __m512 scales = _mm512_maskz_loadu_ps(lanes_of(w.outputs - i), w.scales + i);
            for (int64_t r = 0; r < last_row - first_row; ++r) {
              float* at = made + r * kTaskOutputs + i - begin;
              _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), scales));
            }
          }
    }
    for (int64_t r = first_row; r < last_row; ++r) take(r, begin, made + (r - first_row) * kTaskOutputs, end - begin);
    _mm_sfence();
  });
}

template <typename Out, bool kGated, typename W, typename Take>
void dense_tiled(ffi::ThreadPool& pool, const Bf16* x, int64_t rows, int64_t width, const TiledWeights<W>& w,
                 Activation activation, const Take& take) {
  const int64_t tiles = (rows + 15) / 16, padded = tiles > 1 ? (tiles + 1) / 2 * 2 : tiles, elements = w.steps * kTileElements;
  auto* tiled = scratch<Bf16, kPacked>(padded * elements);
  constexpr int64_t kTogether = 4;
  parallel_for(pool, (padded + kTogether - 1) / kTogether, [&](int64_t i) {
    for (int64_t t = i * kTogether; t < std::min(padded, (i + 1) * kTogether); ++t)
      tile_rows(x + t * 16 * width, std::clamp<int64_t>(rows - t * 16, 0, 16), width, w.steps, tiled + t * elements);
  });
  if (tiles == 1)
    dense_tiled<Out, 4, 1, kGated>(pool, tiled, rows, w, activation, take);
  else
    dense_tiled<Out, 2, 2, kGated>(pool, tiled, rows, w, activation, take);
}

// Calls run(weights) with a matrix, or several of `outputs` behind one another, as tiles (blocks, steps, 16, 16, 2).
template <typename Run>
ffi::Error with_tiled(ffi::AnyBuffer& w, const float* scales, int64_t outputs, int64_t halves, const Run& run) {
  const int64_t blocks = w.dimensions()[0] / halves, steps = w.dimensions()[1];
  if (!has_tiles()) return ffi::Error::InvalidArgument("dense: tiled weights need AMX");
  if (w.element_type() == ffi::BF16)
    run(TiledWeights<Bf16>{static_cast<const Bf16*>(w.untyped_data()), scales, outputs, blocks, steps});
  else if (w.element_type() == ffi::S8)
    run(TiledWeights<int8_t>{static_cast<const int8_t*>(w.untyped_data()), scales, outputs, blocks, steps});
  else
    return ffi::Error::InvalidArgument("dense: tiled weights of bfloat16 or int8");
  return ffi::Error::Success();
}

#endif  // APT_AMX

// ---- products in vector registers

// R rows times 4 outputs: out[4 * r + o].
template <int R, typename W>
void dense_block(const float* const* x, const W* const* w, int64_t width, float* out) {
  Vec acc[kLanes] = {};
  const int64_t even = width / kLanes * kLanes;
  for (int64_t k = 0; k < even; k += kLanes) {
    Vec weights[4];
    for (int o = 0; o < 4; ++o) weights[o] = load(w[o] + k);
    for (int r = 0; r < R; ++r) {
      Vec row = load(x[r] + k);
      for (int o = 0; o < 4; ++o) acc[4 * r + o] += row * weights[o];
    }
  }
  store(out, sums(acc));
  for (int r = 0; r < R; ++r)
    for (int o = 0; o < 4; ++o)
      for (int64_t k = even; k < width; ++k) out[4 * r + o] += x[r][k] * to_float(w[o][k]);
}

template <typename X, typename W>
void dense_vector(ffi::ThreadPool& pool, const X* x, int64_t rows, const W* w, const float* scales, int64_t outputs,
                  int64_t width, float* out) {
  const float* in;
  if constexpr (std::is_same_v<X, float>) {
    in = x;
  } else {
    float* wide = scratch<float, kWide>(rows * width);
    for (int64_t i = 0; i < rows * width; ++i) wide[i] = to_float(x[i]);
    in = wide;
  }
  const int64_t groups = (outputs + 3) / 4;
  const int64_t chunk = std::max<int64_t>(1, std::min<int64_t>(64, groups / (4 * pool.num_threads())));
  parallel_for(pool, (groups + chunk - 1) / chunk, [&](int64_t task) {
    for (int64_t group = task * chunk; group < std::min(groups, (task + 1) * chunk); ++group) {
      const W* starts[4];
      for (int o = 0; o < 4; ++o) starts[o] = w + std::min(group * 4 + o, outputs - 1) * width;
      for (int64_t row = 0; row < rows; row += 4) {
        float result[kLanes];
        const float* xs[4];
        const int count = static_cast<int>(std::min<int64_t>(4, rows - row));
        for (int r = 0; r < count; ++r) xs[r] = in + (row + r) * width;
        if (count == 4) dense_block<4>(xs, starts, width, result);
        if (count == 3) dense_block<3>(xs, starts, width, result);
        if (count == 2) dense_block<2>(xs, starts, width, result);
        if (count == 1) dense_block<1>(xs, starts, width, result);
        for (int r = 0; r < count; ++r)
          for (int o = 0; o < 4 && group * 4 + o < outputs; ++o)
            out[(row + r) * outputs + group * 4 + o] = result[4 * r + o] * (scales ? scales[group * 4 + o] : 1.0f);
      }
    }
  });
}

// Calls run(x, w) with pointers of their types: the same, or int8 weights.
template <typename Run>
ffi::Error of_types(ffi::AnyBuffer& x, ffi::AnyBuffer& w, const Run& run) {
  const auto* narrow = static_cast<const Bf16*>(x.untyped_data());
  const auto* wide = static_cast<const float*>(x.untyped_data());
  const auto* bytes = static_cast<const int8_t*>(w.untyped_data());
  if (x.element_type() == ffi::F32 && w.element_type() == ffi::F32) return run(wide, static_cast<const float*>(w.untyped_data()));
  if (x.element_type() == ffi::BF16 && w.element_type() == ffi::BF16) return run(narrow, static_cast<const Bf16*>(w.untyped_data()));
  if (x.element_type() == ffi::F32 && w.element_type() == ffi::S8) return run(wide, bytes);
  if (x.element_type() == ffi::BF16 && w.element_type() == ffi::S8) return run(narrow, bytes);
  return ffi::Error::InvalidArgument("dense: these dtypes are not offered");
}

bool is_tiled(const ffi::AnyBuffer& w) { return w.dimensions().size() == 5; }

// x (T, I), w (O, I) of the same type, or int8 with scales (O,), else (0,); or w as tiles.
ffi::Error dense(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::F32> scale,
                 ffi::ResultBuffer<ffi::F32> out) {
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1], outputs = out->dimensions()[1];
  const float* scales = scale.element_count() ? scale.typed_data() : nullptr;
  if (rows == 0 || outputs == 0) return ffi::Error::Success();
#ifdef APT_AMX
  const Rows result(out->untyped_data(), rows, outputs * sizeof(float));
  if (is_tiled(w))
    return with_tiled(w, scales, outputs, 1, [&](const auto& tiled) {
      dense_tiled<float, false>(pool, static_cast<const Bf16*>(x.untyped_data()), rows, width, tiled, kNone,
                                [=](auto... part) { result.put(part...); });
    });
#endif
  if (is_tiled(w)) return ffi::Error::InvalidArgument("dense: tiled weights need AMX");
  return of_types(x, w, [&](auto* in, auto* weights) {
    dense_vector(pool, in, rows, weights, scales, outputs, width, out->typed_data());
    return ffi::Error::Success();
  });
}

// The greatest of each row's products: its place in `tokens` (T,), and in `trusted` (T,) whether it is finite and no product NaN.
ffi::Error dense_argmax(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::F32> scale,
                        ffi::ResultBuffer<ffi::S32> tokens, ffi::ResultBuffer<ffi::PRED> trusted, int64_t outputs) {
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1];
  const float* scales = scale.element_count() ? scale.typed_data() : nullptr;
  const auto keep = [&](int64_t row, const Best& best) {
    tokens->typed_data()[row] = best.index;
    trusted->typed_data()[row] = !best.has_nan && std::isfinite(best.score);
  };
  if (rows == 0) return ffi::Error::Success();
#ifdef APT_AMX
  if (is_tiled(w))
    return with_tiled(w, scales, outputs, 1, [&](const auto& tiled) {
      const int64_t ranges = (outputs + kFewestOutputs - 1) / kFewestOutputs;
      Best* found = scratch<Best, kBest>(rows * ranges);
      std::fill_n(found, rows * ranges, Best{});
      dense_tiled<float, false>(pool, static_cast<const Bf16*>(x.untyped_data()), rows, width, tiled, kNone,
                                [=](int64_t row, int64_t first, const float* values, int64_t count) {
                                  found[row * ranges + first / kFewestOutputs] = best_of(values, count, first);
                                });
      for (int64_t row = 0; row < rows; ++row) {
        Best best = found[row * ranges];
        for (int64_t i = 1; i < ranges; ++i) best.add(found[row * ranges + i]);
        keep(row, best);
      }
    });
#endif
  if (is_tiled(w)) return ffi::Error::InvalidArgument("dense: tiled weights need AMX");
  return of_types(x, w, [&](auto* in, auto* weights) {
    float* scores = scratch<float, kScores>(rows * outputs);
    dense_vector(pool, in, rows, weights, scales, outputs, width, scores);
    parallel_for(pool, rows, [&](int64_t row) { keep(row, best_of(scores + row * outputs, outputs, 0)); });
    return ffi::Error::Success();
  });
}

// x (T, I), gate and up as tiles behind one another, scales (2 F,) or (0,), to (T, F).
ffi::Error gated(ffi::ThreadPool pool, ffi::Buffer<ffi::BF16> x, ffi::AnyBuffer w, ffi::Buffer<ffi::F32> scale,
                 ffi::ResultBuffer<ffi::BF16> out, int64_t activation) {
#ifdef APT_AMX
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1], outputs = out->dimensions()[1];
  const float* scales = scale.element_count() ? scale.typed_data() : nullptr;
  const Rows result(out->untyped_data(), rows, outputs * sizeof(Bf16));
  if (rows == 0) return ffi::Error::Success();
  return with_tiled(w, scales, outputs, 2, [&](const auto& tiled) {
    dense_tiled<Bf16, true>(pool, static_cast<const Bf16*>(x.untyped_data()), rows, width, tiled,
                            static_cast<Activation>(activation),
                            [=](auto... part) { result.put(part...); });
  });
#else
  (void)pool, (void)x, (void)w, (void)scale, (void)out, (void)activation;
  return ffi::Error::InvalidArgument("gated: needs AMX tiles");
#endif
}

// ---- what lies between products

// Calls run(p) with a pointer of the type of a buffer's elements.
template <typename Buffer, typename Run>
ffi::Error of_type(Buffer& buffer, const Run& run) {
  if (buffer.element_type() == ffi::F32) return run(static_cast<float*>(buffer.untyped_data()));
  if (buffer.element_type() == ffi::BF16) return run(static_cast<Bf16*>(buffer.untyped_data()));
  return ffi::Error::InvalidArgument("float32 or bfloat16 alone");
}

// As float32, plus `offset`.
void widen(ffi::AnyBuffer& from, float offset, float* out) {
  of_type(from, [&](const auto* p) {
    for (size_t i = 0; i < from.element_count(); ++i) out[i] = to_float(p[i]) + offset;
    return ffi::Error::Success();
  });
}

template <typename T>
void norm_row(const float* row, const float* scale, const float* bias, int64_t width, float eps, bool layer, T* out) {
  const int64_t even = width / kLanes * kLanes;
  float mean = 0;
  if (layer) {
    Vec total{};
    for (int64_t i = 0; i < even; i += kLanes) total += load(row + i);
    mean = sum(total);
    for (int64_t i = even; i < width; ++i) mean += row[i];
    mean /= static_cast<float>(width);
  }
  Vec squares{};
  for (int64_t i = 0; i < even; i += kLanes) {
    const Vec d = load(row + i) - mean;
    squares += d * d;
  }
  float square = sum(squares);
  for (int64_t i = even; i < width; ++i) square += (row[i] - mean) * (row[i] - mean);
  const float inverse = 1.0f / std::sqrt(square / static_cast<float>(width) + eps);
  for (int64_t i = 0; i < even; i += kLanes) {
    Vec v = (load(row + i) - mean) * inverse * load(scale + i);
    if (bias) v += load(bias + i);
    store(out + i, v);
  }
  for (int64_t i = even; i < width; ++i) from_float((row[i] - mean) * inverse * scale[i] + (bias ? bias[i] : 0), out[i]);
}

// h (T, D) plus delta (T, D), or (0, 0): the sum, and its layer or RMS norm by scale (D,), to which `offset` is added, and bias
// (D,), or (0,).
ffi::Error add_norm(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> h, ffi::Buffer<ffi::F32> delta, ffi::AnyBuffer scale,
                    ffi::AnyBuffer bias, ffi::ResultBuffer<ffi::F32> sum, ffi::Result<ffi::AnyBuffer> out, float eps,
                    float offset, int64_t layer) {
  const int64_t rows = h.dimensions()[0], width = h.dimensions()[1];
  float* scales = scratch<float, kScales>(2 * width);
  float* biases = bias.element_count() ? scales + width : nullptr;
  widen(scale, offset, scales);
  if (biases) widen(bias, 0, biases);
  const float* more = delta.element_count() ? delta.typed_data() : nullptr;
  return of_type(*out, [&](auto* to) {
    constexpr int64_t kTogether = 8;
    parallel_for(pool, (rows + kTogether - 1) / kTogether, [&](int64_t task) {
      for (int64_t row = task * kTogether; row < std::min(rows, (task + 1) * kTogether); ++row) {
        const float* from = h.typed_data() + row * width;
        float* mine = sum->typed_data() + row * width;
        if (more)
          for (int64_t i = 0; i < width; ++i) mine[i] = from[i] + more[row * width + i];
        else
          std::copy_n(from, width, mine);
        norm_row(mine, scales, biases, width, eps, layer != 0, to + row * width);
      }
    });
    return ffi::Error::Success();
  });
}

// Of one head's `width` lanes, the first 2 * half turned: a, b to a cos - b sin, b cos + a sin.
template <typename T>
void turn_head(const float* from, const float* bias, const float* cosine, const float* sine, int64_t half, int64_t width,
               bool finite, T* out) {
  float made[kMostLanes];
  for (int64_t i = 0; i < width; ++i) made[i] = from[i] + (bias ? bias[i] : 0);
  for (int64_t i = 0; i < half; ++i) {
    const float a = made[i], b = made[i + half];
    made[i] = a * cosine[i] - b * sine[i];
    made[i + half] = b * cosine[i] + a * sine[i];
  }
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) store(out + i, load(made + i));
  for (; i < width; ++i) from_float(made[i], out[i]);
  if (finite)
    for (i = 0; i < width; ++i)
      if (!(std::fabs(to_float(out[i])) < INFINITY)) out[i] = T{};
}

// Sums (T, (N + 2K) H) of one product for q, k and v, with their bias ((N + 2K) H,), or (0,), to the three; q and k turned by
// cosine and sine (T, half), or (0, 0). What is not finite in k and v becomes 0.
ffi::Error split_qkv(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> sums, ffi::AnyBuffer bias, ffi::Buffer<ffi::F32> cosine,
                     ffi::Buffer<ffi::F32> sine, ffi::Result<ffi::AnyBuffer> q, ffi::Result<ffi::AnyBuffer> k,
                     ffi::Result<ffi::AnyBuffer> v, int64_t head_dim) {
  const int64_t rows = sums.dimensions()[0], width = sums.dimensions()[1];
  const int64_t heads = q->dimensions()[1] / head_dim, key_heads = k->dimensions()[1] / head_dim;
  const int64_t half = cosine.element_count() ? cosine.dimensions()[1] : 0;
  if (head_dim > kMostLanes) return ffi::Error::InvalidArgument("split_qkv: heads of at most 1024 lanes");
  float* biases = bias.element_count() ? scratch<float, kScales>(width) : nullptr;
  if (biases) widen(bias, 0, biases);
  return of_type(*q, [&](auto* queries) {
    using T = std::remove_pointer_t<decltype(queries)>;
    auto *keys = static_cast<T*>(k->untyped_data()), *values = static_cast<T*>(v->untyped_data());
    constexpr int64_t kTogether = 8;
    parallel_for(pool, (rows + kTogether - 1) / kTogether, [&](int64_t task) {
      for (int64_t row = task * kTogether; row < std::min(rows, (task + 1) * kTogether); ++row) {
        const float *cos = cosine.typed_data() + row * half, *sin = sine.typed_data() + row * half;
        for (int64_t i = 0; i < heads + 2 * key_heads; ++i) {
          const float* from = sums.typed_data() + row * width + i * head_dim;
          const float* more = biases ? biases + i * head_dim : nullptr;
          if (i < heads)
            turn_head(from, more, cos, sin, half, head_dim, false, queries + (row * heads + i) * head_dim);
          else if (i < heads + key_heads)
            turn_head(from, more, cos, sin, half, head_dim, true, keys + (row * key_heads + i - heads) * head_dim);
          else
            turn_head(from, more, cos, sin, 0, head_dim, true, values + (row * key_heads + i - heads - key_heads) * head_dim);
        }
      }
    });
    return ffi::Error::Success();
  });
}

// ---- decode attention

constexpr int kTile = 64;  // positions attended to at a time

// What happens to scores before the softmax: `ScoreRules`.
struct Rules {
  float softcap;        // 0: none
  int64_t window;       // 0: none
  const float* slopes;  // of ALiBi, a query head each; nullptr: none
};

// The slots of one request that a query may see: of position after position.
struct Seen {
  const int32_t* ranges;  // own slots of every block: (J, 2), or nullptr
  int64_t block_size, length, first;
  int64_t entry = 0, slot = 0;
  int64_t own = 0;  // next position behind those of the blocks

  // The next slots, at most `n`: for each its block's entry in the table, its slot and its position.
  int next(int n, int32_t* entries, int32_t* slots, int32_t* positions) {
    int count = 0;
    while (count < n && entry * block_size < length) {
      int64_t from = 0, to = std::min(block_size, length - entry * block_size), step = 1;
      if (ranges) {
        from = ranges[2 * entry];
        to = ranges[2 * entry + 1];
        if (to < from) --from, --to, step = -1;
      }
      const int64_t mine = std::min((to - from) * step, length - entry * block_size);
      for (; slot < mine && count < n; ++slot) {
        const int64_t position = entry * block_size + slot;
        if (position < first) continue;
        entries[count] = static_cast<int32_t>(entry);
        slots[count] = static_cast<int32_t>(from + step * slot);
        positions[count++] = static_cast<int32_t>(position);
      }
      if (slot >= mine) ++entry, slot = 0;
    }
    return count;
  }
};

// The first position that a query at position `end` - 1 sees.
inline int64_t first_seen(int64_t window, int64_t end) { return window ? std::max<int64_t>(0, end - window) : 0; }

// Positions [first, length) of a row's blocks; `ranges` (B, J, 2), or (0, 0, 2).
Seen seen_of(ffi::Buffer<ffi::S32>& ranges, int64_t row, int64_t block_size, int64_t length, int64_t first) {
  const int32_t* own = ranges.element_count() ? ranges.typed_data() + row * ranges.dimensions()[1] * 2 : nullptr;
  Seen seen{own, block_size, length, first};
  if (!own) seen.entry = std::min(first, length) / block_size;
  seen.own = length;
  return seen;
}

// `count` rows of `width` elements as float32, `padded` apart, zeros behind.
template <typename T>
void widen(const T* const* rows, int count, int64_t width, int64_t padded, float* out) {
  const int64_t even = width / kLanes * kLanes;
  for (int i = 0; i < count; ++i, out += padded) {
    int64_t k = 0;
    for (; k < even; k += kLanes) store(out + k, load(rows[i] + k));
    for (; k < width; ++k) out[k] = to_float(rows[i][k]);
    for (; k < padded; ++k) out[k] = 0;
  }
}

// Running maximum, denominator and accumulator of flash attention of one query head.
struct Flash {
  float m = -INFINITY, l = 0;
};

// Scores of one query head against `count` keys.
void score(const float* q, const float* keys, int count, int64_t padded, float* scores) {
  for (int t = 0; t < count; t += kLanes) {
    Vec partial[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const float* key = keys + (t + i) * padded;
      Vec even = load(q) * load(key), odd{};
      int64_t k = kLanes;
      for (; k + kLanes < padded; k += 2 * kLanes) {
        odd += load(q + k) * load(key + k);
        even += load(q + k + kLanes) * load(key + k + kLanes);
      }
      if (k < padded) odd += load(q + k) * load(key + k);
      partial[i] = even + odd;
    }
    store(scores + t, sums(partial));
  }
}

// Scores of one query head, by the rules, to weights of the values relative to the running maximum, in place. Returns what the
// accumulator must be scaled by.
float weigh(Flash& state, int count, const Rules& rules, float slope, const int32_t* positions, int64_t last, float* weights) {
  Vec highest = splat(-INFINITY);
  for (int t = 0; t < count; t += kLanes) {
    Vec s = load(weights + t);
    if (rules.softcap != 0) {
      const float cap = rules.softcap;
      for (int i = 0; i < kLanes; ++i) s[i] = cap * std::tanh(s[i] / cap);
    }
    if (rules.slopes)
      for (int i = 0; i < kLanes && t + i < count; ++i) s[i] += slope * static_cast<float>(positions[t + i] - last);
    for (int i = count - t; i < kLanes; ++i) s[i] = -INFINITY;
    store(weights + t, s);
    highest = max(highest, s);
  }
  const float m = std::max(state.m, max(highest));
  Vec total{};
  for (int t = 0; t < count; t += kLanes) {
    Vec w = exp(load(weights + t) - m);
    for (int i = count - t; i < kLanes; ++i) w[i] = 0;
    store(weights + t, w);
    total += w;
  }
  const float scale = std::exp(state.m - m);
  state.l = state.l * scale + sum(total);
  state.m = m;
  return scale;
}

// acc[g] = acc[g] * scales[g] + sum over t of weights[g][t] * values[t], for L vectors of lanes and G heads.
template <int G, int L>
void add_values(const float* const* weights, const float* scales, const float* values, int count, int64_t padded,
                float* const* acc) {
  Vec sums[G][L];
  for (int g = 0; g < G; ++g)
    for (int i = 0; i < L; ++i) sums[g][i] = load(acc[g] + i * kLanes) * scales[g];
  for (int t = 0; t < count; ++t) {
    Vec value[L];
    for (int i = 0; i < L; ++i) value[i] = load(values + t * padded + i * kLanes);
    for (int g = 0; g < G; ++g)
      for (int i = 0; i < L; ++i) sums[g][i] += value[i] * weights[g][t];
  }
  for (int g = 0; g < G; ++g)
    for (int i = 0; i < L; ++i) store(acc[g] + i * kLanes, sums[g][i]);
}

template <int G>
void add_values(int vectors, const float* const* weights, const float* scales, const float* values, int count,
                int64_t padded, float* const* acc) {
  if (vectors == 4) return add_values<G, 4>(weights, scales, values, count, padded, acc);
  if (vectors == 3) return add_values<G, 3>(weights, scales, values, count, padded, acc);
  if (vectors == 2) return add_values<G, 2>(weights, scales, values, count, padded, acc);
  add_values<G, 1>(weights, scales, values, count, padded, acc);
}

// Where a request's keys and values lie.
template <typename T>
struct Cache {
  const T* pool;
  const int32_t* tables;  // (2, J): of keys, of values
  int64_t table_len, block_elements, lanes;
  const T *own_keys, *own_values;  // of positions from `seen.length` on, (.., lanes); in no block

  // Keys and values of the next positions that may be seen, at most kTile.
  int next(Seen& seen, int64_t end, const T** keys, const T** values, int32_t* positions) const {
    int32_t entries[kTile], slots[kTile];
    int count = seen.next(kTile, entries, slots, positions);
    for (int i = 0; i < count; ++i) {
      keys[i] = pool + tables[entries[i]] * block_elements + slots[i] * lanes;
      values[i] = pool + tables[table_len + entries[i]] * block_elements + slots[i] * lanes;
    }
    for (; count < kTile && seen.own < end; ++seen.own) {
      if (seen.own < seen.first) continue;
      keys[count] = own_keys + (seen.own - seen.length) * lanes;
      values[count] = own_values + (seen.own - seen.length) * lanes;
      positions[count++] = static_cast<int32_t>(seen.own);
    }
    return count;
  }
};

// What a thread attends to next, to be fetched early; nullptr: not known.
template <typename T>
struct Following {
  const Cache<T>* cache = nullptr;
  Seen seen{};
};

#ifdef APT_PAIRS

inline __m512i words(const void* p) { return _mm512_loadu_si512(p); }

inline __m512bh pairs(__m512i v) {
  __m512bh out;
  std::memcpy(&out, &v, sizeof out);
  return out;
}

// Scores of G query heads against `count` keys, a multiple of 16 of them, while the keys from `ahead` on are fetched.
template <int G>
void score_pairs(const Bf16* q, const Bf16* const* keys, const Bf16* const* ahead, int64_t lane, int count, int64_t width,
                 float* scores) {
  for (int t = 0; t < count; t += kLanes) {
    Vec partial[G][kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const Bf16* key = keys[t + i] + lane;
      __m512 products[G];
      for (int g = 0; g < G; ++g) products[g] = _mm512_setzero_ps();
      for (int64_t k = 0; k < width; k += 32) {
        const __m512bh of_key = pairs(words(key + k));
        _mm_prefetch(reinterpret_cast<const char*>(ahead[t + i] + lane + k), _MM_HINT_T0);
        for (int g = 0; g < G; ++g) products[g] = _mm512_dpbf16_ps(products[g], of_key, pairs(words(q + g * width + k)));
      }
      for (int g = 0; g < G; ++g) std::memcpy(&partial[g][i], &products[g], sizeof(Vec));
    }
    for (int g = 0; g < G; ++g) store(scores + g * kTile + t, sums(partial[g]));
  }
}

// acc[g] = acc[g] * scales[g] + sum over t of weights[g][t] * values[t], for L times 32 lanes of G heads and an even `count`. Of
// 32 lanes, the accumulator holds those that the instruction for interleaving takes first before the others.
template <int G, int L>
void add_pairs(const uint32_t* weights, const float* scales, const Bf16* const* values, const Bf16* const* ahead, int64_t lane,
               int count, int64_t width, float* acc) {
  __m512 sums[G][2 * L];
  for (int g = 0; g < G; ++g)
    for (int i = 0; i < 2 * L; ++i)
      sums[g][i] = _mm512_mul_ps(_mm512_loadu_ps(acc + g * width + i * kLanes), _mm512_set1_ps(scales[g]));
  for (int t = 0; t < count; t += 2) {
    const Bf16 *first = values[t] + lane, *second = values[t + 1] + lane;
    for (int i = 0; i < L; ++i) {
      const __m512i a = words(first + 32 * i), b = words(second + 32 * i);
      const __m512bh low = pairs(_mm512_unpacklo_epi16(a, b)), high = pairs(_mm512_unpackhi_epi16(a, b));
      _mm_prefetch(reinterpret_cast<const char*>(ahead[t] + lane + 32 * i), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(ahead[t + 1] + lane + 32 * i), _MM_HINT_T0);
      for (int g = 0; g < G; ++g) {
        const __m512bh both = pairs(_mm512_set1_epi32(static_cast<int32_t>(weights[g * (kTile / 2) + t / 2])));
        sums[g][2 * i] = _mm512_dpbf16_ps(sums[g][2 * i], low, both);
        sums[g][2 * i + 1] = _mm512_dpbf16_ps(sums[g][2 * i + 1], high, both);
      }
    }
  }
  for (int g = 0; g < G; ++g)
    for (int i = 0; i < 2 * L; ++i) _mm512_storeu_ps(acc + g * width + i * kLanes, sums[g][i]);
}

// `attend` in dot products of pairs; `width` is a multiple of 32. Weights are rounded to bfloat16.
template <typename Out>
void attend_pairs(const Bf16* q, const Cache<Bf16>& cache, Seen seen, int64_t end, const Rules& rules, int64_t first_key_head,
                  int64_t key_heads, int64_t group, int64_t width, float scale, Out* out, Following<Bf16> following) {
  constexpr int kHeads = 4;  // of one key head at a time
  const int64_t heads = key_heads * group;
  float* acc = scratch<float, kWide>(heads * width);
  std::fill_n(acc, heads * width, 0.0f);
  std::vector<Flash> states(heads);
  struct Taken {
    const Bf16 *keys[kTile], *values[kTile];
    int32_t positions[kTile];
    int count;
  } tiles[2];
  const auto take = [](Taken& to, const Cache<Bf16>& from, Seen& at, int64_t before) {
    to.count = from.next(at, before, to.keys, to.values, to.positions);
    for (int i = to.count; to.count && i < kTile; ++i) to.keys[i] = to.keys[i - 1], to.values[i] = to.values[i - 1];
  };
  alignas(64) float weights[kHeads * kTile];
  alignas(64) uint32_t narrow[kHeads * kTile / 2];
  take(tiles[0], cache, seen, end);
  for (int turn = 0; tiles[turn].count; turn = 1 - turn) {
    const Taken& now = tiles[turn];
    Taken& next = tiles[1 - turn];
    take(next, cache, seen, end);
    // What comes next, in this row or the following one, is fetched while this is worked on.
    Taken of_following;
    of_following.count = 0;
    if (!next.count && following.cache) take(of_following, *following.cache, following.seen, following.seen.length);
    const Taken& fetched = next.count ? next : of_following.count ? of_following : now;
    const Bf16 *const *keys_ahead = fetched.keys, *const *values_ahead = fetched.values;
    const int count = now.count, padded = static_cast<int>(round_up(count, kLanes));
    for (int i = padded; i < fetched.count; ++i)
      for (int64_t e = first_key_head * width; e < (first_key_head + key_heads) * width; e += 32) {
        _mm_prefetch(reinterpret_cast<const char*>(keys_ahead[i] + e), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(values_ahead[i] + e), _MM_HINT_T0);
      }
    for (int64_t k = 0; k < key_heads; ++k) {
      const int64_t lane = (first_key_head + k) * width;
      for (int64_t g = 0; g < group; g += kHeads) {
        const int64_t head = k * group + g;
        const int mine = static_cast<int>(std::min<int64_t>(kHeads, group - g));
        const Bf16* queries = q + head * width;
        if (mine == 4) score_pairs<4>(queries, now.keys, keys_ahead, lane, padded, width, weights);
        if (mine == 3) score_pairs<3>(queries, now.keys, keys_ahead, lane, padded, width, weights);
        if (mine == 2) score_pairs<2>(queries, now.keys, keys_ahead, lane, padded, width, weights);
        if (mine == 1) score_pairs<1>(queries, now.keys, keys_ahead, lane, padded, width, weights);
        float scales[kHeads];
        for (int j = 0; j < mine; ++j) {
          float* row = weights + j * kTile;
          for (int t = 0; t < padded; t += kLanes) store(row + t, load(row + t) * scale);
          const float slope = rules.slopes ? rules.slopes[first_key_head * group + head + j] : 0;
          scales[j] = weigh(states[head + j], count, rules, slope, now.positions, end - 1, row);
          for (int t = 0; t < padded; t += kLanes) {
            const __m256bh half = _mm512_cvtneps_pbh(_mm512_load_ps(row + t));
            std::memcpy(narrow + (j * kTile + t) / 2, &half, sizeof half);
          }
        }
        const int even = (count + 1) / 2 * 2;
        for (int64_t i = 0; i < width;) {
          float* to = acc + head * width + i;
          const auto add = [&](auto lanes) {
            constexpr int L = decltype(lanes)::value;
            if (mine == 4) add_pairs<4, L>(narrow, scales, now.values, values_ahead, lane + i, even, width, to);
            if (mine == 3) add_pairs<3, L>(narrow, scales, now.values, values_ahead, lane + i, even, width, to);
            if (mine == 2) add_pairs<2, L>(narrow, scales, now.values, values_ahead, lane + i, even, width, to);
            if (mine == 1) add_pairs<1, L>(narrow, scales, now.values, values_ahead, lane + i, even, width, to);
            i += 32 * L;
          };
          if (width - i >= 64)
            add(std::integral_constant<int, 2>{});
          else
            add(std::integral_constant<int, 1>{});
        }
      }
    }
  }
  for (int64_t h = 0; h < heads; ++h) {
    const float inverse = states[h].l > 0 ? 1.0f / states[h].l : states[h].l;  // NaN stays
    for (int64_t i = 0; i < width; ++i) {
      const int64_t place = i % 8 / 4 * 16 + i % 32 / 8 * 4 + i % 4;
      from_float(acc[h * width + i / 32 * 32 + place] * inverse, out[h * width + i]);
    }
  }
}

#endif  // APT_PAIRS

// One query at position `end` - 1 over the positions before `end`, of heads that share key heads, `group` to each: q (heads, H),
// out (heads, H).
template <typename T, typename Out>
void attend(const T* q, const Cache<T>& cache, Seen seen, int64_t end, const Rules& rules, int64_t first_key_head,
            int64_t key_heads, int64_t group, int64_t width, float scale, Out* out, [[maybe_unused]] const Following<T>& following = {}) {
#ifdef APT_PAIRS
  if constexpr (std::is_same_v<T, Bf16>)
    if (width % 32 == 0)
      return attend_pairs(q, cache, seen, end, rules, first_key_head, key_heads, group, width, scale, out, following);
#endif
  const int64_t padded = round_up(width, kLanes), heads = key_heads * group;
  float* wide = scratch<float, kWide>(kTile * padded);
  float* queries = scratch<float, kQueries>(heads * 2 * padded + group * (kTile + 1));
  float *acc = queries + heads * padded, *weights = acc + heads * padded, *scales = weights + group * kTile;
  std::fill_n(queries, heads * 2 * padded, 0.0f);
  std::vector<Flash> states(heads);
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t i = 0; i < width; ++i) queries[h * padded + i] = to_float(q[h * width + i]) * scale;
  int32_t positions[kTile];
  const T *keys[kTile], *values[kTile], *mine[kTile];
  for (int count; (count = cache.next(seen, end, keys, values, positions));) {
    for (int64_t k = 0; k < key_heads; ++k) {
      const int64_t lane = (first_key_head + k) * width;
      for (int i = 0; i < count; ++i) mine[i] = keys[i] + lane;
      widen(mine, count, width, padded, wide);
      for (int64_t g = 0; g < group; ++g) {
        const int64_t h = k * group + g;
        const float slope = rules.slopes ? rules.slopes[first_key_head * group + h] : 0;
        score(&queries[h * padded], wide, count, padded, &weights[g * kTile]);
        scales[g] = weigh(states[h], count, rules, slope, positions, end - 1, &weights[g * kTile]);
      }
      for (int i = 0; i < count; ++i) mine[i] = values[i] + lane;
      widen(mine, count, width, padded, wide);
      for (int64_t g = 0; g < group; g += 4)
        for (int64_t i = 0; i < padded; i += 4 * kLanes) {
          const int vectors = static_cast<int>(std::min<int64_t>(4, (padded - i) / kLanes));
          const int heads_now = static_cast<int>(std::min<int64_t>(4, group - g));
          const float* w[4];
          float* a[4];
          for (int j = 0; j < heads_now; ++j) {
            w[j] = &weights[(g + j) * kTile];
            a[j] = &acc[(k * group + g + j) * padded + i];
          }
          const float* v = wide + i;
          if (heads_now == 4) add_values<4>(vectors, w, &scales[g], v, count, padded, a);
          if (heads_now == 3) add_values<3>(vectors, w, &scales[g], v, count, padded, a);
          if (heads_now == 2) add_values<2>(vectors, w, &scales[g], v, count, padded, a);
          if (heads_now == 1) add_values<1>(vectors, w, &scales[g], v, count, padded, a);
        }
    }
  }
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t i = 0; i < width; ++i)
      from_float(states[h].l > 0 ? acc[h * padded + i] / states[h].l : 0.0f, out[h * width + i]);
}

template <typename T>
void decode_kv_rows(ffi::ThreadPool& threads, const T* q, ffi::AnyBuffer& pool, ffi::Buffer<ffi::S32>& tables,
                    ffi::Buffer<ffi::S32>& lens, const int32_t* rows, ffi::Buffer<ffi::S32>& ranges, const Rules& rules,
                    int64_t block_size, ffi::Buffer<ffi::F32>::Dimensions shape, float* out) {
  const int64_t batch = shape[0], heads = shape[1], width = shape[2];
  const int64_t block_elements = pool.dimensions()[1], lanes = block_elements / block_size, key_heads = lanes / width;
  const int64_t table_len = tables.dimensions()[2], group = heads / key_heads;
  // Where rows are fewer than threads, their heads are shared out.
  const int64_t live = std::max(rows[1] - rows[0], 0);
  int64_t parts = 1;
  while (live && live * parts < 2 * threads.num_threads() && key_heads % (2 * parts) == 0) parts *= 2;
  if (live && live * parts < 2 * threads.num_threads()) parts = key_heads;
  const int64_t per_part = key_heads / parts;
  auto* elements = static_cast<const T*>(pool.untyped_data());
  std::fill_n(out, batch * heads * width, 0.0f);
  struct Row {
    Cache<T> cache;
    Seen seen;
  };
  const auto row_of = [&](int64_t row) {
    const int64_t length = lens.typed_data()[row];
    return Row{{elements, tables.typed_data() + row * 2 * table_len, table_len, block_elements, lanes, nullptr, nullptr},
               seen_of(ranges, row, block_size, length, first_seen(rules.window, length))};
  };
  const float scale = 1.0f / std::sqrt(static_cast<float>(width));
  const int64_t together = parts == 1 ? std::clamp<int64_t>(live / (4 * threads.num_threads()), 1, 8) : 1;
  parallel_for(threads, (live + together - 1) / together * parts, [&](int64_t task) {
    const int64_t from = rows[0] + task / parts * together, to = std::min<int64_t>(rows[1], from + together);
    const int64_t first = task % parts * per_part;
    Row mine = row_of(from);
    for (int64_t row = from; row < to; ++row) {
      const Row after = row_of(std::min(row + 1, to - 1));
      const int64_t offset = (row * heads + first * group) * width;
      if (mine.seen.length > 0)
        attend(q + offset, mine.cache, mine.seen, mine.seen.length, rules, first, per_part, group, width, scale, out + offset,
               row + 1 < to ? Following<T>{&after.cache, after.seen} : Following<T>{});
      mine = after;
    }
  });
}

ffi::Error decode_kv(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer pool, ffi::Buffer<ffi::S32> tables,
                     ffi::Buffer<ffi::S32> lens, ffi::Buffer<ffi::S32> rows, ffi::Buffer<ffi::S32> ranges,
                     ffi::Buffer<ffi::F32> slopes, ffi::Result<ffi::AnyBuffer> out, int64_t block_size, float softcap,
                     int64_t window) {
  const Rules rules{softcap, window, slopes.element_count() ? slopes.typed_data() : nullptr};
  if (q.element_type() != pool.element_type() || out->element_type() != ffi::F32)
    return ffi::Error::InvalidArgument("decode_kv: queries of the pool's type to float32");
  return of_type(q, [&](auto* queries) {
    using T = std::remove_pointer_t<decltype(queries)>;
    decode_kv_rows<T>(threads, queries, pool, tables, lens, rows.typed_data(), ranges, rules, block_size, q.dimensions(),
                      static_cast<float*>(out->untyped_data()));
    return ffi::Error::Success();
  });
}

// ---- attention on tiles: prefill, and decode rows over layer inputs

#ifdef APT_AMX

constexpr int kKeys = 128;  // keys taken at a time: with their values they stay in the cache

// A tile of 16 queries that attend to the same keys.
struct QueryTile {
  const Bf16* q[16];  // of `width` elements; nullptr: no query
  Bf16* out[16];
  alignas(64) int32_t positions[16];
  alignas(64) float slopes[16];
  int32_t first, last;  // least and greatest position of its queries
};

inline __m256i half(const Bf16* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// Words of two bfloat16 each: (low, high).
inline __m512i pair(__m256i low, __m256i high) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

inline void transpose(char* tile) {
  auto* words = reinterpret_cast<float*>(tile);
  __m512 turned[16];
  transpose(words, turned);
  for (int i = 0; i < 16; ++i) _mm512_store_ps(words + 16 * i, turned[i]);
}

inline Vec vec(__m512 v) {
  Vec out;
  std::memcpy(&out, &v, sizeof out);
  return out;
}

// Scores of 16 queries against keys [0, visible), already times the scale, to weights by the rules, as bfloat16 words
// (query, pair of keys), tiles of 32 keys. Scores lie transposed, a vector for every key, so that nothing is summed across lanes.
// Returns what the outputs so far must be scaled by.
Vec weigh_tile(float* scores, int visible, const QueryTile& queries, const Rules& rules, const int32_t* positions, float scale,
               float* highest, float* total, char* weights) {
  const __m512i position = _mm512_load_si512(queries.positions);
  const Vec slope = load(queries.slopes), before = load(highest);
  const bool plain = !rules.window && !rules.slopes && rules.softcap == 0 && positions[visible - 1] <= queries.first;
  Vec m = before;
  for (int i = 0; i < visible; ++i) {
    Vec s = load(scores + i * 16) * scale;
    if (!plain) {
      if (rules.softcap != 0)
        for (int j = 0; j < 16; ++j) s[j] = rules.softcap * std::tanh(s[j] / rules.softcap);
      const Vec distance = vec(_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_set1_epi32(positions[i]), position)));
      if (rules.slopes) s += slope * distance;
      s = distance > 0.0f ? splat(-INFINITY) : s;
      if (rules.window) s = distance <= -static_cast<float>(rules.window) ? splat(-INFINITY) : s;
    }
    store(scores + i * 16, s);
    m = max(m, s);
  }
  // A query that has seen no key yet: any finite maximum gives weights of zero.
  const Vec finite = m == -INFINITY ? splat(0.0f) : m;
  Vec sum{};
  const int padded = (visible + 31) / 32 * 32;
  for (int i = 0; i < padded; i += 2) {
    __m512 w[2];
    for (int j = 0; j < 2; ++j) {
      Vec one{};
      if (i + j < visible) {
        const Vec s = load(scores + (i + j) * 16);
        one = s == -INFINITY ? splat(0.0f) : exp(s - finite);
      }
      sum += one;
      std::memcpy(&w[j], &one, sizeof one);
    }
    const __m512bh both = _mm512_cvtne2ps_pbh(w[1], w[0]);
    __m512i lanes;
    std::memcpy(&lanes, &both, sizeof lanes);
    _mm512_store_si512(weights + i * 32, pair(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64(lanes, 1)));
  }
  for (int i = 0; i < padded / 32; ++i) transpose(weights + i * 1024);
  const Vec rescale = before == -INFINITY ? splat(0.0f) : exp(before - finite);
  store(total, load(total) * rescale + sum);
  store(highest, m);
  return rescale;
}

// Queries over the positions before `end`, keys and values from lane `lane` on; where `same`, the values are the keys.
void attend_tiles(const QueryTile* tiles, int64_t count, int64_t width, const Cache<Bf16>& cache, Seen seen, int64_t end,
                  const Rules& rules, int64_t lane, bool same, float scale) {
  const int64_t padded = round_up(width, 32), steps = padded / 32, lane_tiles = padded / 16;
  constexpr int64_t kKeySteps = kKeys / 32, kTileBytes = 1024;
  const int64_t rows_bytes = kKeys * padded * 2, out_floats = lane_tiles * 256;
  char* memory = scratch<char, kMade>((same ? 1 : 2) * rows_bytes + lane_tiles * kKeySteps * kTileBytes +
                                      count * (steps * kTileBytes + out_floats * 4 + 128) + kKeys * 64 + kKeySteps * kTileBytes);
  auto take = [&memory](int64_t bytes) { return std::exchange(memory, memory + bytes); };
  auto* keys = reinterpret_cast<Bf16*>(take(rows_bytes));
  auto* value_rows = same ? keys : reinterpret_cast<Bf16*>(take(rows_bytes));
  char *values = take(lane_tiles * kKeySteps * kTileBytes), *queries = take(count * steps * kTileBytes);
  char *weights = take(kKeySteps * kTileBytes);
  auto* scores = reinterpret_cast<float*>(take(kKeys * 64));
  auto* out = reinterpret_cast<float*>(take(count * out_floats * 4));
  auto *highest = reinterpret_cast<float*>(take(count * 64)), *total = reinterpret_cast<float*>(take(count * 64));
  std::fill_n(out, count * out_floats, 0.0f);
  std::fill_n(highest, count * 16, -INFINITY);
  std::fill_n(total, count * 16, 0.0f);
  // Lanes behind those of a row are zeros in every copy.
  std::memset(keys, 0, rows_bytes);
  if (!same) std::memset(value_rows, 0, rows_bytes);
  for (int64_t c = 0; c < count; ++c) {
    for (int i = 0; i < 16; ++i) {
      Bf16* row = keys + i * padded;
      if (tiles[c].q[i])
        std::copy_n(tiles[c].q[i], width, row);
      else
        std::memset(row, 0, width * 2);
    }
    pack_rows(keys, 16, padded, padded, reinterpret_cast<uint32_t*>(queries + c * steps * kTileBytes));
  }
  int32_t positions[kKeys];
  const Bf16 *key_at[kTile], *value_at[kTile];
  for (;;) {
    int taken = 0;
    for (int n = kTile; n == kTile && taken < kKeys; taken += n) {
      n = cache.next(seen, end, key_at, value_at, positions + taken);
      for (int i = 0; i < n; ++i) {
        std::copy_n(key_at[i] + lane, width, keys + (taken + i) * padded);
        if (!same) std::copy_n(value_at[i] + lane, width, value_rows + (taken + i) * padded);
      }
    }
    if (!taken) break;
    const int64_t key_steps = (taken + 31) / 32;
    // Zeros, not what was there before: 0 * NaN = NaN.
    std::memset(value_rows + taken * padded, 0, (key_steps * 32 - taken) * padded * 2);
    for (int64_t s = 0; s < key_steps; ++s)
      for (int64_t t = 0; t < lane_tiles; ++t)
        for (int i = 0; i < 16; ++i) {
          const Bf16* row = value_rows + (s * 32 + 2 * i) * padded + t * 16;
          _mm512_store_si512(values + (t * kKeySteps + s) * kTileBytes + i * 64, pair(half(row), half(row + padded)));
        }
    for (int64_t c = 0; c < count; ++c) {
      int visible = taken;  // keys behind its last query no query of the tile sees
      while (visible && positions[visible - 1] > tiles[c].last) --visible;
      if (!visible) continue;
      const int64_t visible_steps = (visible + 31) / 32;
      for (int64_t k = 0; k < visible_steps; ++k) {
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t s = 0; s < steps; ++s) {
          _tile_loadd(4, queries + (c * steps + s) * kTileBytes, 64);
          _tile_loadd(5, keys + k * 32 * padded + s * 32, padded * 2);
          _tile_loadd(6, keys + (k * 32 + 16) * padded + s * 32, padded * 2);
          _tile_dpbf16ps(0, 5, 4);
          _tile_dpbf16ps(1, 6, 4);
        }
        _tile_stored(0, scores + k * 512, 64);
        _tile_stored(1, scores + k * 512 + 256, 64);
      }
      alignas(64) float rescale[16];
      store(rescale, weigh_tile(scores, visible, tiles[c], rules, positions, scale, highest + c * 16, total + c * 16, weights));
      float* mine = out + c * out_floats;
      const bool moved = std::any_of(rescale, rescale + 16, [](float r) { return r != 1.0f; });
      for (int64_t t = 0; t < lane_tiles; t += 2) {
        float *first = mine + t * 256, *second = first + 256;
        if (moved)
          for (int i = 0; i < 32; ++i) store(first + i * 16, load(first + i * 16) * rescale[i % 16]);
        _tile_loadd(0, first, 64);
        _tile_loadd(1, second, 64);
        for (int64_t s = 0; s < visible_steps; ++s) {
          _tile_loadd(4, weights + s * kTileBytes, 64);
          _tile_loadd(5, values + (t * kKeySteps + s) * kTileBytes, 64);
          _tile_loadd(6, values + ((t + 1) * kKeySteps + s) * kTileBytes, 64);
          _tile_dpbf16ps(0, 4, 5);
          _tile_dpbf16ps(1, 4, 6);
        }
        _tile_stored(0, first, 64);
        _tile_stored(1, second, 64);
      }
    }
  }
  for (int64_t c = 0; c < count; ++c)
    for (int i = 0; i < 16; ++i) {
      if (!tiles[c].q[i]) continue;
      const float l = total[c * 16 + i], inverse = l > 0 ? 1.0f / l : l;  // NaN stays
      for (int64_t t = 0; t < lane_tiles; ++t) {
        const int64_t lanes = std::clamp<int64_t>(width - t * 16, 0, 16);
        const float* row = out + c * out_floats + t * 256 + i * 16;
        store_lanes(tiles[c].out[i] + t * 16, lanes_of(lanes),
                    _mm512_mul_ps(_mm512_loadu_ps(row), _mm512_set1_ps(inverse)));
      }
    }
}

constexpr int kTaskQueries = 64;  // of a prefill task: 4 tiles a head
constexpr int64_t kFew = 4;       // chunks of at most so many tokens attend as decode rows do

// `count` queries from `q` on, at positions from `first` on, of `group` heads that share a key head.
void prefill_tiles(const Bf16* q, Bf16* out, int64_t count, int64_t first, int64_t heads, int64_t group, int64_t width,
                   const Cache<Bf16>& cache, const Seen& seen, const Rules& rules, int64_t key_head, float scale) {
  std::vector<QueryTile> tiles;
  for (int64_t g = 0; g < group; ++g)
    for (int64_t t = 0; t < count; t += 16) {
      QueryTile tile{};
      for (int64_t i = 0; i < 16; ++i) {
        tile.positions[i] = static_cast<int32_t>(first + t + i);
        tile.slopes[i] = rules.slopes ? rules.slopes[key_head * group + g] : 0;
        if (t + i >= count) continue;
        tile.q[i] = q + ((t + i) * heads + g) * width;
        tile.out[i] = out + ((t + i) * heads + g) * width;
      }
      tile.first = static_cast<int32_t>(first + t);
      tile.last = static_cast<int32_t>(first + std::min(t + 16, count) - 1);
      tiles.push_back(tile);
    }
  Tiles registers;
  attend_tiles(tiles.data(), static_cast<int64_t>(tiles.size()), width, cache, seen, first + count, rules, key_head * width,
               false, scale);
}

#endif  // APT_AMX

// A row's cached layer inputs, which are keys and values at once.
template <typename T>
Cache<T> inputs_of(ffi::AnyBuffer& pool, ffi::Buffer<ffi::S32>& tables, int64_t row, int64_t width) {
  return {static_cast<const T*>(pool.untyped_data()),
          tables.typed_data() + row * tables.dimensions()[1],
          0,  // values are where keys are
          pool.dimensions()[1],
          width,
          nullptr,
          nullptr};
}

// Some query heads of a row, from head `first` on, at the end of what it sees: q and out (count, D).
void absorb(const float* q, const Cache<float>& cache, const Seen& seen, const Rules& rules, int64_t first, int64_t count,
            int64_t width, float* out) {
  const Rules mine{rules.softcap, rules.window, rules.slopes ? rules.slopes + first : nullptr};
  attend(q, cache, seen, seen.length, mine, 0, 1, count, width, 1.0f, out);
}

void absorb(const Bf16* q, const Cache<Bf16>& cache, const Seen& seen, const Rules& rules, int64_t first, int64_t count,
            int64_t width, Bf16* out) {
#ifdef APT_AMX
  std::vector<QueryTile> tiles;
  for (int64_t h = 0; h < count; h += 16) {
    QueryTile tile{};
    for (int64_t i = 0; i < 16; ++i) {
      tile.positions[i] = static_cast<int32_t>(seen.length - 1);
      if (h + i >= count) continue;
      tile.slopes[i] = rules.slopes ? rules.slopes[first + h + i] : 0;
      tile.q[i] = q + (h + i) * width;
      tile.out[i] = out + (h + i) * width;
    }
    tile.first = tile.last = static_cast<int32_t>(seen.length - 1);
    tiles.push_back(tile);
  }
  Tiles registers;
  attend_tiles(tiles.data(), static_cast<int64_t>(tiles.size()), width, cache, seen, seen.length, rules, 0, true, 1.0f);
#else
  (void)q, (void)cache, (void)seen, (void)rules, (void)first, (void)count, (void)width, (void)out;
#endif
}

// One query a row over cached layer inputs, absorbed: q (B, N, D), the scale in it, to sums of layer inputs (B, N, D). All of one
// type: float32, or bfloat16 on matrix tiles.
ffi::Error decode_absorbed(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer pool, ffi::Buffer<ffi::S32> tables,
                           ffi::Buffer<ffi::S32> lens, ffi::Buffer<ffi::S32> rows, ffi::Buffer<ffi::S32> ranges,
                           ffi::Buffer<ffi::F32> slopes, ffi::Result<ffi::AnyBuffer> out, int64_t block_size, float softcap,
                           int64_t window) {
  const int64_t heads = q.dimensions()[1], width = q.dimensions()[2];
  const Rules rules{softcap, window, slopes.element_count() ? slopes.typed_data() : nullptr};
  if (q.element_type() != pool.element_type() || q.element_type() != out->element_type())
    return ffi::Error::InvalidArgument("decode_absorbed: one type for all");
  if (q.element_type() == ffi::BF16 && !apt_has_tiles()) return ffi::Error::InvalidArgument("decode_absorbed: needs AMX tiles");
  std::memset(out->untyped_data(), 0, out->size_bytes());
  const int64_t first_row = rows.typed_data()[0], live = std::max<int64_t>(rows.typed_data()[1] - first_row, 0);
  // Heads of a task: all of them, unless rows are fewer than threads; whole tiles of them.
  const int64_t unit = q.element_type() == ffi::BF16 ? 16 : 1, units = (heads + unit - 1) / unit;
  const int64_t parts = live < 2 * threads.num_threads() ? std::min<int64_t>(units, 2 * threads.num_threads()) : 1;
  const int64_t per_part = (units + parts - 1) / parts * unit;
  return of_type(q, [&](auto* queries) {
    using T = std::remove_pointer_t<decltype(queries)>;
    parallel_for(threads, live * parts, [&](int64_t task) {
      const int64_t row = first_row + task / parts, first = task % parts * per_part, length = lens.typed_data()[row];
      if (length <= 0 || first >= heads) return;
      const int64_t at = (row * heads + first) * width;
      absorb(queries + at, inputs_of<T>(pool, tables, row, width),
             seen_of(ranges, row, block_size, length, first_seen(window, length)), rules, first,
             std::min(per_part, heads - first), width, static_cast<T*>(out->untyped_data()) + at);
    });
    return ffi::Error::Success();
  });
}

ffi::Error prefill(ffi::ThreadPool threads, ffi::Buffer<ffi::BF16> q, ffi::Buffer<ffi::BF16> k, ffi::Buffer<ffi::BF16> v,
                   ffi::Buffer<ffi::BF16> pool, ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> rows,
                   ffi::Buffer<ffi::S32> num_rows, ffi::Buffer<ffi::S32> ranges, ffi::Buffer<ffi::F32> slopes,
                   ffi::ResultBuffer<ffi::BF16> out, int64_t block_size, float softcap, int64_t window) {
#ifdef APT_AMX
  const int64_t heads = q.dimensions()[1], width = q.dimensions()[2], key_heads = k.dimensions()[1];
  const int64_t group = heads / key_heads, lanes = key_heads * width, table_len = tables.dimensions()[2];
  const int64_t batch = rows.dimensions()[1];
  if (!has_tiles()) return ffi::Error::InvalidArgument("prefill: needs AMX tiles");
  const int32_t *offsets = rows.typed_data(), *lengths = offsets + batch, *prefixes = lengths + batch;
  const Rules rules{softcap, window, slopes.element_count() ? slopes.typed_data() : nullptr};
  const float scale = 1.0f / std::sqrt(static_cast<float>(width));
  auto* queries = static_cast<const Bf16*>(q.untyped_data());
  auto* own_keys = static_cast<const Bf16*>(k.untyped_data());
  auto* own_values = static_cast<const Bf16*>(v.untyped_data());
  auto* result = static_cast<Bf16*>(out->untyped_data());
  std::memset(result, 0, out->size_bytes());
  struct Task {
    int32_t row, head, first;
  };
  std::vector<Task> tasks;
  for (int32_t r = 0; r < num_rows.typed_data()[0]; ++r)
    for (int32_t first = 0; first < lengths[r]; first += kTaskQueries)
      for (int32_t head = 0; head < key_heads; ++head) tasks.push_back({r, head, first});
  parallel_for(threads, static_cast<int64_t>(tasks.size()), [&](int64_t i) {
    const auto [row, head, first] = tasks[i];
    const int64_t prefix = prefixes[row], count = std::min<int64_t>(kTaskQueries, lengths[row] - first);
    const int64_t offset = offsets[row];
    const Seen seen = seen_of(ranges, row, block_size, prefix, first_seen(window, prefix + first + 1));
    const Cache<Bf16> cache{static_cast<const Bf16*>(pool.untyped_data()),
                            tables.typed_data() + row * 2 * table_len,
                            table_len,
                            pool.dimensions()[1],
                            lanes,
                            own_keys + offset * lanes,
                            own_values + offset * lanes};
    const int64_t at = ((offset + first) * heads + head * group) * width;
    if (count <= kFew) {
      for (int64_t j = 0; j < count; ++j) {
        Seen of_query = seen;
        of_query.first = first_seen(window, prefix + first + j + 1);
        const int64_t from = at + j * heads * width;
        attend(queries + from, cache, of_query, prefix + first + j + 1, rules, head, 1, group, width, scale, result + from);
      }
      return;
    }
    prefill_tiles(queries + at, result + at, count, prefix + first, heads, group, width, cache, seen, rules, head, scale);
  });
  return ffi::Error::Success();
#else
  (void)threads, (void)q, (void)k, (void)v, (void)pool, (void)tables, (void)rows, (void)num_rows, (void)ranges;
  (void)slopes, (void)out, (void)block_size, (void)softcap, (void)window;
  return ffi::Error::InvalidArgument("prefill: needs AMX tiles");
#endif
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(apt_dense, dense,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()         // x (T, I)
                                  .Arg<ffi::AnyBuffer>()         // w (O, I), or tiles
                                  .Arg<ffi::Buffer<ffi::F32>>()  // scales (O,), or (0,)
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(apt_dense_argmax, dense_argmax,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()         // x (T, I)
                                  .Arg<ffi::AnyBuffer>()         // w (O, I), or tiles
                                  .Arg<ffi::Buffer<ffi::F32>>()  // scales (O,), or (0,)
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::PRED>>()
                                  .Attr<int64_t>("outputs"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(apt_gated, gated,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()  // x (T, I)
                                  .Arg<ffi::AnyBuffer>()          // tiles of gate, then of up
                                  .Arg<ffi::Buffer<ffi::F32>>()   // scales (2 F,), or (0,)
                                  .Ret<ffi::Buffer<ffi::BF16>>()
                                  .Attr<int64_t>("activation"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(apt_add_norm, add_norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()  // h (T, D)
                                  .Arg<ffi::Buffer<ffi::F32>>()  // delta (T, D), or (0, 0)
                                  .Arg<ffi::AnyBuffer>()         // scale (D,)
                                  .Arg<ffi::AnyBuffer>()         // bias (D,), or (0,)
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps")
                                  .Attr<float>("offset")
                                  .Attr<int64_t>("layer"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(apt_split_qkv, split_qkv,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()  // sums (T, (N + 2K) H)
                                  .Arg<ffi::AnyBuffer>()         // bias ((N + 2K) H,), or (0,)
                                  .Arg<ffi::Buffer<ffi::F32>>()  // cosine (T, half), or (0, 0)
                                  .Arg<ffi::Buffer<ffi::F32>>()  // sine
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("head_dim"));

auto decode_arguments() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()         // q (B, N, H), or (B, N, D) absorbed and scaled
      .Arg<ffi::AnyBuffer>()         // pool (P, C * E), of the same type
      .Arg<ffi::Buffer<ffi::S32>>()  // tables (B, 2, J), or (B, J)
      .Arg<ffi::Buffer<ffi::S32>>()  // lens (B,)
      .Arg<ffi::Buffer<ffi::S32>>()  // rows (2,)
      .Arg<ffi::Buffer<ffi::S32>>()  // slot ranges (B, J, 2), or (0, 0, 2)
      .Arg<ffi::Buffer<ffi::F32>>()  // slopes (N,), or (0,)
      .Ret<ffi::AnyBuffer>()
      .Attr<int64_t>("block_size")
      .Attr<float>("softcap")
      .Attr<int64_t>("window");
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(apt_decode_kv, decode_kv, decode_arguments());
XLA_FFI_DEFINE_HANDLER_SYMBOL(apt_decode_absorbed, decode_absorbed, decode_arguments());

XLA_FFI_DEFINE_HANDLER_SYMBOL(apt_prefill, prefill,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()  // q (T, N, H)
                                  .Arg<ffi::Buffer<ffi::BF16>>()  // k (T, K, H)
                                  .Arg<ffi::Buffer<ffi::BF16>>()  // v (T, K, H)
                                  .Arg<ffi::Buffer<ffi::BF16>>()  // pool (P, C * E)
                                  .Arg<ffi::Buffer<ffi::S32>>()   // tables (B, 2, J)
                                  .Arg<ffi::Buffer<ffi::S32>>()   // offsets, chunk lengths and prefix lengths (3, B)
                                  .Arg<ffi::Buffer<ffi::S32>>()   // number of rows (1,)
                                  .Arg<ffi::Buffer<ffi::S32>>()   // slot ranges (B, J, 2), or (0, 0, 2)
                                  .Arg<ffi::Buffer<ffi::F32>>()   // slopes (N,), or (0,)
                                  .Ret<ffi::Buffer<ffi::BF16>>()
                                  .Attr<int64_t>("block_size")
                                  .Attr<float>("softcap")
                                  .Attr<int64_t>("window"));

int apt_has_tiles() {
#ifdef APT_AMX
  return has_tiles();
#else
  return 0;
#endif
}
