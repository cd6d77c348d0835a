// all_reduce + bias + residual + RMSNorm by NVLink multicast: two-shot, where the switch adds up rows and sends results to all.
//
// Rank r owns rows_per_rank rows. GROUPS groups of threads of a CTA take turns with its rows. While a thread finishes a row
// (bias, residual, norm), its parts of the group's next DEPTH rows are on their way from the switch: multimem.ld_reduce loads
// them straight into registers. multimem.st writes the results to all ranks. Each way of a link carries (N+1)/N x M bytes.
//
// A *multicast address* stands for the same offset of every rank's buffer at once. A table of addresses here has the ranks'
// buffers and behind them the multicast address. Only these two instructions may access a multicast address. The switch adds up
// what lies in all buffers, so a rank stages its own rows too. The switch rounds what it returns to the type of the addends:
// 16-bit types are added in float32 (.acc::f32), and the sum is rounded once. The PTX ISA promises neither an order of the
// addends nor the same bits from run to run. All ranks hold the same bits because one of them reads the sum and publishes its
// result.
//
// PULL=0: the results are left in this rank's part of the symmetric buffers, of which `hidden` is one.
// PULL=1: `hidden` is an ordinary tensor; after the second barrier each rank copies the peers' rows to `hidden`. A replicated
//         residual is copied in the same way.
// STAGED=1: `x` is an ordinary tensor, which is first copied to this rank's part of `x_table`.
// EMULATED_MULTICAST=1: loads from all ranks and stores to all ranks replace the two instructions. The loaded values are added
//         in rank order in float32 and rounded to their type. So GPUs without multicast can run all the rest.
//
// Why this is correct
// -------------------
// The argument of kernels/runtime/barrier.py holds for the barriers, and for one buffer of each kind. The causality order that
// it gives is between one rank's write and another rank's read. It does not suffice here, because staged rows are written
// through addresses of one rank's memory and read through multicast ones, and published rows the other way round. Two virtual
// addresses of one memory location are aliases, which count as different proxies although both are generic (PTX ISA, memory
// consistency model). Causality order between aliases is *preserved* only when a fence.proxy.alias lies on the path between the
// accesses. Every thread executes one right after barrier 1 and one right before barrier 2. All multicast accesses of the
// launch lie between these two fences. No other access to a buffer that has a multicast address lies there. So there is a fence
// on every path:
//
// - staging writes, barrier 1, fence, multimem.ld_reduce; for the rank's own rows as well, by the barrier_sync of barrier 1;
// - multimem.st, fence, barrier 2, reads of the published rows;
// - multimem.ld_reduce, fence, barrier 2, end of the launch, staging writes of the next one: a read must not see a later write;
// - reads of the published rows, end of the launch, barrier 1 of the next one, fence, multimem.st.
//
// The ISA asks for one fence anywhere on the path. The ISA took proxies from a model (Lustig et al., "Mixed-proxy extensions
// for the NVIDIA PTX memory consistency model", ISCA 2022) that wants the fence in the CTA of the access that is not plain. The
// fence is there.
//
// The multimem operations are relaxed at system scope. So they are strong, and do not race with a peer's operations. The
// barriers alone order them. The operations bypass L1. Published rows are read after an acquire, which has invalidated L1.
//
// Set by definitions, beside those of row.cuh and EPILOGUE: WORLD_SIZE, GROUPS, THREADS of a group, DEPTH, STAGED, PULL,
// EMULATED_MULTICAST, RESIDUAL_SHARDED, RESIDUAL_OUT, SPIN_LIMIT.

#include "pads.cuh"
#include "epilogue.cuh"

struct MultimemParams {
  const X_TYPE* x;                  // [tokens, HIDDEN], this rank's partial sums
  const RESIDUAL_TYPE* residual;    // [tokens, HIDDEN], or [rows_per_rank, HIDDEN] if RESIDUAL_SHARDED
  const BIAS_TYPE* bias;            // [HIDDEN]
  const WEIGHT_TYPE* weight;        // [HIDDEN]
  const float* hidden_scale;        // [1], of an e4m3 result
  HIDDEN_TYPE* hidden;              // [tokens, HIDDEN]
  RESIDUAL_OUT_TYPE* residual_out;  // [tokens | rows_per_rank, HIDDEN]
  X_TYPE* const* x_table;           // [world + 1], the ranks' symmetric buffers, and the multicast address
  HIDDEN_TYPE* const* hidden_table;
  RESIDUAL_OUT_TYPE* const* residual_table;
  uint32_t* const* pads;
  uint32_t* epochs;  // [MAX_CTAS]
  int32_t* status;   // [MAX_CTAS, 8]
  int32_t rank;
  int32_t tokens;
  float eps;
  float weight_offset;
  float scale;
  const NORM_BIAS_TYPE* norm_bias;  // [HIDDEN]
};

using Row = RowPart<THREADS>;
inline constexpr int VECTORS = Row::VECTORS;
inline constexpr int WARPS = THREADS / 32;
inline constexpr int BLOCK = GROUPS * THREADS;
inline constexpr int COPIED_WORDS = 24;  // words that a thread has on their way when it copies rows; more would be spilled
static_assert(GROUPS <= 15, "each group has a barrier of its own beside that of the CTA");
static_assert(HIDDEN * sizeof(HIDDEN_TYPE) % 16 == 0, "the switch is given 16 bytes at a time");

// A buffer that every rank has.
template <typename T>
struct OnAllRanks {
#if EMULATED_MULTICAST
  T* const* table;
  int rank;

  DEVICE OnAllRanks(T* const* table, int rank) : table(table), rank(rank) {}

  DEVICE void load_sum(Eight<T>& sum, uint64_t element) const {
    float total[8];
    for (int source = 0; source < WORLD_SIZE; ++source) {
      Eight<T> eight;
      load_strong(eight, table[source] + element);
      source == 0 ? unpack(eight, total) : add(total, eight);
    }
    pack(sum, total);
  }
  DEVICE void store_16_bytes(uint64_t byte, const uint32_t (&words)[4]) const {
    // Every rank starts with a different peer, so that no link gets all the stores at once.
    for (int step = 0; step < WORLD_SIZE; ++step)
      store_relaxed_sys((uint8_t*)table[(rank + step) % WORLD_SIZE] + byte, words);
  }
#else
  T* multicast;

  DEVICE OnAllRanks(T* const* table, int) : multicast(table[WORLD_SIZE]) {}

  DEVICE void load_sum(Eight<T>& sum, uint64_t element) const { load_multicast_sum(sum, multicast + element); }
  DEVICE void store_16_bytes(uint64_t byte, const uint32_t (&words)[4]) const {
    store_multicast((uint8_t*)multicast + byte, words);
  }
#endif

  // Stores a thread's part of a row. All threads of the group call it. Where eight elements are 8 bytes, two neighbouring
  // threads put theirs together.
  DEVICE void store(uint64_t row, const Eight<T> (&vectors)[VECTORS], uint32_t thread) const {
    const uint64_t first = row * HIDDEN * sizeof(T);
    if constexpr (sizeof(T) == 1) {
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        const uint32_t vector = v * THREADS + thread;
        const uint32_t low = shuffle_xor(vectors[v].words[0], 1), high = shuffle_xor(vectors[v].words[1], 1);
        if (thread % 2 == 0 && vector < ROW_VECTORS)
          store_16_bytes(first + vector * 8, {vectors[v].words[0], vectors[v].words[1], low, high});
      }
    } else {
      Row::each(thread, [&](int v, uint32_t column) {
        Eight<T> eight = vectors[v];
        for_pieces(eight, [&](auto& words, int offset) { store_16_bytes(first + column * sizeof(T) + offset, words); });
      });
    }
  }
};

struct Cta {
  const MultimemParams& p;
  RowStatistics* partials;  // [GROUPS, 2, WARPS]: rows take turns
  int group;
  uint32_t thread;  // of the group
  int per_rank;
  int per_cta;

  // The first of a rank's rows that is this CTA's.
  DEVICE int first() const { return blockIdx.x * per_cta; }
  // How many of the rows of `owner` are this CTA's.
  DEVICE int share_of(int owner) const {
    const int end = smaller(p.tokens - owner * per_rank, per_rank);
    return smaller(larger(end - first(), 0), per_cta);
  }

  // Computes the sums and results of the rows group, group + GROUPS, ... of this CTA.
  DEVICE void compute() const {
    const int own_rows = share_of(p.rank), own_begin = p.rank * per_rank;
    const OnAllRanks<X_TYPE> x(p.x_table, p.rank);
    const OnAllRanks<HIDDEN_TYPE> hidden(p.hidden_table, p.rank);
    const float inverse_scale = sizeof(HIDDEN_TYPE) == 1 ? 1.0f / *p.hidden_scale : 1.0f;
    Eight<X_TYPE> sums[DEPTH][VECTORS];
    Loaded<THREADS, RESIDUAL_TYPE> residuals[DEPTH];
    // Issues the loads of a row; nothing waits for them before they are used.
    const auto fetch = [&](int place, int index) {
      if (index >= own_rows) return;
      const int local = first() + index;
      const uint64_t row = own_begin + local;
      Row::each(thread, [&](int v, uint32_t column) { x.load_sum(sums[place][v], row * HIDDEN + column); });
      residuals[place].fetch(p.residual + (RESIDUAL_SHARDED ? local : row) * HIDDEN, thread);
    };
#pragma unroll
    for (int place = 0; place < DEPTH; ++place) fetch(place, group + place * GROUPS);

    int parity = 0;
    for (int begin = group; begin < own_rows; begin += DEPTH * GROUPS) {
#pragma unroll
      for (int place = 0; place < DEPTH; ++place) {
        const int index = begin + place * GROUPS;
        if (index >= own_rows) break;
        const int local = first() + index;
        const uint64_t row = own_begin + local;
        float h[VECTORS][8];
        Row::each(thread, [&](int v, uint32_t) { unpack(sums[place][v], h[v]); });
        const RowStatistics own_part = finish_sum<THREADS>(h, p.scale, p.bias, residuals[place], thread);
        fetch(place, index + DEPTH * GROUPS);  // before the threads wait for each other
        Loaded<THREADS, WEIGHT_TYPE> weight;  // again for each row, from a cache: kept, it would take the place of loads
        weight.fetch(p.weight, thread);
        RowStatistics* const of_row = partials + (group * 2 + parity) * WARPS;
        const auto factor = row_factor(group_sum<WARPS>(own_part, of_row, thread, 1 + group), p.eps);
        parity ^= 1;

        if constexpr (RESIDUAL_OUT != NO_ROWS) {
          Eight<RESIDUAL_OUT_TYPE> kept[VECTORS];
          const uint64_t kept_row = RESIDUAL_OUT == OWN_ROWS ? local : row;
          Row::each(thread, [&](int v, uint32_t column) {
            pack(kept[v], h[v]);
            if constexpr (RESIDUAL_OUT == OWN_ROWS || PULL) store(p.residual_out + kept_row * HIDDEN + column, kept[v]);
          });
          if constexpr (RESIDUAL_OUT == ALL_ROWS)
            OnAllRanks<RESIDUAL_OUT_TYPE>(p.residual_table, p.rank).store(row, kept, thread);
        }
        Eight<HIDDEN_TYPE> results[VECTORS];
        Row::each(thread, [&](int v, uint32_t column) {
          normalise(results[v], h[v], factor, weight.vectors[v], loaded(p.norm_bias + column), p.weight_offset, inverse_scale);
          if constexpr (PULL) store(p.hidden + row * HIDDEN + column, results[v]);
        });
        hidden.store(row, results, thread);
      }
    }
  }

  // Copies this CTA's share of the rows of all ranks (FIRST=0), or of all ranks but this one (FIRST=1).
  template <int FIRST, typename T>
  DEVICE void copy_rows(T* target, const T* source) const {
    constexpr int AT_ONCE = larger(1, COPIED_WORDS / (VECTORS * (int)sizeof(Eight<T>) / 4));
    constexpr int OWNERS = WORLD_SIZE - FIRST;
    const int rows = OWNERS * per_cta;
    // The number of the row to copy; -1 past the end of a short share.
    const auto row_at = [&](int index) {
      const int owner = (p.rank + FIRST + index % OWNERS) % WORLD_SIZE, local = index / OWNERS;
      return index < rows && local < share_of(owner) ? owner * per_rank + first() + local : -1;
    };
    for (int begin = group; begin < rows; begin += AT_ONCE * GROUPS) {
      Eight<T> vectors[AT_ONCE][VECTORS];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int row = row_at(begin + i * GROUPS);
        if (row < 0) continue;
        Row::each(thread, [&](int v, uint32_t column) { load(vectors[i][v], source + (uint64_t)row * HIDDEN + column); });
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int row = row_at(begin + i * GROUPS);
        if (row < 0) continue;
        Row::each(thread, [&](int v, uint32_t column) { store(target + (uint64_t)row * HIDDEN + column, vectors[i][v]); });
      }
    }
  }
};

KERNEL(BLOCK, 1) multimem(GRID_CONSTANT MultimemParams p) {
  grid_dependency_wait();
  const int per_rank = (p.tokens + WORLD_SIZE - 1) / WORLD_SIZE;
  const int per_cta = (per_rank + gridDim.x - 1) / gridDim.x;
  const int group = threadIdx.x / THREADS;
  const Cta cta{p, (RowStatistics*)dynamic_shared(), group, threadIdx.x % THREADS, per_rank, per_cta};
  const uint32_t epoch = p.epochs[blockIdx.x];

  if constexpr (STAGED) cta.copy_rows<0>(p.x_table[p.rank], p.x);
  warp_sync();
  meet_peers(p.pads, p.status, epoch + 1, p.rank, 1, BLOCK);
  fence_proxy_alias();
  cta.compute();
  fence_proxy_alias();
  warp_sync();
  meet_peers(p.pads, p.status, epoch + 2, p.rank, 2, BLOCK);
  grid_dependency_launch();  // not before: see push.cu
  if (threadIdx.x == 0) p.epochs[blockIdx.x] = epoch + 2;
  if constexpr (PULL) {
    cta.copy_rows<1>(p.hidden, (const HIDDEN_TYPE*)p.hidden_table[p.rank]);
    if constexpr (RESIDUAL_OUT == ALL_ROWS)
      cta.copy_rows<1>(p.residual_out, (const RESIDUAL_OUT_TYPE*)p.residual_table[p.rank]);
  }
}
