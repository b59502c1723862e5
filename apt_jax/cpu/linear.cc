// Products of rows with a matrix: in bfloat16 on AMX tiles where the CPU has them, else in vector registers.

#include "common.h"

namespace {

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

#ifdef APT_AMX

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
