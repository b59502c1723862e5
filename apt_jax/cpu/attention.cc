// Attention of one query per row over the keys and values of the block pool.

#pragma once

#include "common.h"

namespace {

constexpr int kTile = 64;  // positions attended to at a time
constexpr int kStep = 8;   // positions of a tile read at a time
constexpr int kGroup = kRegisterLanes == kLanes ? 4 : 1;  // heads that share loaded rows, as many as the registers hold

// Modifiers of scores before the softmax, and its sinks, see `LogitModifiers`.
struct Rules {
  float softcap;        // 0: none
  int64_t window;       // 0: none
  const float* slopes;  // of ALiBi, one per query head; nullptr: none
  const float* sinks;   // one per query head; nullptr: none
};

// The slots of one request that a query may see, in the order of positions.
struct Seen {
  const int32_t* ranges;  // own slots of every block: (J, 2), or nullptr
  int64_t block_size, length, first;
  int64_t entry = 0, slot = 0;
  int64_t own = 0;  // next position after the positions in blocks

  // Gets the next slots, at most `n`: table entry of the block, slot and position of each.
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

// The total number of positions that decode rows [from, to) see.
double positions_seen(const int32_t* lens, int64_t from, int64_t to, int64_t window) {
  double seen = 0;
  for (int64_t row = from; row < to; ++row) seen += static_cast<double>(lens[row] - first_seen(window, lens[row]));
  return seen;
}

// Positions [first, length) of a row's blocks; `ranges` (B, J, 2), or (0, 0, 2).
Seen seen_of(ffi::Buffer<ffi::S32>& ranges, int64_t row, int64_t block_size, int64_t length, int64_t first) {
  const int32_t* own = ranges.element_count() ? ranges.typed_data() + row * ranges.dimensions()[1] * 2 : nullptr;
  Seen seen{own, block_size, length, first};
  if (!own) seen.entry = std::min(first, length) / block_size;
  seen.own = length;
  return seen;
}

// Converts `count` rows of `width` elements to float32, `padded` elements apart, with zeros after each row.
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

// Running maximum and denominator of flash attention of one query head.
struct Flash {
  float m = -INFINITY, l = 0;
};

// The state of a query head before its first key.
inline Flash first_state(const Rules& rules, int64_t head) { return rules.sinks ? Flash{rules.sinks[head], 1} : Flash{}; }

constexpr int kScored = kRegisterLanes == kLanes ? 4 : kRegisterLanes;  // keys scored at a time

// Computes the scores of `heads` query heads, at most kGroup, `padded` lanes each, against `count` keys; `keys` must be readable up
// to a multiple of kScored. Scores of head g start at scores[g * kTile]. The order of additions does not depend on the number of
// heads.
#if defined(__AVX512F__)

template <int G>
void score(const float* q, const float* const* keys, int count, int64_t padded, float* scores) {
  for (int t = 0; t < count; t += kScored) {
    Vec partial[kLanes] = {};
    for (int64_t k = 0; k < padded; k += kLanes) {
      Vec key[kScored];
      APT_UNROLL for (int i = 0; i < kScored; ++i) key[i] = load(keys[t + i] + k);
      APT_UNROLL for (int g = 0; g < G; ++g) {
        const Vec query = load(q + g * padded + k);
        APT_UNROLL for (int i = 0; i < kScored; ++i) partial[kScored * g + i] += query * key[i];
      }
    }
    float lanes[kLanes];
    store(lanes, sums(partial));
    APT_UNROLL for (int g = 0; g < G; ++g) std::memcpy(scores + g * kTile + t, lanes + kScored * g, kScored * sizeof(float));
  }
}

template <int G = kGroup>
void score(int64_t heads, const float* q, const float* const* keys, int count, int64_t padded, float* scores) {
  if constexpr (G > 1)
    if (heads < G) return score<G - 1>(heads, q, keys, count, padded, scores);
  score<G>(q, keys, count, padded, scores);
}

#else

void score(int64_t, const float* q, const float* const* keys, int count, int64_t padded, float* scores) {
  using Part = Vec::Part;
  const auto part_of = [](const float* p) {
    Part part;
    std::memcpy(&part, p, sizeof part);
    return part;
  };
  for (int t = 0; t < count; t += kScored) {
    Part products[kScored] = {};
    for (int64_t k = 0; k < padded; k += kRegisterLanes) {
      const Part query = part_of(q + k);
      APT_UNROLL for (int i = 0; i < kScored; ++i) products[i] += query * part_of(keys[t + i] + k);
    }
    fold_all<kRegisterLanes / 2>(products);
    std::memcpy(scores + t, products, sizeof products[0]);
  }
}

#endif

// Lanes [from, to) of a vector, and `other` in the lanes before and after them.
inline Vec lanes_between(const Vec& v, int from, int to, float other) {
  if (from <= 0 && to >= kLanes) return v;
  static constexpr int32_t kNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const IntVec lane = load_as<IntVec>(kNumbers);
  return select((lane >= from) & (lane < to), v, splat(other));
}

// Applies the rules to the scores [from, count) of one query head and replaces them by weights relative to the running maximum;
// other weights become 0. Returns the factor by which the accumulator must be scaled.
float weigh(Flash& state, int count, const Rules& rules, float slope, const int32_t* positions, int64_t last, float* weights,
            int from = 0) {
  Vec highest = splat(-INFINITY);
  for (int t = 0; t < count; t += kLanes) {
    Vec s = load(weights + t);
    if (rules.softcap != 0 || rules.slopes) {
      float lanes[kLanes];
      store(lanes, s);
      for (int i = 0; i < std::min(kLanes, count - t); ++i) {
        if (rules.softcap != 0) lanes[i] = rules.softcap * std::tanh(lanes[i] / rules.softcap);
        if (rules.slopes) lanes[i] += slope * static_cast<float>(positions[t + i] - last);
      }
      s = load(lanes);
    }
    s = lanes_between(s, from - t, count - t, -INFINITY);
    store(weights + t, s);
    highest = max(highest, s);
  }
  const float m = std::max(state.m, max(highest));
  Vec total{};
  for (int t = 0; t < count; t += kLanes) {
    const Vec w = lanes_between(exp(load(weights + t) - m), from - t, count - t, 0);
    store(weights + t, w);
    total += w;
  }
  const float scale = m == state.m ? 1.0f : std::exp(state.m - m);
  state.l = state.l * scale + sum(total);
  state.m = m;
  return scale;
}

// acc[g] = acc[g] * scales[g] + sum over t of weights[g][t] * values[t], for L vectors of lanes from `lane` on and G heads.
template <int G, int L>
void add_values(const float* const* weights, const float* scales, const float* const* values, int64_t lane, int count,
                float* const* acc) {
  Vec sums[G][L];
  APT_UNROLL for (int g = 0; g < G; ++g)
    APT_UNROLL for (int i = 0; i < L; ++i) sums[g][i] = load(acc[g] + i * kLanes) * scales[g];
  for (int t = 0; t < count; ++t) {
    Vec value[L];
    APT_UNROLL for (int i = 0; i < L; ++i) value[i] = load(values[t] + lane + i * kLanes);
    APT_UNROLL for (int g = 0; g < G; ++g)
      APT_UNROLL for (int i = 0; i < L; ++i) sums[g][i] += value[i] * weights[g][t];
  }
  APT_UNROLL for (int g = 0; g < G; ++g)
    APT_UNROLL for (int i = 0; i < L; ++i) store(acc[g] + i * kLanes, sums[g][i]);
}

template <int G = kGroup, int L = 4>
void add_values(int64_t heads, int64_t vectors, const float* const* weights, const float* scales, const float* const* values,
                int64_t lane, int count, float* const* acc) {
  if constexpr (G > 1)
    if (heads < G) return add_values<G - 1, L>(heads, vectors, weights, scales, values, lane, count, acc);
  if constexpr (L > 1)
    if (vectors < L) return add_values<G, L - 1>(heads, vectors, weights, scales, values, lane, count, acc);
  add_values<G, L>(weights, scales, values, lane, count, acc);
}

// Locations of a request's keys and values.
template <typename T>
struct Cache {
  const T* pool;
  const int32_t* tables;  // (2, J): of keys, of values
  int64_t table_len, block_elements, lanes;
  const T *own_keys, *own_values;  // of positions from `seen.length` on, (.., lanes), which are not in blocks

  // Gets keys and values of the next visible positions, at most `most`; returns their number.
  int next(Seen& seen, int64_t end, const T** keys, const T** values, int32_t* positions, int most = kTile) const {
    int32_t entries[kTile], slots[kTile];
    int count = seen.next(most, entries, slots, positions);
    for (int i = 0; i < count; ++i) {
      keys[i] = pool + tables[entries[i]] * block_elements + slots[i] * lanes;
      values[i] = pool + tables[table_len + entries[i]] * block_elements + slots[i] * lanes;
    }
    for (; count < most && seen.own < end; ++seen.own) {
      if (seen.own < seen.first) continue;
      keys[count] = own_keys + (seen.own - seen.length) * lanes;
      values[count] = own_values + (seen.own - seen.length) * lanes;
      positions[count++] = static_cast<int32_t>(seen.own);
    }
    return count;
  }
};

// The cache that a thread attends to next, to be prefetched; nullptr: unknown.
template <typename T>
struct Following {
  const Cache<T>* cache = nullptr;
  Seen seen{};
};

// A tile of positions that are attended to together.
template <typename T>
struct Taken {
  const T *keys[kTile], *values[kTile];
  int32_t positions[kTile];
  int count = 0;

  // Takes the next positions of `seen` before `end`. The last is repeated after them, so that whole vectors can be read.
  void take(const Cache<T>& cache, Seen& seen, int64_t end) {
    count = cache.next(seen, end, keys, values, positions);
    for (int i = count; count && i < kTile; ++i) keys[i] = keys[i - 1], values[i] = values[i - 1];
  }

  // Prefetches part `piece` of `pieces`, because many requested lines at once would delay all other loads.
  void fetch_keys(int64_t piece, int64_t pieces, int64_t from, int64_t to) const {
    fetch(keys, static_cast<int>(count * piece / pieces), static_cast<int>(count * (piece + 1) / pieces), from, to);
  }

  void fetch_values(int64_t piece, int64_t pieces, int64_t from, int64_t to) const {
    if (values[0] == keys[0]) return;  // already fetched
    fetch(values, static_cast<int>(count * piece / pieces), static_cast<int>(count * (piece + 1) / pieces), from, to);
  }

  // Prefetches lanes [from, to) of rows [first, last) into the caches.
  static void fetch(const T* const* rows, int first, int last, int64_t from, int64_t to) {
    constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
    for (int i = first; i < last; ++i)
      for (int64_t e = from; e < to; e += kLine) __builtin_prefetch(rows[i] + e, 0, 2);
  }
};

// Calls work(now, ahead) for each tile of positions that a query sees. `ahead` is the next tile, of this row or the following row,
// which may be prefetched meanwhile.
template <typename T, typename Work>
void for_tiles(const Cache<T>& cache, Seen seen, int64_t end, Following<T> following, const Work& work) {
  Taken<T> tiles[2];
  tiles[0].take(cache, seen, end);
  for (int turn = 0; tiles[turn].count; turn = 1 - turn) {
    Taken<T>& next = tiles[1 - turn];
    next.take(cache, seen, end);
    if (next.count || !following.cache) {
      work(tiles[turn], next);
      continue;
    }
    Taken<T> other;
    other.take(*following.cache, following.seen, following.seen.length);
    work(tiles[turn], other);
  }
}

#ifdef APT_PAIRS

inline __m512i words(const void* p) { return _mm512_loadu_si512(p); }

inline __m512bh pairs(__m512i v) {
  __m512bh out;
  std::memcpy(&out, &v, sizeof out);
  return out;
}

// Computes the scores of G query heads, `width` lanes each, against 16 keys. Scores of head g start at scores[g * kTile].
template <int G>
void score_pairs(const Bf16* q, const Bf16* const* keys, int64_t lane, int64_t width, float* scores) {
  constexpr int kTogether = 4;  // keys: with six heads, 24 of 32 registers accumulate, four hold keys and one holds a query
  Vec partial[G][kLanes];
  for (int i = 0; i < kLanes; i += kTogether) {
    __m512 products[G][kTogether];
    for (auto& of_head : products)
      for (auto& product : of_head) product = _mm512_setzero_ps();
    for (int64_t k = 0; k < width; k += 32) {
      __m512bh of_keys[kTogether];
      for (int j = 0; j < kTogether; ++j) of_keys[j] = pairs(words(keys[i + j] + lane + k));
      for (int g = 0; g < G; ++g) {
        const __m512bh query = pairs(words(q + g * width + k));
        for (int j = 0; j < kTogether; ++j) products[g][j] = _mm512_dpbf16_ps(products[g][j], of_keys[j], query);
      }
    }
    for (int g = 0; g < G; ++g) std::memcpy(&partial[g][i], products[g], sizeof products[g]);
  }
  for (int g = 0; g < G; ++g) store(scores + g * kTile, sums(partial[g]));
}

// acc[g] = acc[g] * scales[g] + sum over t of weights[g][t] * values[t], for L times 32 lanes of G heads and an even `count`. Of
// every 32 lanes, the accumulator holds first the lanes that unpacklo interleaves, then those of unpackhi.
template <int G, int L>
void add_pairs(const uint32_t* weights, const float* scales, const Bf16* const* values, int64_t lane, int count, int64_t width,
               float* acc) {
  __m512 sums[G][2 * L];
  for (int g = 0; g < G; ++g)
    for (int i = 0; i < 2 * L; ++i)
      sums[g][i] = _mm512_mul_ps(_mm512_loadu_ps(acc + g * width + i * kLanes), _mm512_set1_ps(scales[g]));
  for (int t = 0; t < count; t += 2) {
    const Bf16 *first = values[t] + lane, *second = values[t + 1] + lane;
    for (int i = 0; i < L; ++i) {
      const __m512i a = words(first + 32 * i), b = words(second + 32 * i);
      const __m512bh low = pairs(_mm512_unpacklo_epi16(a, b)), high = pairs(_mm512_unpackhi_epi16(a, b));
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

// `attend` with dot products of bfloat16 pairs; `width` is a multiple of 32. Weights are rounded to bfloat16.
template <typename Out>
void attend_pairs(const Bf16* q, const Cache<Bf16>& cache, Seen seen, int64_t end, const Rules& rules, int64_t first_key_head,
                  int64_t key_heads, int64_t group, int64_t width, float scale, Out* out, const Following<Bf16>& following) {
  constexpr int kScoredHeads = 6, kHeads = 4;  // heads of one key head at a time: for scores, for values
  const int step = key_heads == 1 ? kTile : kLanes;  // values of several heads are adjacent, and read in the order of memory
  const int64_t heads = key_heads * group;
  float* acc = scratch<float, kWide>(heads * width);
  std::fill_n(acc, heads * width, 0.0f);
  std::vector<Flash> states(heads);
  for (int64_t h = 0; h < heads; ++h) states[h] = first_state(rules, first_key_head * group + h);
  float* weights = scratch<float, kScores>(heads * kTile * 3 / 2 + heads);
  auto* narrow = reinterpret_cast<uint32_t*>(weights + heads * kTile);
  float* scales = weights + heads * kTile * 3 / 2;
  const int64_t first_lane = first_key_head * width, last_lane = first_lane + key_heads * width;
  for_tiles(cache, seen, end, following, [&](const Taken<Bf16>& now, const Taken<Bf16>& ahead) {
    const int count = now.count;
    // Rows of 16 positions at a time, in the order of memory; data needed next is prefetched meanwhile, piece by piece.
    const int64_t scored = (count + kLanes - 1) / kLanes * key_heads * ((group + kScoredHeads - 1) / kScoredHeads);
    for (int t = 0, piece = 0; t < count; t += kLanes) {
      for (int64_t k = 0; k < key_heads; ++k)
        for (int64_t g = 0; g < group; g += kScoredHeads) {
          const int64_t head = k * group + g, mine = std::min<int64_t>(kScoredHeads, group - g), lane = first_lane + k * width;
          const Bf16* queries = q + head * width;
          float* to = weights + head * kTile + t;
          now.fetch_values(piece++, scored, first_lane, last_lane);
          if (mine == 6) score_pairs<6>(queries, now.keys + t, lane, width, to);
          if (mine == 5) score_pairs<5>(queries, now.keys + t, lane, width, to);
          if (mine == 4) score_pairs<4>(queries, now.keys + t, lane, width, to);
          if (mine == 3) score_pairs<3>(queries, now.keys + t, lane, width, to);
          if (mine == 2) score_pairs<2>(queries, now.keys + t, lane, width, to);
          if (mine == 1) score_pairs<1>(queries, now.keys + t, lane, width, to);
        }
    }
    for (int64_t h = 0; h < heads; ++h) {
      float* row = weights + h * kTile;
      for (int t = 0; t < count; t += kLanes) store(row + t, load(row + t) * scale);
      const float slope = rules.slopes ? rules.slopes[first_key_head * group + h] : 0;
      scales[h] = weigh(states[h], count, rules, slope, now.positions, end - 1, row);
      for (int t = 0; t < count; t += kLanes) {
        const __m256bh half = _mm512_cvtneps_pbh(_mm512_loadu_ps(row + t));
        std::memcpy(narrow + (h * kTile + t) / 2, &half, sizeof half);
      }
    }
    const int64_t added = (count + step - 1) / step * key_heads * ((group + kHeads - 1) / kHeads) * ((width + 63) / 64);
    for (int t = 0, piece = 0; t < count; t += step) {
      const int even = std::min(step, (count - t + 1) / 2 * 2);
      for (int64_t k = 0; k < key_heads; ++k)
        for (int64_t g = 0; g < group; g += kHeads) {
          const int64_t head = k * group + g, mine = std::min<int64_t>(kHeads, group - g), lane = first_lane + k * width;
          for (int64_t i = 0; i < width;) {
            float* to = acc + head * width + i;
            const uint32_t* of_heads = narrow + (head * kTile + t) / 2;
            ahead.fetch_keys(piece++, added, first_lane, last_lane);
            const auto add = [&](auto lanes) {
              constexpr int L = decltype(lanes)::value;
              if (mine == 4) add_pairs<4, L>(of_heads, scales + head, now.values + t, lane + i, even, width, to);
              if (mine == 3) add_pairs<3, L>(of_heads, scales + head, now.values + t, lane + i, even, width, to);
              if (mine == 2) add_pairs<2, L>(of_heads, scales + head, now.values + t, lane + i, even, width, to);
              if (mine == 1) add_pairs<1, L>(of_heads, scales + head, now.values + t, lane + i, even, width, to);
              i += 32 * L;
            };
            if (width - i >= 64)
              add(std::integral_constant<int, 2>{});
            else
              add(std::integral_constant<int, 1>{});
          }
        }
      std::fill_n(scales, heads, 1.0f);
    }
  });
  for (int64_t h = 0; h < heads; ++h) {
    const float inverse = states[h].l > 0 ? 1.0f / states[h].l : states[h].l;  // NaN stays
    for (int64_t i = 0; i < width; ++i) {
      const int64_t place = i % 8 / 4 * 16 + i % 32 / 8 * 4 + i % 4;
      from_float(acc[h * width + i / 32 * 32 + place] * inverse, out[h * width + i]);
    }
  }
}

#endif  // APT_PAIRS

// Attention of one query at position `end` - 1 over the positions before `end`, for `key_heads` key heads with `group` query heads
// each: q (heads, H), out (heads, H).
template <typename T, typename Out>
void attend(const T* q, const Cache<T>& cache, Seen seen, int64_t end, const Rules& rules, int64_t first_key_head,
            int64_t key_heads, int64_t group, int64_t width, float scale, Out* out, const Following<T>& following = {}) {
#ifdef APT_PAIRS
  if constexpr (std::is_same_v<T, Bf16>)
    if (width % 32 == 0)
      return attend_pairs(q, cache, seen, end, rules, first_key_head, key_heads, group, width, scale, out, following);
#endif
  const int64_t padded = round_up(width, kLanes), heads = key_heads * group;
  const int step = key_heads == 1 ? kTile : kStep;  // rows of several heads are adjacent, and read in the order of memory
  float* wide = scratch<float, kWide>(step * padded);
  float* queries = scratch<float, kQueries>(heads * (2 * padded + kTile + 1));
  float *acc = queries + heads * padded, *weights = acc + heads * padded, *scales = weights + heads * kTile;
  std::fill_n(queries, heads * 2 * padded, 0.0f);
  std::vector<Flash> states(heads);
  for (int64_t h = 0; h < heads; ++h) states[h] = first_state(rules, first_key_head * group + h);
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t i = 0; i < width; ++i) queries[h * padded + i] = to_float(q[h * width + i]) * scale;
  // Rows of a head as float32: in place if possible, otherwise copies.
  const float* rows[kTile];
  const auto as_float = [&](const T* const* from, int64_t lane, int count) {
    if constexpr (std::is_same_v<T, float>)
      if (padded == width) {
        for (int i = 0; i < count; ++i) rows[i] = from[i] + lane;
        return;
      }
    const T* mine[kTile];
    for (int i = 0; i < count; ++i) mine[i] = from[i] + lane;
    widen(mine, count, width, padded, wide);
    for (int i = 0; i < count; ++i) rows[i] = wide + i * padded;
  };
  const int64_t first_lane = first_key_head * width, last_lane = first_lane + key_heads * width;
  for_tiles(cache, seen, end, following, [&](const Taken<T>& now, const Taken<T>& ahead) {
    const int count = now.count;
    // Rows of a few positions at a time, in the order of memory; data needed next is prefetched meanwhile.
    const int64_t scored = (count + step - 1) / step * key_heads * ((group + kGroup - 1) / kGroup);
    for (int t = 0, piece = 0; t < count; t += step) {
      const int some = std::min<int>(step, static_cast<int>(round_up(count - t, kScored)));
      for (int64_t k = 0; k < key_heads; ++k) {
        as_float(now.keys + t, first_lane + k * width, some);
        for (int64_t g = 0; g < group; g += kGroup) {
          now.fetch_values(piece++, scored, first_lane, last_lane);
          score(std::min<int64_t>(kGroup, group - g), &queries[(k * group + g) * padded], rows, some, padded,
                &weights[(k * group + g) * kTile + t]);
        }
      }
    }
    for (int64_t h = 0; h < heads; ++h) {
      const float slope = rules.slopes ? rules.slopes[first_key_head * group + h] : 0;
      scales[h] = weigh(states[h], count, rules, slope, now.positions, end - 1, &weights[h * kTile]);
    }
    const int64_t added =
        (count + step - 1) / step * key_heads * ((group + kGroup - 1) / kGroup) * ((padded + 4 * kLanes - 1) / (4 * kLanes));
    for (int t = 0, piece = 0; t < count; t += step) {
      const int some = std::min(step, count - t);
      for (int64_t k = 0; k < key_heads; ++k) {
        as_float(now.values + t, first_lane + k * width, some);
        for (int64_t g = 0; g < group; g += kGroup)
          for (int64_t i = 0; i < padded; i += 4 * kLanes) {
            const int64_t vectors = std::min<int64_t>(4, (padded - i) / kLanes), together = std::min<int64_t>(kGroup, group - g);
            ahead.fetch_keys(piece++, added, first_lane, last_lane);
            const float* w[kGroup];
            float* a[kGroup];
            for (int64_t j = 0; j < together; ++j) {
              w[j] = &weights[(k * group + g + j) * kTile + t];
              a[j] = &acc[(k * group + g + j) * padded + i];
            }
            add_values(together, vectors, w, &scales[k * group + g], rows, i, some, a);
          }
      }
      std::fill_n(scales, heads, 1.0f);
    }
  });
  for (int64_t h = 0; h < heads; ++h) {
    const float inverse = states[h].l > 0 ? 1.0f / states[h].l : states[h].l;  // NaN stays
    for (int64_t i = 0; i < width; ++i) from_float(acc[h * padded + i] * inverse, out[h * width + i]);
  }
}

template <typename T>
void decode_kv_rows(ffi::ThreadPool& threads, const T* q, ffi::AnyBuffer& pool, ffi::Buffer<ffi::S32>& tables,
                    ffi::Buffer<ffi::S32>& lens, const int32_t* rows, ffi::Buffer<ffi::S32>& ranges, const Rules& rules,
                    int64_t block_size, int64_t lanes, ffi::Buffer<ffi::F32>::Dimensions shape, float* out) {
  const int64_t batch = shape[0], heads = shape[1], width = shape[2];
  const int64_t block_elements = elements_of_block(pool), key_heads = lanes / width;
  const int64_t table_len = tables.dimensions()[2], group = heads / key_heads;
  // If there are fewer rows than threads, heads are split among threads.
  const int64_t live = std::max(rows[1] - rows[0], 0);
  int64_t parts = 1;
  while (live && live * parts < 2 * threads.num_threads() && key_heads % (2 * parts) == 0) parts *= 2;
  if (live && live * parts < 2 * threads.num_threads()) parts = key_heads;
  const int64_t per_part = key_heads / parts;
  auto* elements = static_cast<const T*>(pool.untyped_data());
  const double seen = positions_seen(lens.typed_data(), rows[0], rows[0] + live, rules.window);
  const Timed timed("attention of decode rows", seen * 2 * lanes * sizeof(T), seen * 4 * heads * width);
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
                     ffi::Buffer<ffi::F32> slopes, ffi::Buffer<ffi::F32> sinks, ffi::Result<ffi::AnyBuffer> out,
                     int64_t block_size, float softcap, int64_t window, int64_t lanes) {
  const Rules rules{softcap, window, floats(slopes), floats(sinks)};
  if (q.element_type() != pool.element_type() || out->element_type() != ffi::F32)
    return ffi::Error::InvalidArgument("decode_kv: queries of the pool's type to float32");
  return of_type(q, [&](auto* queries) {
    using T = std::remove_pointer_t<decltype(queries)>;
    decode_kv_rows<T>(threads, queries, pool, tables, lens, rows.typed_data(), ranges, rules, block_size, lanes, q.dimensions(),
                      static_cast<float*>(out->untyped_data()));
    return ffi::Error::Success();
  });
}

auto decode_arguments() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()         // q (B, N, H), or (B, N, D) absorbed and scaled
      .Arg<ffi::AnyBuffer>()         // pool (P, C, E), of the same type
      .Arg<ffi::Buffer<ffi::S32>>()  // tables (B, 2, J), or (B, J)
      .Arg<ffi::Buffer<ffi::S32>>()  // lens (B,)
      .Arg<ffi::Buffer<ffi::S32>>()  // rows (2,)
      .Arg<ffi::Buffer<ffi::S32>>()  // slot ranges (B, J, 2), or (0, 0, 2)
      .Arg<ffi::Buffer<ffi::F32>>()  // slopes (N,), or (0,)
      .Arg<ffi::Buffer<ffi::F32>>()  // sinks (N,), or (0,)
      .Ret<ffi::AnyBuffer>()
      .Attr<int64_t>("block_size")
      .Attr<float>("softcap")
      .Attr<int64_t>("window")
      .Attr<int64_t>("lanes");  // elements of a slot
}

}  // namespace

#if APT_HAS_PART(1)

XLA_FFI_DEFINE_HANDLER_SYMBOL(apt_decode_kv, decode_kv, decode_arguments());

#endif
