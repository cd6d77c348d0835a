// all_reduce + bias + residual + RMSNorm for large messages: two-shot, rows streamed through shared memory by bulk copies.
//
// Rank r owns rows_per_rank rows. GROUPS groups of threads of a CTA take turns with its rows. One thread keeps a ring of
// shared-memory stages for each group filled with its rows from all ranks (one stage: one row of one rank). The group adds
// up a row in rank order as its stages fill, adds bias and residual, normalises and writes both results to one of its
// RESULTS pieces of shared memory, and another thread has them copied to where they belong. While one group waits for its
// sums of squares or for a free piece, others compute. So an SM spends its time on moving bytes, and few CTAs fill the links:
// 2(N-1)/N x M bytes each way, nothing read or written twice.
//
// Each group has a ring of its own because a wait for an mbarrier knows the parity of a phase and not its number: a group
// that waits for a stage has itself emptied it the time before, so it is never two phases ahead.
//
// PULL=0: the results go straight to every rank's part of the symmetric output (`hidden_table`), which is `hidden`.
// PULL=1: the results go to this rank's part of it and to `hidden`, an ordinary tensor; after the second barrier each
//         rank copies the peers' rows from there to `hidden`. A replicated residual takes the same way.
// If this kernel makes the scales of float8 rows (scales.cuh), ordinary stores write the scales to where the rows go, and
// ordinary loads copy them.
// STAGED=1: `x` is an ordinary tensor; its rows for the peers are first copied to this rank's part of `x_table`.
//
// Proxies. The async proxy makes bulk copies. Where bulk copies read ordinary writes, the writing thread executes
// fence.proxy.async before the barrier that tells the reader. A thread that starts bulk loads of what a peer wrote fences after
// the acquire. bulk_wait completes this CTA's copies before the release that announces them.
//
// The memory-order argument of the barriers, and why one buffer of each kind is enough, is in kernels/runtime/barrier.py.
//
// Rows and CTAs. Each rank's rows are dealt out to the CTAs in equal parts of neighbouring rows. So rows that are only copied
// can be copied in pieces of COPY_BYTES. A copy takes a thread 0.3 us, however short it is.
//
// Set by definitions, beside those of row.cuh and EPILOGUE: WORLD_SIZE, GROUPS, THREADS, STAGES and RESULTS of a group,
// STAGED, PULL, RESIDUAL_SHARDED, RESIDUAL_OUT, SPIN_LIMIT.

#include "pads.cuh"
#include "epilogue.cuh"
#include "wire.cuh"
#include "scales.cuh"

struct StreamParams {
  const X_TYPE* x;                  // [tokens, HIDDEN], this rank's partial sums
  const RESIDUAL_TYPE* residual;    // [tokens, HIDDEN], or [rows_per_rank, HIDDEN] if RESIDUAL_SHARDED
  const BIAS_TYPE* bias;            // [HIDDEN]
  const WEIGHT_TYPE* weight;        // [HIDDEN]
  const float* hidden_scale;        // [1], of an e4m3 result
  HIDDEN_TYPE* hidden;              // [tokens, HIDDEN]
  RESIDUAL_OUT_TYPE* residual_out;  // [tokens | rows_per_rank, HIDDEN]
  X_TYPE* const* x_table;           // [world], the ranks' symmetric buffers
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
inline constexpr int BLOCK = GROUPS * THREADS + 64;  // one warp fills the rings, one publishes the results
inline constexpr int X_BYTES = HIDDEN * sizeof(X_TYPE);
inline constexpr int HIDDEN_BYTES = HIDDEN * sizeof(HIDDEN_TYPE);
inline constexpr int RESIDUAL_BYTES = HIDDEN * sizeof(RESIDUAL_OUT_TYPE);
inline constexpr bool PULL_RESIDUAL = PULL && RESIDUAL_OUT == ALL_ROWS;
inline constexpr int LONG_COPY = 16384;

constexpr int aligned(int bytes) { return (bytes + 127) / 128 * 128; }
inline constexpr int STAGE_BYTES =
    aligned(larger(X_BYTES, larger(PULL ? HIDDEN_BYTES : 0, PULL_RESIDUAL ? RESIDUAL_BYTES : 0)));
inline constexpr int COPY_BYTES = smaller(larger(STAGE_BYTES, LONG_COPY), GROUPS * STAGES * STAGE_BYTES / 2);
inline constexpr int COPY_STAGES = GROUPS * STAGES * STAGE_BYTES / COPY_BYTES;
inline constexpr int KEPT_OFFSET = aligned(HIDDEN_BYTES);  // of the new residual in a piece, behind the normalised row
inline constexpr int RESULT_BYTES = KEPT_OFFSET + (RESIDUAL_OUT == NO_ROWS ? 0 : aligned(RESIDUAL_BYTES));
static_assert(X_BYTES % 16 == 0 && HIDDEN_BYTES % 16 == 0, "bulk copies move multiples of 16 bytes");

struct Shared {
  uint64_t full[GROUPS][STAGES];        // a stage has arrived
  uint64_t empty[GROUPS][STAGES];       // a stage has been read: one arrival of each warp of the group
  uint64_t ready[GROUPS][RESULTS];      // a piece has been written: one arrival of each warp of the group
  uint64_t taken[GROUPS][RESULTS];      // a piece has been read by its copies
  uint64_t squared[GROUPS][2];          // partial sums of squares, of two rows in turn: one arrival of each warp
  uint64_t copied[COPY_STAGES];         // a stage of all rings taken as one, for copies of rows before and after the sums
  RowStatistics partials[2][GROUPS][WARPS];
#if SCALE_COLUMNS
  float maxima[GROUPS][WARPS];
#endif
  uint8_t* tables[2][WORLD_SIZE];  // x_table, hidden_table: copies, as every row needs these addresses
};
inline constexpr int RESULTS_OFFSET = aligned(sizeof(Shared));
inline constexpr int RINGS_OFFSET = RESULTS_OFFSET + GROUPS * RESULTS * RESULT_BYTES;
static_assert(RINGS_OFFSET + GROUPS * STAGES * STAGE_BYTES <= SHARED_BYTES, "the launch gives less shared memory than this needs");

DEVICE void wait_for(uint64_t* barrier, uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

struct Cta {
  const StreamParams& p;
  Shared& shared;
  uint8_t* results;
  uint8_t* rings;
  int per_rank;
  int per_cta;
  int own_begin;
  int own_rows;  // that this CTA computes

  // The first of a rank's rows that is this CTA's.
  DEVICE int first() const { return blockIdx.x * per_cta; }
  // How many of the rows of `owner` are this CTA's.
  DEVICE int share_of(int owner) const {
    const int end = smaller(p.tokens - owner * per_rank, per_rank);
    return smaller(larger(end - first(), 0), per_cta);
  }
  DEVICE int local_row(int index) const { return first() + index; }

  // One thread: keeps the rings full, row by row, in rank order.
  DEVICE void fill_rings() const {
    fence_proxy_async();
    for (int index = 0; index < own_rows; ++index) {
      const uint64_t row = (uint64_t)(own_begin + local_row(index)) * HIDDEN;
      const int group = index % GROUPS;
      for (int source = 0; source < WORLD_SIZE; ++source) {
        const int chunk = index / GROUPS * WORLD_SIZE + source, stage = chunk % STAGES, round = chunk / STAGES;
        if (round > 0) wait_for(&shared.empty[group][stage], (round - 1) & 1);
        const X_TYPE* from = source == p.rank ? p.x : (const X_TYPE*)shared.tables[0][source];
        mbarrier_arrive_expect(&shared.full[group][stage], X_BYTES);
        bulk_load(rings + (group * STAGES + stage) * STAGE_BYTES, from + row, X_BYTES, &shared.full[group][stage]);
      }
    }
  }

  DEVICE uint8_t* result(int group, int buffer) const { return results + (group * RESULTS + buffer) * RESULT_BYTES; }

#if SCALE_COLUMNS
  // Stores a scale to all places where the row goes. Ordinary stores are enough: the second barrier is behind them.
  DEVICE void spread_scale(uint64_t row, uint32_t index, const uint32_t (&word)[1]) const {
    store_global((uint8_t*)(scales_at(p.hidden, p.tokens, row) + index), word);
    for (int rank = 0; rank < WORLD_SIZE; ++rank)
      if ((rank == p.rank) == PULL)
        store_global((uint8_t*)(scales_at((HIDDEN_TYPE*)shared.tables[1][rank], p.tokens, row) + index), word);
  }

  // All threads: copies the scales of this CTA's share of the peers' rows.
  DEVICE void copy_scales(uint32_t thread) const {
    for (int step = 1; step < WORLD_SIZE; ++step) {
      const int owner = (p.rank + step) % WORLD_SIZE;
      const uint64_t row = owner * per_rank + first();
      const float* const from = scales_at((HIDDEN_TYPE*)shared.tables[1][owner], p.tokens, row);
      float* const to = scales_at(p.hidden, p.tokens, row);
      for (int i = thread; i < share_of(owner) * SCALES; i += BLOCK) {
        uint32_t word[1];
        load_relaxed_sys(word, (const uint8_t*)(from + i));
        store_global((uint8_t*)(to + i), word);
      }
    }
  }
#endif

  // One group of threads computes the rows group, group + GROUPS, ... of this CTA.
  DEVICE void compute(int group, uint32_t thread) const {
    const uint8_t* const ring = rings + group * STAGES * STAGE_BYTES;
    [[maybe_unused]] const float inverse_scale =
        sizeof(HIDDEN_TYPE) == 1 && SCALE_COLUMNS == 0 ? 1.0f / *p.hidden_scale : 1.0f;
    Loaded<THREADS, WEIGHT_TYPE> weight;
    weight.fetch(p.weight, thread);
    int stage = 0, buffer = 0;
    uint32_t stage_parity = 0, buffer_parity = 1;
    for (int index = group, turn = 0; index < own_rows; index += GROUPS, ++turn) {
      const int local = local_row(index);
      const uint64_t row = own_begin + local;
      Loaded<THREADS, RESIDUAL_TYPE> residual;
      residual.fetch(p.residual + (RESIDUAL_SHARDED ? local : row) * HIDDEN, thread);
      float h[VECTORS][8];
#pragma unroll
      for (int source = 0; source < WORLD_SIZE; ++source) {
        wait_for(&shared.full[group][stage], stage_parity);
        const X_TYPE* const values = (const X_TYPE*)(ring + stage * STAGE_BYTES);
        Row::each(thread, [&](int v, uint32_t column) {
          Eight<X_TYPE> eight;
          load_shared_eight(eight, values + column);
          source == 0 ? unpack(eight, h[v]) : add(h[v], eight);
        });
        warp_sync();
        if (thread % 32 == 0) mbarrier_arrive(&shared.empty[group][stage]);
        if (++stage == STAGES) stage = 0, stage_parity ^= 1;
      }
      const RowStatistics statistics = warp_sum(finish_sum<THREADS>(h, p.scale, p.bias, residual, thread));
      if (thread % 32 == 0) {
        shared.partials[turn & 1][group][thread / 32] = statistics;
        mbarrier_arrive(&shared.squared[group][turn & 1]);
      }
      warp_sync();
      wait_for(&shared.squared[group][turn & 1], turn / 2 & 1);
      const auto factor = row_factor(total<WARPS>(shared.partials[turn & 1][group]), p.eps);
#if SCALE_COLUMNS
      const auto scales =
          scales_of_row<THREADS>(h, factor, weight, p.weight_offset, thread, [&](float value) {
            return group_max<THREADS / 32>(value, shared.maxima[group], thread, 1 + group);
          });
#endif
      if (turn >= RESULTS) wait_for(&shared.taken[group][buffer], buffer_parity);
      uint8_t* const piece = result(group, buffer);
      Row::each(thread, [&](int v, uint32_t column) {
        if constexpr (RESIDUAL_OUT != NO_ROWS) {
          Eight<RESIDUAL_OUT_TYPE> kept;
          pack(kept, h[v]);
          store_shared_eight((RESIDUAL_OUT_TYPE*)(piece + KEPT_OFFSET) + column, kept);
        }
#if SCALE_COLUMNS
        const auto coded = quantised(h[v], factor, weight.vectors[v], p.weight_offset, scales.of(v));
        if (column % SCALE_COLUMNS == 0) spread_scale(row, column / SCALE_COLUMNS, coded.word);
        const Eight<HIDDEN_TYPE> eight{{coded.codes[0], coded.codes[1]}};
#else
        Eight<HIDDEN_TYPE> eight;
        normalise(eight, h[v], factor, weight.vectors[v], loaded(p.norm_bias + column), p.weight_offset, inverse_scale);
#endif
        store_shared_eight((HIDDEN_TYPE*)piece + column, eight);
      });
      fence_proxy_async_shared();
      warp_sync();
      if (thread % 32 == 0) mbarrier_arrive(&shared.ready[group][buffer]);
      warp_sync();
      if (++buffer == RESULTS) buffer = 0, buffer_parity ^= 1;
    }
  }

  // One thread starts the copies of a row from `from`: to this rank's `own`, and to `table`. In `table` the row goes to this
  // rank's buffer, where the peers get it (PULL), or to the peers' buffers.
  template <typename T>
  DEVICE void spread(const uint8_t* from, T* own, T* const* table, uint64_t element) const {
    constexpr uint32_t BYTES = HIDDEN * sizeof(T);
    bulk_store(own + element, from, BYTES);
    if constexpr (PULL) {
      bulk_store(table[p.rank] + element, from, BYTES);
    } else {
      for (int step = 1; step < WORLD_SIZE; ++step)
        bulk_store(table[(p.rank + step) % WORLD_SIZE] + element, from, BYTES);
    }
  }

  // One thread starts the copies of the results to where they belong, in the order of the rows.
  DEVICE void publish() const {
    constexpr int LAG = GROUPS * RESULTS > 1 ? 1 : 0;  // pieces that copies may still read while the next row is awaited
    for (int index = 0; index < own_rows + LAG; ++index) {
      if (index < own_rows) {
        const int group = index % GROUPS, turn = index / GROUPS;
        wait_for(&shared.ready[group][turn % RESULTS], turn / RESULTS & 1);
        const uint8_t* const piece = result(group, turn % RESULTS);
        const int local = local_row(index);
        const uint64_t element = (uint64_t)(own_begin + local) * HIDDEN;
        spread(piece, p.hidden, (HIDDEN_TYPE* const*)shared.tables[1], element);
        if constexpr (RESIDUAL_OUT == OWN_ROWS)
          bulk_store(p.residual_out + (uint64_t)local * HIDDEN, piece + KEPT_OFFSET, RESIDUAL_BYTES);
        if constexpr (RESIDUAL_OUT == ALL_ROWS)
          spread(piece + KEPT_OFFSET, p.residual_out, p.residual_table, element);
      }
      bulk_commit();
      bulk_wait_read<LAG>();
      const int read = index - LAG;
      if (read >= 0) mbarrier_arrive(&shared.taken[read % GROUPS][read / GROUPS % RESULTS]);
    }
    bulk_wait();
    fence_proxy_async();
  }

  // One thread: copies this CTA's share of the peers' rows from source(owner) to `target`. `chunk` counts the stages used
  // through the launch, and is returned. Up to LAG of the latest stores may still read their stage; the other stages are
  // loading.
  template <typename T, typename Source>
  DEVICE int copy_rows(Source source, T* target, int chunk) const {
    constexpr int64_t ROW_BYTES = HIDDEN * sizeof(T);
    constexpr int LAG = COPY_STAGES > 4 ? COPY_STAGES / 3 : 1;
    fence_proxy_async();
    int most = 0;
    for (int step = 1; step < WORLD_SIZE; ++step) most = larger(most, share_of((p.rank + step) % WORLD_SIZE));
    // Peers take turns, so that no link gets all the loads at once. Returns how many bytes at `begin` are copied at once: 0
    // past the end of a short share.
    const auto piece_at = [&](int position, int& owner, uint64_t& begin) {
      owner = (p.rank + 1 + position % (WORLD_SIZE - 1)) % WORLD_SIZE;
      const int64_t before = (int64_t)(position / (WORLD_SIZE - 1)) * COPY_BYTES;
      const int64_t left = share_of(owner) * ROW_BYTES - before;
      begin = (owner * per_rank + first()) * (uint64_t)ROW_BYTES + before;
      return left < COPY_BYTES ? larger((int)left, 0) : COPY_BYTES;
    };
    const int positions = (int)((most * ROW_BYTES + COPY_BYTES - 1) / COPY_BYTES) * (WORLD_SIZE - 1);
    int loaded = chunk, to_load = 0, owner;
    uint64_t begin;
    for (int position = 0; position < positions; ++position) {
      for (; to_load < positions && loaded - chunk < COPY_STAGES - LAG; ++to_load) {
        const int bytes = piece_at(to_load, owner, begin);
        if (bytes == 0) continue;
        const int stage = loaded++ % COPY_STAGES;
        bulk_wait_read<LAG>();
        mbarrier_arrive_expect(&shared.copied[stage], bytes);
        bulk_load(rings + stage * COPY_BYTES, (const uint8_t*)source(owner) + begin, bytes, &shared.copied[stage]);
      }
      const int bytes = piece_at(position, owner, begin);
      if (bytes == 0) continue;
      const int stage = chunk % COPY_STAGES;
      wait_for(&shared.copied[stage], chunk / COPY_STAGES & 1);
      bulk_store((uint8_t*)target + begin, rings + stage * COPY_BYTES, bytes);
      bulk_commit();
      ++chunk;
    }
    bulk_wait();
    return chunk;
  }
};

KERNEL(BLOCK, 1) stream(GRID_CONSTANT StreamParams p) {
  uint8_t* const memory = dynamic_shared();
  Shared& shared = *(Shared*)memory;
  const uint32_t thread = threadIdx.x;
  const bool fills = thread == GROUPS * THREADS, publishes = thread == GROUPS * THREADS + 32;
  if (thread == 0) {
    for (int stage = 0; stage < GROUPS * STAGES; ++stage) {
      mbarrier_init(&shared.full[0][stage], 1);
      mbarrier_init(&shared.empty[0][stage], WARPS);
    }
    if (STAGED || PULL)
      for (int stage = 0; stage < COPY_STAGES; ++stage) mbarrier_init(&shared.copied[stage], 1);
    for (int buffer = 0; buffer < GROUPS * RESULTS; ++buffer) {
      mbarrier_init(&shared.ready[0][buffer], WARPS);
      mbarrier_init(&shared.taken[0][buffer], 1);
    }
    for (int group = 0; group < GROUPS; ++group)
      for (int parity = 0; parity < 2; ++parity) mbarrier_init(&shared.squared[group][parity], WARPS);
    mbarrier_init_fence();
    for (int rank = 0; rank < WORLD_SIZE; ++rank) {
      shared.tables[0][rank] = (uint8_t*)p.x_table[rank];
      shared.tables[1][rank] = (uint8_t*)p.hidden_table[rank];
    }
  }
  grid_dependency_wait();
  const int per_rank = (p.tokens + WORLD_SIZE - 1) / WORLD_SIZE;
  const int per_cta = (per_rank + gridDim.x - 1) / gridDim.x;
  Cta cta{p, shared, memory + RESULTS_OFFSET, memory + RINGS_OFFSET, per_rank, per_cta, p.rank * per_rank, 0};
  cta.own_rows = cta.share_of(p.rank);
  const uint32_t epoch = p.epochs[blockIdx.x];

  int copied = 0;
  if constexpr (STAGED) {
    warp_sync();
    barrier_sync(0, BLOCK);  // the mbarriers are there
    if (fills) {
      copied = cta.copy_rows([&](int) { return p.x; }, p.x_table[p.rank], copied);
      fence_proxy_async();
    }
  }
  warp_sync();
  meet_peers(p.pads, p.status, epoch + 1, p.rank, 1, BLOCK);
  if (thread < GROUPS * THREADS) {
    cta.compute(thread / THREADS, thread % THREADS);
  } else if (fills) {
    cta.fill_rings();
  } else if (publishes) {
    cta.publish();
  }
  warp_sync();
  meet_peers(p.pads, p.status, epoch + 2, p.rank, 2, BLOCK);
  grid_dependency_launch();  // not before: see push.cu
  if (thread == 0) p.epochs[blockIdx.x] = epoch + 2;
#if SCALE_COLUMNS
  if constexpr (PULL) cta.copy_scales(thread);
#endif
  if (PULL && fills) {
    copied = cta.copy_rows([&](int owner) { return p.hidden_table[owner]; }, p.hidden, copied);
    if constexpr (PULL_RESIDUAL)
      cta.copy_rows([&](int owner) { return p.residual_table[owner]; }, p.residual_out, copied);
  }
}
