// Products of rows with a matrix: integer weights as integers, bfloat16 on matrix tiles if the CPU has them, otherwise in vector
// registers.

#include "linear_heads.cc"
#include "linear_integer.cc"
#include "linear_tiles.cc"
#include "linear_vector.cc"

namespace {

// Scales the sums of a row, adds a bias, applies the activation, and stores the result as Out.
template <typename Out, typename B>
struct Store {
  Out* out;
  int64_t outputs;
  const float* scales;  // of outputs, or nullptr, as are the biases
  const B* biases;
  Activation activation;

  Vec finished(Vec sum, int64_t output, int64_t count) const {
    if (scales) sum *= load_some(scales + output, count);
    if (biases) sum += load_some(biases + output, count);
    return activate(sum, activation);
  }

  // Stores `count` sums from output `first` on, without sums past the last output.
  void operator()(int64_t row, int64_t first, const float* sums, int64_t count) const {
    count = std::min(count, outputs - first);
    Out* to = out + row * outputs + first;
    for (int64_t i = 0; i < count; i += kLanes)
      store_some(to + i, finished(load_some(sums + i, count - i), first + i, count - i), count - i);
  }
};

// Calls run(rows, weights, word) with a matrix in tiles (blocks, steps, 32 / p, 16, p), or with `halves` concatenated matrices of
// `outputs`; `word` has the type of weights in products without matrix tiles.
template <typename Run>
ffi::Error with_weights(const ffi::AnyBuffer& x, const ffi::AnyBuffer& w, const float* scales, int64_t outputs, int64_t halves,
                        const Run& run) {
  if (w.dimensions().size() != 5) return ffi::Error::InvalidArgument("dense: weights are not laid out in tiles");
  const int64_t blocks = w.dimensions()[0] / halves, steps = w.dimensions()[1];
  const auto weights = [&](auto* values) {
    using W = std::remove_const_t<std::remove_pointer_t<decltype(values)>>;
    return TiledWeights<W>{values, scales, outputs, blocks, steps};
  };
  const bool is_wide = x.element_type() == ffi::F32;
  if (!is_wide && x.element_type() != ffi::BF16) return ffi::Error::InvalidArgument("dense: rows of float32 or bfloat16");
  if (w.element_type() == ffi::F32 && is_wide)
    return run(static_cast<const float*>(x.untyped_data()), weights(static_cast<const float*>(w.untyped_data())), float{});
  if (w.element_type() == ffi::BF16 && !is_wide)
    return run(static_cast<const Bf16*>(x.untyped_data()), weights(static_cast<const Bf16*>(w.untyped_data())), Bf16{});
  if (w.element_type() == ffi::S8 && is_wide)
    return run(static_cast<const float*>(x.untyped_data()), weights(static_cast<const int8_t*>(w.untyped_data())), float{});
  if (w.element_type() == ffi::S8)
    return run(static_cast<const Bf16*>(x.untyped_data()), weights(static_cast<const int8_t*>(w.untyped_data())), Bf16{});
  return ffi::Error::InvalidArgument("dense: weights of the type of the rows, or int8");
}

// Times a call of a product of rows with a matrix.
Timed timed_product(const char* kind, int64_t rows, int64_t width, int64_t outputs, const ffi::AnyBuffer& w) {
  return Timed(kind, static_cast<double>(w.size_bytes()), 2.0 * rows * width * outputs, width, outputs);
}

#ifdef APT_AMX
template <typename Rows>
constexpr bool kOnTiles = std::is_same_v<Rows, const Bf16*>;
#endif

// Stores the values of a gated layer for the sums of a panel of two matrices.
template <typename Out, int64_t kHalf = kPanel / 2>
struct Gate {
  Out* out;
  int64_t outputs;
  const float* scales;  // of gate, then of up, or nullptr
  Gating gating;

  void operator()(int64_t row, int64_t first, const float* sums) const {
    const int64_t count = std::min(kHalf, outputs - first);
    for (int64_t i = 0; i < count; i += kLanes) {
      const int64_t mine = std::min<int64_t>(kLanes, count - i);
      Vec gate = load(sums + i), up = load(sums + kHalf + i);
      if (scales) {
        gate *= load_some(scales + first + i, mine);
        up *= load_some(scales + outputs + first + i, mine);
      }
      store_some(out + row * outputs + first + i, gating(gate, up, first + i, mine, outputs), mine);
    }
  }
};

// Computes activate(x w^T * scales + bias) with weights in tiles.
ffi::Error dense(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> live, ffi::AnyBuffer x, ffi::AnyBuffer w,
                 ffi::Buffer<ffi::F32> scale, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> out, int64_t activation) {
  const int64_t rows = live_rows(live, x.dimensions()[0], out), width = x.dimensions()[1], outputs = out->dimensions()[1];
  if (rows == 0 || outputs == 0) return ffi::Error::Success();
  const Timed timed = timed_product("product", rows, width, outputs, w);
  const float* scales = floats(scale);
  const auto run = [&](const auto* biases, auto* to) {
    const Store<std::remove_pointer_t<decltype(to)>, std::remove_const_t<std::remove_pointer_t<decltype(biases)>>> finish{
        to, outputs, scales, biases, static_cast<Activation>(activation)};
    if (w.element_type() == ffi::U8)
      return with_integers(w, scales, width, outputs, 1, [&](const IntegerWeights& weights) {
        return multiply_rows(pool, x, rows, weights, false, [&](int64_t row, int64_t first, const float* sums) {
          finish(row, first, sums, kIntegerPanel);
        });
      });
    auto finish_scaled = finish;
    finish_scaled.scales = nullptr;
    return with_weights(x, w, scales, outputs, 1, [&](const auto* in, const auto& weights, auto word) {
#ifdef APT_AMX
      if constexpr (kOnTiles<decltype(in)>) {
        if (has_tiles()) {
          dense_tiled<float, false>(pool, in, rows, width, weights, {kNone}, finish_scaled);
          return ffi::Error::Success();
        }
      }
#else
      (void)finish_scaled;
#endif
      dense_panels<decltype(word)>(pool, in, rows, width, weights, false,
                                   [&](int64_t row, int64_t first, const float* sums) { finish(row, first, sums, kPanel); });
      return ffi::Error::Success();
    });
  };
  return of_type(*out, [&](auto* to) {
    if (!bias.element_count()) return run(static_cast<const float*>(nullptr), to);
    return of_type(bias, [&](const auto* biases) { return run(biases, to); });
  });
}

// Finds the largest product of each row: its index in `tokens` (T,), and in `trusted` (T,) true if it is finite and no product is
// NaN.
ffi::Error dense_argmax(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> live, ffi::AnyBuffer x, ffi::AnyBuffer w,
                        ffi::Buffer<ffi::F32> scale, ffi::ResultBuffer<ffi::S32> tokens, ffi::ResultBuffer<ffi::PRED> trusted,
                        int64_t outputs) {
  live_rows(live, x.dimensions()[0], trusted);
  const int64_t rows = live_rows(live, x.dimensions()[0], tokens), width = x.dimensions()[1];
  if (rows == 0) return ffi::Error::Success();
  const Timed timed = timed_product("product and best score", rows, width, outputs, w);
  const float* scales = floats(scale);
  constexpr int64_t kRange = 32;
  static_assert(kPanel % kRange == 0 && kIntegerPanel % kRange == 0);
  const int64_t ranges = (outputs + kRange - 1) / kRange;
  Best* found = scratch<Best, kBest>(rows * ranges);
  std::fill_n(found, rows * ranges, Best{});
  const auto keep = [&](int64_t row, int64_t first, const float* scores, int64_t count) {
    found[row * ranges + first / kRange] = best_of(scores, std::min(count, outputs - first), first);
  };
  const auto keep_scaled = [&](int64_t row, int64_t first, float* sums, int64_t count) {
    count = std::min(count, outputs - first);
    if (count <= 0) return;  // tiles after the last output
    if (scales)
      for (int64_t i = 0; i < count; ++i) sums[i] *= scales[first + i];
    keep(row, first, sums, count);
  };
  const auto error =
      w.element_type() == ffi::U8
          ? with_integers(w, scales, width, outputs, 1,
                          [&](const IntegerWeights& weights) {
                            return multiply_rows(pool, x, rows, weights, false, [&](int64_t row, int64_t first, float* sums) {
                              keep_scaled(row, first, sums, kIntegerPanel);
                            });
                          })
          : with_weights(x, w, scales, outputs, 1, [&](const auto* in, const auto& weights, auto word) {
#ifdef APT_AMX
              if constexpr (kOnTiles<decltype(in)>)
                if (has_tiles()) {
                  dense_tiled<float, false>(pool, in, rows, width, weights, {kNone}, keep);
                  return ffi::Error::Success();
                }
#endif
              dense_panels<decltype(word)>(pool, in, rows, width, weights, false, [&](int64_t row, int64_t first, float* sums) {
                keep_scaled(row, first, sums, kPanel);
              });
              return ffi::Error::Success();
            });
  if (error.failure()) return error;
  for (int64_t row = 0; row < rows; ++row) {
    Best best = found[row * ranges];
    for (int64_t i = 1; i < ranges; ++i) best.add(found[row * ranges + i]);
    tokens->typed_data()[row] = best.index;
    trusted->typed_data()[row] = !best.has_nan && std::isfinite(best.score);
  }
  return error;
}

// Computes activate(gate) * up (T, F), of the type of x, from x (T, I), the concatenated tiles of gate and up, and scales (2 F,),
// or (0,).
ffi::Error gated(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> live, ffi::AnyBuffer x, ffi::AnyBuffer w,
                 ffi::Buffer<ffi::F32> scale, ffi::Result<ffi::AnyBuffer> out, int64_t activation) {
  const int64_t rows = live_rows(live, x.dimensions()[0], out), width = x.dimensions()[1], outputs = out->dimensions()[1];
  const float* scales = floats(scale);
  const auto kind = static_cast<Activation>(activation);
  if (rows == 0) return ffi::Error::Success();
  const Timed timed = timed_product("gated product", rows, width, 2 * outputs, w);
  if (x.element_type() != out->element_type()) return ffi::Error::InvalidArgument("gated: one type for rows and result");
  if (w.element_type() == ffi::U8)
    return with_integers(w, scales, width, outputs, 2, [&](const IntegerWeights& weights) {
      return of_type(*out, [&](auto* to) {
        using Out = std::remove_pointer_t<decltype(to)>;
        return multiply_rows(pool, x, rows, weights, true, Gate<Out, kIntegerPanel>{to, outputs, scales, {kind}});
      });
    });
  return with_weights(x, w, scales, outputs, 2, [&](const auto* in, const auto& weights, auto word) {
    using Given = std::remove_const_t<std::remove_pointer_t<decltype(in)>>;
    auto* to = static_cast<Given*>(out->untyped_data());
#ifdef APT_AMX
    if constexpr (kOnTiles<decltype(in)>)
      if (has_tiles()) {
        const Rows result(to, rows, outputs * sizeof(Bf16));
        dense_tiled<Bf16, true>(pool, in, rows, width, weights, {kind}, [=](auto... part) { result.put(part...); });
        return ffi::Error::Success();
      }
#endif
    dense_panels<decltype(word)>(pool, in, rows, width, weights, true, Gate<Given>{to, outputs, scales, {kind}});
    return ffi::Error::Success();
  });
}

}  // namespace

#if APT_HAS_PART(2)

XLA_FFI_DEFINE_HANDLER_SYMBOL(apt_dense, dense,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S32>>()  // number of rows to compute (1,), or (0,)
                                  .Arg<ffi::AnyBuffer>()         // x (T, I)
                                  .Arg<ffi::AnyBuffer>()         // w in tiles, of numbers or integers
                                  .Arg<ffi::Buffer<ffi::F32>>()  // scales (O,), or (0,)
                                  .Arg<ffi::AnyBuffer>()         // bias (O,), or (0,)
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("activation"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(apt_dense_argmax, dense_argmax,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S32>>()  // number of rows to compute (1,), or (0,)
                                  .Arg<ffi::AnyBuffer>()         // x (T, I)
                                  .Arg<ffi::AnyBuffer>()         // w in tiles, of numbers or integers
                                  .Arg<ffi::Buffer<ffi::F32>>()  // scales (O,), or (0,)
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::PRED>>()
                                  .Attr<int64_t>("outputs"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(apt_gated, gated,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S32>>()  // number of rows to compute (1,), or (0,)
                                  .Arg<ffi::AnyBuffer>()         // x (T, I)
                                  .Arg<ffi::AnyBuffer>()         // tiles of gate, then of up
                                  .Arg<ffi::Buffer<ffi::F32>>()  // scales (2 F,), or (0,)
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("activation"));

#endif
