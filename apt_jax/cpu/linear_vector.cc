// Products of rows with a matrix in vector registers, from weights laid out in panels.

#pragma once

#include "linear_common.h"

namespace {

constexpr int kMostRows = 6;  // maximum number of rows that share loaded weights
#if defined(__AVX512F__)
constexpr int kBlocks = 4;  // with six rows, 24 of 32 registers accumulate, four hold weights and one holds an input
#else
constexpr int kBlocks = 2;
#endif
constexpr int64_t kPanel = kBlocks * kLanes;  // outputs of a task
constexpr int64_t kHalfLine = 32;             // bytes of half a cache line

// Number of blocks of a panel by which R rows are multiplied at once: sums take at most 12 of 16 registers with two registers per
// vector, or 24 of 32 with four.
template <int R>
constexpr int kBlocksOf = kRegisterLanes == kLanes || R <= 2 ? kBlocks : kBlocks / 2;

// Products of a 64-byte word of weights with its inputs, in kParts parts. `X` is the type of rows.
template <typename W>
struct Words;

template <>
struct Words<float> {
  using X = float;
  static constexpr int kInputs = 1, kParts = 1;

  static Vec load_weights(const float* w, int) { return load(w); }

  static Vec broadcast(const float* x, int) { return splat(*x); }

  static Vec add(const Vec& sum, const Vec& w, const Vec& x) { return sum + w * x; }
};

#ifdef APT_PAIRS

template <>
struct Words<Bf16> {
  using X = Bf16;
  static constexpr int kInputs = 2, kParts = 1;

  static __m512i load_weights(const Bf16* w, int) { return _mm512_loadu_si512(w); }

  static __m512i broadcast(const Bf16* x, int) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return _mm512_set1_epi32(pair);
  }

  static Vec add(Vec sum, __m512i w, __m512i x) {
    __m512bh weights, inputs;
    __m512 out;
    std::memcpy(&weights, &w, sizeof w);
    std::memcpy(&inputs, &x, sizeof x);
    std::memcpy(&out, &sum, sizeof sum);
    out = _mm512_dpbf16_ps(out, weights, inputs);
    std::memcpy(&sum, &out, sizeof out);
    return sum;
  }
};

#else

template <>
struct Words<Bf16> {
  using X = float;
  static constexpr int kInputs = 2, kParts = 2;  // the first inputs of pairs, then the second

  static Vec load_weights(const Bf16* w, int part) {
    const UintVec both = load_as<UintVec>(w);
    return bits_as<Vec>(part ? both & 0xffff0000u : both << 16);
  }

  static Vec broadcast(const float* x, int part) { return splat(x[part]); }

  static Vec add(const Vec& sum, const Vec& w, const Vec& x) { return sum + w * x; }
};

#endif

// Multiplies R rows, `stride` apart, by words [first, first + words) of C blocks, and writes out[r * out_stride + i], or adds to it
// if `first` is not 0. Terms are added in the order of the inputs for any R. With every word, P half cache lines from `ahead` on
// are prefetched into the L2 cache.
template <int R, int C, int P, typename W>
__attribute__((noinline)) void multiply_blocks(const typename Words<W>::X* x, int64_t stride, const W* const* w, int64_t first,
                                               int64_t words, const char* ahead, float* out, int64_t out_stride) {
  using Of = Words<W>;
  constexpr int64_t kWord = kLanes * Of::kInputs;
  Vec sums[R][C];
  APT_UNROLL for (int r = 0; r < R; ++r) {
    APT_UNROLL for (int c = 0; c < C; ++c) sums[r][c] = splat(0.0f);
  }
  const W* blocks[C];
  for (int c = 0; c < C; ++c) blocks[c] = w[c] + first * kWord;
  x += first * Of::kInputs;
  for (int64_t k = 0; k < words; ++k) {
    APT_UNROLL for (int part = 0; part < Of::kParts; ++part) {
      decltype(Of::load_weights(nullptr, 0)) weights[C];
      APT_UNROLL for (int c = 0; c < C; ++c) weights[c] = Of::load_weights(blocks[c] + k * kWord, part);
      APT_UNROLL for (int r = 0; r < R; ++r) {
        const auto input = Of::broadcast(x + r * stride + k * Of::kInputs, part);
        APT_UNROLL for (int c = 0; c < C; ++c) sums[r][c] = Of::add(sums[r][c], weights[c], input);
      }
    }
    for (int p = 0; p < P; p += 2) __builtin_prefetch(ahead + (k * P + p) * kHalfLine, 0, 2);
  }
  APT_UNROLL for (int r = 0; r < R; ++r) {
    APT_UNROLL for (int c = 0; c < C; ++c) {
      float* to = out + r * out_stride + c * kLanes;
      store(to, first ? sums[r][c] + load(to) : sums[r][c]);
    }
  }
}

// Multiplies by all blocks of a panel.
template <int R, int P, typename W>
void multiply(const typename Words<W>::X* x, int64_t stride, const W* const* w, int64_t first, int64_t words, const char* ahead,
              float* out, int64_t out_stride) {
  constexpr int C = kBlocksOf<R>, kShare = P * C / kBlocks;  // the same number for each group of blocks
  multiply_blocks<R, C, kShare, W>(x, stride, w, first, words, ahead, out, out_stride);
  for (int c = C; c < kBlocks; c += C)
    multiply_blocks<R, C, kShare, W>(x, stride, w + c, first, words, ahead + c / C * words * kShare * kHalfLine, out + c * kLanes,
                                     out_stride);
}

template <int P, typename W, int R = kMostRows>
void multiply(int rows, const typename Words<W>::X* x, int64_t stride, const W* const* w, int64_t first, int64_t words,
              const char* ahead, float* out, int64_t out_stride) {
  if constexpr (R > 1)
    if (rows < R) return multiply<P, W, R - 1>(rows, x, stride, w, first, words, ahead, out, out_stride);
  multiply<R, P, W>(x, stride, w, first, words, ahead, out, out_stride);
}

constexpr int64_t kChain = 256;  // words whose products are added sequentially: rounding errors grow with their number

template <typename W>
void multiply(int rows, const typename Words<W>::X* x, int64_t stride, const W* const* w, int64_t words, float* out,
              int64_t out_stride = kPanel, const char* ahead = nullptr, int halves = 0) {
  for (int64_t first = 0; first < words; first += kChain, ahead += kChain * halves * kHalfLine) {
    const int64_t mine = std::min(kChain, words - first);
    if (halves == 0) multiply<0, W>(rows, x, stride, w, first, mine, ahead, out, out_stride);
    if (halves == 2) multiply<2, W>(rows, x, stride, w, first, mine, ahead, out, out_stride);
    if constexpr (kRegisterLanes == kLanes) {
      if (halves == 4) multiply<4, W>(rows, x, stride, w, first, mine, ahead, out, out_stride);
      if (halves == 8) multiply<8, W>(rows, x, stride, w, first, mine, ahead, out, out_stride);
    }
  }
}

// Rows of whole words of inputs, as the kernels require; other rows are copied.
template <typename X, typename Given>
struct Inputs {
  const X* rows;
  int64_t stride;

  Inputs(ffi::ThreadPool& pool, const Given* x, int64_t count, int64_t width, int inputs) : stride(round_up(width, inputs)) {
    if constexpr (std::is_same_v<X, Given>) {
      rows = x;
      if (stride == width) return;
    }
    X* copy = scratch<X, kWide>(count * stride);
    constexpr int64_t kTogether = 16;
    parallel_for(pool, (count + kTogether - 1) / kTogether, [&](int64_t task) {
      for (int64_t r = task * kTogether; r < std::min(count, (task + 1) * kTogether); ++r)
        for (int64_t i = 0; i < stride; ++i) from_float(i < width ? to_float(x[r * width + i]) : 0.0f, copy[r * stride + i]);
    });
    rows = copy;
  }
};

constexpr int64_t kPartBytes = 2 << 20;     // bytes of rows that a task multiplies by a panel
constexpr int64_t kCacheBytes = 900 << 10;  // of rows, a panel and the prefetched part of the next, which must not evict the others

// Multiplies `rows` rows, `stride` apart, by a matrix and calls take(row, first output, sums) with kPanel sums of a row, of which
// some may be past the last output. With `gated`, the first half of a panel belongs to the first of two concatenated matrices, and
// the second half to the second.
template <typename W, typename Stored, typename Take>
struct PanelProduct {
  using Of = Words<W>;
  using X = typename Of::X;
  const X* x;
  int64_t stride, rows, words, block_elements, own_blocks, panels, part_rows, parts;
  TiledWeights<Stored> w;
  bool gated;
  Take take;

  PanelProduct(int64_t threads, const X* inputs, int64_t row_stride, int64_t count, int64_t width, const TiledWeights<Stored>& weights,
               bool is_gated, const Take& taken)
      : x(inputs), stride(row_stride), rows(count), w(weights), gated(is_gated), take(taken) {
    words = (width + Of::kInputs - 1) / Of::kInputs;
    block_elements = w.steps * kTileElements;
    own_blocks = gated ? kBlocks / 2 : kBlocks;
    panels = (w.blocks + own_blocks - 1) / own_blocks;
    const int64_t by_size = (rows * stride * static_cast<int64_t>(sizeof(X)) + kPartBytes - 1) / kPartBytes;
    const int64_t by_threads = panels < 4 * threads ? (4 * threads + panels - 1) / panels : 1;
    parts = std::clamp<int64_t>(std::max(by_size, by_threads), 1, std::max<int64_t>(1, (rows + kMostRows - 1) / kMostRows));
    part_rows = (rows + parts - 1) / parts;
  }

  int64_t tasks() const { return panels * parts; }

  const Stored* block_of(int64_t panel, int c) const {
    return w.tiles(std::min(panel * own_blocks + c % own_blocks, w.blocks - 1), static_cast<int>(c / own_blocks));
  }

  void operator()(int64_t task) const {
    const int64_t panel = task % panels, first_row = task / panels * part_rows, last_row = std::min(rows, first_row + part_rows);
    const W* blocks[kBlocks];
    for (int c = 0; c < kBlocks; ++c) {
      if constexpr (std::is_same_v<W, Stored>) {
        blocks[c] = block_of(panel, c);
      } else {
        W* wide = scratch<W, kWeights>(kBlocks * block_elements) + c * block_elements;
        widen(block_of(panel, c), block_elements, wide);
        blocks[c] = wide;
      }
    }
    alignas(64) float sums[kMostRows * kPanel];
    const int64_t count = last_row - first_row, groups = (count + kMostRows - 1) / kMostRows;
    // The first rows read the weights, the others find them in the cache. Meanwhile the next panel is prefetched: by all rows
    // except the first with AVX-512, by all rows if registers are smaller and products take longer.
    const int64_t panel_bytes = kBlocks * block_elements * static_cast<int64_t>(sizeof(W));
    const int64_t room = kCacheBytes - panel_bytes - count * stride * static_cast<int64_t>(sizeof(X));
    const bool knows_next = std::is_same_v<W, Stored> && !gated && (panel + 2) * kBlocks <= w.blocks;
    const char* ahead = knows_next ? reinterpret_cast<const char*>(block_of(panel + 1, 0)) : nullptr;
    int64_t left = knows_next ? std::min(panel_bytes, room) : 0;
    for (int64_t g = 0, row = first_row; g < groups; ++g) {
      const int64_t mine = (last_row - row + groups - g - 1) / (groups - g);
      const int halves = kRegisterLanes < kLanes || groups > 5 ? 2 : groups == 2 ? 2 * kBlocks : kBlocks;
      const int64_t bytes = words * halves * kHalfLine;
      const bool fetches = (g > 0 || kRegisterLanes < kLanes) && groups > 1 && left >= bytes;
      multiply<W>(static_cast<int>(mine), x + row * stride, stride, blocks, words, sums, kPanel, ahead, fetches ? halves : 0);
      if (fetches) ahead += bytes, left -= bytes;
      for (int64_t r = 0; r < mine; ++r, ++row) take(row, panel * own_blocks * kLanes, sums + r * kPanel);
    }
  }
};

template <typename W, typename Stored, typename Given, typename Take>
void dense_panels(ffi::ThreadPool& pool, const Given* given, int64_t rows, int64_t width, const TiledWeights<Stored>& w,
                  bool gated, const Take& take) {
  using Of = Words<W>;
  const Inputs<typename Of::X, Given> x(pool, given, rows, width, Of::kInputs);
  const PanelProduct<W, Stored, Take> product(pool.num_threads(), x.rows, x.stride, rows, width, w, gated, take);
  parallel_for(pool, product.tasks(), product);
}

}  // namespace
