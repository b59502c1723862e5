// Kernels for CPUs, called by XLA through its foreign function interface; `ops.py` wraps them. One translation unit, or parts of it
// (`APT_HAS_PART`):
//
//   layer.cc            a whole layer of decode rows
//   linear.cc           rows times a matrix
//   linear_tiles.cc     on matrix tiles (AMX)
//   linear_vector.cc    in vector registers
//   linear_heads.cc     of every head with a matrix of its own
//   linear_integer.cc   with weights of 4 or 8 bits, as integers
//   low_rank.cc         what adapters add to products
//   elementwise.cc      what lies between products
//   attention.cc        attention of one query a row over keys and values
//   attention_panels.cc attention of chunks of prompts, in vector registers
//   attention_tiles.cc  attention on matrix tiles (AMX): chunks of prompts, and one query a row over layer inputs
//   common.h            numbers of bfloat16, threads, memory for a call
//   vectors.h           vectors of 16 lanes, in as many registers as they take
//
// XLA's own code for CPUs repacks weights at every product and copies blocks out of the pool before it attends to them.
// These read every weight and every cached element once.
// Sums and softmax are float32. What a row gives depends on that row alone, not on how many others there are.

#include "layer.cc"
#if APT_HAS_PART(2)
#include "low_rank.cc"
#endif

#if APT_HAS_PART(1)

// What the kernels are compiled for.
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

// What took how long since the last call of this: lines of name, count, seconds, bytes and operations, tabs between them.
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
