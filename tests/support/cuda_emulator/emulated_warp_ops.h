// The functions of apt_jax/lab/kernels/cuda/warp_ops.cuh on a CPU, and `emulate`, which runs the blocks of a grid, a cluster at a
// time: threads are fibers, which stop where the lanes of a warp meet. What the hardware leaves open is chosen by a seed:
// the order of warps, and whether copies and stores to other blocks take effect at once or as late as allowed. Shared
// memory begins as NaN, addresses are checked, lanes that meet at different instructions and barriers that never open
// are errors.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#define KERNEL extern "C"
#define DEVICE inline
#define CLUSTER_OF(blocks)
#define THREADS_OF(threads)

using Bits16 = uint16_t;
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct int4 { int x, y, z, w; };

namespace emulator {

constexpr int kLanes = 32;
constexpr size_t kStackBytes = 64 << 10;

enum Kind { kNone, kShuffle, kShuffleXor, kVote, kLoad4, kLoad2, kTransposed4, kTranspose, kMultiply, kWarpSync, kBlockSync, kArrive, kWait, kDone };

struct Copy { uint32_t to; const void* from; bool reads; };
struct Store { int rank; uint32_t at; uint8_t bytes[8]; int size; };

struct Fiber {
  jmp_buf context;
  ucontext_t start;
  std::vector<char> stack;
  int block = 0, thread = 0;
  Kind kind = kNone;
  void* operand = nullptr;
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open;
  std::vector<Store> stores;
};

struct Warp {
  Fiber* lanes = nullptr;
  int block = 0;
  bool done = false, at_block_barrier = false, at_cluster_barrier = false;
  uint64_t arrived = 0, waited = 0;
};

struct Machine {
  std::vector<std::vector<uint8_t>> shared;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Fiber* current = nullptr;
  jmp_buf scheduler;
  jmp_buf failed;
  std::string error;
  void** arguments = nullptr;
  void* kernel = nullptr;
  int num_blocks = 0, first_block = 0, cluster = 1, warps_a_block = 1;
  bool is_half = false, late_copies = false, late_stores = false;
  uint64_t random = 1;
};

inline Machine* machine = nullptr;

[[noreturn]] inline void fail(const std::string& what) {
  machine->error = what;
  _longjmp(machine->failed, 1);
}

inline uint64_t random_number() {
  uint64_t& x = machine->random;
  x ^= x << 13, x ^= x >> 7, x ^= x << 17;
  return x;
}

inline uint8_t* shared_memory(int rank, uint32_t at, int size) {
  std::vector<uint8_t>& memory = machine->shared[rank];
  if (at % size != 0) fail("shared address " + std::to_string(at) + " is not aligned to " + std::to_string(size));
  if (at + size > memory.size()) fail("shared address " + std::to_string(at) + " is out of bounds");
  return memory.data() + at;
}

template <typename T>
T load(int rank, uint32_t at) {
  T value;
  memcpy(&value, shared_memory(rank, at, sizeof(T)), sizeof(T));
  return value;
}

inline void do_copy(int rank, const Copy& c) {
  uint8_t* to = shared_memory(rank, c.to, 16);
  if (c.reads)
    memcpy(to, c.from, 16);
  else
    memset(to, 0, 16);
}

inline void do_store(const Store& s) {
  const size_t threads = machine->fibers.size() / machine->cluster;
  const Kind first = machine->fibers[s.rank * threads].kind;
  if (first == kNone || first == kDone) fail("a store to a block that has not begun, or has ended");
  memcpy(shared_memory(s.rank, s.at, s.size), s.bytes, s.size);
}

inline void stop(Kind kind, void* operand) {
  Fiber* me = machine->current;
  me->kind = kind, me->operand = operand;
  if (_setjmp(me->context) == 0) _longjmp(machine->scheduler, 1);
}

inline float widened(uint32_t pair, int i) {
  const uint16_t bits = static_cast<uint16_t>(pair >> (16 * i));
  if (machine->is_half) {
    _Float16 h;
    memcpy(&h, &bits, 2);
    return static_cast<float>(h);
  }
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float f;
  memcpy(&f, &wide, 4);
  return f;
}

inline uint16_t narrowed(float value) {
  uint16_t bits;
  if (machine->is_half) {
    const _Float16 h = static_cast<_Float16>(value);
    memcpy(&bits, &h, 2);
    return bits;
  }
  uint32_t wide;
  memcpy(&wide, &value, 4);
  if (value != value) return 0x7fff;
  return static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}

struct Shuffle { int64_t value, result; int from; };
struct ShuffleXor { float value, result; int with; };
struct Vote { bool set; uint32_t result; };
struct Load { uint32_t* to; uint32_t row; };
struct Multiply { float* c; const uint32_t* a; uint32_t b[2]; };
struct Transpose { uint32_t value, result; };

inline void load_matrices_of(Fiber* lanes, int count, bool transposed) {
  const int rank = lanes[0].block;
  for (int j = 0; j < count; ++j) {
    uint16_t matrix[8][8];
    for (int r = 0; r < 8; ++r)
      memcpy(matrix[r], shared_memory(rank, static_cast<Load*>(lanes[8 * j + r].operand)->row, 16), 16);
    for (int t = 0; t < kLanes; ++t) {
      const int r = t / 4, c = 2 * (t % 4);
      const uint32_t low = transposed ? matrix[c][r] : matrix[r][c], high = transposed ? matrix[c + 1][r] : matrix[r][c + 1];
      static_cast<Load*>(lanes[t].operand)->to[j] = low | high << 16;
    }
  }
}

// Fragments as the PTX manual has them for mma.m16n8k16.
inline void multiply_all(Fiber* lanes) {
  float a[16][16], b[16][8];
  for (int t = 0; t < kLanes; ++t) {
    const Multiply& m = *static_cast<Multiply*>(lanes[t].operand);
    for (int i = 0; i < 2; ++i) {
      const int k = 2 * (t % 4) + i;
      a[t / 4][k] = widened(m.a[0], i), a[t / 4 + 8][k] = widened(m.a[1], i);
      a[t / 4][k + 8] = widened(m.a[2], i), a[t / 4 + 8][k + 8] = widened(m.a[3], i);
      b[k][t / 4] = widened(m.b[0], i), b[k + 8][t / 4] = widened(m.b[1], i);
    }
  }
  for (int t = 0; t < kLanes; ++t) {
    float* c = static_cast<Multiply*>(lanes[t].operand)->c;
    for (int i = 0; i < 4; ++i) {
      const int r = t / 4 + i / 2 * 8, n = 2 * (t % 4) + i % 2;
      float sum = c[i];
      for (int k = 0; k < 16; ++k) sum += a[r][k] * b[k][n];
      c[i] = sum;
    }
  }
}

inline void transpose_all(Fiber* lanes) {
  uint16_t matrix[8][8];
  for (int t = 0; t < kLanes; ++t) {
    const uint32_t v = static_cast<Transpose*>(lanes[t].operand)->value;
    matrix[t / 4][2 * (t % 4)] = v & 0xffff, matrix[t / 4][2 * (t % 4) + 1] = v >> 16;
  }
  for (int t = 0; t < kLanes; ++t)
    static_cast<Transpose*>(lanes[t].operand)->result =
        matrix[2 * (t % 4)][t / 4] | static_cast<uint32_t>(matrix[2 * (t % 4) + 1][t / 4]) << 16;
}

// What happens when all lanes of a warp have met.
inline void meet(Warp& warp) {
  Fiber* lanes = warp.lanes;
  switch (lanes[0].kind) {
    case kShuffle:
      for (int t = 0; t < kLanes; ++t) {
        Shuffle& s = *static_cast<Shuffle*>(lanes[t].operand);
        s.result = static_cast<Shuffle*>(lanes[s.from % kLanes].operand)->value;
      }
      break;
    case kShuffleXor:
      for (int t = 0; t < kLanes; ++t) {
        ShuffleXor& s = *static_cast<ShuffleXor*>(lanes[t].operand);
        s.result = static_cast<ShuffleXor*>(lanes[t ^ s.with].operand)->value;
      }
      break;
    case kVote: {
      uint32_t votes = 0;
      for (int t = 0; t < kLanes; ++t) votes |= static_cast<uint32_t>(static_cast<Vote*>(lanes[t].operand)->set) << t;
      for (int t = 0; t < kLanes; ++t) static_cast<Vote*>(lanes[t].operand)->result = votes;
      break;
    }
    case kLoad4: load_matrices_of(lanes, 4, false); break;
    case kLoad2: load_matrices_of(lanes, 2, false); break;
    case kTransposed4: load_matrices_of(lanes, 4, true); break;
    case kTranspose: transpose_all(lanes); break;
    case kMultiply: multiply_all(lanes); break;
    case kBlockSync: warp.at_block_barrier = true; break;
    case kArrive:
      if (warp.arrived != warp.waited) fail("a second arrival at a cluster barrier without a wait");
      ++warp.arrived;
      break;
    case kWait:
      ++warp.waited;
      if (warp.arrived != warp.waited) fail("a wait at a cluster barrier without an arrival");
      warp.at_cluster_barrier = true;
      break;
    case kDone: warp.done = true; break;
    default: break;
  }
}

inline void body() {
  void** a = machine->arguments;
  using Function = void (*)(void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*);
  reinterpret_cast<Function>(machine->kernel)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]);
  stop(kDone, nullptr);
}

// Run the lanes of a warp to where they next meet.
inline void advance(Warp& warp) {
  for (int t = 0; t < kLanes; ++t) {
    Fiber& fiber = warp.lanes[t];
    machine->current = &fiber;
    if (_setjmp(machine->scheduler) == 0) {
      if (fiber.kind == kNone)
        setcontext(&fiber.start);
      else
        _longjmp(fiber.context, 1);
    }
  }
  for (int t = 1; t < kLanes; ++t)
    if (warp.lanes[t].kind != warp.lanes[0].kind) fail("lanes of a warp meet at different instructions");
  meet(warp);
}

// True for a warp that can go on; opens barriers.
inline bool is_ready(Warp& warp) {
  if (warp.done) return false;
  std::vector<Warp>& warps = machine->warps;
  const int count = machine->warps_a_block, first = warp.block * count;
  if (warp.at_block_barrier) {
    for (int i = first; i < first + count; ++i)
      if (!warps[i].at_block_barrier) return false;
    for (int i = first; i < first + count; ++i) warps[i].at_block_barrier = false;
  }
  if (warp.at_cluster_barrier) {
    for (const Warp& other : warps)
      if (other.arrived < warp.waited) return false;
    warp.at_cluster_barrier = false;
  }
  return true;
}

inline void run_cluster(int threads, int shared_bytes) {
  const int count = machine->cluster * threads;
  for (auto& memory : machine->shared) memory.assign(shared_bytes, 0xff);
  for (int i = 0; i < count; ++i) {
    Fiber& fiber = machine->fibers[i];
    fiber.block = i / threads, fiber.thread = i % threads, fiber.kind = kNone;
    fiber.groups.clear(), fiber.open.clear(), fiber.stores.clear();
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.data(), fiber.start.uc_stack.ss_size = fiber.stack.size();
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, body, 0);
  }
  const int num_warps = count / kLanes;
  for (int i = 0; i < num_warps; ++i) {
    machine->warps[i] = Warp{};
    machine->warps[i].lanes = &machine->fibers[kLanes * i], machine->warps[i].block = i / machine->warps_a_block;
  }
  // The first of an order of blocks, and of warps in each, that can go on; now and then the order changes.
  std::vector<uint64_t> order(num_warps);
  while (true) {
    if (random_number() % 64 == 0 || order[0] == 0)
      for (int i = 0; i < num_warps; ++i) {
        const bool with_block = i % machine->warps_a_block != 0;
        order[i] = (with_block ? order[i - 1] >> 32 : random_number() >> 33) << 32 | (random_number() >> 33) | 1;
      }
    int best = -1;
    for (int i = 0; i < num_warps; ++i)
      if (is_ready(machine->warps[i]) && (best < 0 || order[i] < order[best])) best = i;
    if (best < 0) break;
    advance(machine->warps[best]);
  }
  for (const Warp& warp : machine->warps)
    if (!warp.done) fail("warps wait at a barrier that never opens");
  for (const Fiber& fiber : machine->fibers)
    if (!fiber.stores.empty()) fail("a block ends before its stores to others are released");
}

}  // namespace emulator

// Returns an empty text, or what went wrong.
extern "C" const char* emulate(void* kernel, void** arguments, int blocks, int cluster, int threads, int shared_bytes,
                               int is_half, uint64_t seed) {
  using namespace emulator;
  static std::string error;
  Machine one;
  machine = &one;
  one.num_blocks = blocks, one.kernel = kernel, one.arguments = arguments, one.cluster = cluster, one.is_half = is_half != 0;
  one.warps_a_block = threads / kLanes, one.random = 2 * seed + 1;
  one.late_copies = seed % 2 != 0, one.late_stores = seed / 2 % 2 != 0;
  one.shared.resize(cluster), one.warps.resize(cluster * threads / kLanes), one.fibers.resize(cluster * threads);
  for (Fiber& fiber : one.fibers) fiber.stack.resize(kStackBytes);
  for (int i = 0; i < 8; ++i) random_number();
  if (_setjmp(one.failed) == 0)
    for (one.first_block = 0; one.first_block < blocks; one.first_block += cluster) run_cluster(threads, shared_bytes);
  error = one.error;
  return error.c_str();
}

// ---- what kernels call

inline int thread_index() { return emulator::machine->current->thread; }
inline int block_index() { return emulator::machine->first_block + emulator::machine->current->block; }
inline int num_blocks() { return emulator::machine->num_blocks; }
inline uint32_t cluster_rank() { return emulator::machine->current->block; }
inline uint32_t shared_base() { return 0; }
inline int opaque(int value) { return value; }

inline void block_sync() { emulator::stop(emulator::kBlockSync, nullptr); }
inline void warp_sync() { emulator::stop(emulator::kWarpSync, nullptr); }
inline void cluster_arrive() {
  auto& stores = emulator::machine->current->stores;
  for (const auto& s : stores) emulator::do_store(s);
  stores.clear();
  emulator::stop(emulator::kArrive, nullptr);
}
inline void cluster_wait() { emulator::stop(emulator::kWait, nullptr); }

inline float shuffle_xor(float value, int with) {
  emulator::ShuffleXor s{value, 0, with};
  emulator::stop(emulator::kShuffleXor, &s);
  return s.result;
}
inline int64_t shuffle(int64_t value, int from) {
  emulator::Shuffle s{value, 0, from};
  emulator::stop(emulator::kShuffle, &s);
  return s.result;
}
inline uint32_t vote(bool set) {
  emulator::Vote v{set, 0};
  emulator::stop(emulator::kVote, &v);
  return v.result;
}

inline void copy_async(uint32_t to, const void* from, bool reads) {
  if (reinterpret_cast<uintptr_t>(from) % 2 != 0) emulator::fail("a copy from an odd address");
  auto* me = emulator::machine->current;
  const emulator::Copy c{to, from, reads};
  if (emulator::machine->late_copies)
    me->open.push_back(c);
  else
    emulator::do_copy(me->block, c);
}
inline void copies_commit() {
  auto* me = emulator::machine->current;
  me->groups.push_back(std::move(me->open));
  me->open.clear();
}
template <int PENDING>
void copies_wait() {
  auto* me = emulator::machine->current;
  while (me->groups.size() > PENDING) {
    for (const auto& c : me->groups.front()) emulator::do_copy(me->block, c);
    me->groups.erase(me->groups.begin());
  }
}

template <typename T>
T load_shared(uint32_t at, T*) {
  return emulator::load<T>(emulator::machine->current->block, at);
}
template <typename T>
void store_shared(uint32_t at, T v) {
  memcpy(emulator::shared_memory(emulator::machine->current->block, at, sizeof(T)), &v, sizeof(T));
}
template <typename T>
void store_cluster(uint32_t at, int rank, T v) {
  if (rank < 0 || rank >= emulator::machine->cluster) emulator::fail("a store to a block outside the cluster");
  emulator::Store s{rank, at, {}, sizeof(T)};
  memcpy(s.bytes, &v, sizeof(T));
  if (emulator::machine->late_stores)
    emulator::machine->current->stores.push_back(s);
  else
    emulator::do_store(s);
}

inline void load_matrices(uint32_t (&m)[4], uint32_t row) {
  emulator::Load l{m, row};
  emulator::stop(emulator::kLoad4, &l);
}
inline void load_matrices(uint32_t (&m)[2], uint32_t row) {
  emulator::Load l{m, row};
  emulator::stop(emulator::kLoad2, &l);
}
inline void load_transposed(uint32_t (&m)[4], uint32_t row) {
  emulator::Load l{m, row};
  emulator::stop(emulator::kTransposed4, &l);
}
inline uint32_t transpose(uint32_t m) {
  emulator::Transpose t{m, 0};
  emulator::stop(emulator::kTranspose, &t);
  return t.result;
}
inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulator::Multiply m{c, a, {b0, b1}};
  emulator::stop(emulator::kMultiply, &m);
}
inline uint32_t packed(float low, float high) {
  return emulator::narrowed(low) | static_cast<uint32_t>(emulator::narrowed(high)) << 16;
}

inline float exponential(float x) { return std::exp(x); }
inline float as_float(int bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
