// Vectors of 16 lanes: one register with AVX-512, several if registers are smaller. Compilers keep a type that is wider than a
// register in memory, so such a vector is an array of register-sized vectors.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define APT_PAIRS 1  // dot products of pairs of bfloat16
#endif

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Unrolls a loop with a fixed number of iterations over vectors, which compilers keep in registers only if the loop is unrolled.
#if defined(__clang__)
#define APT_UNROLL _Pragma("unroll")
#else
#define APT_UNROLL _Pragma("GCC unroll 16")
#endif

namespace {

constexpr int kLanes = 16;

#if defined(__AVX512F__)

constexpr int kRegisterLanes = 16;
typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IntVec __attribute__((vector_size(64)));
typedef uint32_t UintVec __attribute__((vector_size(64)));
typedef uint16_t HalfVec __attribute__((vector_size(32)));
typedef int8_t ByteVec __attribute__((vector_size(16)));

template <typename V>
inline V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <typename V>
inline void store_as(void* p, const V& v) {
  std::memcpy(p, &v, sizeof v);
}

// The same bits as lanes of another type.
template <typename To, typename From>
inline To bits_as(const From& v) {
  static_assert(sizeof(To) == sizeof v);
  return load_as<To>(&v);
}

// Each lane as a number of another type.
template <typename To, typename From>
inline To convert(const From& v) {
  return __builtin_convertvector(v, To);
}

template <typename V>
inline V select(const IntVec& condition, const V& a, const V& b) {
  return condition ? a : b;
}

inline __m512 native(Vec v) { return load_as<__m512>(&v); }

inline Vec vec(__m512 v) { return load_as<Vec>(&v); }

inline Vec splat(float x) { return vec(_mm512_set1_ps(x)); }

inline IntVec splat(int32_t x) { return IntVec{} + x; }

inline float sum(Vec v) { return _mm512_reduce_add_ps(native(v)); }

inline float max(Vec v) { return _mm512_reduce_max_ps(native(v)); }

inline Vec max(Vec a, Vec b) { return vec(_mm512_max_ps(native(a), native(b))); }  // b where either is NaN

// a * b + c, rounded once.
inline Vec multiply_add(Vec a, Vec b, Vec c) { return vec(_mm512_fmadd_ps(native(a), native(b), native(c))); }

#else

#if defined(__AVX2__)
constexpr int kRegisterLanes = 8;  // of 32 bits
#else
constexpr int kRegisterLanes = 4;
#endif
constexpr int kRegisters = kLanes / kRegisterLanes;

template <typename T>
struct Lanes {
  typedef T Part __attribute__((vector_size(kRegisterLanes * sizeof(T))));
  Part parts[kRegisters];

  T operator[](int i) const { return parts[i / kRegisterLanes][i % kRegisterLanes]; }
};

typedef Lanes<float> Vec;
typedef Lanes<int32_t> IntVec;
typedef Lanes<uint32_t> UintVec;
typedef Lanes<uint16_t> HalfVec;
typedef Lanes<int8_t> ByteVec;

template <typename T>
struct Same {
  using type = T;
};

// An argument type from which the compiler does not deduce T.
template <typename T>
using Given = typename Same<T>::type;

#define APT_LANEWISE(op)                                                         \
  template <typename T>                                                          \
  inline Lanes<T> operator op(Lanes<T> a, const Lanes<T>& b) {                   \
    for (int i = 0; i < kRegisters; ++i) a.parts[i] = a.parts[i] op b.parts[i];  \
    return a;                                                                    \
  }                                                                              \
  template <typename T>                                                          \
  inline Lanes<T> operator op(Lanes<T> a, Given<T> b) {                          \
    for (int i = 0; i < kRegisters; ++i) a.parts[i] = a.parts[i] op b;           \
    return a;                                                                    \
  }                                                                              \
  template <typename T>                                                          \
  inline Lanes<T> operator op(Given<T> a, Lanes<T> b) {                          \
    for (int i = 0; i < kRegisters; ++i) b.parts[i] = a op b.parts[i];           \
    return b;                                                                    \
  }                                                                              \
  template <typename T, typename B>                                              \
  inline Lanes<T>& operator op##=(Lanes<T>& a, const B& b) {                     \
    return a = a op b;                                                           \
  }
APT_LANEWISE(+)
APT_LANEWISE(-)
APT_LANEWISE(*)
APT_LANEWISE(/)
APT_LANEWISE(&)
APT_LANEWISE(|)
APT_LANEWISE(^)
APT_LANEWISE(<<)
APT_LANEWISE(>>)
#undef APT_LANEWISE

// -1 in lanes where the comparison holds, otherwise 0.
#define APT_COMPARISON(op)                                                           \
  template <typename T>                                                              \
  inline IntVec operator op(const Lanes<T>& a, const Lanes<T>& b) {                  \
    IntVec out;                                                                      \
    for (int i = 0; i < kRegisters; ++i) out.parts[i] = a.parts[i] op b.parts[i];    \
    return out;                                                                      \
  }                                                                                  \
  template <typename T>                                                              \
  inline IntVec operator op(const Lanes<T>& a, Given<T> b) {                         \
    IntVec out;                                                                      \
    for (int i = 0; i < kRegisters; ++i) out.parts[i] = a.parts[i] op b;             \
    return out;                                                                      \
  }
APT_COMPARISON(<)
APT_COMPARISON(<=)
APT_COMPARISON(>)
APT_COMPARISON(>=)
APT_COMPARISON(==)
APT_COMPARISON(!=)
#undef APT_COMPARISON

template <typename T>
inline Lanes<T> operator-(Lanes<T> a) {
  for (auto& part : a.parts) part = -part;
  return a;
}

template <typename V>
inline V load_as(const void* p) {
  V v;
  for (int i = 0; i < kRegisters; ++i)
    std::memcpy(&v.parts[i], static_cast<const char*>(p) + i * sizeof v.parts[i], sizeof v.parts[i]);
  return v;
}

template <typename V>
inline void store_as(void* p, const V& v) {
  for (int i = 0; i < kRegisters; ++i)
    std::memcpy(static_cast<char*>(p) + i * sizeof v.parts[i], &v.parts[i], sizeof v.parts[i]);
}

// The same bits as lanes of another type.
template <typename To, typename From>
inline To bits_as(const From& v) {
  static_assert(sizeof(To) == sizeof v);
  To out;
  for (int i = 0; i < kRegisters; ++i) out.parts[i] = (typename To::Part)v.parts[i];
  return out;
}

// Each lane as a number of another type.
template <typename To, typename From>
inline To convert(const From& v) {
  To out;
  for (int i = 0; i < kRegisters; ++i) out.parts[i] = __builtin_convertvector(v.parts[i], typename To::Part);
  return out;
}

template <typename V>
inline V select(const IntVec& condition, V a, const V& b) {
  for (int i = 0; i < kRegisters; ++i) a.parts[i] = condition.parts[i] ? a.parts[i] : b.parts[i];
  return a;
}

template <typename T>
inline Lanes<T> splat(T x) {
  Lanes<T> v;
  for (auto& part : v.parts) {
    if constexpr (kRegisterLanes == 8)
      part = typename Lanes<T>::Part{x, x, x, x, x, x, x, x};
    else
      part = typename Lanes<T>::Part{x, x, x, x};
  }
  return v;
}

// b where either is NaN.
inline Vec::Part max(Vec::Part a, Vec::Part b) {
#if defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

inline Vec max(Vec a, const Vec& b) {
  for (int i = 0; i < kRegisters; ++i) a.parts[i] = max(a.parts[i], b.parts[i]);
  return a;
}

// Swaps lanes i and i ^ distance.
template <int distance, int... i>
inline Vec::Part swapped(Vec::Part v, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(v, v, (i ^ distance)...);
}

// Reduces all lanes with combine(a, b), a function of two registers.
template <int distance = kRegisterLanes / 2, typename Combine>
inline float across(Vec::Part v, const Combine& combine) {
  v = combine(v, swapped<distance>(v, std::make_integer_sequence<int, kRegisterLanes>{}));
  if constexpr (distance > 1)
    return across<distance / 2>(v, combine);
  else
    return v[0];
}

inline float sum(const Vec& v) {
  Vec::Part left = v.parts[0];
  for (int i = 1; i < kRegisters; ++i) left += v.parts[i];
  return across(left, [](Vec::Part a, Vec::Part b) { return a + b; });
}

inline float max(const Vec& v) {
  Vec::Part left = v.parts[0];
  for (int i = 1; i < kRegisters; ++i) left = max(left, v.parts[i]);
  return across(left, [](Vec::Part a, Vec::Part b) { return max(a, b); });
}

// a * b + c, rounded once if the CPU has an instruction for it; otherwise the rounding is up to the compiler.
inline Vec multiply_add(const Vec& a, const Vec& b, Vec c) {
#if defined(__AVX2__) && defined(__FMA__)
  for (int i = 0; i < kRegisters; ++i) c.parts[i] = _mm256_fmadd_ps(a.parts[i], b.parts[i], c.parts[i]);
  return c;
#else
  return a * b + c;
#endif
}

#endif

// Sums lanes at distance h within groups of 2 * h lanes; the result holds the sums of a, then the sums of b.
template <int h, typename R, int... i>
inline R fold(R a, R b, std::integer_sequence<int, i...>) {
  constexpr int n = sizeof...(i);
  constexpr auto at = [](int lane) { return lane / (n / 2) * n + lane % (n / 2) / h * 2 * h + lane % h; };
  return __builtin_shufflevector(a, b, at(i)...) + __builtin_shufflevector(a, b, (at(i) + h)...);
}

// Sums each of n registers with n lanes; the first register holds the sums.
template <int h, typename R>
inline void fold_all(R* registers) {
  for (int i = 0; i < h; ++i)
    registers[i] = fold<h>(registers[2 * i], registers[2 * i + 1], std::make_integer_sequence<int, kRegisterLanes>{});
  if constexpr (h > 1) fold_all<h / 2>(registers);
}

// Lane i of the result is the sum of v[i].
inline Vec sums(const Vec* v) {
#if defined(__AVX512F__)
  Vec registers[kLanes];
  std::copy_n(v, kLanes, registers);
  fold_all<kLanes / 2>(registers);
  return registers[0];
#else
  Vec out;
  for (int i = 0; i < kRegisters; ++i) {
    Vec::Part registers[kRegisterLanes];
    for (int j = 0; j < kRegisterLanes; ++j) {
      const Vec& of = v[i * kRegisterLanes + j];
      registers[j] = of.parts[0];
      for (int k = 1; k < kRegisters; ++k) registers[j] += of.parts[k];
    }
    fold_all<kRegisterLanes / 2>(registers);
    out.parts[i] = registers[0];
  }
  return out;
#endif
}

}  // namespace
