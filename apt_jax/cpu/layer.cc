// A decoder layer for decode rows of the KV kind, as phases of one call.

#include "attention_tiles.cc"
#include "elementwise.cc"
#include "linear.cc"

namespace {

// Elements of a buffer of type T, or nullptr if it is empty.
template <typename T>
const T* values_of(const ffi::AnyBuffer& buffer) {
  return buffer.element_count() ? static_cast<const T*>(buffer.untyped_data()) : nullptr;
}

// The type of matrices whose elements are bytes of `IntegerWeights`.
using Integers = uint8_t;

template <typename Stored>
constexpr bool kIntegers = std::is_same_v<Stored, Integers>;

template <typename Stored>
using WeightsOf = std::conditional_t<kIntegers<Stored>, IntegerWeights, TiledWeights<Stored>>;

// Arguments of a layer. `T` is the type of its cache, rows and parameters, `Stored` the type of its matrices.
template <typename T, typename Stored>
struct LayerArguments {
  int64_t rows, width, heads, key_heads, head_dim, ffn, half;
  float* h;  // (rows, width), updated in place
  T* pool;
  int64_t block_size, block_elements, table_len;
  const int32_t *tables, *lens, *first_slots, *second_slots;
  const float *cosine, *sine;  // (rows, half)
  const T *attn_scale, *attn_bias, *ffn_scale, *ffn_bias;
  WeightsOf<Stored> wqkv, more, wo, w_up, w_down;  // more: the rest of q, k and v, or no outputs
  const T *bqkv, *bo, *b_up, *b_down;
  float eps, offset;
  bool layer_norm, gated;
  Activation activation;
  Rules rules;
};

// Adds a product with its bias to the residual stream.
template <typename T, int64_t kSums>
struct AddTo {
  float* h;
  int64_t width;
  const float* scales;
  const T* biases;

  void operator()(int64_t row, int64_t first, const float* sums) const {
    const int64_t count = std::min(kSums, width - first);
    float* to = h + row * width + first;
    for (int64_t i = 0; i < count; i += kLanes) {
      const int64_t mine = std::min<int64_t>(kLanes, count - i);
      Vec v = load_some(sums + i, mine);
      if (scales) v *= load_some(scales + first + i, mine);
      if (biases) v += load_some(biases + first + i, mine);
      store_some(to + i, load_some(to + i, mine) + v, mine);
    }
  }
};

// Type of rows of T between the operations of a layer, with the same numerical values.
#ifdef APT_PAIRS
template <typename T>
using RowOf = T;

template <typename T>
const T* inputs_of(const T* rows) {
  return rows;
}
#else
template <typename T>
using RowOf = std::conditional_t<std::is_same_v<T, Bf16>, WideBf16, T>;

inline const float* inputs_of(const float* rows) { return rows; }

inline const float* inputs_of(const WideBf16* rows) { return &rows->value; }
#endif

// Rows of a layer in the form that its products take: of type X, and also as groups of integers if `integers`.
template <typename X, bool integers>
struct LayerRows {
  X* values;
  Group* groups;
  int64_t width;

  static int64_t groups_of(int64_t width) { return (width + kGroupInputs - 1) / kGroupInputs; }

  static int64_t bytes(int64_t rows, int64_t width) {
    const int64_t of_groups = integers ? groups_of(width) * sizeof(Group) : 0;
    return rows * (round_up(width * sizeof(X), 64) + of_groups) + 128;
  }

  // Rounds `count` values of a row, from `first`, a multiple of the group size, on.
  void round(int64_t row, int64_t first, int64_t count) const {
    if constexpr (integers)
      round_row(values + row * width + first, count, groups + row * groups_of(width) + first / kGroupInputs);
    else
      (void)row, (void)first, (void)count;
  }
};

template <typename T, typename Stored, typename Take>
auto layer_product(int64_t threads, const LayerRows<RowOf<T>, kIntegers<Stored>>& x, int64_t rows, const WeightsOf<Stored>& w, bool gated,
                   const Take& take) {
  if constexpr (kIntegers<Stored>)
    return IntegerProduct<Take>(threads, x.groups, rows, w, gated, take);
  else
    return PanelProduct<T, Stored, Take>(threads, inputs_of(x.values), x.width, rows, x.width, w, gated, take);
}

template <typename T, typename Stored>
void run_layer(ffi::ThreadPool& pool, const LayerArguments<T, Stored>& a) {
  constexpr bool integers = kIntegers<Stored>;
  constexpr int64_t kSums = integers ? kIntegerPanel : kPanel;
  const int64_t threads = pool.num_threads(), queries = a.heads * a.head_dim, lanes = a.key_heads * a.head_dim;
  const int64_t all = queries + 2 * lanes, group = a.heads / a.key_heads;
  using X = RowOf<T>;
  using Rows = LayerRows<X, integers>;
  char* memory = scratch<char, kLayer>(round_up(a.rows * all * 4, 64) + Rows::bytes(a.rows, a.width) * 2 +
                                       Rows::bytes(a.rows, queries) + Rows::bytes(a.rows, a.ffn));
  const auto take = [&memory](int64_t bytes) { return std::exchange(memory, memory + round_up(bytes, 64)); };
  auto* sums = reinterpret_cast<float*>(take(a.rows * all * 4));
  const auto rows_for = [&](int64_t width) {
    Rows rows{reinterpret_cast<X*>(take(a.rows * width * sizeof(X))), nullptr, width};
    if constexpr (integers) rows.groups = reinterpret_cast<Group*>(take(a.rows * Rows::groups_of(width) * sizeof(Group)));
    return rows;
  };
  const Rows x = rows_for(a.width), x_ffn = rows_for(a.width), attended = rows_for(queries), up = rows_for(a.ffn);

  const auto norm = [&](const T* scale, const T* bias, const Rows& out) {
    return [&a, out, scale, bias](int64_t row) {
      norm_row(a.h + row * a.width, scale, bias, a.width, a.eps, a.offset, a.layer_norm, out.values + row * a.width);
      out.round(row, 0, a.width);
    };
  };
  const Store<float, T> to_sums{sums, all, a.wqkv.scales, nullptr, kNone};
  const auto keep_sums = [&](int64_t row, int64_t first, const float* v) { to_sums(row, first, v, kSums); };
  const auto project = layer_product<T, Stored>(threads, x, a.rows, a.wqkv, false, keep_sums);
  // Overwrites what the first product stored past its last output.
  const auto keep_more = [&](int64_t row, int64_t first, const float* v) { to_sums(row, a.wqkv.outputs + first, v, kSums); };
  const auto& more = a.more.outputs ? a.more : a.wqkv;
  const auto project_more = layer_product<T, Stored>(threads, x, a.rows, more, false, keep_more);

  // If there are fewer rows than threads, heads are split among threads.
  int64_t parts = 1;
  while (a.rows * parts < 2 * threads && a.key_heads % (2 * parts) == 0) parts *= 2;
  if (a.rows * parts < 2 * threads) parts = a.key_heads;
  const int64_t per_part = a.key_heads / parts;
  const int64_t part_lanes = per_part * group * a.head_dim;
  const bool rounds_parts = parts == 1 || part_lanes % kGroupInputs == 0;  // else several tasks would share a group
  const float scale = 1.0f / std::sqrt(static_cast<float>(a.head_dim));
  const auto attend_part = [&](int64_t task) {
    const int64_t row = task / parts, first = task % parts * per_part, length = a.lens[row];
    X* out = attended.values + row * queries + first * group * a.head_dim;
    const float* of_row = sums + row * all;
    const float *cosine = a.cosine + row * a.half, *sine = a.sine + row * a.half;
    const auto turn = [&](int64_t head, int64_t half, bool finite, T* to) {
      const T* bias = a.bqkv ? a.bqkv + head * a.head_dim : nullptr;
      turn_head(of_row + head * a.head_dim, bias, cosine, sine, half, a.head_dim, finite, to);
    };
    T* q = scratch<T, kPacked>(per_part * group * a.head_dim);
    for (int64_t g = 0; g < per_part * group; ++g) turn(first * group + g, a.half, false, q + g * a.head_dim);
    for (int64_t k = first; k < first + per_part; ++k) {
      turn(a.heads + k, a.half, true, a.pool + a.first_slots[row] * lanes + k * a.head_dim);
      turn(a.heads + a.key_heads + k, 0, true, a.pool + a.second_slots[row] * lanes + k * a.head_dim);
    }
    const auto cache_of = [&](int64_t of) {
      return Cache<T>{a.pool, a.tables + of * 2 * a.table_len, a.table_len, a.block_elements, lanes, nullptr, nullptr};
    };
    const auto seen_by = [&](int64_t of) {
      const int64_t seen_from = first_seen(a.rules.window, a.lens[of]);
      Seen seen{nullptr, a.block_size, a.lens[of], seen_from};
      seen.entry = std::min<int64_t>(seen_from, a.lens[of]) / a.block_size;
      seen.own = a.lens[of];
      return seen;
    };
    const bool more = parts == 1 && row + 1 < a.rows;
    const Cache<T> mine = cache_of(row), after = more ? cache_of(row + 1) : mine;
    attend(q, mine, seen_by(row), length, a.rules, first, per_part, group, a.head_dim, scale, out,
           more ? Following<T>{&after, seen_by(row + 1)} : Following<T>{});
    if (rounds_parts) attended.round(row, first * group * a.head_dim, part_lanes);
  };

  const AddTo<T, kSums> add_attention{a.h, a.width, a.wo.scales, a.bo}, add_ffn{a.h, a.width, a.w_down.scales, a.b_down};
  const auto mix = layer_product<T, Stored>(threads, attended, a.rows, a.wo, false, add_attention);
  const Store<X, T> to_up{up.values, a.ffn, a.w_up.scales, a.b_up, a.activation};
  const Gate<X, integers ? kIntegerPanel : kPanel / 2> gate{up.values, a.ffn, a.w_up.scales, {a.activation}};
  const auto keep_up = [&](int64_t row, int64_t first, const float* v) {
    if (a.gated)
      gate(row, first, v);
    else
      to_up(row, first, v, kSums);
    up.round(row, first, std::min(kIntegerPanel, a.ffn - first));
  };
  const auto widen_rows = layer_product<T, Stored>(threads, x_ffn, a.rows, a.w_up, a.gated, keep_up);
  const auto narrow = layer_product<T, Stored>(threads, up, a.rows, a.w_down, false, add_ffn);

  Phases phases;
  const double seen = positions_seen(a.lens, 0, a.rows, a.rules.window);
  const auto add_product = [&](const char* name, const auto& product, const auto& w) {
    const double tiles = static_cast<double>(w.blocks * w.steps) * (product.gated ? 2 : 1);
    double elements = tiles * kTileElements, bytes = elements * sizeof(*w.values);
    if constexpr (integers)
      bytes = tiles * static_cast<double>(w.tile_bytes()), elements *= static_cast<double>(w.groups()) / static_cast<double>(w.steps);
    phases.add(product.tasks(), std::ref(product), name, bytes, 2.0 * a.rows * elements);
  };
  phases.add(a.rows, norm(a.attn_scale, a.attn_bias, x), "norm");
  add_product("product: q, k, v", project, a.wqkv);
  if (a.more.outputs) add_product("product: v", project_more, more);
  phases.add(a.rows * parts, attend_part, "attention of decode rows", seen * 2 * lanes * sizeof(T), seen * 4 * queries);
  const auto round_attended = [&](int64_t row) { attended.round(row, 0, queries); };
  if (integers && !rounds_parts) phases.add(a.rows, round_attended, "rounding of rows");
  add_product("product: attention output", mix, a.wo);
  phases.add(a.rows, norm(a.ffn_scale, a.ffn_bias, x_ffn), "norm");
  add_product("product: feed-forward up", widen_rows, a.w_up);
  add_product("product: feed-forward down", narrow, a.w_down);
  phases.run(pool);
}

ffi::Error decode_layer(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> live, ffi::Buffer<ffi::F32> h, ffi::AnyBuffer cache,
                        ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> lens, ffi::Buffer<ffi::S32> first_slots,
                        ffi::Buffer<ffi::S32> second_slots, ffi::Buffer<ffi::F32> cosine, ffi::Buffer<ffi::F32> sine,
                        ffi::Buffer<ffi::F32> slopes, ffi::Buffer<ffi::F32> sinks, ffi::AnyBuffer attn_scale,
                        ffi::AnyBuffer attn_bias, ffi::AnyBuffer wqkv, ffi::Buffer<ffi::F32> wqkv_scale, ffi::AnyBuffer more, ffi::AnyBuffer bqkv, ffi::AnyBuffer wo, ffi::Buffer<ffi::F32> wo_scale,
                        ffi::AnyBuffer bo, ffi::AnyBuffer ffn_scale, ffi::AnyBuffer ffn_bias, ffi::AnyBuffer w_up,
                        ffi::Buffer<ffi::F32> w_up_scale, ffi::AnyBuffer b_up, ffi::AnyBuffer w_down,
                        ffi::Buffer<ffi::F32> w_down_scale, ffi::AnyBuffer b_down, ffi::ResultBuffer<ffi::F32> h_out,
                        ffi::Result<ffi::AnyBuffer> cache_out, int64_t heads, int64_t key_heads, int64_t head_dim, int64_t ffn,
                        int64_t first_outputs, int64_t block_size, float softcap, int64_t window, float eps, float offset, int64_t layer_norm,
                        int64_t gated, int64_t activation) {
  if (cache.element_type() != cache_out->element_type() || cache.size_bytes() != cache_out->size_bytes() ||
      h.size_bytes() != h_out->size_bytes())
    return ffi::Error::InvalidArgument("decode_layer: results of the type and size of their arguments");
  if (h.untyped_data() != h_out->untyped_data()) std::memcpy(h_out->untyped_data(), h.untyped_data(), h.size_bytes());
  if (cache.untyped_data() != cache_out->untyped_data())
    std::memcpy(cache_out->untyped_data(), cache.untyped_data(), cache.size_bytes());
  const int64_t rows = std::clamp<int64_t>(live.typed_data()[0], 0, h.dimensions()[0]), width = h.dimensions()[1];
  if (rows == 0) return ffi::Error::Success();
  if (head_dim > kMostLanes) return ffi::Error::InvalidArgument("decode_layer: heads of at most 1024 lanes");
  for (const auto* given : {&attn_scale, &attn_bias, &bqkv, &bo, &ffn_scale, &ffn_bias, &b_up, &b_down})
    if (given->element_count() && given->element_type() != cache.element_type())
      return ffi::Error::InvalidArgument("decode_layer: one type for the cache and all parameters but matrices");
  const auto stored = wqkv.element_type();
  if (stored != cache.element_type() && stored != ffi::U8 && stored != ffi::S8)
    return ffi::Error::InvalidArgument("decode_layer: matrices of the cache's type, int8 or tiles of integers");
  if ((more.element_count() && more.element_type() != stored) || wo.element_type() != stored || w_up.element_type() != stored || w_down.element_type() != stored)
    return ffi::Error::InvalidArgument("decode_layer: one type for all matrices");
  const auto run = [&](auto* elements, auto* stored) {
    using T = std::remove_pointer_t<decltype(elements)>;
    using Stored = std::remove_const_t<std::remove_pointer_t<decltype(stored)>>;
    ffi::Error error = ffi::Error::Success();
    const auto weights = [&](ffi::AnyBuffer& w, const float* scales, int64_t inputs, int64_t outputs, int64_t halves) {
      WeightsOf<Stored> out{};
      if constexpr (kIntegers<Stored>) {
        const auto found = with_integers(w, scales, inputs, outputs, halves, [&](const IntegerWeights& given) {
          out = given;
          return ffi::Error::Success();
        });
        if (found.failure()) error = found;
      } else {
        out = {static_cast<const Stored*>(w.untyped_data()), scales, outputs, w.dimensions()[0] / halves, w.dimensions()[1]};
      }
      return out;
    };
    LayerArguments<T, Stored> a{};
    a.rows = rows, a.width = width, a.heads = heads, a.key_heads = key_heads, a.head_dim = head_dim, a.ffn = ffn;
    a.half = cosine.element_count() ? cosine.dimensions()[1] : 0;
    a.h = h_out->typed_data();
    a.pool = static_cast<T*>(cache_out->untyped_data());
    a.block_size = block_size, a.block_elements = elements_of_block(cache), a.table_len = tables.dimensions()[2];
    a.tables = tables.typed_data(), a.lens = lens.typed_data();
    a.first_slots = first_slots.typed_data(), a.second_slots = second_slots.typed_data();
    a.cosine = cosine.typed_data(), a.sine = sine.typed_data();
    a.attn_scale = values_of<T>(attn_scale), a.attn_bias = values_of<T>(attn_bias);
    a.ffn_scale = values_of<T>(ffn_scale), a.ffn_bias = values_of<T>(ffn_bias);
    a.wqkv = weights(wqkv, floats(wqkv_scale), width, first_outputs, 1), a.bqkv = values_of<T>(bqkv);
    if (more.element_count()) a.more = weights(more, nullptr, width, (heads + 2 * key_heads) * head_dim - first_outputs, 1);
    a.wo = weights(wo, floats(wo_scale), heads * head_dim, width, 1), a.bo = values_of<T>(bo);
    a.w_up = weights(w_up, floats(w_up_scale), width, ffn, gated ? 2 : 1), a.b_up = values_of<T>(b_up);
    a.w_down = weights(w_down, floats(w_down_scale), ffn, width, 1), a.b_down = values_of<T>(b_down);
    a.eps = eps, a.offset = offset, a.layer_norm = layer_norm != 0, a.gated = gated != 0;
    a.activation = static_cast<Activation>(activation);
    a.rules = Rules{softcap, window, floats(slopes), floats(sinks)};
    if (error.failure()) return error;
    run_layer(pool, a);
    return ffi::Error::Success();
  };
  const auto run_stored = [&](auto* elements) {
    using T = std::remove_pointer_t<decltype(elements)>;
    if (wqkv.element_type() == ffi::U8) return run(elements, static_cast<const Integers*>(nullptr));
    if (wqkv.element_type() == ffi::S8) return run(elements, static_cast<const int8_t*>(nullptr));
    return run(elements, static_cast<const T*>(nullptr));
  };
  if (cache.element_type() == ffi::F32) return run_stored(static_cast<float*>(nullptr));
  if (cache.element_type() == ffi::BF16) return run_stored(static_cast<Bf16*>(nullptr));
  return ffi::Error::InvalidArgument("decode_layer: float32 or bfloat16");
}

}  // namespace

#if APT_HAS_PART(1)

XLA_FFI_DEFINE_HANDLER_SYMBOL(apt_decode_layer, decode_layer,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S32>>()  // number of rows to compute (1,)
                                  .Arg<ffi::Buffer<ffi::F32>>()  // h (B, D), the residual stream
                                  .Arg<ffi::AnyBuffer>()         // pool (P, C, E)
                                  .Arg<ffi::Buffer<ffi::S32>>()  // tables (B, 2, J)
                                  .Arg<ffi::Buffer<ffi::S32>>()  // lens (B,), the row's own position included
                                  .Arg<ffi::Buffer<ffi::S32>>()  // slots of keys (B,)
                                  .Arg<ffi::Buffer<ffi::S32>>()  // slots of values (B,)
                                  .Arg<ffi::Buffer<ffi::F32>>()  // cosine (B, half), or (0, 0)
                                  .Arg<ffi::Buffer<ffi::F32>>()  // sine
                                  .Arg<ffi::Buffer<ffi::F32>>()  // slopes (N,), or (0,)
                                  .Arg<ffi::Buffer<ffi::F32>>()  // sinks (N,), or (0,)
                                  .Arg<ffi::AnyBuffer>()         // attention norm: scale (D,)
                                  .Arg<ffi::AnyBuffer>()         // its bias (D,), or (0,), as are all biases and scales below
                                  .Arg<ffi::AnyBuffer>()         // tiles for q, k and v
                                  .Arg<ffi::Buffer<ffi::F32>>()  // their scales
                                  .Arg<ffi::AnyBuffer>()         // tiles of another kind for the rest of them, or (0,)
                                  .Arg<ffi::AnyBuffer>()         // bias
                                  .Arg<ffi::AnyBuffer>()         // tiles of the output projection
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()  // feed-forward norm: scale (D,)
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()  // tiles up, or of gate and then of up
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()  // tiles down
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()  // h, in place
                                  .Ret<ffi::AnyBuffer>()         // pool, in place
                                  .Attr<int64_t>("heads")
                                  .Attr<int64_t>("key_heads")
                                  .Attr<int64_t>("head_dim")
                                  .Attr<int64_t>("ffn")
                                  .Attr<int64_t>("first_outputs")
                                  .Attr<int64_t>("block_size")
                                  .Attr<float>("softcap")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("eps")
                                  .Attr<float>("offset")
                                  .Attr<int64_t>("layer_norm")
                                  .Attr<int64_t>("gated")
                                  .Attr<int64_t>("activation"));

#endif
