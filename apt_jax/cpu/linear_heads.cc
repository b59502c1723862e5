// Products of every head with a separate matrix, from weights in the layout of checkpoints. Absorption uses them to map queries to
// layer inputs, and sums of layer inputs to values.

#pragma once

#include "linear_vector.cc"

namespace {

// True if products of T use instructions for pairs.
template <typename T>
constexpr bool kInPairs =
#ifdef APT_PAIRS
    std::is_same_v<T, Bf16>;
#else
    false;
#endif

// out[r * kPanel + i] = sum over h of x[r][h] w[h * stride + i], i < kPanel; `lanes` is even. Terms are added in the order of h.
// Not inlined, so that the compiler keeps the sums in registers.
template <int R, typename T>
__attribute__((noinline)) void onto_panel(const T* const* x, const T* w, int64_t lanes, int64_t stride, float* out) {
#ifdef APT_PAIRS
  if constexpr (kInPairs<T>) {
    Vec sums[R][kBlocks] = {};
    for (int64_t h = 0; h < lanes; h += 2) {
      __m512i weights[kBlocks];
      APT_UNROLL for (int c = 0; c < kBlocks; c += 2) {
        const __m512i one = _mm512_loadu_si512(w + h * stride + c * kLanes);
        const __m512i next = _mm512_loadu_si512(w + (h + 1) * stride + c * kLanes);
        weights[c] = _mm512_unpacklo_epi16(one, next);
        weights[c + 1] = _mm512_unpackhi_epi16(one, next);
      }
      APT_UNROLL for (int r = 0; r < R; ++r) {
        const __m512i input = Words<Bf16>::broadcast(x[r] + h, 0);
        APT_UNROLL for (int c = 0; c < kBlocks; ++c) sums[r][c] = Words<Bf16>::add(sums[r][c], weights[c], input);
      }
    }
    // The two vectors have alternating groups of four outputs.
    APT_UNROLL for (int r = 0; r < R; ++r)
      APT_UNROLL for (int c = 0; c < kBlocks; c += 2) {
        const Vec low = sums[r][c], high = sums[r][c + 1];
        float* to = out + r * kPanel + c * kLanes;
        store(to, __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
        store(to + kLanes, __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
      }
    return;
  }
#endif
  constexpr int C = kBlocksOf<R>;
  for (int from = 0; from < kBlocks; from += C) {
    Vec sums[R][C] = {};
    for (int64_t h = 0; h < lanes; ++h) {
      Vec weights[C];
      APT_UNROLL for (int c = 0; c < C; ++c) weights[c] = load(w + h * stride + (from + c) * kLanes);
      APT_UNROLL for (int r = 0; r < R; ++r) {
        const Vec input = splat(to_float(x[r][h]));
        APT_UNROLL for (int c = 0; c < C; ++c) sums[r][c] += weights[c] * input;
      }
    }
    APT_UNROLL for (int r = 0; r < R; ++r)
      APT_UNROLL for (int c = 0; c < C; ++c) store(out + r * kPanel + (from + c) * kLanes, sums[r][c]);
  }
}

template <int R = kMostRows, typename T>
void onto_panel(int64_t rows, const T* const* x, const T* w, int64_t lanes, int64_t stride, float* out) {
  if (rows == R) return onto_panel<R>(x, w, lanes, stride, out);
  if constexpr (R > 1) onto_panel<R - 1>(rows, x, w, lanes, stride, out);
}

constexpr int kDots = 4;  // rows, and outputs, whose products are computed together: the sums of 16 vectors form one vector

// Adds the products of x[r] and w[c], of `width` elements (whole vectors), to found[r * kDots + c], lane by lane.
template <int R, typename T>
__attribute__((noinline)) void add_dots(const T* const* x, const T* const* w, int64_t width, Vec* found) {
  Vec sums[R][kDots];
  APT_UNROLL for (int r = 0; r < R; ++r)
    APT_UNROLL for (int c = 0; c < kDots; ++c) sums[r][c] = found[r * kDots + c];
#ifdef APT_PAIRS
  if constexpr (kInPairs<T>) {
    for (int64_t i = 0; i < width; i += 2 * kLanes) {
      __m512i weights[kDots];
      APT_UNROLL for (int c = 0; c < kDots; ++c) weights[c] = Words<Bf16>::load_weights(w[c] + i, 0);
      APT_UNROLL for (int r = 0; r < R; ++r) {
        const __m512i input = Words<Bf16>::load_weights(x[r] + i, 0);
        APT_UNROLL for (int c = 0; c < kDots; ++c) sums[r][c] = Words<Bf16>::add(sums[r][c], weights[c], input);
      }
    }
  } else
#endif
    for (int64_t i = 0; i < width; i += kLanes) {
      Vec weights[kDots];
      APT_UNROLL for (int c = 0; c < kDots; ++c) weights[c] = load(w[c] + i);
      APT_UNROLL for (int r = 0; r < R; ++r) {
        const Vec input = load(x[r] + i);
        APT_UNROLL for (int c = 0; c < kDots; ++c) sums[r][c] += weights[c] * input;
      }
    }
  APT_UNROLL for (int r = 0; r < R; ++r)
    APT_UNROLL for (int c = 0; c < kDots; ++c) found[r * kDots + c] = sums[r][c];
}

// Returns the dot products of x[r] and w[c], of `width` elements, in lane r * kDots + c, for R rows.
template <int R, typename T>
Vec dots(const T* const* x, const T* const* w, int64_t width) {
  constexpr int64_t kWhole = kInPairs<T> ? 2 * kLanes : kLanes;
  constexpr int kRows = kRegisterLanes == kLanes ? R : 1;  // as many as there are registers for their sums
  Vec found[kDots * kDots] = {};
  const int64_t whole = width / kWhole * kWhole;
  for (int r = 0; r < R; r += kRows) add_dots<kRows>(x + r, w, whole, found + r * kDots);
  if (whole < width) {
    T copies[R + kDots][kWhole] = {};
    const T* rest[R + kDots];
    for (int i = 0; i < R + kDots; ++i) {
      std::copy_n((i < R ? x[i] : w[i - R]) + whole, width - whole, copies[i]);
      rest[i] = copies[i];
    }
    for (int r = 0; r < R; r += kRows) add_dots<kRows>(rest + r, rest + R, kWhole, found + r * kDots);
  }
  return sums(found);
}

template <int R = kDots, typename T>
Vec dots(int64_t rows, const T* const* x, const T* const* w, int64_t width) {
  if constexpr (R > 1)
    if (rows < R) return dots<R - 1>(rows, x, w, width);
  return dots<R>(x, w, width);
}

// Products of x (B, N, H) or (B, N, D), rows [first, last), with w (K, H, D), the matrix of each head's key head.
template <typename T>
struct HeadProducts {
  const T* x;
  const T* w;
  int64_t first, last, heads, key_heads, lanes, width;

  int64_t rows() const { return (last - first) * (heads / key_heads); }

  // Index, among all heads of all rows of x, of the i-th query head of a key head.
  int64_t place(int64_t key_head, int64_t i) const {
    const int64_t group = heads / key_heads;
    return (first + i / group) * heads + key_head * group + i % group;
  }

  void keys(ffi::ThreadPool& pool, T* out) const {
    const int64_t panels = (width + kPanel - 1) / kPanel;
    parallel_for(pool, key_heads * panels, [&](int64_t task) {
      const int64_t key_head = task / panels, at = task % panels * kPanel, count = std::min(kPanel, width - at);
      const T* matrix = w + key_head * lanes * width + at;
      int64_t stride = width;
      if (count < kPanel) {  // pad to a whole panel
        T* whole = scratch<T, kWeights>(lanes * kPanel);
        std::fill_n(whole, lanes * kPanel, T{});
        for (int64_t h = 0; h < lanes; ++h) std::copy_n(matrix + h * width, count, whole + h * kPanel);
        matrix = whole, stride = kPanel;
      }
      alignas(64) float sums[kMostRows * kPanel];
      for (int64_t i = 0; i < rows(); i += kMostRows) {
        const T* from[kMostRows];
        int64_t row[kMostRows];
        const int64_t mine = std::min<int64_t>(kMostRows, rows() - i);
        for (int64_t r = 0; r < mine; ++r) {
          row[r] = place(key_head, i + r);
          from[r] = x + row[r] * lanes;
        }
        onto_panel(mine, from, matrix, lanes, stride, sums);
        for (int64_t r = 0; r < mine; ++r) {
          T* to = out + row[r] * width + at;
          for (int64_t c = 0; c < kPanel; c += kLanes) store_some(to + c, load(sums + r * kPanel + c), count - c);
        }
      }
    });
  }

  void values(ffi::ThreadPool& pool, float* out) const {
    constexpr int64_t kOutputs = 16;  // of a task: their weights stay in the L1 cache for all rows
    const int64_t parts = (lanes + kOutputs - 1) / kOutputs;
    parallel_for(pool, key_heads * parts, [&](int64_t task) {
      const int64_t key_head = task / parts, begin = task % parts * kOutputs, end = std::min(lanes, begin + kOutputs);
      for (int64_t i = 0; i < rows(); i += kDots) {
        const T* from[kDots];
        float* to[kDots];
        const int64_t mine = std::min<int64_t>(kDots, rows() - i);
        for (int64_t r = 0; r < mine; ++r) {
          const int64_t row = place(key_head, i + r);
          from[r] = x + row * width, to[r] = out + row * lanes;
        }
        for (int64_t h = begin; h < end; h += kDots) {
          const T* of[kDots];
          const int64_t outputs = std::min<int64_t>(kDots, end - h);
          for (int64_t c = 0; c < kDots; ++c) of[c] = w + (key_head * lanes + h + std::min(c, outputs - 1)) * width;
          alignas(64) float found[kDots * kDots];
          store(found, dots(mine, from, of, width));
          for (int64_t r = 0; r < mine; ++r) std::copy_n(found + r * kDots, outputs, to[r] + h);
        }
      }
    });
  }
};

// Maps x (B, N, H) to (B, N, D), of the type of x, if `onto` is 1; otherwise x (B, N, D) to (B, N, H), float32. Rows outside the
// range are zeros.
ffi::Error head_products(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::S32> range,
                         ffi::Result<ffi::AnyBuffer> out, int64_t onto) {
  const int64_t batch = x.dimensions()[0], heads = x.dimensions()[1], out_width = out->dimensions()[2];
  const int64_t key_heads = w.dimensions()[0], lanes = w.dimensions()[1], width = w.dimensions()[2];
  const int64_t first = std::clamp<int64_t>(range.typed_data()[0], 0, batch);
  const int64_t last = std::clamp<int64_t>(range.typed_data()[1], first, batch);
  if (x.element_type() != w.element_type() || out->element_type() != (onto ? x.element_type() : ffi::F32))
    return ffi::Error::InvalidArgument("head_products: one type for rows and weights");
  if (key_heads == 0 || heads % key_heads || lanes % 2)
    return ffi::Error::InvalidArgument("head_products: key heads must divide heads, and lanes be even");
  const Timed timed("products of absorption", static_cast<double>(w.size_bytes()), 2.0 * (last - first) * heads * lanes * width);
  char* bytes = static_cast<char*>(out->untyped_data());
  const int64_t row_bytes = heads * out_width * (onto && x.element_type() == ffi::BF16 ? 2 : 4);
  std::memset(bytes, 0, first * row_bytes);
  std::memset(bytes + last * row_bytes, 0, (batch - last) * row_bytes);
  return of_type(x, [&](auto* rows) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(rows)>>;
    const HeadProducts<T> products{rows, static_cast<const T*>(w.untyped_data()), first, last, heads, key_heads, lanes, width};
    if (first < last && onto) products.keys(pool, static_cast<T*>(out->untyped_data()));
    if (first < last && !onto) products.values(pool, static_cast<float*>(out->untyped_data()));
    return ffi::Error::Success();
  });
}

}  // namespace

#if APT_HAS_PART(2)

XLA_FFI_DEFINE_HANDLER_SYMBOL(apt_head_products, head_products,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()         // x (B, N, H), or (B, N, D)
                                  .Arg<ffi::AnyBuffer>()         // w (K, H, D)
                                  .Arg<ffi::Buffer<ffi::S32>>()  // first row and one after the last (2,)
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("onto"));

#endif
