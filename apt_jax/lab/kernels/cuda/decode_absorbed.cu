// Absorbed decode attention in one pass over cached layer inputs, for chips with clusters (sm_90). Contract:
// apt_jax/lab/kernels/cuda_decode_absorbed.py, which lists the variants and launches them; `python -m tools.cuda_kernels` compiles.
//
// A cluster of CLUSTER blocks of WARPS warps takes a range of tiles of 16 * HALVES positions. Every warp has 16 * MT feature lanes of
// its own: it copies them from device memory once (x, a ring of STAGES tiles in shared memory), keeps the same lanes of the
// absorbed queries of 8 * NT heads in registers, and computes with both
//   its part of the scores of a tile,  S^T (positions x heads)     = x q^T,     to be summed over all warps of the cluster,
//   its lanes of the output,           Z^T (lanes x heads)        += x^T P^T,   in registers.
// Copies need no barrier but the warp's own. Scores are summed over the warps of a block in shared memory, then over blocks:
// each block owns HEADS / CLUSTER heads, gets their sums from all others through distributed shared memory, does the
// softmax, and stores P, and the factor of what Z^T holds so far, in all blocks.
//
// Three tiles are under way, so that one cluster barrier a tile is enough and Z's product lies between its two halves:
//   scores of tile i + 2 | softmax of tile i + 1 | arrive | Z of tile i, copy tile i + STAGES | wait
// Partial scores at their owner have 2 buffers. P has 3: after the barrier of tile i a block may still read the P of tile i,
// while another stores that of tile i + 2.
//
// Sums have a fixed order: equal inputs give equal bits. A slot that is not the row's own is not read.
#ifdef __CUDACC__
#include "warp_ops.cuh"
#else
#include "emulated_warp_ops.h"
#endif

constexpr float kMasked = -1e30f;    // as triton_common.MASKED
constexpr int kItemFields = 8;       // triton_work_list.WorkList.items
constexpr int kScoreBuffers = 2;
constexpr int kWeightBuffers = 3;

// Places of `shape`: what else is the same for all items. Names in Python: cuda_decode_absorbed.Shape.
enum Field { kHeads, kWidth, kValueWidth, kEntries, kBlockSize, kBlockStride, kWindow, kSoftcap, kHasRanges, kHasSlopes, kGroups, kGroupHeads, kItems, kNumFields };

template <int CLUSTER, int WARPS, int MT, int NT, int HALVES, int STAGES>
struct Layout {
  static constexpr int kTile = 16 * HALVES;  // positions
  static constexpr int kThreads = 32 * WARPS;
  static constexpr int kAllHeads = 8 * NT;
  static constexpr int kOwnHeads = kAllHeads / CLUSTER;
  static constexpr int kHeadsAtOnce = 32 / kTile;                            // softmax of a warp: a lane a position
  static constexpr int kRounds = (kOwnHeads + kHeadsAtOnce * WARPS - 1) / (kHeadsAtOnce * WARPS);
  static constexpr int kPitch = 32 * MT + 16;  // an odd number of 16 bytes: eight rows lie in different banks
  static constexpr int kRowP = 2 * kTile + 16;
  // Bytes of shared memory, one after another.
  static constexpr int kInputs = 0;                                                            // x: stage, warp, position
  static constexpr int kOfWarps = kInputs + STAGES * WARPS * kTile * kPitch;                   // scores: warp, heads / 8, lane
  static constexpr int kOfBlocks = kOfWarps + WARPS * NT * 32 * 16;                            // scores: buffer, block, head
  static constexpr int kWeights = kOfBlocks + kScoreBuffers * CLUSTER * kOwnHeads * kTile * 4;  // P: buffer, head
  static constexpr int kFactors = kWeights + kWeightBuffers * kAllHeads * kRowP;                    // factor and l: buffer, head
  static constexpr int kSteps = kFactors + kWeightBuffers * kAllHeads * 8;                          // Step: stage, warp
  static constexpr int kFields = kSteps + STAGES * WARPS * 32;                                 // `shape`
  static constexpr int kBytes = kFields + kNumFields * 4;
  static_assert(kAllHeads % CLUSTER == 0 && STAGES > 3 && HALVES <= 2, "");
};

// A number of `shape`, which lies in shared memory: in registers it would push others out.
DEVICE int read_field(uint32_t fields, Field field) {
  return load_shared(fields + 4 * field, static_cast<int*>(nullptr));
}

// A tile on its way through the pipeline, the same for all lanes of a warp.
struct Step {
  int row, place, length, position;
  uint32_t own;  // bit t: position + t is to be read
  int is_first, is_last;
};

DEVICE void write_step(uint32_t at, const Step& s) {
  store_shared(at, int4{s.row, s.place, s.length, s.position});
  store_shared(at + 16, int4{static_cast<int>(s.own), s.is_first, s.is_last, 0});
}

DEVICE Step read_step(uint32_t at) {
  const int4 a = load_shared(at, static_cast<int4*>(nullptr)), b = load_shared(at + 16, static_cast<int4*>(nullptr));
  return Step{a.x, a.y, a.z, a.w, static_cast<uint32_t>(b.x), b.y, b.z};
}

// Walks the tiles of a range of items, one tile ahead of the copies: where its positions lie takes a load to know.
template <int TILE>
struct Cursor {
  const int *items, *tables, *ranges;
  uint32_t fields;
  int item, end, tile, last, table;
  Step step;
  int64_t offset;  // of lane % 16's position, in elements of the pool

  DEVICE void seek(int lane) {
    while (tile >= last) {
      if (item == end) return;
      const int* fields = items + kItemFields * item++;
      table = fields[1], tile = fields[3], last = fields[4];
      step.row = fields[0], step.length = fields[2], step.place = fields[7];
      step.is_first = 1;
    }
    step.position = TILE * tile;
    step.is_last = tile + 1 == last;
    const int position = step.position + lane % TILE, window = read_field(fields, kWindow), block_size = read_field(fields, kBlockSize);
    bool own = position < step.length && (window == 0 || position >= step.length - window);
    offset = 0;
    if (own) {
      const int entry = position / block_size, order = position % block_size;
      int slot = order;
      if (read_field(fields, kHasRanges)) {
        const int* range = ranges + 2 * (static_cast<int64_t>(table) * read_field(fields, kEntries) + entry);
        const int from = range[0], to = range[1];
        slot = from <= to ? from + order : from - 1 - order;
        own = order < (from <= to ? to - from : from - to);
      }
      const int block = tables[static_cast<int64_t>(table) * read_field(fields, kEntries) + entry];
      offset = static_cast<int64_t>(block) * read_field(fields, kBlockStride) + static_cast<int64_t>(slot) * read_field(fields, kWidth);
    }
    step.own = vote(own && lane < TILE);
  }

  DEVICE void next(int lane) {
    ++tile;
    step.is_first = 0;
    seek(lane);
  }
};

template <int CLUSTER, int WARPS, int MT, int NT, int HALVES, int STAGES>
struct Warp {
  using L = Layout<CLUSTER, WARPS, MT, NT, HALVES, STAGES>;
  int lane, warp, rank;
  uint32_t shared;
  int first_lane;  // of the warp's features
  int first_head, heads;
  uint32_t q[MT][NT][2];
  float z[MT][NT][4];
  float m[L::kRounds], l[L::kRounds];  // of the heads that this block owns

  DEVICE uint32_t inputs(int step) const {
    return shared + L::kInputs + ((step % STAGES) * WARPS + warp) * L::kTile * L::kPitch;
  }
  DEVICE uint32_t step_at(int step) const { return shared + L::kSteps + ((step % STAGES) * WARPS + warp) * 32; }
  DEVICE uint32_t scores_of_blocks(int step, int block, int own_head, int position) const {
    return shared + L::kOfBlocks +
           ((((step % kScoreBuffers) * CLUSTER + block) * L::kOwnHeads + own_head) * L::kTile + position) * 4;
  }
  DEVICE uint32_t weights(int step, int head) const {
    return shared + L::kWeights + ((step % kWeightBuffers) * L::kAllHeads + head) * L::kRowP;
  }
  DEVICE uint32_t factors(int step, int head) const {
    return shared + L::kFactors + ((step % kWeightBuffers) * L::kAllHeads + head) * 8;
  }

  DEVICE int field(Field of) const { return read_field(shared + L::kFields, of); }

  DEVICE void clear() {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int i = 0; i < 4; ++i) z[mt][nt][i] = 0.0f;
  }

  // Start the copy of a tile, if there is one; a group of copies either way.
  DEVICE void copy(int step, int num_steps, Cursor<L::kTile>& cursor, const Bits16* pool) {
    if (step < num_steps) {
      if (lane == 0) write_step(step_at(step), cursor.step);
      const int lane = opaque(this->lane);
#pragma unroll
      for (int i = 0; i < MT * HALVES; ++i) {
        const int chunk = 32 * i + lane, position = chunk / (2 * MT), column = chunk % (2 * MT);
        const int64_t offset = shuffle(cursor.offset, position);
        const int feature = first_lane + 8 * column;
        const bool reads = (cursor.step.own >> position & 1) != 0 && feature < field(kWidth);
        copy_async(inputs(step) + position * L::kPitch + 16 * column, pool + (reads ? offset + feature : 0), reads);
      }
      cursor.next(lane);
    }
    copies_commit();
  }

  // The warp's lanes of the absorbed queries of a row, as right sides of 16 x 8 products.
  DEVICE void load_queries(const Bits16* queries, int row) {
    const int lane = opaque(this->lane);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const int head = 8 * nt + lane / 4;
      const Bits16* of_head = queries + (static_cast<int64_t>(row) * field(kHeads) + first_head + head) * field(kWidth);
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int feature = first_lane + 16 * mt + 8 * i + 2 * (lane % 4);
          const bool there = head < heads && feature < field(kWidth);
          q[mt][nt][i] = there ? *reinterpret_cast<const uint32_t*>(of_head + feature) : 0u;
        }
    }
  }

  // This warp's part of the scores of a tile, 16 positions at a time, and the block's sums of them.
  DEVICE void scores(int step, const Bits16* queries) {
    copies_wait<STAGES - 3>();
    warp_sync();
    const Step of = read_step(step_at(step));
    if (of.is_first) load_queries(queries, of.row);
    const uint32_t of_warps = shared + L::kOfWarps;
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      float s[NT][4] = {};
      const uint32_t row = inputs(step) + (16 * half + lane % 16) * L::kPitch + (lane / 16) * 16;
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        uint32_t x[4];
        load_matrices(x, row + 32 * mt);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) multiply(s[nt], x, q[mt][nt][0], q[mt][nt][1]);
      }
      if (half > 0) block_sync();  // the half before has been read
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
        store_shared(of_warps + ((warp * NT + nt) * 32 + lane) * 16, float4{s[nt][0], s[nt][1], s[nt][2], s[nt][3]});
      block_sync();
      sum_warps(step, half);
    }
  }

  // The sums of the block's warps for 16 positions, to the owners of the heads.
  DEVICE void sum_warps(int step, int half) {
    const int lane = opaque(this->lane);
    const uint32_t of_warps = shared + L::kOfWarps;
    for (int i = 32 * warp + lane; i < 32 * NT; i += L::kThreads) {
      float4 sum = load_shared(of_warps + i * 16, static_cast<float4*>(nullptr));
#pragma unroll
      for (int w = 1; w < WARPS; ++w) {
        const float4 more = load_shared(of_warps + (w * NT * 32 + i) * 16, static_cast<float4*>(nullptr));
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
      }
      const int position = 16 * half + i % 32 / 4, head = i / 32 * 8 + 2 * (i % 4);
      const int owner = head / L::kOwnHeads, owner2 = (head + 1) / L::kOwnHeads;
      const uint32_t at = scores_of_blocks(step, rank, head % L::kOwnHeads, position);
      const uint32_t at2 = scores_of_blocks(step, rank, (head + 1) % L::kOwnHeads, position);
      store_cluster(at, owner, sum.x);
      store_cluster(at2, owner2, sum.y);
      store_cluster(at + 8 * 4, owner, sum.z);
      store_cluster(at2 + 8 * 4, owner2, sum.w);
    }
  }

  DEVICE float by_rules(float s, const Step& of, int position, int head, const float* slopes) const {
    const float cap = as_float(field(kSoftcap));
    if (cap != 0.0f) s = cap * (1.0f - 2.0f / (1.0f + exponential(2.0f * s / cap)));  // tanh
    if (field(kHasSlopes) && head < heads) s += slopes[first_head + head] * static_cast<float>(position - (of.length - 1));
    return s;
  }

  // Softmax of the heads that this block owns, and what all blocks need of it.
  DEVICE void softmax(int step, const float* slopes, float* piece_m, float* piece_l) {
    const Step of = read_step(step_at(step));
    const int t = lane % L::kTile;
    const bool own = (of.own >> t & 1) != 0;
#pragma unroll
    for (int round = 0; round < L::kRounds; ++round) {
      const int first = L::kHeadsAtOnce * (round * WARPS + warp);
      if (first >= L::kOwnHeads) break;
      const bool there = first + lane / L::kTile < L::kOwnHeads;
      const int own_head = there ? first + lane / L::kTile : first, head = rank * L::kOwnHeads + own_head;
      if (of.is_first) m[round] = kMasked, l[round] = 0.0f;
      float s = 0.0f;
#pragma unroll
      for (int block = 0; block < CLUSTER; ++block)
        s += load_shared(scores_of_blocks(step, block, own_head, t), static_cast<float*>(nullptr));
      s = own ? by_rules(s, of, of.position + t, head, slopes) : kMasked;
      float top = s;
#pragma unroll
      for (int with = L::kTile / 2; with > 0; with /= 2) {
        const float other = shuffle_xor(top, with);
        top = other > top ? other : top;
      }
      top = top > m[round] ? top : m[round];
      const float p = own ? exponential(s - top) : 0.0f, before = exponential(m[round] - top);
      float sum = p;
#pragma unroll
      for (int with = L::kTile / 2; with > 0; with /= 2) sum += shuffle_xor(sum, with);
      l[round] = l[round] * before + sum;
      m[round] = top;
      const uint32_t pair = packed(p, shuffle_xor(p, 1));
      if (there && t % 2 == 0)
        for (int block = 0; block < CLUSTER; ++block) store_cluster(weights(step, head) + 2 * t, block, pair);
      if (there && t < CLUSTER) store_cluster(factors(step, head), t, float2{before, l[round]});
      if (there && t == 0 && of.is_last && of.place >= 0 && head < heads) {
        const int64_t at = static_cast<int64_t>(of.place) * field(kHeads) + first_head + head;
        piece_m[at] = m[round], piece_l[at] = l[round];
      }
    }
  }

  // z = factor z + x^T P^T of a tile; after the last one of an item z goes to its place.
  DEVICE void output(int step, Bits16* out, float* piece_z) {
    const Step of = read_step(step_at(step));
    float factor[NT][2];  // of two heads
    bool changes = false;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        factor[nt][i] = load_shared(factors(step, 8 * nt + 2 * (lane % 4) + i), static_cast<float*>(nullptr));
        changes = changes || factor[nt][i] != 1.0f;
      }
    if (vote(changes) != 0) {
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
          for (int i = 0; i < 4; ++i) z[mt][nt][i] *= factor[nt][i % 2];
    }
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      uint32_t p[NT][2];
      const uint32_t of_half = lane / 8 % 2 * 16 + 32 * half;
#pragma unroll
      for (int nt = 0; nt + 1 < NT; nt += 2) {
        uint32_t two[4];
        load_matrices(two, weights(step, 8 * nt + lane / 16 * 8 + lane % 8) + of_half);
        p[nt][0] = two[0], p[nt][1] = two[1], p[nt + 1][0] = two[2], p[nt + 1][1] = two[3];
      }
      if constexpr (NT % 2 == 1) load_matrices(p[NT - 1], weights(step, 8 * (NT - 1) + lane % 8) + of_half);
      const uint32_t row = inputs(step) + (16 * half + lane % 8 + lane / 16 * 8) * L::kPitch + lane / 8 % 2 * 16;
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        uint32_t x[4];
        load_transposed(x, row + 32 * mt);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) multiply(z[mt][nt], x, p[nt][0], p[nt][1]);
      }
    }
    if (of.is_last) {
      if (of.place < 0)
        store_result(step, of.row, out);
      else
        store_partial(of.place, piece_z);
      clear();
    }
  }

  DEVICE void store_result(int step, int row, Bits16* out) const {
    const int width = field(kValueWidth), lane = opaque(this->lane);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      float scale[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float l = load_shared(factors(step, 8 * nt + 2 * (lane % 4) + i) + 4, static_cast<float*>(nullptr));
        scale[i] = 1.0f / (l > 1e-30f ? l : 1e-30f);
      }
      const int head = 8 * nt + lane / 4;
      Bits16* of_head = out + (static_cast<int64_t>(row) * field(kHeads) + first_head + head) * width;
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t pair = transpose(packed(z[mt][nt][2 * i] * scale[0], z[mt][nt][2 * i + 1] * scale[1]));
          const int feature = first_lane + 16 * mt + 8 * i + 2 * (lane % 4);
          if (head < heads && feature < width) *reinterpret_cast<uint32_t*>(of_head + feature) = pair;
        }
    }
  }

  DEVICE void store_partial(int place, float* piece_z) const {
    const int width = field(kValueWidth), lane = opaque(this->lane);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int head = 8 * nt + 2 * (lane % 4) + i % 2;
        float* of_head = piece_z + (static_cast<int64_t>(place) * field(kHeads) + first_head + head) * width;
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
          const int feature = first_lane + 16 * mt + lane / 4 + i / 2 * 8;
          if (head < heads && feature < width) of_head[feature] = z[mt][nt][i];
        }
      }
  }

  // Rows without a tile give zeros.
  DEVICE void zero(int row, Bits16* out) const {
    const int width = field(kValueWidth), end = first_lane + 16 * MT < width ? first_lane + 16 * MT : width;
    for (int head = 0; head < heads; ++head) {
      Bits16* of_head = out + (static_cast<int64_t>(row) * field(kHeads) + first_head + head) * width;
      for (int feature = first_lane + 2 * lane; feature < end; feature += 64)
        *reinterpret_cast<uint32_t*>(of_head + feature) = 0u;
    }
  }
};

template <int CLUSTER, int WARPS, int MT, int NT, int HALVES, int STAGES>
DEVICE void run(const int* items, const int* starts, const int* tables, const int* ranges, const float* slopes,
                const int* shape, const Bits16* queries, const Bits16* pool, Bits16* out, float* piece_z, float* piece_m,
                float* piece_l) {
  using L = Layout<CLUSTER, WARPS, MT, NT, HALVES, STAGES>;
  Warp<CLUSTER, WARPS, MT, NT, HALVES, STAGES> w;
  w.lane = thread_index() % 32, w.warp = thread_index() / 32, w.rank = static_cast<int>(cluster_rank());
  w.shared = shared_base();
  if (thread_index() < kNumFields) store_shared(w.shared + L::kFields + 4 * thread_index(), shape[thread_index()]);
  block_sync();
  w.first_lane = (w.rank * WARPS + w.warp) * 16 * MT;
  const int cluster = block_index() / CLUSTER, range = cluster / w.field(kGroups);
  w.first_head = cluster % w.field(kGroups) * w.field(kGroupHeads);
  const int left = w.field(kHeads) - w.first_head;
  w.heads = left < w.field(kGroupHeads) ? left : w.field(kGroupHeads);
  w.clear();

  // Of the items of a range, all of which have tiles. Those without come after the last range's.
  const int count = num_blocks() / CLUSTER / w.field(kGroups), first = starts[range], end = starts[range + 1];
  int num_steps = 0;
  if (first < end) {
    const int *head = items + kItemFields * first, *tail = items + kItemFields * (end - 1);
    num_steps = tail[5] + tail[4] - tail[3] - head[5];
  }
  for (int item = starts[count] + range; item < w.field(kItems) && items[kItemFields * item] >= 0; item += count)
    w.zero(items[kItemFields * item], out);
  Cursor<L::kTile> cursor{items, tables, ranges, w.shared + L::kFields, first, end, 0, 0, 0, Step{}, 0};
  cursor.seek(w.lane);
  for (int step = 0; step < STAGES; ++step) w.copy(step, num_steps, cursor, pool);
  // All blocks have begun: their shared memory may be written to
  cluster_arrive();
  cluster_wait();
  for (int step = -2; step < num_steps; ++step) {
    if (step + 2 < num_steps) w.scores(step + 2, queries);
    if (step + 1 >= 0 && step + 1 < num_steps) w.softmax(step + 1, slopes, piece_m, piece_l);
    warp_sync();
    cluster_arrive();
    if (step >= 0) {
      w.output(step, out, piece_z);
      warp_sync();
      w.copy(step + STAGES, num_steps, cursor, pool);
    }
    cluster_wait();
  }
}

// A variant, from the command line. The smallest, for readers and editors:
#ifndef ONE_CLUSTER
#define ONE_CLUSTER 1
#define ONE_WARPS 1
#define ONE_MT 1
#define ONE_NT 1
#define ONE_HALVES 1
#define ONE_STAGES 4
#endif

KERNEL void CLUSTER_OF(ONE_CLUSTER) THREADS_OF(32 * ONE_WARPS)
    decode_absorbed(const int* __restrict__ items, const int* __restrict__ starts, const int* __restrict__ tables,
                    const int* __restrict__ ranges, const float* __restrict__ slopes, const int* __restrict__ shape,
                    const Bits16* __restrict__ queries, const Bits16* __restrict__ pool, Bits16* __restrict__ out,
                    float* __restrict__ piece_z, float* __restrict__ piece_m, float* __restrict__ piece_l) {
  run<ONE_CLUSTER, ONE_WARPS, ONE_MT, ONE_NT, ONE_HALVES, ONE_STAGES>(items, starts, tables, ranges, slopes, shape, queries, pool, out,
                                                          piece_z, piece_m, piece_l);
}
