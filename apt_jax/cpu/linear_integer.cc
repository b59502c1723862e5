// Products of rows with weights of 4 to 8 bits, as integers: rows are rounded to 8 bits, in groups of 32 inputs, and the products
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
  float sum;      // sum of the inputs
  int32_t total;  // sum of the values
  int32_t later;  // sum of the last 16 values
};

// Format of weights, which are stored as unsigned integers: int8 with a scale for each output, or a type of GGUF files.
enum class IntegerKind { kPerOutput, kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ4_K, kQ5_K, kQ6_K };

struct IntegerLayout {
  int bits;
  bool scaled;     // a scale for each output of a tile, float16
  bool shifted;    // also a minimum that is added to each weight, float16
  int zero;        // integer that represents 0
  int groups = 1;  // of a tile; if there are several, they have integers that multiply the scale and the minimum

  // True if the integers of a group are the factors of the scale for its first and its last 16 inputs.
  constexpr bool in_halves() const { return groups > 1 && !shifted; }
  constexpr int64_t floats_bytes() const { return (scaled ? 2 * kLanes : 0) + (shifted ? 2 * kLanes : 0); }
  constexpr int64_t head_bytes() const {
    return groups == 1 ? floats_bytes() : (floats_bytes() + 2 * kLanes * groups + 63) / 64 * 64;
  }
  constexpr int64_t group_bytes() const { return kLanes * kGroupInputs * bits / 8; }
  constexpr int64_t bytes() const { return head_bytes() + groups * group_bytes(); }
};

constexpr IntegerLayout layout_of(IntegerKind kind) {
  switch (kind) {
    case IntegerKind::kPerOutput: return {8, false, false, 128};
    case IntegerKind::kQ8_0: return {8, true, false, 128};
    case IntegerKind::kQ4_0: return {4, true, false, 8};
    case IntegerKind::kQ4_1: return {4, true, true, 0};
    case IntegerKind::kQ5_0: return {5, true, false, 16};
    case IntegerKind::kQ5_1: return {5, true, true, 0};
    case IntegerKind::kQ4_K: return {4, true, true, 0, 8};
    case IntegerKind::kQ5_K: return {5, true, true, 0, 8};
    default: return {6, true, false, 32, 8};
  }
}

constexpr IntegerKind kIntegerKinds[] = {IntegerKind::kPerOutput, IntegerKind::kQ8_0, IntegerKind::kQ4_0,
                                         IntegerKind::kQ4_1,      IntegerKind::kQ5_0, IntegerKind::kQ5_1,
                                         IntegerKind::kQ4_K,      IntegerKind::kQ5_K, IntegerKind::kQ6_K};

// Tiles of 16 outputs and one or eight groups of inputs; the tiles of the same outputs are adjacent (`ops/blocks.py`). A tile has
// the scales of its outputs, the minima added to their weights, two integers of each group and output, and the groups. A group is
// words of 64 bytes with four inputs of each output; with fewer bits than eight, the low halves of word i hold inputs 4 i to
// 4 i + 3, and the high halves inputs 4 i + 16 to 4 i + 19. The fifth bits of all inputs follow in one word, in whose bytes bit i is
// of inputs 4 i to 4 i + 3, or the fifth and sixth in two such words. Several matrices of `blocks` times 16 outputs may be
// concatenated.
struct IntegerWeights {
  const uint8_t* values;
  const float* scales;  // of outputs, or nullptr
  int64_t outputs, blocks, steps;
  IntegerKind kind;

  int64_t tile_bytes() const { return layout_of(kind).bytes(); }
  int64_t groups() const { return steps * layout_of(kind).groups; }  // of a row
  const uint8_t* tiles(int64_t block, int half) const { return values + (half * blocks + block) * steps * tile_bytes(); }
};

// Word i of a group's weights, four inputs of each output.
template <int kBits>
inline __attribute__((always_inline)) UintVec word_of(const uint8_t* group, int i) {
  if constexpr (kBits == 8) return load_as<UintVec>(group + i * 64);
  const UintVec both = load_as<UintVec>(group + i % 4 * 64), low = (i < 4 ? both : both >> 4) & 0x0f0f0f0fu;
  if constexpr (kBits == 5) {
    const UintVec fifth = load_as<UintVec>(group + 4 * 64);
    return low | ((i < 4 ? fifth << (4 - i) : fifth >> (i - 4)) & 0x10101010u);
  }
  if constexpr (kBits == 6) {
    const UintVec more = load_as<UintVec>(group + (4 + i / 4) * 64);
    return low | ((i % 4 < 2 ? more << (4 - 2 * (i % 4)) : more >> (2 * (i % 4) - 4)) & 0x30303030u);
  }
  return low;
}

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
void round_row(const T* x, int64_t count, Group* out) {
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  for (int64_t first = 0; first < count; first += kGroupInputs, ++out) {
    const Vec low = load_some(x + first, count - first);
    const Vec high = count - first > kLanes ? load_some(x + first + kLanes, count - first - kLanes) : Vec{};
    const float top = max(max(max(low, -low), max(high, -high))), not_finite = sum(low * 0.0f + high * 0.0f);
    const bool counts = not_finite == 0.0f && top > 1e-30f;
    const Vec inverse = splat(counts ? 127.0f / top : 0.0f);
    const Vec a = counts ? multiply_add(low, inverse, magic) - magic : Vec{};
    const Vec b = counts ? multiply_add(high, inverse, magic) - magic : Vec{};
    const auto later = static_cast<int32_t>(sum(b)), total = static_cast<int32_t>(sum(a)) + later;
    store_as(out->values, convert<ByteVec>(convert<IntVec>(a)));
    store_as(out->values + kLanes, convert<ByteVec>(convert<IntVec>(b)));
    out->scale = (counts ? top / 127.0f : 0.0f) + not_finite;
    out->sum = out->scale * static_cast<float>(total);
    out->total = total;
    out->later = later;
  }
}

// Numbers of the outputs for a group of a tile, applied to the sums of the group's products.
template <IntegerKind kKind>
struct GroupScales {
  static constexpr IntegerLayout kLayout = layout_of(kKind);
  static constexpr int kSums = kLayout.in_halves() ? 2 : 1;  // of a row and a group
  Vec scale{}, second{};                                     // second: minimum, or scale of the last 16 inputs

  explicit GroupScales(const uint8_t* tile) {
    if constexpr (kLayout.scaled) scale = load_halves(tile);
    if constexpr (kLayout.shifted) second = load_halves(tile + 2 * kLanes);
  }

  GroupScales of_group(const uint8_t* tile, int64_t group) const {
    GroupScales out = *this;
    if constexpr (kLayout.groups > 1) {
      const uint8_t* factors = tile + kLayout.floats_bytes() + 2 * kLanes * group;
      out.scale = scale * load(reinterpret_cast<const int8_t*>(factors));
      out.second = (kLayout.in_halves() ? scale : second) * load(reinterpret_cast<const int8_t*>(factors + kLanes));
    }
    return out;
  }

  void add(Vec& sum, const IntVec* totals, const Group& group) const {
    const Vec product = convert<Vec>(totals[0]);
    if constexpr (kLayout.in_halves())
      sum = sum + (product * scale + convert<Vec>(totals[1]) * second) * group.scale;
    else if constexpr (kLayout.scaled)
      sum = sum + product * (scale * group.scale);
    else
      sum = sum + product * group.scale;
    if constexpr (kLayout.shifted) sum = sum + second * group.sum;
  }
};

// Subtracts the zero point of the weights from sums of products, or of those of the first and the last 16 inputs.
template <IntegerKind kKind>
inline void subtract_zero(IntVec* totals, const Group& group) {
  constexpr IntegerLayout kLayout = layout_of(kKind);
  if constexpr (kLayout.in_halves()) {
    totals[0] -= kLayout.zero * (group.total - group.later);
    totals[1] -= kLayout.zero * group.later;
  } else if constexpr (kLayout.zero != 0) {
    totals[0] -= kLayout.zero * group.total;
  }
}

#if defined(__AVX2__) && !defined(__AVX512BW__)

// Computes the sums of products of a group of weights with that of each of R rows, `stride` apart. Pairs of products are summed in
// 16 bits, as many as fit; with eight bits the zero point, 128, is subtracted first and the sign moved to the inputs.
template <IntegerKind kKind, int R>
inline __attribute__((always_inline)) void sum_groups(const Group* x, int64_t stride, const uint8_t* from,
                                                      IntVec (*totals)[GroupScales<kKind>::kSums]) {
  constexpr IntegerLayout kLayout = layout_of(kKind);
  constexpr int kTogether = kLayout.bits == 4 ? 8 : kLayout.bits == 5 ? 4 : kLayout.bits == 6 ? 2 : 1;
  const __m256i ones = _mm256_set1_epi16(1);
  APT_UNROLL for (int r = 0; r < R; ++r) std::fill_n(totals[r], GroupScales<kKind>::kSums, IntVec{});
  APT_UNROLL for (int first = 0; first < kGroupWords; first += kTogether) {
    IntVec pairs[R] = {};
    APT_UNROLL for (int i = first; i < first + kTogether; ++i) {
      UintVec weights = word_of<kLayout.bits>(from, i);
      if constexpr (kLayout.bits == 8) weights ^= 0x80808080u;
      APT_UNROLL for (int r = 0; r < R; ++r) {
        int32_t four;
        std::memcpy(&four, x[r * stride].values + 4 * i, sizeof four);
        const __m256i inputs = _mm256_set1_epi32(four);
        APT_UNROLL for (int j = 0; j < kRegisters; ++j) {
          const auto w = (__m256i)weights.parts[j];
          if constexpr (kLayout.bits == 8)
            pairs[r].parts[j] = (IntVec::Part)_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(inputs, w));
          else
            pairs[r].parts[j] = (IntVec::Part)_mm256_add_epi16((__m256i)pairs[r].parts[j], _mm256_maddubs_epi16(w, inputs));
        }
      }
    }
    APT_UNROLL for (int r = 0; r < R; ++r)
      APT_UNROLL for (int j = 0; j < kRegisters; ++j)
        totals[r][kLayout.in_halves() ? first / 4 : 0].parts[j] += (IntVec::Part)_mm256_madd_epi16((__m256i)pairs[r].parts[j], ones);
  }
  if constexpr (kLayout.bits != 8) {
    APT_UNROLL for (int r = 0; r < R; ++r) subtract_zero<kKind>(totals[r], x[r * stride]);
  }
}

#else

template <IntegerKind kKind, int R>
inline __attribute__((always_inline)) void sum_groups(const Group* x, int64_t stride, const uint8_t* from,
                                                      IntVec (*totals)[GroupScales<kKind>::kSums]) {
  constexpr IntegerLayout kLayout = layout_of(kKind);
  UintVec words[kGroupWords];
  APT_UNROLL for (int i = 0; i < kGroupWords; ++i) words[i] = word_of<kLayout.bits>(from, i);
#if defined(__AVX512VNNI__)
  APT_UNROLL
#endif
  for (int r = 0; r < R; ++r) {
    const Group& group = x[r * stride];
    IntVec sums[2] = {};
    subtract_zero<kKind>(sums, group);
    for (int64_t i = 0; i < kGroupWords / 2; ++i) {
      sums[0] = add_products(sums[0], words[i], group.values + 4 * i);
      sums[1] = add_products(sums[1], words[i + kGroupWords / 2], group.values + 4 * i + kGroupInputs / 2);
    }
    if constexpr (kLayout.in_halves())
      std::copy_n(sums, 2, totals[r]);
    else
      totals[r][0] = sums[0] + sums[1];
  }
}

#endif

// Multiplies R rows, `stride` groups apart, by a block of 16 outputs, and writes out[r * out_stride + i].
template <IntegerKind kKind, int R>
__attribute__((noinline)) void multiply_groups(const Group* x, int64_t stride, const uint8_t* tile, int64_t steps, float* out,
                                               int64_t out_stride) {
  constexpr IntegerLayout kLayout = layout_of(kKind);
  const auto fetch_ahead = [](const uint8_t* from, int64_t bytes) {
#if defined(__x86_64__)
    if constexpr (R == 1)
      for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(from + 4096 + b);
#else
    (void)from, (void)bytes;
#endif
  };
  Vec sums[R] = {};
  for (int64_t k = 0; k < steps; ++k, tile += kLayout.bytes()) {
    fetch_ahead(tile, kLayout.head_bytes());
    const GroupScales<kKind> of_tile(tile);
    const uint8_t* words = tile + kLayout.head_bytes();
    for (int g = 0; g < kLayout.groups; ++g, ++x, words += kLayout.group_bytes()) {
      fetch_ahead(words, kLayout.group_bytes());
      const GroupScales<kKind> scales = of_tile.of_group(tile, g);
      IntVec totals[R][GroupScales<kKind>::kSums];
      sum_groups<kKind, R>(x, stride, words, totals);
      APT_UNROLL for (int r = 0; r < R; ++r) scales.add(sums[r], totals[r], x[r * stride]);
    }
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
    case IntegerKind::kQ8_0: return multiply_groups<IntegerKind::kQ8_0>(rows, x, stride, tile, steps, out, out_stride);
    case IntegerKind::kQ4_0: return multiply_groups<IntegerKind::kQ4_0>(rows, x, stride, tile, steps, out, out_stride);
    case IntegerKind::kQ4_1: return multiply_groups<IntegerKind::kQ4_1>(rows, x, stride, tile, steps, out, out_stride);
    case IntegerKind::kQ5_0: return multiply_groups<IntegerKind::kQ5_0>(rows, x, stride, tile, steps, out, out_stride);
    case IntegerKind::kQ5_1: return multiply_groups<IntegerKind::kQ5_1>(rows, x, stride, tile, steps, out, out_stride);
    case IntegerKind::kQ4_K: return multiply_groups<IntegerKind::kQ4_K>(rows, x, stride, tile, steps, out, out_stride);
    case IntegerKind::kQ5_K: return multiply_groups<IntegerKind::kQ5_K>(rows, x, stride, tile, steps, out, out_stride);
    case IntegerKind::kQ6_K: return multiply_groups<IntegerKind::kQ6_K>(rows, x, stride, tile, steps, out, out_stride);
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
    const int64_t by_size = (rows * w.groups() * static_cast<int64_t>(sizeof(Group)) + kGroupPartBytes - 1) / kGroupPartBytes;
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
        multiply_groups(w.kind, mine, x + row * w.groups(), w.groups(), w.tiles(block, static_cast<int>(c / kIntegerBlocks)), w.steps,
                        sums + c * kLanes, kSums);
      }
      for (int64_t r = 0; r < mine; ++r) take(row + r, panel * kIntegerPanel, sums + r * kSums);
    }
  }
};

// Rounds rows to groups, in scratch memory of this thread.
template <typename T>
Group* round_rows(ffi::ThreadPool& pool, const T* x, int64_t rows, int64_t width, const IntegerWeights& w) {
  Group* groups = scratch<Group, kRounded>(rows * w.groups());
  constexpr int64_t kTogether = 8;
  parallel_for(pool, (rows + kTogether - 1) / kTogether, [&](int64_t task) {
    for (int64_t r = task * kTogether; r < std::min(rows, (task + 1) * kTogether); ++r)
      round_row(x + r * width, width, groups + r * w.groups());
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
    if (weights.groups() != (width + kGroupInputs - 1) / kGroupInputs || weights.blocks * kLanes < outputs || (width == 0))
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
