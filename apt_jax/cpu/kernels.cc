// Kernels for CPUs, called by XLA through its foreign function interface; `ops.py` wraps them. Compiled as one translation unit, or
// in parts (`APT_HAS_PART`):
//
//   layer.cc            a whole layer of decode rows
//   linear.cc           rows times a matrix
//   linear_tiles.cc     on matrix tiles (AMX)
//   linear_vector.cc    in vector registers
//   linear_heads.cc     every head times a separate matrix
//   linear_experts.cc   each row times the matrices of a few experts
//   linear_integer.cc   with weights of 4 to 8 bits, as integers
//   low_rank.cc         additions of adapters to products
//   elementwise.cc      operations between products
//   attention.cc        attention of one query per row over keys and values
//   attention_panels.cc attention of prompt chunks, in vector registers
//   attention_tiles.cc  attention on matrix tiles (AMX): prompt chunks, and one query per row over layer inputs
//   common.h            bfloat16 numbers, threads, scratch memory
//   vectors.h           vectors of 16 lanes, in one or several registers
//
// XLA's own code for CPUs repacks weights at every product and copies blocks out of the pool before it attends to them. These
// kernels read every weight and every cached element once. Sums and softmax are float32. The result of a row does not depend on
// other rows or their number.

#include "layer.cc"
#if APT_HAS_PART(1)
#include "linear_experts.cc"
#endif
#if APT_HAS_PART(2)
#include "low_rank.cc"
#endif

#if APT_HAS_PART(1)

// The instruction set that the kernels are compiled for.
extern "C" const char* apt_instructions() {
#if defined(__AVX512F__)
  return "AVX-512"
#if defined(APT_PAIRS)
         ", BF16"
#endif
#if defined(__AVX512VNNI__)
         ", VNNI"
#endif
      ;
#elif defined(__AVX2__)
  return "AVX2";
#elif defined(__ARM_NEON)
  return "NEON";
#else
  return "plain vectors";
#endif
}

int apt_has_tiles() {
#ifdef APT_AMX
  return has_tiles();
#else
  return 0;
#endif
}

#ifdef APT_TIMES

// Times of operations since the last call: lines of name, count, seconds, bytes and operations, separated by tabs.
extern "C" const char* apt_take_times() {
  static std::string out;
  std::lock_guard<std::mutex> lock(Timed::mutex());
  out.clear();
  for (const auto& [name, total] : Timed::totals()) {
    out += name;
    for (double value : {static_cast<double>(total.count), total.seconds, total.bytes, total.operations})
      out += "\t" + std::to_string(value);
    out += "\n";
  }
  Timed::totals().clear();
  return out.c_str();
}

#endif

#endif  // APT_HAS_PART(1)
