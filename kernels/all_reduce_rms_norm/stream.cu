// all_reduce + bias + residual + RMSNorm for large messages: two-shot, rows streamed through shared memory by bulk copies.
//
// Rank r owns rows_per_rank rows. GROUPS groups of threads of a CTA take turns with its rows. One thread keeps a ring of
// shared-memory stages for each group filled with its rows from all ranks (one stage: one row of one rank). The group adds
// up a row in rank order as its stages fill, adds bias and residual, normalises, writes the result to its own piece of
// shared memory, and one of its threads has it copied to all ranks. While one group computes, the copies of others run, so
// few CTAs fill the links: 2(N-1)/N x M bytes each way, nothing read or written twice.
//
// Each group has a ring of its own because a wait for an mbarrier knows the parity of a phase and not its number: a group
// that waits for a stage has itself emptied it the time before, so it is never two phases ahead.
//
// PULL=0: the results go straight to every rank's part of the symmetric output (`hidden_table`), which is `hidden`.
// PULL=1: the results go to this rank's part of it and to `hidden`, an ordinary tensor; after the second barrier each
//         rank copies the peers' rows from there to `hidden`. A replicated residual takes the same way.
// STAGED=1: `x` is an ordinary tensor; its rows for the peers are first copied to this rank's part of `x_table`.
//
// Proxies. Bulk copies are made by the async proxy. Ordinary writes that they read are followed by fence.proxy.async in
// the writing thread before the barrier that tells the reader; a thread that starts bulk loads of what a peer wrote
// fences after the acquire; bulk_wait completes this CTA's copies before the release that announces them.
//
// The memory-order argument of the barriers, and why one buffer of each kind is enough, is in kernels/_sync.py. Rows and
// CTAs: CTA b handles, of each rank's rows, b, b + grid, b + 2 grid, ... on every rank.
//
// Set by definitions, beside those of rms_norm_row.cuh: WORLD_SIZE, GROUPS, THREADS and STAGES of a group, STAGED, PULL,
// RESIDUAL_SHARDED, RESIDUAL_OUT, SPIN_LIMIT.

#include "pads.cuh"
#include "rms_norm_row.cuh"

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
};

using Row = RowPart<THREADS>;
inline constexpr int VECTORS = Row::VECTORS;
inline constexpr int WARPS = THREADS / 32;
inline constexpr int BLOCK = GROUPS * THREADS + 32;  // the last warp fills the rings
inline constexpr int X_BYTES = HIDDEN * sizeof(X_TYPE);
inline constexpr int HIDDEN_BYTES = HIDDEN * sizeof(HIDDEN_TYPE);
inline constexpr int RESIDUAL_BYTES = HIDDEN * sizeof(RESIDUAL_OUT_TYPE);
inline constexpr bool PULL_RESIDUAL = PULL && RESIDUAL_OUT == ALL_ROWS;

constexpr int aligned(int bytes) { return (bytes + 127) / 128 * 128; }
inline constexpr int STAGE_BYTES =
    aligned(larger(X_BYTES, larger(PULL ? HIDDEN_BYTES : 0, PULL_RESIDUAL ? RESIDUAL_BYTES : 0)));
inline constexpr int RESULT_BYTES = aligned(HIDDEN_BYTES);
static_assert(X_BYTES % 16 == 0 && HIDDEN_BYTES % 16 == 0, "bulk copies move multiples of 16 bytes");

struct Shared {
  uint64_t full[GROUPS][STAGES];      // a stage has arrived
  uint64_t empty[GROUPS][STAGES];     // a stage has been read: one arrival of each warp of the group
  uint64_t collected[GROUPS * STAGES];  // PULL: the same stages, used once more after the second barrier
  float partials[2][GROUPS][WARPS];
  uint8_t* tables[2][WORLD_SIZE];  // x_table, hidden_table: addresses that every row needs
};
inline constexpr int RESULTS_OFFSET = aligned(sizeof(Shared));
inline constexpr int RINGS_OFFSET = RESULTS_OFFSET + GROUPS * RESULT_BYTES;
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
  int own_begin;
  int own_rows;  // that this CTA computes

  DEVICE int rows_of(int owner) const { return smaller(larger(p.tokens - owner * per_rank, 0), per_rank); }
  // How many of the rows of `owner` are this CTA's.
  DEVICE int share_of(int owner) const {
    const int rows = rows_of(owner) - (int)blockIdx.x;
    return rows > 0 ? (rows + (int)gridDim.x - 1) / (int)gridDim.x : 0;
  }
  DEVICE int local_row(int index) const { return blockIdx.x + index * gridDim.x; }

  // Copies the peers' rows of x to this rank's symmetric buffer.
  DEVICE void stage() const {
    X_TYPE* const staging = p.x_table[p.rank];
    for (int step = 1; step < WORLD_SIZE; ++step) {
      const int owner = (p.rank + step) % WORLD_SIZE;
      const uint32_t units = share_of(owner) * ROW_VECTORS;
      for (uint32_t unit = threadIdx.x; unit < units; unit += BLOCK) {
        const uint64_t row = owner * per_rank + local_row(unit / ROW_VECTORS);
        const uint64_t element = row * HIDDEN + unit % ROW_VECTORS * 8;
        Eight<X_TYPE> eight;
        load(eight, p.x + element);
        store(staging + element, eight);
      }
    }
    fence_proxy_async();
  }

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

  // One group of threads: the rows group, group + GROUPS, ... of this CTA.
  DEVICE void compute(int group, uint32_t thread) const {
    uint8_t* const result = results + group * RESULT_BYTES;
    const uint8_t* const ring = rings + group * STAGES * STAGE_BYTES;
    const float inverse_scale = sizeof(HIDDEN_TYPE) == 1 ? 1.0f / *p.hidden_scale : 1.0f;
    for (int index = group, turn = 0; index < own_rows; index += GROUPS, ++turn) {
      const int local = local_row(index);
      const uint64_t row = own_begin + local;
      // Their loads are under way while the stages fill.
      Loaded<THREADS, RESIDUAL_TYPE> residual;
      residual.fetch(p.residual + (RESIDUAL_SHARDED ? local : row) * HIDDEN, thread);
      Loaded<THREADS, WEIGHT_TYPE> weight;
      weight.fetch(p.weight, thread);

      float h[VECTORS][8] = {};
      for (int source = 0; source < WORLD_SIZE; ++source) {
        const int chunk = turn * WORLD_SIZE + source, stage = chunk % STAGES;
        wait_for(&shared.full[group][stage], chunk / STAGES & 1);
        const X_TYPE* const values = (const X_TYPE*)(ring + stage * STAGE_BYTES);
        Row::each(thread, [&](int v, uint32_t column) {
          Eight<X_TYPE> eight;
          load_shared_eight(eight, values + column);
          add(h[v], eight);
        });
        warp_sync();
        if (thread % 32 == 0) mbarrier_arrive(&shared.empty[group][stage]);
      }

      const float squares = finish_sum<THREADS>(h, p.scale, p.bias, residual, thread);
      // The sum's barrier also tells the group that its last result has left shared memory.
      if (thread == 0) bulk_wait_read<0>();
      warp_sync();
      const float sum = group_sum<WARPS>(squares, shared.partials[turn & 1][group], thread, 1 + group);
      const float factor = inverse_rms(sum, p.eps);
      Row::each(thread, [&](int v, uint32_t column) {
        keep(h[v], local, row, column);
        normalise(h[v], factor, weight.vectors[v], p.weight_offset, inverse_scale);
        Eight<HIDDEN_TYPE> eight;
        pack(eight, h[v]);
        store_shared_eight((HIDDEN_TYPE*)result + column, eight);
      });
      fence_proxy_async_shared();
      barrier_sync(1 + group, THREADS);
      if (thread == 0) publish(result, row);
      warp_sync();
    }
    if (thread == 0) {
      bulk_wait();
      fence_proxy_async();
    }
    warp_sync();
  }

  // Stores one vector of the new residual.
  DEVICE void keep(const float (&h)[8], int local, uint64_t row, uint32_t column) const {
    if constexpr (RESIDUAL_OUT == NO_ROWS) return;
    Eight<RESIDUAL_OUT_TYPE> eight;
    pack(eight, h);
    if constexpr (RESIDUAL_OUT == OWN_ROWS) store(p.residual_out + (uint64_t)local * HIDDEN + column, eight);
    if constexpr (RESIDUAL_OUT == ALL_ROWS) {
      const uint64_t element = row * HIDDEN + column;
      store(p.residual_out + element, eight);
      if constexpr (PULL) {
        store(p.residual_table[p.rank] + element, eight);
      } else {
        for (int step = 1; step < WORLD_SIZE; ++step)
          store(p.residual_table[(p.rank + step) % WORLD_SIZE] + element, eight);
      }
    }
  }

  // One thread: has the result copied to where `hidden` is on this rank and to where the peers get it.
  DEVICE void publish(const uint8_t* result, uint64_t row) const {
    bulk_store(p.hidden + row * HIDDEN, result, HIDDEN_BYTES);
    if constexpr (PULL) {
      bulk_store((HIDDEN_TYPE*)shared.tables[1][p.rank] + row * HIDDEN, result, HIDDEN_BYTES);
    } else {
      for (int step = 1; step < WORLD_SIZE; ++step) {
        HIDDEN_TYPE* const peer = (HIDDEN_TYPE*)shared.tables[1][(p.rank + step) % WORLD_SIZE];
        bulk_store(peer + row * HIDDEN, result, HIDDEN_BYTES);
      }
    }
    bulk_commit();
  }

  // One thread: copies this CTA's share of the peers' rows of `table` to `target`. `chunk` counts the stages used through
  // the launch, and is returned. Up to LAG of the latest stores may still read their stage; the other stages are loading.
  template <typename T>
  DEVICE int collect(T* const* table, T* target, int chunk) const {
    constexpr uint32_t BYTES = HIDDEN * sizeof(T);
    constexpr int ALL_STAGES = GROUPS * STAGES, LAG = ALL_STAGES > 4 ? ALL_STAGES / 3 : 1;
    int most = 0;
    for (int step = 1; step < WORLD_SIZE; ++step) most = larger(most, share_of((p.rank + step) % WORLD_SIZE));
    // Peers take turns, so that no link gets all the loads at once. False for a row past the end of a short share.
    const auto element_at = [&](int position, int& owner, uint64_t& element) {
      owner = (p.rank + 1 + position % (WORLD_SIZE - 1)) % WORLD_SIZE;
      const int index = position / (WORLD_SIZE - 1);
      element = (uint64_t)(owner * per_rank + local_row(index)) * HIDDEN;
      return index < share_of(owner);
    };
    const int positions = most * (WORLD_SIZE - 1);
    int loaded = chunk, to_load = 0, owner;
    uint64_t element;
    for (int position = 0; position < positions; ++position) {
      for (; to_load < positions && loaded - chunk < ALL_STAGES - LAG; ++to_load) {
        if (!element_at(to_load, owner, element)) continue;
        const int stage = loaded++ % ALL_STAGES;
        bulk_wait_read<LAG>();
        mbarrier_arrive_expect(&shared.collected[stage], BYTES);
        bulk_load(rings + stage * STAGE_BYTES, table[owner] + element, BYTES, &shared.collected[stage]);
      }
      if (!element_at(position, owner, element)) continue;
      const int stage = chunk % ALL_STAGES;
      wait_for(&shared.collected[stage], chunk / ALL_STAGES & 1);
      bulk_store(target + element, rings + stage * STAGE_BYTES, BYTES);
      bulk_commit();
      ++chunk;
    }
    return chunk;
  }
};

KERNEL(BLOCK) stream(GRID_CONSTANT StreamParams p) {
  uint8_t* const memory = dynamic_shared();
  Shared& shared = *(Shared*)memory;
  const uint32_t thread = threadIdx.x;
  const bool fills = thread == GROUPS * THREADS;  // first thread of the last warp
  if (thread == 0) {
    for (int stage = 0; stage < GROUPS * STAGES; ++stage) {
      mbarrier_init(&shared.full[0][stage], 1);
      mbarrier_init(&shared.empty[0][stage], WARPS);
      if (PULL) mbarrier_init(&shared.collected[stage], 1);
    }
    mbarrier_init_fence();
    for (int rank = 0; rank < WORLD_SIZE; ++rank) {
      shared.tables[0][rank] = (uint8_t*)p.x_table[rank];
      shared.tables[1][rank] = (uint8_t*)p.hidden_table[rank];
    }
  }
  grid_dependency_wait();
  const int per_rank = (p.tokens + WORLD_SIZE - 1) / WORLD_SIZE;
  Cta cta{p, shared, memory + RESULTS_OFFSET, memory + RINGS_OFFSET, per_rank, p.rank * per_rank, 0};
  cta.own_rows = cta.share_of(p.rank);
  const uint32_t epoch = p.epochs[blockIdx.x];

  if constexpr (STAGED) cta.stage();
  warp_sync();
  meet_peers(p.pads, p.status, epoch + 1, p.rank, 1, BLOCK);
  if (thread < GROUPS * THREADS) {
    cta.compute(thread / THREADS, thread % THREADS);
  } else if (fills) {
    cta.fill_rings();
  }
  warp_sync();
  if constexpr (PULL_RESIDUAL) fence_proxy_async();  // the residual rows that peers will copy
  meet_peers(p.pads, p.status, epoch + 2, p.rank, 2, BLOCK);
  grid_dependency_launch();  // not before: see push.cu
  if (thread == 0) p.epochs[blockIdx.x] = epoch + 2;
  if (PULL && fills) {
    fence_proxy_async();
    const int chunk = cta.collect(p.hidden_table, p.hidden, 0);
    if constexpr (PULL_RESIDUAL) cta.collect(p.residual_table, p.residual_out, chunk);
    bulk_wait();
  }
}
