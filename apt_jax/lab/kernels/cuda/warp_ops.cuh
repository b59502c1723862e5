// What the kernel asks of the hardware, one instruction each: PTX for sm_90, version 8.0. tests/support/cuda_emulator has
// the same functions for a CPU. Shared memory is addressed in bytes from the start of a block's own.
#pragma once
#include <cstdint>

#define KERNEL extern "C" __global__
#define DEVICE __device__ __forceinline__
#define CLUSTER_OF(blocks) __cluster_dims__(blocks, 1, 1)
#define THREADS_OF(threads) __launch_bounds__(threads, 1)

using Bits16 = uint16_t;

DEVICE int thread_index() { return threadIdx.x; }
DEVICE int block_index() { return blockIdx.x; }
DEVICE int num_blocks() { return gridDim.x; }

DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

DEVICE uint32_t shared_base() {
  extern __shared__ __align__(16) uint8_t memory[];
  return static_cast<uint32_t>(__cvta_generic_to_shared(memory));
}

// The value, and what is computed from it stays where it is: outside of a loop it would take registers.
DEVICE int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

DEVICE void block_sync() { __syncthreads(); }
DEVICE void warp_sync() { __syncwarp(); }
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

DEVICE float shuffle_xor(float value, int with) { return __shfl_xor_sync(~0u, value, with); }
DEVICE int64_t shuffle(int64_t value, int from) { return __shfl_sync(~0u, value, from); }
DEVICE uint32_t vote(bool set) { return __ballot_sync(~0u, set); }

// 16 bytes from device memory, or zeros without reading any.
DEVICE void copy_async(uint32_t to, const void* from, bool reads) {
  const int bytes = reads ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

DEVICE float4 load_shared(uint32_t at, float4*) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
  return v;
}
DEVICE int4 load_shared(uint32_t at, int4*) {
  int4 v;
  asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
DEVICE float load_shared(uint32_t at, float*) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
  return v;
}
DEVICE int load_shared(uint32_t at, int*) {
  int v;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
DEVICE void store_shared(uint32_t at, int v) { asm volatile("st.shared.s32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }
DEVICE void store_shared(uint32_t at, float4 v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
DEVICE void store_shared(uint32_t at, int4 v) {
  asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Stores to the same address of another block of the cluster.
DEVICE uint32_t address_in(uint32_t at, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  return there;
}
DEVICE void store_cluster(uint32_t at, int rank, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address_in(at, rank)), "f"(v) : "memory");
}
DEVICE void store_cluster(uint32_t at, int rank, float2 v) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address_in(at, rank)), "f"(v.x), "f"(v.y) : "memory");
}
DEVICE void store_cluster(uint32_t at, int rank, uint32_t v) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address_in(at, rank)), "r"(v) : "memory");
}

// Four, or two, 8 x 8 matrices of 16-bit numbers; lane l gives the address of row l % 8 of matrix l / 8.
DEVICE void load_matrices(uint32_t (&m)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}
DEVICE void load_matrices(uint32_t (&m)[2], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(m[0]), "=r"(m[1]) : "r"(row) : "memory");
}
DEVICE void load_transposed(uint32_t (&m)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}
DEVICE uint32_t transpose(uint32_t m) {
  uint32_t t;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(m));
  return t;
}

// c += a b of 16 x 16 and 16 x 8. The text of this instruction and the next is what float16 and bfloat16 differ in:
// cuda_decode_absorbed.py replaces `bf16` by `f16`.
DEVICE void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE uint32_t packed(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

DEVICE float exponential(float x) { return __expf(x); }
DEVICE float as_float(int bits) { return __int_as_float(bits); }
