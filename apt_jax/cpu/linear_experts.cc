// Mixtures of experts: every row goes through the gated feed-forward layers of a few experts. Rows are sorted by expert; experts that
// no row goes to are not read.

#include <vector>

namespace {

// Adds the sums of an expert's rows to the rows that they belong to. An expert has a row at most once, and calls of one row have
// different outputs.
struct AddWeighted {
  float* out;
  int64_t outputs;
  const int64_t* rows;
  const float* weights;

  void operator()(int64_t row, int64_t first, const float* sums, int64_t count) const {
    count = std::min(count, outputs - first);
    float* to = out + rows[row] * outputs + first;
    for (int64_t i = 0; i < count; ++i) to[i] += weights[row] * sums[i];
  }
};

// Rows (T * E) in the order of their experts: the row and weight of each, and where the rows of every expert begin.
struct SortedRows {
  std::vector<int64_t> rows, starts;
  std::vector<float> weights;

  SortedRows(const int32_t* ids, const float* given, int64_t count, int64_t each, int64_t experts)
      : rows(count * each), starts(experts + 1), weights(count * each) {
    for (int64_t i = 0; i < count * each; ++i) ++starts[ids[i] + 1];
    for (int64_t e = 0; e < experts; ++e) starts[e + 1] += starts[e];
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t i = 0; i < count * each; ++i) {
      const int64_t to = next[ids[i]]++;
      rows[to] = i / each;
      weights[to] = given[i];
    }
  }
};

// Computes the weighted sum (T, D), float32, of the experts `ids` (T, E) for rows x (T, D): w_down(gating(gate, up)). `up` holds the
// tiles of every expert's gate and up (2F, D), one expert after another, `biases` (X, 2F) their biases, `down` the tiles of w_down
// (D, F).
ffi::Error experts(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> live, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> ids,
                   ffi::Buffer<ffi::F32> weights, ffi::AnyBuffer up, ffi::Buffer<ffi::F32> biases, ffi::AnyBuffer down,
                   ffi::ResultBuffer<ffi::F32> out, int64_t experts, int64_t activation, float alpha, float limit) {
  const int64_t rows = live_rows(live, x.dimensions()[0], out), width = x.dimensions()[1], each = ids.dimensions()[1];
  if (rows == 0) return ffi::Error::Success();
  const int64_t inner = up.dimensions()[0] / experts / 2 * 16;
  if (down.element_type() != up.element_type()) return ffi::Error::InvalidArgument("experts: weights of one type");
  for (int64_t i = 0; i < rows * each; ++i)
    if (ids.typed_data()[i] < 0 || ids.typed_data()[i] >= experts) return ffi::Error::InvalidArgument("experts: no such expert");
  const SortedRows sorted(ids.typed_data(), weights.typed_data(), rows, each, experts);
  int64_t active = 0;
  for (int64_t e = 0; e < experts; ++e) active += sorted.starts[e + 1] > sorted.starts[e];
  const Timed timed("experts", static_cast<double>((up.size_bytes() + down.size_bytes()) / experts * active),
                    6.0 * rows * each * width * inner, width, inner);
  if (biases.element_count() && static_cast<int64_t>(biases.element_count()) != experts * 2 * inner)
    return ffi::Error::InvalidArgument("experts: a bias for every output of gate and up");
  std::memset(out->untyped_data(), 0, rows * width * sizeof(float));
  return with_weights(x, up, nullptr, inner, 2 * experts, [&](const auto* in, const auto& all_up, auto word) {
    using W = std::remove_const_t<std::remove_pointer_t<decltype(all_up.values)>>;
    const TiledWeights<W> all_down{static_cast<const W*>(down.untyped_data()), nullptr, width, down.dimensions()[0] / experts,
                                   down.dimensions()[1]};
    using Given = std::remove_const_t<std::remove_pointer_t<decltype(in)>>;
    Given* own = scratch<Given, kSorted>(rows * width);
    Given* mixed = scratch<Given, kMixed>(rows * inner);
    const auto part = [](auto all, int64_t expert, int64_t halves) {
      all.values += expert * halves * all.blocks * all.steps * kTileElements;
      return all;
    };
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t first = sorted.starts[e], count = sorted.starts[e + 1] - first;
      if (count == 0) continue;
      for (int64_t r = 0; r < count; ++r)
        std::memcpy(own + r * width, in + sorted.rows[first + r] * width, width * sizeof(Given));
      const auto of_up = part(all_up, e, 2);
      const auto of_down = part(all_down, e, 1);
      const Gating gating{static_cast<Activation>(activation), biases.element_count() ? biases.typed_data() + e * 2 * inner : nullptr,
                          alpha, limit};
      const AddWeighted add{out->typed_data(), width, sorted.rows.data() + first, sorted.weights.data() + first};
#ifdef APT_AMX
      if constexpr (std::is_same_v<Given, Bf16>)
        if (has_tiles()) {
          const Rows result(mixed, count, inner * sizeof(Bf16));
          dense_tiled<Bf16, true>(pool, own, count, width, of_up, gating, [=](auto... values) { result.put(values...); });
          dense_tiled<float, false>(pool, mixed, count, inner, of_down, {kNone}, add);
          continue;
        }
#endif
      dense_panels<decltype(word)>(pool, own, count, width, of_up, true, Gate<Given>{mixed, inner, nullptr, gating});
      dense_panels<decltype(word)>(pool, mixed, count, inner, of_down, false,
                                   [&](int64_t row, int64_t at, const float* sums) { add(row, at, sums, kPanel); });
    }
    return ffi::Error::Success();
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(apt_experts, experts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S32>>()  // number of rows to compute (1,), or (0,)
                                  .Arg<ffi::AnyBuffer>()         // x (T, D)
                                  .Arg<ffi::Buffer<ffi::S32>>()  // experts of each row (T, E)
                                  .Arg<ffi::Buffer<ffi::F32>>()  // their weights (T, E)
                                  .Arg<ffi::AnyBuffer>()         // tiles of gate and up of every expert
                                  .Arg<ffi::Buffer<ffi::F32>>()  // biases of gate and up of every expert (X, 2F), or (0,)
                                  .Arg<ffi::AnyBuffer>()         // tiles of w_down of every expert
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("experts")
                                  .Attr<int64_t>("activation")
                                  .Attr<float>("alpha")
                                  .Attr<float>("limit"));
