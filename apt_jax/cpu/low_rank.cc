// Additions of adapters to products: each row is multiplied by a narrow matrix, and the result by a wide matrix.

#include "common.h"

namespace {

// Additions of S adapters to a matrix: A (S, rank, inputs) and B (S, rank, outputs).
template <typename T>
struct LowRank {
  const T *a, *b;
  int64_t rank, inputs, outputs;
};

constexpr int64_t kMostRank = 512;
constexpr int64_t kRowsTogether = 4;  // rows of one adapter, for which its matrices are read once

// inner[row][j] = A_j . x for `kRows` rows. The result of a row does not depend on the number of rows.
template <int kRows, typename T, typename X>
void narrow_rows(const T* a, int64_t rank, int64_t inputs, const X* const* x, float (*inner)[kMostRank]) {
  constexpr int kTogether = 4;
  const int64_t even = inputs / kLanes * kLanes;
  for (int64_t first = 0; first < rank; first += kTogether) {
    const int64_t count = std::min<int64_t>(kTogether, rank - first);
    const T* of[kTogether];
    for (int j = 0; j < kTogether; ++j) of[j] = a + (first + std::min<int64_t>(j, count - 1)) * inputs;
    Vec sums[kRows][kTogether] = {};
    for (int64_t i = 0; i < even; i += kLanes) {
      Vec columns[kTogether];
      APT_UNROLL
      for (int j = 0; j < kTogether; ++j) columns[j] = load(of[j] + i);
      APT_UNROLL
      for (int row = 0; row < kRows; ++row) {
        const Vec v = load(x[row] + i);
        APT_UNROLL
        for (int j = 0; j < kTogether; ++j) sums[row][j] = multiply_add(v, columns[j], sums[row][j]);
      }
    }
    for (int row = 0; row < kRows; ++row)
      for (int j = 0; j < count; ++j) {
        float total = sum(sums[row][j]);
        for (int64_t i = even; i < inputs; ++i) total += to_float(x[row][i]) * to_float(of[j][i]);
        inner[row][first + j] = total;
      }
  }
}

// y += inner B for outputs [begin, end) of `kRows` rows. `y` of a row begins at output 0.
template <int kRows, typename T>
void widen_rows(const T* b, int64_t rank, int64_t outputs, int64_t begin, int64_t end, const float (*inner)[kMostRank],
                float* const* y) {
  for (int64_t at = begin; at < end; at += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, end - at);
    Vec sums[kRows];
    APT_UNROLL
    for (int row = 0; row < kRows; ++row) sums[row] = load_some(y[row] + at, count);
    for (int64_t j = 0; j < rank; ++j) {
      const Vec v = load_some(b + j * outputs + at, count);
      APT_UNROLL
      for (int row = 0; row < kRows; ++row) sums[row] = multiply_add(splat(inner[row][j]), v, sums[row]);
    }
    APT_UNROLL
    for (int row = 0; row < kRows; ++row) store_some(y[row] + at, sums[row], count);
  }
}

// Rows with an adapter, grouped by adapter.
struct AdapterRows {
  std::vector<int64_t> rows;
  std::vector<std::pair<int64_t, int64_t>> tasks;  // first place in `rows`, number of rows

  AdapterRows(const int32_t* index, int64_t count, int64_t adapters) {
    for (int64_t row = 0; row < count; ++row)
      if (index[row] > 0 && index[row] <= adapters) rows.push_back(row);
    std::stable_sort(rows.begin(), rows.end(), [&](int64_t a, int64_t b) { return index[a] < index[b]; });
    const int64_t all = static_cast<int64_t>(rows.size());
    for (int64_t at = 0, next; at < all; at = next) {
      for (next = at + 1; next < all && next < at + kRowsTogether && index[rows[next]] == index[rows[at]];) ++next;
      if (next - at < kRowsTogether)  // one by one
        for (int64_t i = at; i < next; ++i) tasks.push_back({i, 1});
      else
        tasks.push_back({at, next - at});
    }
  }
};

template <int kRows, typename T, typename X>
void add_to_rows(const LowRank<T>& w, int64_t adapter, const X* const* x, float* const* y) {
  float inner[kRows][kMostRank];
  narrow_rows<kRows>(w.a + adapter * w.rank * w.inputs, w.rank, w.inputs, x, inner);
  widen_rows<kRows>(w.b + adapter * w.rank * w.outputs, w.rank, w.outputs, 0, w.outputs, inner, y);
}

// Adds to y (T, O) the products of x (T, I) with each row's adapter, for up to three parts of the outputs.
ffi::Error add_low_rank(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> index, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> y,
                        ffi::AnyBuffer a0, ffi::AnyBuffer b0, ffi::AnyBuffer a1, ffi::AnyBuffer b1, ffi::AnyBuffer a2,
                        ffi::AnyBuffer b2, ffi::ResultBuffer<ffi::F32> out, int64_t width0, int64_t width1, int64_t width2) {
  if (y.untyped_data() != out->untyped_data()) std::memcpy(out->untyped_data(), y.untyped_data(), y.size_bytes());
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1], outputs = y.dimensions()[1];
  const ffi::AnyBuffer *as[] = {&a0, &a1, &a2}, *bs[] = {&b0, &b1, &b2};
  const int64_t widths[] = {width0, width1, width2};
  if (width0 + width1 + width2 != outputs) return ffi::Error::InvalidArgument("add_low_rank: parts of all outputs");
  int64_t adapters = 0;
  for (int part = 0; part < 3; ++part) {
    if (!as[part]->element_count()) continue;
    const auto a = as[part]->dimensions(), b = bs[part]->dimensions();
    if (as[part]->element_type() != x.element_type() || bs[part]->element_type() != x.element_type())
      return ffi::Error::InvalidArgument("add_low_rank: one type for rows and matrices");
    if (a[2] != inputs || b[2] != widths[part] || a[0] != b[0] || a[1] != b[1] || a[1] > kMostRank)
      return ffi::Error::InvalidArgument("add_low_rank: matrices that do not fit");
    adapters = a[0];
  }
  const AdapterRows of(index.typed_data(), rows, adapters);
  const Timed timed("low-rank products of adapters", 0, 0);
  return of_type(x, [&](const auto* values) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(values)>>;
    parallel_for(pool, static_cast<int64_t>(of.tasks.size()), [&](int64_t task) {
      const auto [first, count] = of.tasks[task];
      const T* from[kRowsTogether];
      float* to[kRowsTogether];
      for (int64_t i = 0; i < count; ++i) {
        from[i] = values + of.rows[first + i] * inputs;
        to[i] = out->typed_data() + of.rows[first + i] * outputs;
      }
      const int64_t adapter = index.typed_data()[of.rows[first]] - 1;
      for (int part = 0; part < 3; ++part) {
        if (as[part]->element_count()) {
          const LowRank<T> w{static_cast<const T*>(as[part]->untyped_data()), static_cast<const T*>(bs[part]->untyped_data()),
                             as[part]->dimensions()[1], inputs, widths[part]};
          if (count == kRowsTogether)
            add_to_rows<kRowsTogether>(w, adapter, from, to);
          else
            add_to_rows<1>(w, adapter, from, to);
        }
        for (int64_t i = 0; i < count; ++i) to[i] += widths[part];
      }
    });
    return ffi::Error::Success();
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(apt_add_low_rank, add_low_rank,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S32>>()  // adapter of each row (T,), 0: none
                                  .Arg<ffi::AnyBuffer>()         // x (T, I)
                                  .Arg<ffi::Buffer<ffi::F32>>()  // y (T, O)
                                  .Arg<ffi::AnyBuffer>()         // A (S, R, I) of the first part, or (0,)
                                  .Arg<ffi::AnyBuffer>()         // B (S, R, O)
                                  .Arg<ffi::AnyBuffer>()         // of the second
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()  // of the third
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()  // y, in place
                                  .Attr<int64_t>("width0")       // outputs of each part
                                  .Attr<int64_t>("width1")
                                  .Attr<int64_t>("width2"));
