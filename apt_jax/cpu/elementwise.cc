// Operations between products: norms, and the split of one product into q, k and v.

#include "common.h"

namespace {

// Computes the layer or RMS norm of a row with scale (D,), to which `offset` is added, and bias (D,), or nullptr.
template <typename P, typename T>
void norm_row(const float* row, const P* scale, const P* bias, int64_t width, float eps, float offset, bool layer, T* out) {
  const int64_t even = width / kLanes * kLanes;
  float mean = 0;
  if (layer) {
    Vec total{};
    for (int64_t i = 0; i < even; i += kLanes) total += load(row + i);
    mean = sum(total);
    for (int64_t i = even; i < width; ++i) mean += row[i];
    mean /= static_cast<float>(width);
  }
  Vec squares{};
  for (int64_t i = 0; i < even; i += kLanes) {
    const Vec d = load(row + i) - mean;
    squares += d * d;
  }
  float square = sum(squares);
  for (int64_t i = even; i < width; ++i) square += (row[i] - mean) * (row[i] - mean);
  const float inverse = 1.0f / std::sqrt(square / static_cast<float>(width) + eps);
  for (int64_t i = 0; i < even; i += kLanes) {
    Vec v = (load(row + i) - mean) * inverse * (load(scale + i) + offset);
    if (bias) v += load(bias + i);
    store(out + i, v);
  }
  for (int64_t i = even; i < width; ++i)
    from_float((row[i] - mean) * inverse * (to_float(scale[i]) + offset) + (bias ? to_float(bias[i]) : 0), out[i]);
}

// Computes h (T, D) plus delta (T, D), or (0, 0), and the sum's layer or RMS norm with scale (D,), to which `offset` is added, and
// bias (D,), or (0,).
ffi::Error add_norm(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> live, ffi::Buffer<ffi::F32> h, ffi::Buffer<ffi::F32> delta, ffi::AnyBuffer scale,
                    ffi::AnyBuffer bias, ffi::ResultBuffer<ffi::F32> sum, ffi::Result<ffi::AnyBuffer> out, float eps,
                    float offset, int64_t layer) {
  live_rows(live, h.dimensions()[0], sum);
  const int64_t rows = live_rows(live, h.dimensions()[0], out), width = h.dimensions()[1];
  const Timed timed("sum and norm", 0, 0);
  const float* more = delta.element_count() ? delta.typed_data() : nullptr;
  if (bias.element_count() && bias.element_type() != scale.element_type())
    return ffi::Error::InvalidArgument("add_norm: one type for scale and bias");
  const auto of_output = [&](const auto* scales, auto* to) {
    const auto* biases = bias.element_count() ? static_cast<decltype(scales)>(bias.untyped_data()) : nullptr;
    constexpr int64_t kTogether = 8;
    parallel_for(pool, (rows + kTogether - 1) / kTogether, [&](int64_t task) {
      for (int64_t row = task * kTogether; row < std::min(rows, (task + 1) * kTogether); ++row) {
        const float* from = h.typed_data() + row * width;
        float* mine = sum->typed_data() + row * width;
        if (more)
          for (int64_t i = 0; i < width; ++i) mine[i] = from[i] + more[row * width + i];
        else
          std::copy_n(from, width, mine);
        norm_row(mine, scales, biases, width, eps, offset, layer != 0, to + row * width);
      }
    });
    return ffi::Error::Success();
  };
  return of_type(scale, [&](const auto* scales) { return of_type(*out, [&](auto* to) { return of_output(scales, to); }); });
}

// Rotates the first 2 * half of a head's `width` lanes: a, b to a cos - b sin, b cos + a sin. If `finite`, non-finite results
// become 0.
template <typename B, typename T>
void turn_head(const float* from, const B* bias, const float* cosine, const float* sine, int64_t half, int64_t width,
               bool finite, T* out) {
  float made[kMostLanes];
  for (int64_t i = 0; i < width; ++i) made[i] = from[i] + (bias ? to_float(bias[i]) : 0);
  for (int64_t i = 0; i < half; ++i) {
    const float a = made[i], b = made[i + half];
    made[i] = a * cosine[i] - b * sine[i];
    made[i + half] = b * cosine[i] + a * sine[i];
  }
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) store(out + i, load(made + i));
  for (; i < width; ++i) from_float(made[i], out[i]);
  if (finite)
    for (i = 0; i < width; ++i)
      if (!(std::fabs(to_float(out[i])) < INFINITY)) out[i] = T{};
}

// Splits the sums (T, (N + 2K) H) of one product, plus bias ((N + 2K) H,), or (0,), into q, k and v; q and k are rotated by cosine
// and sine (T, half), or (0, 0). Non-finite values of k and v become 0.
ffi::Error split_qkv(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> live, ffi::Buffer<ffi::F32> sums, ffi::AnyBuffer bias, ffi::Buffer<ffi::F32> cosine,
                     ffi::Buffer<ffi::F32> sine, ffi::Result<ffi::AnyBuffer> q, ffi::Result<ffi::AnyBuffer> k,
                     ffi::Result<ffi::AnyBuffer> v, int64_t head_dim) {
  int64_t rows = sums.dimensions()[0];
  const int64_t width = sums.dimensions()[1];
  if (k->element_type() != q->element_type() || v->element_type() != q->element_type())
    return ffi::Error::InvalidArgument("split_qkv: one type for q, k and v");
  for (auto* result : {&q, &k, &v}) rows = live_rows(live, sums.dimensions()[0], *result);
  const Timed timed("q, k and v from one product", 0, 0);
  const int64_t heads = q->dimensions()[1] / head_dim, key_heads = k->dimensions()[1] / head_dim;
  const int64_t half = cosine.element_count() ? cosine.dimensions()[1] : 0;
  if (head_dim > kMostLanes) return ffi::Error::InvalidArgument("split_qkv: heads of at most 1024 lanes");
  const auto of_bias = [&](const auto* biases, auto* queries) {
    using T = std::remove_pointer_t<decltype(queries)>;
    auto *keys = static_cast<T*>(k->untyped_data()), *values = static_cast<T*>(v->untyped_data());
    constexpr int64_t kTogether = 8;
    parallel_for(pool, (rows + kTogether - 1) / kTogether, [&](int64_t task) {
      for (int64_t row = task * kTogether; row < std::min(rows, (task + 1) * kTogether); ++row) {
        const float *cos = cosine.typed_data() + row * half, *sin = sine.typed_data() + row * half;
        for (int64_t i = 0; i < heads + 2 * key_heads; ++i) {
          const float* from = sums.typed_data() + row * width + i * head_dim;
          const auto* more = biases ? biases + i * head_dim : nullptr;
          if (i < heads)
            turn_head(from, more, cos, sin, half, head_dim, false, queries + (row * heads + i) * head_dim);
          else if (i < heads + key_heads)
            turn_head(from, more, cos, sin, half, head_dim, true, keys + (row * key_heads + i - heads) * head_dim);
          else
            turn_head(from, more, cos, sin, 0, head_dim, true, values + (row * key_heads + i - heads - key_heads) * head_dim);
        }
      }
    });
    return ffi::Error::Success();
  };
  return of_type(*q, [&](auto* queries) {
    if (!bias.element_count()) return of_bias(static_cast<const float*>(nullptr), queries);
    return of_type(bias, [&](const auto* biases) { return of_bias(biases, queries); });
  });
}

}  // namespace

#if APT_HAS_PART(1)

XLA_FFI_DEFINE_HANDLER_SYMBOL(apt_add_norm, add_norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S32>>()  // number of rows to compute (1,), or (0,)
                                  .Arg<ffi::Buffer<ffi::F32>>()  // h (T, D)
                                  .Arg<ffi::Buffer<ffi::F32>>()  // delta (T, D), or (0, 0)
                                  .Arg<ffi::AnyBuffer>()         // scale (D,)
                                  .Arg<ffi::AnyBuffer>()         // bias (D,), or (0,)
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps")
                                  .Attr<float>("offset")
                                  .Attr<int64_t>("layer"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(apt_split_qkv, split_qkv,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S32>>()  // number of rows to compute (1,), or (0,)
                                  .Arg<ffi::Buffer<ffi::F32>>()  // sums (T, (N + 2K) H)
                                  .Arg<ffi::AnyBuffer>()         // bias ((N + 2K) H,), or (0,)
                                  .Arg<ffi::Buffer<ffi::F32>>()  // cosine (T, half), or (0, 0)
                                  .Arg<ffi::Buffer<ffi::F32>>()  // sine
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("head_dim"));

#endif
