// Attention of prompt chunks over their cached prefix and themselves, and of queries over cached layer inputs, on matrix tiles if
// the CPU has them.

#include "attention_panels.cc"
#include "linear_tiles.cc"

namespace {

#ifdef APT_AMX

constexpr int kKeys = 128;  // keys processed at a time, which fit the CPU cache with their values

// A tile of 16 queries that attend to the same keys.
struct QueryTile {
  const Bf16* q[16];  // of `width` elements; nullptr: no query
  Bf16* out[16];
  alignas(64) int32_t positions[16];
  alignas(64) float slopes[16];
  Flash before[16];  // states before the first key
  int32_t first, last;  // lowest and highest position of the queries
};

inline __m256i half(const Bf16* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// Words of two bfloat16 each: (low, high).
inline __m512i pair(__m256i low, __m256i high) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

inline void transpose(char* tile) {
  auto* words = reinterpret_cast<float*>(tile);
  __m512 turned[16];
  for (int i = 0; i < 16; ++i) turned[i] = _mm512_load_ps(words + 16 * i);
  transpose(turned);
  for (int i = 0; i < 16; ++i) _mm512_store_ps(words + 16 * i, turned[i]);
}

// Converts scores of 16 queries against keys [0, visible) to weights by the rules, as bfloat16 words (query, pair of keys) in tiles
// of 32 keys. Scores are transposed, one vector per key, so nothing is summed across lanes. Returns the factors by which the
// outputs so far must be scaled.
Vec weigh_tile(float* scores, int visible, const QueryTile& queries, const Rules& rules, const int32_t* positions, float scale,
               float* highest, float* total, char* weights) {
  const __m512i position = _mm512_load_si512(queries.positions);
  const Vec slope = load(queries.slopes), before = load(highest);
  const bool plain = !rules.window && !rules.slopes && rules.softcap == 0 && positions[visible - 1] <= queries.first;
  Vec m = before;
  for (int i = 0; i < visible; ++i) {
    Vec s = load(scores + i * 16) * scale;
    if (!plain) {
      if (rules.softcap != 0)
        for (int j = 0; j < 16; ++j) s[j] = rules.softcap * std::tanh(s[j] / rules.softcap);
      const Vec distance = vec(_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_set1_epi32(positions[i]), position)));
      if (rules.slopes) s += slope * distance;
      s = distance > 0.0f ? splat(-INFINITY) : s;
      if (rules.window) s = distance <= -static_cast<float>(rules.window) ? splat(-INFINITY) : s;
    }
    store(scores + i * 16, s);
    m = max(m, s);
  }
  // A query that has seen no key yet: any finite maximum gives weights of zero.
  const Vec finite = m == -INFINITY ? splat(0.0f) : m;
  Vec sum{};
  const int padded = (visible + 31) / 32 * 32;
  for (int i = 0; i < padded; i += 2) {
    __m512 w[2];
    for (int j = 0; j < 2; ++j) {
      Vec one{};
      if (i + j < visible) {
        const Vec s = load(scores + (i + j) * 16);
        one = s == -INFINITY ? splat(0.0f) : exp(s - finite);
      }
      sum += one;
      std::memcpy(&w[j], &one, sizeof one);
    }
    const __m512bh both = _mm512_cvtne2ps_pbh(w[1], w[0]);
    __m512i lanes;
    std::memcpy(&lanes, &both, sizeof lanes);
    _mm512_store_si512(weights + i * 32, pair(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64(lanes, 1)));
  }
  for (int i = 0; i < padded / 32; ++i) transpose(weights + i * 1024);
  const Vec rescale = before == -INFINITY ? splat(0.0f) : exp(before - finite);
  store(total, load(total) * rescale + sum);
  store(highest, m);
  return rescale;
}

// Attention of queries over the positions before `end`, with keys and values from lane `lane` on; if `same`, the values are the
// keys.
void attend_tiles(const QueryTile* tiles, int64_t count, int64_t width, const Cache<Bf16>& cache, Seen seen, int64_t end,
                  const Rules& rules, int64_t lane, bool same, float scale) {
  const int64_t padded = round_up(width, 32), steps = padded / 32, lane_tiles = padded / 16;
  constexpr int64_t kKeySteps = kKeys / 32, kTileBytes = 1024;
  const int64_t rows_bytes = kKeys * padded * 2, out_floats = lane_tiles * 256;
  char* memory = scratch<char, kMade>((same ? 1 : 2) * rows_bytes + lane_tiles * kKeySteps * kTileBytes +
                                      count * (steps * kTileBytes + out_floats * 4 + 128) + kKeys * 64 + kKeySteps * kTileBytes);
  auto take = [&memory](int64_t bytes) { return std::exchange(memory, memory + bytes); };
  auto* keys = reinterpret_cast<Bf16*>(take(rows_bytes));
  auto* value_rows = same ? keys : reinterpret_cast<Bf16*>(take(rows_bytes));
  char *values = take(lane_tiles * kKeySteps * kTileBytes), *queries = take(count * steps * kTileBytes);
  char *weights = take(kKeySteps * kTileBytes);
  auto* scores = reinterpret_cast<float*>(take(kKeys * 64));
  auto* out = reinterpret_cast<float*>(take(count * out_floats * 4));
  auto *highest = reinterpret_cast<float*>(take(count * 64)), *total = reinterpret_cast<float*>(take(count * 64));
  std::fill_n(out, count * out_floats, 0.0f);
  for (int64_t i = 0; i < count * 16; ++i) {
    const Flash& before = tiles[i / 16].before[i % 16];
    highest[i] = before.m, total[i] = before.l;
  }
  // Lanes after the last lane of a row are zeros in every copy.
  std::memset(keys, 0, rows_bytes);
  if (!same) std::memset(value_rows, 0, rows_bytes);
  for (int64_t c = 0; c < count; ++c) {
    for (int i = 0; i < 16; ++i) {
      Bf16* row = keys + i * padded;
      if (tiles[c].q[i])
        std::copy_n(tiles[c].q[i], width, row);
      else
        std::memset(row, 0, width * 2);
    }
    pack_rows(keys, 16, padded, padded, reinterpret_cast<uint32_t*>(queries + c * steps * kTileBytes));
  }
  int32_t positions[kKeys];
  const Bf16 *key_at[kTile], *value_at[kTile];
  for (;;) {
    int taken = 0;
    for (int n = kTile; n == kTile && taken < kKeys; taken += n) {
      n = cache.next(seen, end, key_at, value_at, positions + taken);
      for (int i = 0; i < n; ++i) {
        std::copy_n(key_at[i] + lane, width, keys + (taken + i) * padded);
        if (!same) std::copy_n(value_at[i] + lane, width, value_rows + (taken + i) * padded);
      }
    }
    if (!taken) break;
    const int64_t key_steps = (taken + 31) / 32;
    // Old contents must be cleared, because 0 * NaN = NaN.
    std::memset(value_rows + taken * padded, 0, (key_steps * 32 - taken) * padded * 2);
    for (int64_t s = 0; s < key_steps; ++s)
      for (int64_t t = 0; t < lane_tiles; ++t)
        for (int i = 0; i < 16; ++i) {
          const Bf16* row = value_rows + (s * 32 + 2 * i) * padded + t * 16;
          _mm512_store_si512(values + (t * kKeySteps + s) * kTileBytes + i * 64, pair(half(row), half(row + padded)));
        }
    for (int64_t c = 0; c < count; ++c) {
      int visible = taken;  // no query of the tile sees keys after its last query
      while (visible && positions[visible - 1] > tiles[c].last) --visible;
      if (!visible) continue;
      const int64_t visible_steps = (visible + 31) / 32;
      for (int64_t k = 0; k < visible_steps; ++k) {
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t s = 0; s < steps; ++s) {
          _tile_loadd(4, queries + (c * steps + s) * kTileBytes, 64);
          _tile_loadd(5, keys + k * 32 * padded + s * 32, padded * 2);
          _tile_loadd(6, keys + (k * 32 + 16) * padded + s * 32, padded * 2);
          _tile_dpbf16ps(0, 5, 4);
          _tile_dpbf16ps(1, 6, 4);
        }
        _tile_stored(0, scores + k * 512, 64);
        _tile_stored(1, scores + k * 512 + 256, 64);
      }
      alignas(64) float rescale[16];
      store(rescale, weigh_tile(scores, visible, tiles[c], rules, positions, scale, highest + c * 16, total + c * 16, weights));
      float* mine = out + c * out_floats;
      const bool moved = std::any_of(rescale, rescale + 16, [](float r) { return r != 1.0f; });
      for (int64_t t = 0; t < lane_tiles; t += 2) {
        float *first = mine + t * 256, *second = first + 256;
        if (moved)
          for (int i = 0; i < 32; ++i) store(first + i * 16, load(first + i * 16) * rescale[i % 16]);
        _tile_loadd(0, first, 64);
        _tile_loadd(1, second, 64);
        for (int64_t s = 0; s < visible_steps; ++s) {
          _tile_loadd(4, weights + s * kTileBytes, 64);
          _tile_loadd(5, values + (t * kKeySteps + s) * kTileBytes, 64);
          _tile_loadd(6, values + ((t + 1) * kKeySteps + s) * kTileBytes, 64);
          _tile_dpbf16ps(0, 4, 5);
          _tile_dpbf16ps(1, 4, 6);
        }
        _tile_stored(0, first, 64);
        _tile_stored(1, second, 64);
      }
    }
  }
  for (int64_t c = 0; c < count; ++c)
    for (int i = 0; i < 16; ++i) {
      if (!tiles[c].q[i]) continue;
      const float l = total[c * 16 + i], inverse = l > 0 ? 1.0f / l : l;  // NaN stays
      for (int64_t t = 0; t < lane_tiles; ++t) {
        const int64_t lanes = std::clamp<int64_t>(width - t * 16, 0, 16);
        const float* row = out + c * out_floats + t * 256 + i * 16;
        store_lanes(tiles[c].out[i] + t * 16, lanes_of(lanes),
                    _mm512_mul_ps(_mm512_loadu_ps(row), _mm512_set1_ps(inverse)));
      }
    }
}

// Attention of `count` queries from `q` on, at positions from `first` on, for `group` heads that share a key head.
void prefill_tiles(const Bf16* q, Bf16* out, int64_t count, int64_t first, int64_t heads, int64_t group, int64_t width,
                   const Cache<Bf16>& cache, const Seen& seen, const Rules& rules, int64_t key_head, float scale) {
  std::vector<QueryTile> tiles;
  for (int64_t g = 0; g < group; ++g)
    for (int64_t t = 0; t < count; t += 16) {
      QueryTile tile{};
      for (int64_t i = 0; i < 16; ++i) {
        tile.positions[i] = static_cast<int32_t>(first + t + i);
        tile.slopes[i] = rules.slopes ? rules.slopes[key_head * group + g] : 0;
        tile.before[i] = first_state(rules, key_head * group + g);
        if (t + i >= count) continue;
        tile.q[i] = q + ((t + i) * heads + g) * width;
        tile.out[i] = out + ((t + i) * heads + g) * width;
      }
      tile.first = static_cast<int32_t>(first + t);
      tile.last = static_cast<int32_t>(first + std::min(t + 16, count) - 1);
      tiles.push_back(tile);
    }
  Tiles registers;
  attend_tiles(tiles.data(), static_cast<int64_t>(tiles.size()), width, cache, seen, first + count, rules, key_head * width,
               false, scale);
}

#endif  // APT_AMX

// A row's cached layer inputs, which are both keys and values.
template <typename T>
Cache<T> inputs_of(ffi::AnyBuffer& pool, ffi::Buffer<ffi::S32>& tables, int64_t row, int64_t width) {
  return {static_cast<const T*>(pool.untyped_data()),
          tables.typed_data() + row * tables.dimensions()[1],
          0,  // values are the keys
          elements_of_block(pool),
          width,
          nullptr,
          nullptr};
}

// Absorbed attention of `count` query heads of a row, from head `first` on, at the row's last position: q and out (count, D).
template <typename T>
void absorb(const T* q, const Cache<T>& cache, const Seen& seen, const Rules& rules, int64_t first, int64_t count, int64_t width,
            T* out) {
#ifdef APT_AMX
  if constexpr (std::is_same_v<T, Bf16>)
    if (has_tiles()) {
      std::vector<QueryTile> tiles;
      for (int64_t h = 0; h < count; h += 16) {
        QueryTile tile{};
        for (int64_t i = 0; i < 16; ++i) {
          tile.positions[i] = static_cast<int32_t>(seen.length - 1);
          if (h + i >= count) continue;
          tile.slopes[i] = rules.slopes ? rules.slopes[first + h + i] : 0;
          tile.before[i] = first_state(rules, first + h + i);
          tile.q[i] = q + (h + i) * width;
          tile.out[i] = out + (h + i) * width;
        }
        tile.first = tile.last = static_cast<int32_t>(seen.length - 1);
        tiles.push_back(tile);
      }
      Tiles registers;
      attend_tiles(tiles.data(), static_cast<int64_t>(tiles.size()), width, cache, seen, seen.length, rules, 0, true, 1.0f);
      return;
    }
#endif
  const Rules mine{rules.softcap, rules.window, rules.slopes ? rules.slopes + first : nullptr,
                   rules.sinks ? rules.sinks + first : nullptr};
  attend(q, cache, seen, seen.length, mine, 0, 1, count, width, 1.0f, out);
}

// Absorbed attention of one query per row over cached layer inputs: q (B, N, D), already scaled, to sums of layer inputs (B, N, D).
// All of one type, float32 or bfloat16.
ffi::Error decode_absorbed(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer pool, ffi::Buffer<ffi::S32> tables,
                           ffi::Buffer<ffi::S32> lens, ffi::Buffer<ffi::S32> rows, ffi::Buffer<ffi::S32> ranges,
                           ffi::Buffer<ffi::F32> slopes, ffi::Buffer<ffi::F32> sinks, ffi::Result<ffi::AnyBuffer> out,
                           int64_t block_size, float softcap, int64_t window, int64_t) {
  const int64_t heads = q.dimensions()[1], width = q.dimensions()[2];
  const Rules rules{softcap, window, floats(slopes), floats(sinks)};
  if (q.element_type() != pool.element_type() || q.element_type() != out->element_type())
    return ffi::Error::InvalidArgument("decode_absorbed: one type for all");
  std::memset(out->untyped_data(), 0, out->size_bytes());
  const int64_t first_row = rows.typed_data()[0], live = std::max<int64_t>(rows.typed_data()[1] - first_row, 0);
  const double seen = positions_seen(lens.typed_data(), first_row, first_row + live, window);
  const int64_t bytes = q.element_type() == ffi::F32 ? 4 : 2;
  const Timed timed("absorbed attention of decode rows", seen * width * bytes, seen * 4 * heads * width);
  // Heads per task, in whole tiles: all heads, unless there are fewer rows than threads.
  const int64_t unit = q.element_type() == ffi::F32 ? 1 : apt_has_tiles() ? 16 : 4, units = (heads + unit - 1) / unit;
  const int64_t parts = live < 2 * threads.num_threads() ? std::min<int64_t>(units, 2 * threads.num_threads()) : 1;
  const int64_t per_part = (units + parts - 1) / parts * unit;
  return of_type(q, [&](auto* queries) {
    using T = std::remove_pointer_t<decltype(queries)>;
    parallel_for(threads, live * parts, [&](int64_t task) {
      const int64_t row = first_row + task / parts, first = task % parts * per_part, length = lens.typed_data()[row];
      if (length <= 0 || first >= heads) return;
      const int64_t at = (row * heads + first) * width;
      absorb(queries + at, inputs_of<T>(pool, tables, row, width),
             seen_of(ranges, row, block_size, length, first_seen(window, length)), rules, first,
             std::min(per_part, heads - first), width, static_cast<T*>(out->untyped_data()) + at);
    });
    return ffi::Error::Success();
  });
}

constexpr int64_t kTaskQueries = 64;   // queries of a prefill task on matrix tiles: 4 tiles per head
constexpr int64_t kPanelQueries = 96;  // queries of a prefill task in vector registers, which copies keys and values to panels
constexpr int64_t kFew = 4;            // chunks of at most this many tokens are computed like decode rows

template <typename T>
void prefill_rows(ffi::ThreadPool& threads, const T* q, const T* k, const T* v, const T* elements,
                  ffi::AnyBuffer::Dimensions shape, int64_t key_heads, int64_t block_elements, ffi::Buffer<ffi::S32>& tables,
                  ffi::Buffer<ffi::S32>& rows, int64_t num_rows, ffi::Buffer<ffi::S32>& ranges, const Rules& rules,
                  int64_t block_size, T* out) {
  const int64_t heads = shape[1], width = shape[2], group = heads / key_heads, lanes = key_heads * width;
  const int64_t table_len = tables.dimensions()[2], batch = rows.dimensions()[1];
  const int32_t *offsets = rows.typed_data(), *lengths = offsets + batch, *prefixes = lengths + batch;
  const float scale = 1.0f / std::sqrt(static_cast<float>(width));
  const bool on_tiles = std::is_same_v<T, Bf16> && apt_has_tiles();
  const int64_t together = on_tiles ? kTaskQueries : kPanelQueries;
  double read = 0, pairs = 0;
  for (int32_t r = 0; r < num_rows; ++r) {
    read += prefixes[r] + lengths[r];
    pairs += (prefixes[r] + 0.5 * (lengths[r] + 1)) * lengths[r];
  }
  const Timed timed("attention of prompts", read * 2 * lanes * sizeof(T), pairs * 4 * heads * width);
  std::fill_n(out, shape[0] * heads * width, T{});
  struct Task {
    int32_t row, head, heads;  // key heads
    int64_t first;
  };
  std::vector<Task> tasks;
  const int64_t short_rows = std::count_if(lengths, lengths + num_rows, [](int32_t n) { return n <= kFew; });
  const int32_t parts = short_rows < 2 * threads.num_threads() ? static_cast<int32_t>(key_heads) : 1;
  for (int32_t r = 0; r < num_rows; ++r)
    for (int64_t first = 0; first < lengths[r]; first += together) {
      const int32_t each = lengths[r] - first <= kFew && parts == 1 ? static_cast<int32_t>(key_heads) : 1;
      for (int32_t head = 0; head < key_heads; head += each) tasks.push_back({r, head, each, first});
    }
  parallel_for(threads, static_cast<int64_t>(tasks.size()), [&](int64_t i) {
    const auto [row, head, key_heads_now, first] = tasks[i];
    const int64_t prefix = prefixes[row], count = std::min(together, lengths[row] - first), offset = offsets[row];
    const Seen seen = seen_of(ranges, row, block_size, prefix, first_seen(rules.window, prefix + first + 1));
    const Cache<T> cache{elements,       tables.typed_data() + row * 2 * table_len, table_len, block_elements, lanes,
                         k + offset * lanes, v + offset * lanes};
    const int64_t at = ((offset + first) * heads + head * group) * width;
    if (count <= kFew) {
      for (int64_t j = 0; j < count; ++j) {
        Seen of_query = seen;
        of_query.first = first_seen(rules.window, prefix + first + j + 1);
        const int64_t from = at + j * heads * width;
        attend(q + from, cache, of_query, prefix + first + j + 1, rules, head, key_heads_now, group, width, scale,
               out + from);
      }
      return;
    }
#ifdef APT_AMX
    if constexpr (std::is_same_v<T, Bf16>)
      if (on_tiles)
        return prefill_tiles(q + at, out + at, count, prefix + first, heads, group, width, cache, seen, rules, head, scale);
#endif
    std::vector<Query<T>> queries;
    for (int64_t j = 0; j < count; ++j)
      for (int64_t g = 0; g < group; ++g) {
        const int64_t from = at + (j * heads + g) * width;
        queries.push_back({q + from, out + from, prefix + first + j, rules.slopes ? rules.slopes[head * group + g] : 0,
                           first_state(rules, head * group + g)});
      }
    attend_panels(queries, cache, seen, prefix + first + count, rules, head * width, width, scale);
  });
}

// All of one type, float32 or bfloat16; the width of a head is even.
ffi::Error prefill(ffi::ThreadPool threads, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer pool,
                   ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> rows, ffi::Buffer<ffi::S32> num_rows,
                   ffi::Buffer<ffi::S32> ranges, ffi::Buffer<ffi::F32> slopes, ffi::Buffer<ffi::F32> sinks,
                   ffi::Result<ffi::AnyBuffer> out, int64_t block_size, float softcap, int64_t window) {
  const Rules rules{softcap, window, floats(slopes), floats(sinks)};
  for (auto type : {k.element_type(), v.element_type(), pool.element_type(), out->element_type()})
    if (type != q.element_type()) return ffi::Error::InvalidArgument("prefill: one type for all");
  return of_type(q, [&](auto* queries) {
    using T = std::remove_pointer_t<decltype(queries)>;
    prefill_rows<T>(threads, queries, static_cast<const T*>(k.untyped_data()), static_cast<const T*>(v.untyped_data()),
                    static_cast<const T*>(pool.untyped_data()), q.dimensions(), k.dimensions()[1], elements_of_block(pool), tables,
                    rows, num_rows.typed_data()[0], ranges, rules, block_size, static_cast<T*>(out->untyped_data()));
    return ffi::Error::Success();
  });
}

}  // namespace

#if APT_HAS_PART(1)

XLA_FFI_DEFINE_HANDLER_SYMBOL(apt_decode_absorbed, decode_absorbed, decode_arguments());

XLA_FFI_DEFINE_HANDLER_SYMBOL(apt_prefill, prefill,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()         // q (T, N, H)
                                  .Arg<ffi::AnyBuffer>()         // k (T, K, H)
                                  .Arg<ffi::AnyBuffer>()         // v (T, K, H)
                                  .Arg<ffi::AnyBuffer>()         // pool (P, C, E)
                                  .Arg<ffi::Buffer<ffi::S32>>()   // tables (B, 2, J)
                                  .Arg<ffi::Buffer<ffi::S32>>()   // offsets, chunk lengths and prefix lengths (3, B)
                                  .Arg<ffi::Buffer<ffi::S32>>()   // number of rows (1,)
                                  .Arg<ffi::Buffer<ffi::S32>>()   // slot ranges (B, J, 2), or (0, 0, 2)
                                  .Arg<ffi::Buffer<ffi::F32>>()   // slopes (N,), or (0,)
                                  .Arg<ffi::Buffer<ffi::F32>>()   // sinks (N,), or (0,)
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("block_size")
                                  .Attr<float>("softcap")
                                  .Attr<int64_t>("window"));

#endif
