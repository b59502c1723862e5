// Attention of prompt chunks over their cached prefix and themselves, in vector registers: products of panels, like products with
// weights.

#pragma once

#include "attention.cc"
#include "linear_vector.cc"

namespace {

// Transposes 32-bit words of at most 16 rows: out[k * 16 + i] is word k of row i. Missing rows are zeros.
inline void turn_words(const uint32_t* const* rows, int64_t count, int64_t words, uint32_t* out) {
  int64_t k = 0;
#if defined(__AVX512F__)
  for (; k + 16 <= words; k += 16) {
    __m512 in[16];
    for (int i = 0; i < 16; ++i)
      in[i] = i < count ? _mm512_loadu_ps(reinterpret_cast<const float*>(rows[i] + k)) : _mm512_setzero_ps();
    transpose(in);
    for (int i = 0; i < 16; ++i) _mm512_storeu_ps(reinterpret_cast<float*>(out + (k + i) * 16), in[i]);
  }
#endif
  for (; k < words; ++k)
    for (int64_t i = 0; i < 16; ++i) out[k * 16 + i] = i < count ? rows[i][k] : 0;
}

// Keys, at most kTile, as blocks of outputs whose inputs are the lanes of a head.
void panel_of_keys(const float* const* keys, int64_t lane, int64_t count, int64_t width, float* out) {
  for (int64_t b = 0; b * kLanes < count; ++b) {
    const uint32_t* rows[kLanes];
    const int64_t mine = std::min<int64_t>(kLanes, count - b * kLanes);
    for (int64_t i = 0; i < mine; ++i) rows[i] = reinterpret_cast<const uint32_t*>(keys[b * kLanes + i] + lane);
    turn_words(rows, mine, width, reinterpret_cast<uint32_t*>(out + b * width * kLanes));
  }
}

void panel_of_keys(const Bf16* const* keys, int64_t lane, int64_t count, int64_t width, Bf16* out) {  // an even width
  for (int64_t b = 0; b * kLanes < count; ++b) {
    const uint32_t* rows[kLanes];
    const int64_t mine = std::min<int64_t>(kLanes, count - b * kLanes);
    for (int64_t i = 0; i < mine; ++i) rows[i] = reinterpret_cast<const uint32_t*>(keys[b * kLanes + i] + lane);
    turn_words(rows, mine, width / 2, reinterpret_cast<uint32_t*>(out + b * width * kLanes));
  }
}

// Values as blocks of 16 lanes whose inputs are positions; zeros after the last lane and the last position of a word.
void blocks_of_values(const float* const* values, int64_t lane, int64_t count, int64_t width, int64_t blocks, float* out) {
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t t = 0; t < count; ++t)
      store(out + (b * kTile + t) * kLanes, load_some(values[t] + lane + b * kLanes, std::max<int64_t>(width - b * kLanes, 0)));
}

void blocks_of_values(const Bf16* const* values, int64_t lane, int64_t count, int64_t width, int64_t blocks, Bf16* out) {
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t lanes = std::clamp<int64_t>(width - b * kLanes, 0, kLanes);
    for (int64_t t = 0; t < count; t += 2) {
      Bf16 first[kLanes] = {}, second[kLanes] = {};
      std::memcpy(first, values[t] + lane + b * kLanes, lanes * sizeof(Bf16));
      if (t + 1 < count) std::memcpy(second, values[t + 1] + lane + b * kLanes, lanes * sizeof(Bf16));
      const auto wide = [](const Bf16* p) { return convert<UintVec>(load_as<HalfVec>(p)); };
      store_as(out + (b * kTile + t) * kLanes, wide(first) | wide(second) << 16);
    }
  }
}

// One query of a head at a position; the result is written to `out`.
template <typename T>
struct Query {
  const T* q;
  T* out;
  int64_t position;
  float slope;
  Flash before;  // state before the first key
};

// Attention of queries at ascending positions that share a key head, over the positions before `end`.
template <typename T>
void attend_panels(const std::vector<Query<T>>& queries, const Cache<T>& cache, Seen seen, int64_t end, const Rules& rules,
                   int64_t lane, int64_t width, float scale) {
  using Of = Words<T>;
  using X = typename Of::X;
  const int64_t count = static_cast<int64_t>(queries.size()), blocks = round_up(width, kPanel) / kLanes;
  const int64_t words = width / Of::kInputs, padded = blocks * kLanes;
  char* memory = scratch<char, kMade>(count * (width * sizeof(X) + padded * 4) + kTile * (width + padded) * sizeof(T) + 256);
  const auto take = [&memory](int64_t bytes) { return std::exchange(memory, memory + round_up(bytes, 64)); };
  auto* rows = reinterpret_cast<X*>(take(count * width * sizeof(X)));
  auto* acc = reinterpret_cast<float*>(take(count * padded * 4));
  auto* keys = reinterpret_cast<T*>(take(kTile * width * sizeof(T)));
  auto* values = reinterpret_cast<T*>(take(kTile * padded * sizeof(T)));
  for (int64_t i = 0; i < count; ++i)
    for (int64_t k = 0; k < width; ++k) from_float(to_float(queries[i].q[k]), rows[i * width + k]);
  std::fill_n(acc, count * padded, 0.0f);
  std::vector<Flash> states(count);
  for (int64_t i = 0; i < count; ++i) states[i] = queries[i].before;
  const T *key_at[kTile], *value_at[kTile];
  int32_t positions[kTile];
  const T* key_blocks[kTile / kLanes];
  for (int c = 0; c < kTile / kLanes; ++c) key_blocks[c] = keys + c * width * kLanes;
  static_assert(kTile % kPanel == 0);
  alignas(64) float scores[kMostRows * kTile], sums[kMostRows * kPanel];
  alignas(64) X rounded[kMostRows * kTile];
  const X* weights = rounded;
  if constexpr (std::is_same_v<X, float>) weights = scores;
  for (int taken; (taken = cache.next(seen, end, key_at, value_at, positions));) {
    panel_of_keys(key_at, lane, taken, width, keys);
    blocks_of_values(value_at, lane, taken, width, blocks, values);
    for (int64_t first = 0, mine; first < count; first += mine) {
      mine = std::min<int64_t>(kMostRows, count - first);
      if (queries[first + mine - 1].position < positions[0]) continue;
      for (int t = 0; t < taken; t += kPanel)
        multiply<T>(static_cast<int>(mine), rows + first * width, width, key_blocks + t / kLanes, words, scores + t, kTile);
      float rescale[kMostRows];
      int64_t seen_words = 0;
      for (int64_t r = 0; r < mine; ++r) {
        const Query<T>& query = queries[first + r];
        float* row = scores + r * kTile;
        int visible = taken, hidden = 0;  // number of keys up to the query, and of those before its window
        while (visible && positions[visible - 1] > query.position) --visible;
        if (rules.window)
          while (hidden < visible && positions[hidden] <= query.position - rules.window) ++hidden;
        rescale[r] = 1;
        if (hidden == visible) {
          visible = 0;
        } else {
          for (int t = 0; t < taken; t += kLanes) store(row + t, load(row + t) * scale);
          rescale[r] = weigh(states[first + r], visible, rules, query.slope, positions, query.position, row, hidden);
        }
        std::fill(row + visible, row + kTile, 0.0f);
        if constexpr (!std::is_same_v<X, float>)
          for (int t = 0; t < kTile; t += kLanes) store(rounded + r * kTile + t, load(row + t));
        seen_words = std::max<int64_t>(seen_words, (visible + Of::kInputs - 1) / Of::kInputs);
      }
      if (!seen_words) continue;
      for (int64_t b = 0; b < blocks; b += kBlocks) {
        const T* value_blocks[kBlocks];
        for (int c = 0; c < kBlocks; ++c) value_blocks[c] = values + (b + c) * kTile * kLanes;
        multiply<T>(static_cast<int>(mine), weights, kTile, value_blocks, seen_words, sums);
        for (int64_t r = 0; r < mine; ++r)
          for (int i = 0; i < kPanel; i += kLanes) {
            float* to = acc + (first + r) * padded + b * kLanes + i;
            store(to, load(to) * rescale[r] + load(sums + r * kPanel + i));
          }
      }
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    const float l = states[i].l, inverse = l > 0 ? 1.0f / l : l;  // NaN stays
    int64_t k = 0;
    for (; k + kLanes <= width; k += kLanes) store(queries[i].out + k, load(acc + i * padded + k) * inverse);
    for (; k < width; ++k) from_float(acc[i * padded + k] * inverse, queries[i].out[k]);
  }
}

}  // namespace
