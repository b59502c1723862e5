// Code shared by the CPU kernels: bfloat16 numbers, parallel loops, scratch memory, matrix tiles (AMX).

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "vectors.h"
#include "xla/ffi/api/ffi.h"

#if defined(APT_PAIRS) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define APT_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

// The kernels are compiled as a whole or, if APT_PART is defined, in parallel parts: each has the XLA handlers of its number, and
// the functions that these need.
#ifdef APT_PART
#define APT_HAS_PART(number) (APT_PART == number)
#else
#define APT_HAS_PART(number) 1
#endif

namespace ffi = xla::ffi;

// 1 if bfloat16 products use matrix tiles on this machine, otherwise 0.
extern "C" int apt_has_tiles();

namespace {

struct Bf16 {
  uint16_t bits;
};

inline Vec load(const float* p) { return load_as<Vec>(p); }

inline Vec load(const Bf16* p) { return bits_as<Vec>(convert<UintVec>(load_as<HalfVec>(p)) << 16); }

inline Vec load(const int8_t* p) {
#if defined(__AVX512F__)  // GCC converts bytes one by one
  return vec(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
#elif defined(__AVX2__)
  Vec v;
  for (int i = 0; i < kRegisters; ++i)
    v.parts[i] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + kRegisterLanes * i))));
  return v;
#else
  return convert<Vec>(load_as<ByteVec>(p));
#endif
}

inline void store(float* p, const Vec& v) { store_as(p, v); }

inline float to_float(float x) { return x; }

inline float to_float(int8_t x) { return x; }

inline float to_float(Bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

// Loads the first `count` lanes, at most all; the others are zeros.
inline Vec load_some(const float* p, int64_t count) {
  if (count >= kLanes) return load(p);
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = p[i];
  return load(lanes);
}

inline Vec load_some(const Bf16* p, int64_t count) {
  if (count >= kLanes) return load(p);
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = to_float(p[i]);
  return load(lanes);
}

inline void from_float(float x, float& out) { out = x; }

inline void from_float(float x, Bf16& out) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  out.bits = x == x ? static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : 0x7fc0;
}

inline void store(Bf16* p, const Vec& v) {
#ifdef APT_PAIRS
  const __m256bh rounded = _mm512_cvtneps_pbh(native(v));  // denormal numbers become 0, as in products of pairs
  std::memcpy(p, &rounded, sizeof rounded);
#else
  const UintVec bits = bits_as<UintVec>(v), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  store_as(p, convert<HalfVec>(select(v == v, rounded, (bits & 0) + 0x7fc0)));
#endif
}

#ifndef APT_PAIRS

// A bfloat16 number stored as float32, the type used in products.
struct WideBf16 {
  float value;
};

inline float to_float(WideBf16 x) { return x.value; }

inline void from_float(float x, WideBf16& out) {
  Bf16 rounded;
  from_float(x, rounded);
  out.value = to_float(rounded);
}

inline Vec load(const WideBf16* p) { return load_as<Vec>(p); }

inline Vec load_some(const WideBf16* p, int64_t count) { return load_some(&p->value, count); }

inline void store(WideBf16* p, const Vec& v) {
  Bf16 rounded[kLanes];
  store(rounded, v);
  store_as(p, load(rounded));
}

#endif

// Stores the first `count` lanes, at most all.
template <typename T>
void store_some(T* to, const Vec& v, int64_t count) {
  if (count >= kLanes) return store(to, v);
  float lanes[kLanes];
  store(lanes, v);
  for (int64_t i = 0; i < count; ++i) from_float(lanes[i], to[i]);
}

// e^x to about one unit in the last place: 2^n times a polynomial of the remainder, |remainder| <= ln(2) / 2. The result may be
// infinite for x > 88, and is e^-87 for x < -87; NaN stays NaN.
#if defined(__AVX512F__)
inline Vec exp(Vec given) {
  const __m512 x = _mm512_max_ps(_mm512_set1_ps(-87.0f), native(given));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
  return vec(_mm512_scalef_ps(p, n));
}
#else
inline Vec exp(const Vec& given) {
  const Vec x = select(given < 88.0f, max(given, splat(-87.0f)), splat(88.0f));
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = multiply_add(x, splat(1.44269504088896341f), splat(magic)), n = shifted - magic;
  const Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) p = p * r + c;
  p = p * r * r + r + 1.0f;
  // The bits of `magic` above the exponent are shifted out.
  p = bits_as<Vec>(bits_as<IntVec>(p) + (bits_as<IntVec>(shifted) << 23));
  return select(given == given, select(given < 88.0f, p, splat(INFINITY)), given);
}
#endif

// Measures the time until the end of a scope, under a name, with the bytes of weights and cache read and the number of operations
// (a multiplication and an addition are two); names of products include inputs and outputs. Recorded only if APT_TIMES is defined,
// see `build.take_times`.
#ifdef APT_TIMES
class Timed {
 public:
  struct Total {
    int64_t count = 0;
    double seconds = 0, bytes = 0, operations = 0;
  };

  Timed(const char* name, double bytes, double operations, int64_t inputs = 0, int64_t outputs = 0)
      : name_(name), bytes_(bytes), operations_(operations), start_(std::chrono::steady_clock::now()) {
    if (outputs) name_ += ": " + std::to_string(inputs) + " to " + std::to_string(outputs);
  }

  ~Timed() {
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start_;
    std::lock_guard<std::mutex> lock(mutex());
    Total& total = totals()[name_];
    ++total.count, total.seconds += taken.count(), total.bytes += bytes_, total.operations += operations_;
  }

  static std::map<std::string, Total>& totals() {
    static std::map<std::string, Total> all;
    return all;
  }

  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }

 private:
  std::string name_;
  double bytes_, operations_;
  std::chrono::steady_clock::time_point start_;
};
#else
struct Timed {
  Timed(const char*, double, double, int64_t = 0, int64_t = 0) {}
  ~Timed() {}
};
#endif

// Work in phases, on this thread and free threads of the pool: every call of a phase has returned before the next phase begins.
// Calls are split into one range per thread, so that each thread reads its weights sequentially; a thread that has finished its
// range takes calls of other ranges. Threads of the pool may join at any time, or not at all.
class Phases {
 public:
  using Call = std::function<void(int64_t)>;

  // Adds n calls call(i), 0 <= i < n. `name`, `bytes` and `operations` as for `Timed`; nullptr: not timed.
  void add(int64_t n, Call call, const char* name = nullptr, double bytes = 0, double operations = 0) {
    shared_->phases.emplace_back(n, std::move(call));
    measured_.push_back({name, bytes, operations});
  }

  // Objects that calls refer to must live until this returns.
  void run(ffi::ThreadPool& pool) {
    int64_t most = 0;
    for (const Phase& phase : shared_->phases) most = std::max(most, phase.n);
    const int64_t threads = std::clamp<int64_t>(most, 1, pool.num_threads());
    shared_->threads = threads;
    for (Phase& phase : shared_->phases) phase.taken = std::make_unique<Counter[]>(threads);
    for (int64_t thread = 1; thread < threads; ++thread)
      pool.Schedule([shared = shared_, thread] {
        for (Phase& phase : shared->phases) shared->work(phase, thread);
      });
    size_t at = 0;
    for (Phase& phase : shared_->phases) {
      const Measured& mine = measured_[at++];
      if (!mine.name) {
        shared_->work(phase, 0);
        continue;
      }
      const Timed timed(mine.name, mine.bytes, mine.operations);
      shared_->work(phase, 0);
    }
  }

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };

  struct Phase {
    int64_t n;
    Call call;  // not used by a thread that joins after all calls have been taken
    std::unique_ptr<Counter[]> taken;  // number of calls taken from each thread's range
    std::atomic<int64_t> done{0};

    // Takes the next call for a thread, from its own range, then from the ranges after it; returns n if none is left.
    int64_t take(int64_t thread, int64_t threads) {
      for (int64_t k = 0; k < threads; ++k) {
        const int64_t range = (thread + k) % threads, first = n * range / threads, count = n * (range + 1) / threads - first;
        std::atomic<int64_t>& at = taken[range].value;
        if (at.load(std::memory_order_relaxed) >= count) continue;
        const int64_t i = at.fetch_add(1, std::memory_order_relaxed);
        if (i < count) return first + i;
      }
      return n;
    }

    Phase(int64_t count, Call made) : n(count), call(std::move(made)) {}
  };

  struct Measured {
    const char* name;
    double bytes, operations;
  };

  struct Shared {
    std::deque<Phase> phases;
    std::atomic<int> asleep{0};
    std::mutex mutex;
    std::condition_variable phase_done;
    int64_t threads = 1;

    void work(Phase& phase, int64_t thread) {
      for (int64_t i; (i = phase.take(thread, threads)) < phase.n;) {
        phase.call(i);
        if (phase.done.fetch_add(1) + 1 == phase.n && asleep.load()) {
          std::lock_guard<std::mutex> lock(mutex);
          phase_done.notify_all();
        }
      }
      const auto is_done = [&] { return phase.done.load() >= phase.n; };
      for (int spins = 0; spins < 2000; ++spins) {
        if (is_done()) return;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      }
      // Sleep, so that a preempted thread can be moved to this core at once.
      std::unique_lock<std::mutex> lock(mutex);
      asleep.fetch_add(1);
      phase_done.wait(lock, is_done);
      asleep.fetch_sub(1);
    }
  };
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::vector<Measured> measured_;
};

// Calls f(i) for 0 <= i < n, as one phase.
template <typename F>
void parallel_for(ffi::ThreadPool& pool, int64_t n, const F& f) {
  if (n == 1 || pool.num_threads() == 1) {
    for (int64_t i = 0; i < n; ++i) f(i);
    return;
  }
  Phases phases;
  phases.add(n, std::cref(f));
  phases.run(pool);
}

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Memory that a thread keeps for its next call, because new memory of this size costs a page fault per 4 KiB; one buffer per
// `slot`.
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

enum Slots { kLayer, kPacked, kMade, kWide, kQueries, kWeights, kScores, kBest, kScales, kRounded, kSorted, kMixed };

constexpr int64_t kMostLanes = 1024;  // maximum lanes per head

// The values of an optional argument; nullptr if it is empty.
inline const float* floats(const ffi::Buffer<ffi::F32>& values) { return values.element_count() ? values.typed_data() : nullptr; }

// C * E of a pool (P, C, E).
inline int64_t elements_of_block(const ffi::AnyBuffer& pool) { return pool.dimensions()[1] * pool.dimensions()[2]; }

// The number of rows to compute: `live` (1,), at most `rows`, or all `rows` if `live` is (0,). The other rows of `out` become
// zeros.
template <typename Out>
int64_t live_rows(const ffi::Buffer<ffi::S32>& live, int64_t rows, Out& out) {
  if (!live.element_count() || rows == 0) return rows;
  const int64_t count = std::clamp<int64_t>(live.typed_data()[0], 0, rows), row_bytes = out->size_bytes() / rows;
  std::memset(static_cast<char*>(out->untyped_data()) + count * row_bytes, 0, (rows - count) * row_bytes);
  return count;
}

// Calls run(p) with a pointer of the type of a buffer's elements.
template <typename Buffer, typename Run>
ffi::Error of_type(Buffer& buffer, const Run& run) {
  if (buffer.element_type() == ffi::F32) return run(static_cast<float*>(buffer.untyped_data()));
  if (buffer.element_type() == ffi::BF16) return run(static_cast<Bf16*>(buffer.untyped_data()));
  return ffi::Error::InvalidArgument("float32 or bfloat16 alone");
}

#if defined(__AVX512F__)

// Transposes a 16 x 16 matrix in place.
inline void transpose(__m512 (&m)[16]) {
  __m512 a[16];
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_ps(m[2 * i], m[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_ps(m[2 * i], m[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    auto d = [&](int k) { return _mm512_castps_pd(a[4 * i + k]); };
    m[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(d(0), d(2)));
    m[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(d(0), d(2)));
    m[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(d(1), d(3)));
    m[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(d(1), d(3)));
  }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_f32x4(m[i], m[i + 4], 0x88);
    a[i + 4] = _mm512_shuffle_f32x4(m[i], m[i + 4], 0xdd);
    a[i + 8] = _mm512_shuffle_f32x4(m[i + 8], m[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_f32x4(m[i + 8], m[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    m[i] = _mm512_shuffle_f32x4(a[i], a[i + 8], 0x88);
    m[i + 8] = _mm512_shuffle_f32x4(a[i], a[i + 8], 0xdd);
  }
}

#endif

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

// True if the operating system lets this process use tiles; requested once.
bool has_tiles() {
  static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
  return granted;
}

// Configures all eight tiles of the current thread as 16 rows of 64 bytes, during the lifetime of the object.
struct Tiles {
  Tiles() {
    static const TileConfig config;
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
};

// Mask of the first `count` lanes, at most all.
inline __mmask16 lanes_of(int64_t count) { return count >= 16 ? 0xffff : static_cast<__mmask16>((1u << count) - 1); }

// Packs at most 16 rows of bfloat16 as right-hand tiles: tile k holds the elements 32 k to 32 k + 31 of all rows, as pairs: 32-bit
// word (i, j) is the i-th pair of row j. Missing rows are zeros.
void pack_rows(const Bf16* x, int64_t rows, int64_t width, int64_t stride, uint32_t* out) {
  for (int64_t k = 0; k < width; k += 32, out += 256) {
    alignas(64) float in[256];
    for (int64_t j = 0; j < rows; ++j) std::memcpy(in + 16 * j, x + j * stride + k, 64);
    std::memset(in + 16 * rows, 0, (16 - rows) * 64);
    __m512 columns[16];
    for (int i = 0; i < 16; ++i) columns[i] = _mm512_load_ps(in + 16 * i);
    transpose(columns);
    for (int i = 0; i < 16; ++i) _mm512_storeu_ps(reinterpret_cast<float*>(out) + 16 * i, columns[i]);
  }
}

#endif  // APT_AMX

}  // namespace
