// Kernels for CPUs, called by XLA through its foreign function interface; `ops.py` wraps them. One translation unit:
//
//   linear.cc           rows times a matrix
//   elementwise.cc      what lies between products
//   attention.cc        attention of one query a row over keys and values
//   attention_tiles.cc  attention on matrix tiles (AMX): prefill, and one query a row over layer inputs
//
// XLA's own code for CPUs repacks weights at every product and copies blocks out of the pool before it attends to them.
// These read every weight and every cached element once.
// Sums and softmax are float32. What a row gives depends on that row alone, not on how many others there are.

#include "common.h"
#include "linear.cc"
#include "elementwise.cc"
#include "attention_tiles.cc"

int apt_has_tiles() {
#ifdef APT_AMX
  return has_tiles();
#else
  return 0;
#endif
}
