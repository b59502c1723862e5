// Code shared by products on matrix tiles and in vector registers: layout of weights, activations, argmax of scores.

#pragma once

#include "common.h"

namespace {

constexpr int64_t kTileElements = 512;  // of 32 inputs and 16 outputs

// A matrix in tiles of 16 outputs and 32 inputs; the tiles of the same outputs are adjacent. A tile holds words of 64 bytes: one
// input of each of the 16 outputs in float32, or a pair of inputs of each output in bfloat16; in int8 words have half the size.
// Several matrices of `blocks` times 16 outputs may be concatenated.
template <typename W>
struct TiledWeights {
  const W* values;
  const float* scales;  // of outputs, or nullptr
  int64_t outputs, blocks, steps;

  const W* tiles(int64_t block, int half) const { return values + (half * blocks + block) * steps * kTileElements; }
};

enum Activation : int64_t { kNone, kSilu, kGeluTanh, kRelu };

inline Vec activate(Vec v, Activation activation) {
  if (activation == kNone) return v;
  if (activation == kRelu) return select(v < 0.0f, splat(0.0f), v);  // NaN stays
  const Vec z = activation == kSilu ? v : 1.5957691216f * (v + 0.044715f * v * v * v);  // gelu: tanh(z / 2) by sigmoid(z)
  return v / (1.0f + exp(-z));
}

// What a gated layer makes of its two products: activate(gate) * up, or, with a limit, (up + 1) * gate * sigmoid(alpha * gate), where
// gate is at most the limit and up lies between -limit and limit (gpt-oss).
struct Gating {
  Activation activation;
  const float* biases = nullptr;  // of gate, then of up, or nullptr
  float alpha = 0, limit = 0;     // 0: no limit

  // The values of `count` of a layer's `outputs`, from output `first` on.
  Vec operator()(Vec gate, Vec up, int64_t first, int64_t count, int64_t outputs) const {
    if (biases) {
      gate += load_some(biases + first, count);
      up += load_some(biases + outputs + first, count);
    }
    if (limit == 0) return activate(gate, activation) * up;
    gate = select(gate > limit, splat(limit), gate);  // NaN stays
    up = select(up > limit, splat(limit), up);
    up = select(up < -limit, splat(-limit), up);
    return (up + 1.0f) * (gate / (1.0f + exp(-alpha * gate)));
  }
};

// Converts int8 tiles to the type used in products. Integers are exact in bfloat16.
inline void widen(const int8_t* w, int64_t count, Bf16* out) {
#ifdef APT_PAIRS
  for (int64_t i = 0; i < count; i += 32) {
    _mm_prefetch(reinterpret_cast<const char*>(w + i + 8192), _MM_HINT_T0);
    const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + i)));
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(words)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(words, 1)));
    const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
    std::memcpy(out + i, &both, sizeof both);
  }
#else
  for (int64_t i = 0; i < count; i += kLanes) store(out + i, load(w + i));
#endif
}

inline void widen(const int8_t* w, int64_t count, float* out) {  // pairs of inputs are separated
  for (int64_t i = 0; i < count; i += 2 * kLanes)
    for (int j = 0; j < kLanes; ++j) {
      out[i + j] = w[i + 2 * j];
      out[i + kLanes + j] = w[i + 2 * j + 1];
    }
}

// The largest of a row's scores so far, and the first index that has it.
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
      top = select(more, v, top);
      place = select(more, splat(static_cast<int32_t>(i)), place);
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

}  // namespace
