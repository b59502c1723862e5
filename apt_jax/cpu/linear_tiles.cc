// Products of bfloat16 rows with a matrix on matrix tiles (AMX).

#pragma once

#include "linear_common.h"

namespace {

#ifdef APT_AMX

// Copies rows of x to left-hand tiles, padded with zeros.
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

// Multiplies TB tiles of rows by OB * 16 outputs, with OB * TB = 4 accumulators, because four products hide the latency of one. The
// sums of tile t with outputs o are written to out[t * OB + o], rows `stride` bytes apart. Meanwhile weights some tiles ahead are
// prefetched: of these outputs, and after their last tile from `ahead` on.
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

inline void store_lanes(Bf16* to, __mmask16 mask, __m512 v) {
  __m256bh half = _mm512_cvtneps_pbh(v);
  __m256i bits;
  std::memcpy(&bits, &half, sizeof bits);
  _mm256_mask_storeu_epi16(to, mask, bits);
}

// Copies part of a row of a result, bypassing the cache if the result would not fit in it.
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

constexpr int64_t kTaskBytes = 1 << 20;  // bytes of tiled rows of a task, which stay in the cache for all of its outputs
constexpr int64_t kTaskOutputs = 64, kFewestOutputs = 32;

// Products of `rows` tiled rows, OB blocks of 16 outputs and TB tiles of rows at a time. With `kGated` there are two matrices, and
// the result is `gating(x w_gate, x w_up)`. A task's outputs are computed in a buffer: if they were written to their destination
// directly, the 16 outputs of every row would fall into the same few sets of the cache. Then `take(row, first, values, count)` gets
// outputs [first, first + count) of each row, where first is a multiple of kFewestOutputs.
template <typename Out, int OB, int TB, bool kGated, typename W, typename Take>
void dense_tiled(ffi::ThreadPool& pool, const Bf16* x, int64_t rows, const TiledWeights<W>& w, const Gating& gating,
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
          Bf16* wide = scratch<Bf16, kWeights>(OB * count) + i * count;
          widen(values, count, wide);
          starts[i] = wide;
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
                const Vec both[2] = {vec(_mm512_mul_ps(_mm512_load_ps(gate + r * 16), scales[0])),
                                     vec(_mm512_mul_ps(_mm512_load_ps(up + r * 16), scales[1]))};
                const int64_t at = first + i * 16;
                store_lanes(to + r * kTaskOutputs, 0xffff, native(gating(both[0], both[1], at, w.outputs - at, w.outputs)));
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
                 const Gating& gating, const Take& take) {
  const int64_t tiles = (rows + 15) / 16, padded = tiles > 1 ? (tiles + 1) / 2 * 2 : tiles, elements = w.steps * kTileElements;
  auto* tiled = scratch<Bf16, kPacked>(padded * elements);
  constexpr int64_t kTogether = 4;
  parallel_for(pool, (padded + kTogether - 1) / kTogether, [&](int64_t i) {
    for (int64_t t = i * kTogether; t < std::min(padded, (i + 1) * kTogether); ++t)
      tile_rows(x + t * 16 * width, std::clamp<int64_t>(rows - t * 16, 0, 16), width, w.steps, tiled + t * elements);
  });
  if (tiles == 1)
    dense_tiled<Out, 4, 1, kGated>(pool, tiled, rows, w, gating, take);
  else
    dense_tiled<Out, 2, 2, kGated>(pool, tiled, rows, w, gating, take);
}

#endif  // APT_AMX

}  // namespace
