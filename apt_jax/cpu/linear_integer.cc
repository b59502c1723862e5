// Products of rows with 4-bit or 8-bit weights, as integers: rows are rounded to 8 bits, in groups of 32 inputs, and the products
// of a group are summed exactly. Each row is rounded separately, and groups are added in order, so the bits of a row's result do
// not depend on other rows.

#pragma once

#include "linear_common.h"

namespace {

constexpr int64_t kGroupInputs = 32;
constexpr int64_t kIntegerBlocks = 2, kIntegerPanel = kIntegerBlocks * kLanes;  // outputs of a task
constexpr int64_t kGroupWords = kGroupInputs / 4;

// 32 inputs of a row: values[i] * scale.
struct alignas(16) Group {
  int8_t values[kGroupInputs];
  float scale;
  float sum;       // sum of the inputs
  int32_t offset;  // added to a sum of products to subtract the zero point of the weights
};

// Format of weights, which are stored as unsigned integers.
enum class IntegerKind { kPerOutput, kEight, kFour, kFourShifted };

struct IntegerLayout {
  int bits;
  bool scaled;   // a scale for each output of a group, float16
  bool shifted;  // also a minimum that is added to each weight, float16
  int zero;      // integer that represents 0

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

// Tiles of 16 outputs and 32 inputs; the tiles of the same outputs are adjacent. A tile has the scales of its outputs, the minima
// added to their weights, and words of 64 bytes with four inputs of each output; with four bits, the low halves of word i hold
// inputs 4 i to 4 i + 3, and the high halves inputs 4 i + 16 to 4 i + 19. Several matrices of `blocks` times 16 outputs may be
// concatenated.
struct IntegerWeights {
  const uint8_t* values;
  const float* scales;  // of outputs, or nullptr
  int64_t outputs, blocks, steps;
  IntegerKind kind;

  int64_t tile_bytes() const { return layout_of(kind).bytes(); }
  int zero() const { return layout_of(kind).zero; }
  const uint8_t* tiles(int64_t block, int half) const { return values + (half * blocks + block) * steps * tile_bytes(); }
};

// Adds four products of bytes, unsigned times signed, to each lane of a sum.
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

#else

inline IntVec add_products(IntVec sum, const UintVec& weights, const int8_t* inputs) {
  for (int i = 0; i < 4; ++i) sum += bits_as<IntVec>(weights >> (8 * i) & 0xffu) * static_cast<int32_t>(inputs[i]);
  return sum;
}

#endif

// 16 float16, all finite.
inline Vec load_halves(const uint8_t* p) {
#if defined(__AVX512F__)
  return vec(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__AVX2__) && defined(__F16C__)
  Vec v;
  for (int i = 0; i < kRegisters; ++i)
    v.parts[i] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 2 * kRegisterLanes * i)));
  return v;
#else
  const UintVec bits = convert<UintVec>(load_as<HalfVec>(p)), magnitude = bits & 0x7fffu;
  const Vec normal = bits_as<Vec>((magnitude << 13) + (112u << 23)), small = convert<Vec>(bits_as<IntVec>(magnitude)) * 0x1p-24f;
  const Vec v = select(magnitude < 0x400u, small, normal);
  return bits_as<Vec>(bits_as<UintVec>(v) | (bits & 0x8000u) << 16);
#endif
}

// Rounds `count` inputs of a row; the last group is padded with zeros. A group with a non-finite input gives NaN.
template <typename T>
void round_row(const T* x, int64_t count, int zero, Group* out) {
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  for (int64_t first = 0; first < count; first += kGroupInputs, ++out) {
    const Vec low = load_some(x + first, count - first);
    const Vec high = count - first > kLanes ? load_some(x + first + kLanes, count - first - kLanes) : Vec{};
    const float top = max(max(max(low, -low), max(high, -high))), not_finite = sum(low * 0.0f + high * 0.0f);
    const bool counts = not_finite == 0.0f && top > 1e-30f;
    const Vec inverse = splat(counts ? 127.0f / top : 0.0f);
    const Vec a = counts ? multiply_add(low, inverse, magic) - magic : Vec{};
    const Vec b = counts ? multiply_add(high, inverse, magic) - magic : Vec{};
    const auto total = static_cast<int32_t>(sum(a + b));
    store_as(out->values, convert<ByteVec>(convert<IntVec>(a)));
    store_as(out->values + kLanes, convert<ByteVec>(convert<IntVec>(b)));
    out->scale = (counts ? top / 127.0f : 0.0f) + not_finite;
    out->sum = out->scale * static_cast<float>(total);
    out->offset = -zero * total;
  }
}

// Scales and minima of a tile's outputs, applied to the sums of a group's products.
template <IntegerKind kKind>
struct GroupScales {
  static constexpr IntegerLayout kLayout = layout_of(kKind);
  Vec scale{}, shift{};

  explicit GroupScales(const uint8_t* tile) {
    if constexpr (kLayout.scaled) scale = load_halves(tile);
    if constexpr (kLayout.shifted) shift = load_halves(tile + 2 * kLanes);
  }

  void add(Vec& sum, const IntVec& total, const Group& group) const {
    const Vec product = convert<Vec>(total);
    if constexpr (kLayout.scaled)
      sum = sum + product * (scale * group.scale);
    else
      sum = sum + product * group.scale;
    if constexpr (kLayout.shifted) sum = sum + shift * group.sum;
  }
};

#if defined(__AVX2__) && !defined(__AVX512BW__)

// Adds four products of bytes per lane to sums of pairs, which must not exceed 16 bits.
inline void add_pairs_of_bytes(IntVec& sum, const UintVec& weights, __m256i inputs) {
  for (int i = 0; i < kRegisters; ++i)
    sum.parts[i] = (IntVec::Part)_mm256_add_epi16((__m256i)sum.parts[i], _mm256_maddubs_epi16((__m256i)weights.parts[i], inputs));
}

// Computes the sums of products of a tile with a group of each of R rows, `stride` apart. Pairs of products are summed in 16 bits:
// with four bits all products of a lane fit; with eight bits the zero point, 128, is subtracted and the sign moved to the inputs.
template <int kBits, int R>
inline __attribute__((always_inline)) void sum_groups(const Group* x, int64_t stride, const uint8_t* words, IntVec* totals) {
  const __m256i ones = _mm256_set1_epi16(1);
  const auto inputs = [&](int r, int64_t first) {
    int32_t four;
    std::memcpy(&four, x[r * stride].values + first, sizeof four);
    return _mm256_set1_epi32(four);
  };
  if constexpr (kBits == 4) {
    IntVec pairs[R] = {};
    for (int64_t i = 0; i < kGroupWords / 2; ++i) {
      const UintVec both = load_as<UintVec>(words + i * 64), low = both & 0x0f0f0f0fu, high = both >> 4 & 0x0f0f0f0fu;
      APT_UNROLL for (int r = 0; r < R; ++r) {
        add_pairs_of_bytes(pairs[r], low, inputs(r, 4 * i));
        add_pairs_of_bytes(pairs[r], high, inputs(r, 4 * i + kGroupInputs / 2));
      }
    }
    APT_UNROLL for (int r = 0; r < R; ++r)
      APT_UNROLL for (int i = 0; i < kRegisters; ++i)
        totals[r].parts[i] = (IntVec::Part)_mm256_madd_epi16((__m256i)pairs[r].parts[i], ones) + x[r * stride].offset;
  } else {
    APT_UNROLL for (int r = 0; r < R; ++r) totals[r] = IntVec{};
    for (int64_t i = 0; i < kGroupWords; ++i) {
      const UintVec weights = load_as<UintVec>(words + i * 64) ^ 0x80808080u;
      APT_UNROLL for (int r = 0; r < R; ++r) {
        const __m256i four = inputs(r, 4 * i);
        APT_UNROLL for (int j = 0; j < kRegisters; ++j) {
          const auto w = (__m256i)weights.parts[j];
          const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(four, w));
          totals[r].parts[j] += (IntVec::Part)_mm256_madd_epi16(pairs, ones);
        }
      }
    }
  }
}

#else

template <int kBits, int R>
inline __attribute__((always_inline)) void sum_groups(const Group* x, int64_t stride, const uint8_t* from, IntVec* totals) {
  UintVec words[kGroupWords];
  if constexpr (kBits == 8) {
    for (int64_t i = 0; i < kGroupWords; ++i) words[i] = load_as<UintVec>(from + i * 64);
  } else {
    for (int64_t i = 0; i < kGroupWords / 2; ++i) {
      const UintVec both = load_as<UintVec>(from + i * 64);
      words[i] = both & 0x0f0f0f0fu;
      words[i + kGroupWords / 2] = both & 0xf0f0f0f0u;  // times 16
    }
  }
#if defined(__AVX512VNNI__)
  APT_UNROLL
#endif
  for (int r = 0; r < R; ++r) {
    const Group& group = x[r * stride];
    IntVec low = splat(group.offset), high{};
    for (int64_t i = 0; i < kGroupWords / 2; ++i) {
      low = add_products(low, words[i], group.values + 4 * i);
      high = add_products(high, words[i + kGroupWords / 2], group.values + 4 * i + kGroupInputs / 2);
    }
    totals[r] = low + (kBits == 8 ? high : high >> 4);
  }
}

#endif

// Multiplies R rows, `stride` groups apart, by a block of 16 outputs, and writes out[r * out_stride + i].
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
    const GroupScales<kKind> scales(tile);
    IntVec totals[R];
    sum_groups<kLayout.bits, R>(x + k, stride, tile + kLayout.head_bytes(), totals);
    APT_UNROLL for (int r = 0; r < R; ++r) scales.add(sums[r], totals[r], x[r * stride + k]);
  }
  APT_UNROLL for (int r = 0; r < R; ++r) store(out + r * out_stride, sums[r]);
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

constexpr int64_t kGroupPartBytes = 512 << 10;  // bytes of rows that a task multiplies by a panel

// Multiplies rounded rows by a matrix and calls take(row, first output, sums) with kIntegerPanel sums of a row, of which some may
// be past the last output. With `gated`, these sums are of the first of two concatenated matrices, followed by as many of the
// second.
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

// Rounds rows to groups, in scratch memory of this thread.
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

// Calls run(weights) with a matrix of tiles (blocks, steps, bytes of a tile), or with `halves` concatenated matrices of `outputs`.
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

// Multiplies rows of float32 or bfloat16; for `take` see `IntegerProduct`.
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
