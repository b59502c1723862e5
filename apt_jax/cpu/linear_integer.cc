// Products of rows with weights of 4 or 8 bits, as integers: rows are rounded to 8 bits, a group of 32 inputs at a time, and the
// products of a group are summed exactly. What is rounded is a row alone, and sums are added up in the order of groups: a row
// gives the same bits whatever rows are computed beside it.

#pragma once

#include "linear_common.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kGroupInputs = 32;
constexpr int64_t kIntegerBlocks = 2, kIntegerPanel = kIntegerBlocks * kLanes;  // outputs of a task
constexpr int64_t kGroupWords = kGroupInputs / 4;

// 32 inputs of a row: values[i] * scale.
struct alignas(16) Group {
  int8_t values[kGroupInputs];
  float scale;
  float sum;       // of inputs
  int32_t offset;  // what takes the zero point of the weights out of a sum of products
};

// The values that weights are stored with, all of them unsigned.
enum class IntegerKind { kPerOutput, kEight, kFour, kFourShifted };

struct IntegerLayout {
  int bits;
  bool scaled;   // a scale for each output of a group, float16
  bool shifted;  // and a value that is added, float16
  int zero;      // what stands for 0

  constexpr int64_t head_bytes() const { return (scaled ? 2 * kLanes : 0) + (shifted ? 2 * kLanes : 0); }
  constexpr int64_t bytes() const { return head_bytes() + kLanes * kGroupInputs * bits / 8; }
};

constexpr IntegerLayout layout_of(IntegerKind kind) {
  if (kind == IntegerKind::kPerOutput) return {8, false, false, 128};
  if (kind == IntegerKind::kEight) return {8, true, false, 128};
  if (kind == IntegerKind::kFour) return {4, true, false, 8};
  return {4, true, true, 0};
}

constexpr IntegerKind kIntegerKinds[] = {IntegerKind::kPerOutput, IntegerKind::kEight, IntegerKind::kFour, IntegerKind::kFourShifted};

// Tiles of 16 outputs and 32 inputs, those of the same outputs one after another. A tile is the scales of its outputs, what is
// added to each of their weights, and words of 64 bytes: four inputs of each output; with four bits inputs 4 i to 4 i + 3 in the low
// halves of word i and those 16 further in the high halves. `halves` matrices of `blocks` times 16 outputs lie behind one another.
struct IntegerWeights {
  const uint8_t* values;
  const float* scales;  // of outputs, or nullptr
  int64_t outputs, blocks, steps;
  IntegerKind kind;

  int64_t tile_bytes() const { return layout_of(kind).bytes(); }
  int zero() const { return layout_of(kind).zero; }
  const uint8_t* tiles(int64_t block, int half) const { return values + (half * blocks + block) * steps * tile_bytes(); }
};

// Four products of bytes a lane, unsigned times signed, added to a sum.
#if defined(__AVX512VNNI__)

inline IntVec add_products(IntVec sum, UintVec weights, const int8_t* inputs) {
  int32_t four;
  std::memcpy(&four, inputs, sizeof four);
  __m512i w, out;
  std::memcpy(&w, &weights, sizeof w);
  std::memcpy(&out, &sum, sizeof out);
  out = _mm512_dpbusd_epi32(out, w, _mm512_set1_epi32(four));
  std::memcpy(&sum, &out, sizeof sum);
  return sum;
}

#elif defined(__AVX512BW__)

inline IntVec add_products(IntVec sum, UintVec weights, const int8_t* inputs) {
  int32_t four;
  std::memcpy(&four, inputs, sizeof four);
  const __m512i x = _mm512_set1_epi32(four), low = _mm512_set1_epi16(0xff);
  __m512i w, out;
  std::memcpy(&w, &weights, sizeof w);
  std::memcpy(&out, &sum, sizeof out);
  const __m512i even = _mm512_madd_epi16(_mm512_and_si512(w, low), _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8));
  const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(w, 8), _mm512_srai_epi16(x, 8));
  out = _mm512_add_epi32(out, _mm512_add_epi32(even, odd));
  std::memcpy(&sum, &out, sizeof sum);
  return sum;
}

#elif defined(__AVX2__)

inline IntVec add_products(IntVec sum, UintVec weights, const int8_t* inputs) {
  int32_t four;
  std::memcpy(&four, inputs, sizeof four);
  const __m256i x = _mm256_set1_epi32(four), low = _mm256_set1_epi16(0xff);
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), odd = _mm256_srai_epi16(x, 8);
  __m256i w[2], out[2];
  std::memcpy(w, &weights, sizeof w);
  std::memcpy(out, &sum, sizeof out);
  for (int i = 0; i < 2; ++i) {
    const __m256i evens = _mm256_madd_epi16(_mm256_and_si256(w[i], low), even);
    const __m256i odds = _mm256_madd_epi16(_mm256_srli_epi16(w[i], 8), odd);
    out[i] = _mm256_add_epi32(out[i], _mm256_add_epi32(evens, odds));
  }
  std::memcpy(&sum, out, sizeof sum);
  return sum;
}

#else

inline IntVec add_products(IntVec sum, UintVec weights, const int8_t* inputs) {
  for (int i = 0; i < 4; ++i) sum += __builtin_convertvector(weights >> (8 * i) & 0xffu, IntVec) * static_cast<int32_t>(inputs[i]);
  return sum;
}

#endif

// 16 float16, all finite.
inline Vec load_halves(const uint8_t* p) {
#if defined(__AVX512F__)
  const __m512 wide = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  Vec v;
  std::memcpy(&v, &wide, sizeof v);
  return v;
#else
  HalfVec h;
  std::memcpy(&h, p, sizeof h);
  const UintVec bits = __builtin_convertvector(h, UintVec), magnitude = bits & 0x7fffu;
  const UintVec normal = (magnitude << 13) + (112u << 23);
  const Vec small = __builtin_convertvector(__builtin_convertvector(magnitude, IntVec), Vec) * 0x1p-24f;
  Vec v;
  std::memcpy(&v, &normal, sizeof v);
  v = magnitude < 0x400u ? small : v;
  UintVec out;
  std::memcpy(&out, &v, sizeof out);
  out |= (bits & 0x8000u) << 16;
  std::memcpy(&v, &out, sizeof v);
  return v;
#endif
}

inline Vec swapped(Vec v, int distance) {
  switch (distance) {
    case 8: return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    case 4: return __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    case 2: return __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    default: return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  }
}

// a * b + c, rounded once where the CPU can: else compilers choose, and rounding to integers with them.
inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return vec(_mm512_fmadd_ps(native(a), native(b), native(c)));
#elif defined(__FMA__)
  __m256 x[2], y[2], z[2];
  std::memcpy(x, &a, sizeof a);
  std::memcpy(y, &b, sizeof b);
  std::memcpy(z, &c, sizeof c);
  for (int i = 0; i < 2; ++i) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
  std::memcpy(&c, z, sizeof c);
  return c;
#else
  return a * b + c;
#endif
}

// Rounds `count` inputs of a row, the last group filled up with zeros; those of a group that holds what is not finite become NaN.
template <typename T>
void round_row(const T* x, int64_t count, int zero, Group* out) {
  typedef int8_t ByteVec __attribute__((vector_size(16)));
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  for (int64_t first = 0; first < count; first += kGroupInputs, ++out) {
    const Vec low = load_some(x + first, count - first);
    const Vec high = count - first > kLanes ? load_some(x + first + kLanes, count - first - kLanes) : Vec{};
    Vec most = max(max(low, -low), max(high, -high)), not_finite = low * 0.0f + high * 0.0f;
    for (int distance = 8; distance; distance /= 2) {
      most = max(most, swapped(most, distance));
      not_finite += swapped(not_finite, distance);
    }
    const float top = most[0];
    const bool finite = not_finite[0] == 0.0f, counts = finite && top > 1e-30f;
    const Vec inverse = splat(counts ? 127.0f / top : 0.0f);
    const Vec magic = splat(kMagic);
    const Vec a = counts ? multiply_add(low, inverse, magic) - magic : Vec{};
    const Vec b = counts ? multiply_add(high, inverse, magic) - magic : Vec{};
    Vec total = a + b;
    for (int distance = 8; distance; distance /= 2) total += swapped(total, distance);
    const int32_t sum = static_cast<int32_t>(total[0]);
    const ByteVec bytes[2] = {__builtin_convertvector(__builtin_convertvector(a, IntVec), ByteVec),
                              __builtin_convertvector(__builtin_convertvector(b, IntVec), ByteVec)};
    std::memcpy(out->values, bytes, sizeof bytes);
    out->scale = (counts ? top / 127.0f : 0.0f) + not_finite[0];
    out->sum = out->scale * static_cast<float>(sum);
    out->offset = -zero * sum;
  }
}

// R rows, `stride` groups apart, times a block of 16 outputs, to out[r * out_stride + i].
template <IntegerKind kKind, int R>
__attribute__((noinline)) void multiply_groups(const Group* x, int64_t stride, const uint8_t* tile, int64_t steps, float* out,
                                               int64_t out_stride) {
  constexpr IntegerLayout kLayout = layout_of(kKind);
  Vec sums[R] = {};
  for (int64_t k = 0; k < steps; ++k, tile += kLayout.bytes()) {
#if defined(__x86_64__)
    if constexpr (R == 1)
      for (int64_t b = 0; b < kLayout.bytes(); b += 64) __builtin_prefetch(tile + 4096 + b);
#endif
    UintVec words[kGroupWords];
    const uint8_t* from = tile + kLayout.head_bytes();
    if constexpr (kLayout.bits == 8) {
      std::memcpy(words, from, sizeof words);
    } else {
      for (int64_t i = 0; i < kGroupWords / 2; ++i) {
        UintVec both;
        std::memcpy(&both, from + i * 64, sizeof both);
        words[i] = both & 0x0f0f0f0fu;
        words[i + kGroupWords / 2] = both & 0xf0f0f0f0u;  // times 16
      }
    }
    const Vec scale = kLayout.scaled ? load_halves(tile) : Vec{};
    const Vec shift = kLayout.shifted ? load_halves(tile + 2 * kLanes) : Vec{};
    for (int r = 0; r < R; ++r) {
      const Group& group = x[r * stride + k];
      IntVec low = IntVec{} + group.offset, high{};
      for (int64_t i = 0; i < kGroupWords / 2; ++i) {
        low = add_products(low, words[i], group.values + 4 * i);
        high = add_products(high, words[i + kGroupWords / 2], group.values + 4 * i + kGroupInputs / 2);
      }
      const IntVec total = low + (kLayout.bits == 8 ? high : high >> 4);
      const Vec product = __builtin_convertvector(total, Vec);
      if constexpr (kLayout.scaled)
        sums[r] = sums[r] + product * (scale * group.scale);
      else
        sums[r] = sums[r] + product * group.scale;
      if constexpr (kLayout.shifted) sums[r] = sums[r] + shift * group.sum;
    }
  }
  for (int r = 0; r < R; ++r) store(out + r * out_stride, sums[r]);
}

#if defined(__AVX512F__)
constexpr int64_t kMostGroupRows = 8;
#else
constexpr int64_t kMostGroupRows = 4;
#endif

template <IntegerKind kKind>
void multiply_groups(int64_t rows, const Group* x, int64_t stride, const uint8_t* tile, int64_t steps, float* out, int64_t out_stride) {
  while (rows) {
    const int64_t mine = rows >= kMostGroupRows ? kMostGroupRows : rows >= 4 ? 4 : rows >= 2 ? 2 : 1;
    if (mine == 8) multiply_groups<kKind, kMostGroupRows>(x, stride, tile, steps, out, out_stride);
    if (mine == 4) multiply_groups<kKind, 4>(x, stride, tile, steps, out, out_stride);
    if (mine == 2) multiply_groups<kKind, 2>(x, stride, tile, steps, out, out_stride);
    if (mine == 1) multiply_groups<kKind, 1>(x, stride, tile, steps, out, out_stride);
    rows -= mine, x += mine * stride, out += mine * out_stride;
  }
}

inline void multiply_groups(IntegerKind kind, int64_t rows, const Group* x, int64_t stride, const uint8_t* tile, int64_t steps,
                            float* out, int64_t out_stride) {
  switch (kind) {
    case IntegerKind::kPerOutput: return multiply_groups<IntegerKind::kPerOutput>(rows, x, stride, tile, steps, out, out_stride);
    case IntegerKind::kEight: return multiply_groups<IntegerKind::kEight>(rows, x, stride, tile, steps, out, out_stride);
    case IntegerKind::kFour: return multiply_groups<IntegerKind::kFour>(rows, x, stride, tile, steps, out, out_stride);
    case IntegerKind::kFourShifted: return multiply_groups<IntegerKind::kFourShifted>(rows, x, stride, tile, steps, out, out_stride);
  }
}

constexpr int64_t kGroupPartBytes = 512 << 10;  // of rows that a task goes through for every panel

// Rounded rows times a matrix; take(row, first output, sums) is given kIntegerPanel sums of a row, some of them maybe past the last
// output. With `gated` these are of the first of two matrices behind one another, and as many of the other follow.
template <typename Take>
struct IntegerProduct {
  const Group* x;
  int64_t rows, panels, part_rows, parts;
  IntegerWeights w;
  bool gated;
  Take take;

  IntegerProduct(int64_t threads, const Group* inputs, int64_t count, const IntegerWeights& weights, bool is_gated, const Take& taken)
      : x(inputs), rows(count), w(weights), gated(is_gated), take(taken) {
    panels = (w.blocks + kIntegerBlocks - 1) / kIntegerBlocks;
    const int64_t by_size = (rows * w.steps * static_cast<int64_t>(sizeof(Group)) + kGroupPartBytes - 1) / kGroupPartBytes;
    const int64_t by_threads = panels < 4 * threads ? (4 * threads + panels - 1) / panels : 1;
    parts = std::clamp<int64_t>(std::max(by_size, by_threads), 1, std::max<int64_t>(1, (rows + kMostGroupRows - 1) / kMostGroupRows));
    part_rows = (rows + parts - 1) / parts;
    if (parts > 1) part_rows = round_up(part_rows, kMostGroupRows);
  }

  int64_t tasks() const { return panels * parts; }

  void operator()(int64_t task) const {
    const int64_t panel = task % panels, first_row = task / panels * part_rows, last_row = std::min(rows, first_row + part_rows);
    constexpr int64_t kSums = 2 * kIntegerPanel;
    alignas(64) float sums[kMostGroupRows * kSums];
    for (int64_t row = first_row; row < last_row; row += kMostGroupRows) {
      const int64_t mine = std::min(kMostGroupRows, last_row - row);
      for (int64_t c = 0; c < (gated ? 2 : 1) * kIntegerBlocks; ++c) {
        const int64_t block = std::min(panel * kIntegerBlocks + c % kIntegerBlocks, w.blocks - 1);
        multiply_groups(w.kind, mine, x + row * w.steps, w.steps, w.tiles(block, static_cast<int>(c / kIntegerBlocks)), w.steps,
                        sums + c * kLanes, kSums);
      }
      for (int64_t r = 0; r < mine; ++r) take(row + r, panel * kIntegerPanel, sums + r * kSums);
    }
  }
};

// Rows as groups, in memory of this thread.
template <typename T>
Group* round_rows(ffi::ThreadPool& pool, const T* x, int64_t rows, int64_t width, const IntegerWeights& w) {
  Group* groups = scratch<Group, kRounded>(rows * w.steps);
  constexpr int64_t kTogether = 8;
  parallel_for(pool, (rows + kTogether - 1) / kTogether, [&](int64_t task) {
    for (int64_t r = task * kTogether; r < std::min(rows, (task + 1) * kTogether); ++r)
      round_row(x + r * width, width, w.zero(), groups + r * w.steps);
  });
  return groups;
}

// Calls run(weights) with a matrix of tiles (blocks, steps, bytes of a tile), or with several of `outputs` behind one another.
template <typename Run>
ffi::Error with_integers(const ffi::AnyBuffer& w, const float* scales, int64_t width, int64_t outputs, int64_t halves, const Run& run) {
  const auto sizes = w.dimensions();
  if (w.element_type() != ffi::U8 || sizes.size() != 3) return ffi::Error::InvalidArgument("weights are not tiles of integers");
  for (const IntegerKind kind : kIntegerKinds) {
    const IntegerWeights weights{static_cast<const uint8_t*>(w.untyped_data()), scales, outputs, sizes[0] / halves, sizes[1], kind};
    if (weights.tile_bytes() != sizes[2]) continue;
    if (weights.steps != (width + kGroupInputs - 1) / kGroupInputs || weights.blocks * kLanes < outputs || (width == 0))
      return ffi::Error::InvalidArgument("tiles of integers of another size than the rows or the result");
    if ((kind == IntegerKind::kPerOutput) != (scales != nullptr))
      return ffi::Error::InvalidArgument("a scale for each output is for tiles without scales");
    return run(weights);
  }
  return ffi::Error::InvalidArgument("tiles of integers of an unknown size");
}

// Multiplies rows of float32 or bfloat16; take as for `IntegerProduct`.
template <typename Take>
ffi::Error multiply_rows(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, int64_t rows, const IntegerWeights& w, bool gated,
                         const Take& take) {
  const int64_t width = x.dimensions()[1];
  return of_type(x, [&](const auto* from) {
    const IntegerProduct<Take> product(pool.num_threads(), round_rows(pool, from, rows, width, w), rows, w, gated, take);
    parallel_for(pool, product.tasks(), product);
    return ffi::Error::Success();
  });
}

}  // namespace
