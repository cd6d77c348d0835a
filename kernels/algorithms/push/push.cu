// all_reduce + bias + residual + RMSNorm for small and medium messages. Rows are pushed into the receivers' inboxes, and each
// word shows by itself that it has arrived (the Lamport style of NCCL's LL and TensorRT-LLM's all_reduce). No barrier.
//
// one-shot (ONE_SHOT=1): every rank pushes all its rows to all peers, and computes every row itself, all in the same
//   order: (N-1) x M on the links, one hop.
// two-shot: every rank pushes each row to its owner, the owner computes it and pushes the result to all peers:
//   2(N-1)/N x M on the links, two hops.
// CLUSTER CTAs may share a row: each has a part of its columns, and tells the others of its cluster what the part adds to the
// row's statistics, and its largest value where a scale is made of the row. A CTA's SM limits how fast a long row goes in and out.
//
// Why this is correct
// -------------------
// A word of an inbox that is NOT_ARRIVED has not been written since it was cleared; data never has that word
// (drop_negative_zeros). So each 32-bit word carries its own flag, and no order between stores is needed: relaxed
// accesses at system scope are enough, because their words are single-copy atomic.
//
// An inbox is three parts that calls use in turn. Call k receives in part k % 3 and clears what call k-1 used. A peer
// writes to that part again in its call k+2. It starts that call after its call k+1, which needed a row of this rank's
// call k+1, and this rank starts call k+1 when its call k, with the clearing, has ended (kernel boundary, or
// griddepcontrol.wait). Every rank needs something of every other rank in every call, as every rank adds to every row.
// Two parts would not do: a peer may be one call ahead while this rank still clears.
//
// State. All threads read from the state's phase which part a launch receives in. All its CTAs together move the phase on to
// the next part. Each CTA adds 1, once, and CTA 0 also adds what is left of the way. The phase says the launch's own part
// until the last CTA has added (part_of), so no CTA needs to know whether it is the last. A CTA adds when all its threads have
// in registers what they need of the state (barrier_sync_with). The number that it adds depends on what they have loaded, so
// the loads come first without a release. A release would wait for the CTA's stores to peers, and the addition hands nothing
// else over. Only the next launch reads the new phase. It does so when this launch has ended (kernel boundary, or
// griddepcontrol.wait), which makes all additions visible to it. So CTAs may add early. They do when their first rows are on
// their way, and go on at once. If they added at their end, the next kernel would wait for that.
//
// A call may be several launches, one for each range of local rows, so that inboxes of a message's size are not needed.
//
// CTA b handles the same rows on all ranks and waits for peers' CTAs of the same number only: no co-residency beyond
// that is needed. The state lives in device memory, so graph replays and launches of other shapes may follow each other.
//
// With a wire (wire.cuh) partial sums travel to the owners of their rows in codes, and so do the normalised rows from their
// owners. An owner adds its own partial sums as they are. It keeps of its result what the other ranks decode from the codes, so
// all ranks have the same bits. Rows of the new residual travel as they are.
//
// FED=1: the rows of the result that this rank computes stay in its own memory, `hidden`, and this kernel takes no rows of the
// peers. The GEMM behind this kernel sends this rank's rows and takes the peers' rows (fed.cuh). This kernel gives the GEMM a
// new number of the call, and resets what its clusters and threads claim. The argument above, that a call needs something of
// every other rank, then holds for the kernel and its GEMM together: a rank that owns no rows waits for nobody in this kernel,
// but its GEMM waits for all rows, and every rank has added to each of these rows. So such a call is one launch, with its GEMM
// between it and the next launch.
//
// Set by definitions, beside those of row.cuh, wire.cuh and EPILOGUE: FED, WORLD_SIZE, THREADS, CTAS_PER_SM (the registers must
// allow it), CLUSTER, ONE_SHOT, RESIDUAL_SHARDED, RESIDUAL_OUT, SPIN_LIMIT (polls before a thread gives up; 0: never),
// PREFETCH. A one-shot rank computes all rows, so its residual is not sharded.

#include "epilogue.cuh"
#include "wire.cuh"
#include "scales.cuh"
#include "prefetch.cuh"
#if CLUSTER > 1
#include "cluster.cuh"
#endif
#if FED
#include "fed.cuh"
#endif

inline constexpr uint32_t PARTS = 3;  // of an inbox
struct PushState {
  uint32_t phase;        // ONE_PART times the part that the next call receives in. During a call: see part_of
  uint32_t used[PARTS];  // 16-byte units that the latest call in each part has used
};

struct PushParams {
  const X_TYPE* x;                       // [tokens, HIDDEN], this rank's partial sums
  const RESIDUAL_TYPE* residual;         // [tokens, HIDDEN], or [rows_per_rank, HIDDEN] if RESIDUAL_SHARDED
  const BIAS_TYPE* bias;                 // [HIDDEN]
  const WEIGHT_TYPE* weight;             // [HIDDEN]
  const float* hidden_scale;             // [1], of an e4m3 result
  HIDDEN_TYPE* hidden;                   // [tokens, HIDDEN]
  RESIDUAL_OUT_TYPE* residual_out;       // [tokens | rows_per_rank, HIDDEN]
  uint8_t* const* inboxes;               // [world], three parts of part_bytes each
  PushState* state;
  int32_t* status;                       // [grid, 8]: what a thread gave up waiting for
  uint64_t part_bytes;
  int32_t rank;
  int32_t tokens;
  int32_t begin;  // the launch's local rows, begin to end: rows of x (one-shot), or of each rank's own (two-shot)
  int32_t end;
  float eps;
  float weight_offset;
  float scale;
  const NORM_BIAS_TYPE* norm_bias;  // [HIDDEN]
  Prefetched prefetch;
#if FED
  FedState* fed;
#endif
};

static_assert(!FED || (!ONE_SHOT && RESIDUAL_OUT != ALL_ROWS && !ResultRow::CODED), "owners' rows alone, as they are");
static_assert(!ONE_SHOT || (!RESIDUAL_SHARDED && RESIDUAL_OUT != OWN_ROWS), "one-shot needs and gives all rows");
static_assert(!ONE_SHOT || !SumRow::CODED, "only owners of rows read codes");
static_assert(CLUSTER == 1 || (!FED && !SumRow::CODED && (SCALE_COLUMNS || !ResultRow::CODED)), "not what CTAs share");

inline constexpr int ROW_THREADS = CLUSTER * THREADS;
using Row = RowPart<ROW_THREADS>;
inline constexpr int VECTORS = Row::VECTORS;
inline constexpr int WARPS = ROW_THREADS / 32;  // of a row
inline constexpr int PEERS = WORLD_SIZE - 1;
inline constexpr int AHEAD = 1;                 // turns from sending a row until it is computed
inline constexpr bool PUBLISHES = !ONE_SHOT && !FED;
// Whether a turn looks into the inbox before it sends, so that the loads are under way meanwhile, and loads what the next turn
// sends. Rows in codes spend less time on the links, so it is waiting for memory that limits them. Larger groups and longer rows
// have no registers for that.
inline constexpr bool EARLY = SumRow::CODED && VECTORS * PEERS == 1;
inline constexpr int BEHIND = PUBLISHES ? 1 : 0;  // turns from computing a row until the peers' rows of its number are taken

// The bytes of an inbox that each turn of a CTA uses.
using KeptRow = Exact<RESIDUAL_OUT_TYPE>;
inline constexpr uint32_t TURN_BYTES =
    PEERS *
    (SumRow::ROW_BYTES + (!PUBLISHES ? 0 : ResultRow::ROW_BYTES + (RESIDUAL_OUT == ALL_ROWS ? KeptRow::ROW_BYTES : 0)));
// 16-byte vectors of each thread.
inline constexpr uint32_t CLEARED_A_TURN = (TURN_BYTES + ROW_THREADS * 16 - 1) / (ROW_THREADS * 16);

// A call in part k finds the phase k * ONE_PART. What the CTAs add makes it the phase of the next part. Until CTA 0 adds, the
// phase grows by the CTAs that have added. From then on it lacks the CTAs that have not. A phase that lacks some of part 0's
// is just below 2^32, so it still says the last part.
inline constexpr uint32_t ONE_PART = 1 << 16;  // more than a grid has CTAs
DEVICE uint32_t part_of(uint32_t phase) { return smaller(phase / ONE_PART, PARTS - 1); }
// What CTA 0 of `ctas` adds besides the 1 that each CTA adds.
DEVICE uint32_t to_next_part(uint32_t part, int ctas) { return (part == PARTS - 1 ? 1 - PARTS : 1) * ONE_PART - ctas; }

// Peer number `step` (0 .. PEERS-1) after `rank`; a row from there lies in section `step` of this rank's inbox, and this
// rank's rows lie in section `PEERS - 1 - step` of that peer's.
DEVICE int peer_after(int rank, int step) { return (rank + 1 + step) % WORLD_SIZE; }

// The rows that one launch exchanges in a part of an inbox: a section of `rows` rows for each sender.
template <typename Travelling>
struct Sections {
  uint64_t offset;  // bytes from the begin of the part
  int rows;

  DEVICE typename Travelling::Element* row(uint8_t* part, int section, int row) const {
    return (typename Travelling::Element*)(part + offset) + ((uint64_t)section * rows + row) * Travelling::ROW;
  }
  // The end, rounded up to what is cleared at a time, and to the alignment of what lies behind: e4m3 rows may end 8 bytes off.
  DEVICE uint64_t end() const { return offset + ((uint64_t)PEERS * rows * Travelling::ROW_BYTES + 15) / 16 * 16; }
};

struct Call {
  const PushParams& p;
  uint32_t thread;
  int per_rank;
  uint32_t part;
  uint8_t* inbox;            // this rank's inbox, the part of this call
  uint8_t* peer_inbox[PEERS];  // the same part of the peers' inboxes, by step

  DEVICE int rows_of(int owner) const { return smaller(larger(p.tokens - owner * per_rank, 0), per_rank); }

  template <typename Travelling>
  DEVICE void push(const Sections<Travelling>& sections, int step, int row, uint32_t column,
                   const typename Travelling::Piece& piece) const {
    store_strong(Travelling::at(sections.row(peer_inbox[step], PEERS - 1 - step, row), column), piece);
  }

  // Loads one vector of row `row` from all sections for which wanted(section) holds, whether it has arrived or not.
  template <typename Travelling, typename Wanted>
  DEVICE void look(typename Travelling::Piece (&got)[PEERS], const Sections<Travelling>& sections, int row, uint32_t column,
                   Wanted wanted) const {
#pragma unroll
    for (int section = 0; section < PEERS; ++section)
      if (wanted(section)) load_strong(got[section], Travelling::at(sections.row(inbox, section, row), column));
  }

  // Looks again until what `look` has loaded has arrived.
  template <typename Travelling, typename Wanted>
  DEVICE void receive(typename Travelling::Piece (&got)[PEERS], const Sections<Travelling>& sections, int row,
                      uint32_t column, int phase, Wanted wanted) const {
    [[maybe_unused]] uint32_t polls = 0;
    while (true) {
      uint32_t missing = 0;
#pragma unroll
      for (int section = 0; section < PEERS; ++section)
        if (wanted(section) && !arrived(got[section])) missing |= 1u << section;
      if (missing == 0) return;
#if SPIN_LIMIT
      if (++polls == SPIN_LIMIT) {
        for (int section = 0; section < PEERS; ++section) {
          int32_t* report = p.status + blockIdx.x * 8 + peer_after(p.rank, section);
          if (missing >> section & 1 && *report == 0) *report = phase;
        }
        return;
      }
#endif
      look(got, sections, row, column, wanted);
    }
  }
};

// Adds up one vector of all ranks in rank order, with `own` in this rank's place. The sum starts from 0, so the signs of zeros
// make no difference.
template <typename T>
DEVICE void add_up(float (&h)[8], const Eight<T>& own, const Eight<T> (&got)[PEERS], int rank) {
  for (int i = 0; i < 8; ++i) h[i] = 0.0f;
#pragma unroll
  for (int source = 0; source < WORLD_SIZE; ++source) {
    // Registers can't be indexed by a number that is known only at run time, so the section is selected.
    Eight<T> eight = own;
#pragma unroll
    for (int section = 0; section < PEERS; ++section)
      if (peer_after(rank, section) == source) eight = got[section];
    add(h, eight);
  }
}
template <typename T, int BITS>
DEVICE void add_up(float (&h)[8], const Eight<T>& own, const InCodes<BITS> (&got)[PEERS], int rank) {
  add_in_rank_order(h, own, got, rank, [=](int section) { return peer_after(rank, section); });
}

// Adds up statistics of the threads of a row, and finds the largest of their values. Two sets of sums in shared memory take turns.
//
// In a cluster each warp sends its number to all CTAs, where an mbarrier counts the bytes. Each set has one, and so have the
// maxima. A CTA's warps send the sums of a row when they have those of the row before. So a warp that has all sums of a row may
// send its sum of the next row of the same set: nobody reads or awaits the set's earlier sums any more. It may also send its
// largest value of that row: every warp had read the maxima of the row before when it sent these sums. Numbers come from all
// CTAs before any of them ends.
struct RowTotals {
#if CLUSTER > 1
  static constexpr int BARRIERS = SCALE_COLUMNS ? 3 : 2;  // one of each set, and one of the maxima

  uint64_t* barriers;
  uint32_t phase = 0;  // of the next set's barrier
#if SCALE_COLUMNS
  uint32_t phase_of_maxima = 0;
#endif
#endif
  RowStatistics* sets;  // [2, WARPS], and behind them the maxima, one for each warp
  int next = 0;         // the next set

  DEVICE RowTotals() {
#if CLUSTER > 1
    barriers = (uint64_t*)dynamic_shared();
    sets = (RowStatistics*)(barriers + BARRIERS);
    if (threadIdx.x == 0) {
      for (int i = 0; i < BARRIERS; ++i) mbarrier_init(barriers + i, 1);
      mbarrier_init_fence();
    }
    warp_sync();
    cluster_arrive();
    cluster_wait();  // the mbarriers of the other CTAs are there
#else
    sets = (RowStatistics*)dynamic_shared();
#endif
  }

#if CLUSTER > 1
  // Puts the number of each warp into `numbers` of all CTAs, and waits until the numbers of all warps are here.
  template <typename T>
  DEVICE void share(const T& number, T* numbers, uint32_t thread, uint64_t* barrier, uint32_t barrier_phase) {
    const float* const parts = (const float*)&number;
    if (thread % 32 < CLUSTER)
#pragma unroll
      for (int i = 0; i < (int)sizeof number / 4; ++i)
        store_to_cta(thread % 32, (uint32_t*)(numbers + thread / 32) + i, as_bits(parts[i]), barrier);
    warp_sync();
    [[maybe_unused]] uint32_t polls = 0;
    while (!mbarrier_try_wait(barrier, barrier_phase)) {
#if SPIN_LIMIT
      if (++polls == SPIN_LIMIT) break;
#endif
    }
  }
#endif

  // `thread`: the number of the thread in the row.
  DEVICE RowStatistics sum(RowStatistics value, uint32_t thread) {
    RowStatistics* const sums = sets + next * WARPS;
#if CLUSTER > 1
    uint64_t* const barrier = barriers + next;
    if (threadIdx.x == 0) mbarrier_arrive_expect(barrier, WARPS * sizeof value);
    share(warp_sum(value), sums, thread, barrier, phase);
    phase ^= next;
    next ^= 1;
    return total<WARPS>(sums);
#else
    value = group_sum<WARPS>(value, sums, thread, 0);
    next ^= 1;
    return value;
#endif
  }

#if SCALE_COLUMNS
  // Is called once behind each `sum`, whose barrier is between two uses of the maxima.
  DEVICE float largest(float value, uint32_t thread) {
    float* const maxima = (float*)(sets + 2 * WARPS);
#if CLUSTER > 1
    uint64_t* const barrier = barriers + 2;
    if (threadIdx.x == 0) mbarrier_arrive_expect(barrier, WARPS * sizeof value);
    share(warp_max(value), maxima, thread, barrier, phase_of_maxima);
    phase_of_maxima ^= 1;
    return largest_of<WARPS>(maxima);
#else
    return group_max<WARPS>(value, maxima, thread, 0);
#endif
  }
#endif
};

KERNEL(THREADS, CTAS_PER_SM) push(GRID_CONSTANT PushParams p) {
  if (only_prefetches(p.prefetch)) return;
  RowTotals totals;
  grid_dependency_wait();

#if CLUSTER > 1
  const uint32_t thread = cluster_rank() * THREADS + threadIdx.x;
#else
  const uint32_t thread = threadIdx.x;
#endif
  const int rank = p.rank, ctas = row_ctas(p.prefetch), stride = ctas / CLUSTER;
  const int first = p.begin + blockIdx.x / CLUSTER;
  uint8_t* const own_inbox = p.inboxes[rank];
  uint8_t* peer_inbox[PEERS];
  for (int step = 0; step < PEERS; ++step) peer_inbox[step] = p.inboxes[peer_after(rank, step)];
  uint32_t state[4];  // phase and used: one load, because a second one would wait for the first
  load_global(state, p.state);
  Call call{p, thread, (p.tokens + WORLD_SIZE - 1) / WORLD_SIZE, part_of(state[0])};
  const int per_rank = call.per_rank;
  call.inbox = own_inbox + call.part * p.part_bytes;
  for (int step = 0; step < PEERS; ++step) call.peer_inbox[step] = peer_inbox[step] + call.part * p.part_bytes;

  const int rows = p.end - p.begin;
  const Sections<SumRow> sums{0, rows};
  const Sections<ResultRow> normalised{sums.end(), PUBLISHES ? rows : 0};
  const Sections<KeptRow> residuals{normalised.end(), PUBLISHES && RESIDUAL_OUT == ALL_ROWS ? rows : 0};

  // The row that is sent to the peer of that step: one row to all peers (one-shot), or each peer's row of this number (two-shot).
  const auto sends = [&](int step, int local) { return ONE_SHOT || local < call.rows_of(peer_after(rank, step)); };
  const auto load_sent = [&](Eight<X_TYPE> (&own)[VECTORS], int step, int local) {
    const uint64_t row = ONE_SHOT ? local : peer_after(rank, step) * per_rank + local;
    Row::each(thread, [&](int v, uint32_t column) { load(own[v], p.x + row * HIDDEN + column); });
  };
  [[maybe_unused]] Eight<X_TYPE> next[VECTORS];
  const auto send = [&](int local) {
    for (int step = 0; step < PEERS; ++step) {
      if (!sends(step, local)) continue;
      Eight<X_TYPE> own[VECTORS];
      if constexpr (EARLY)
        own[0] = next[0];
      else
        load_sent(own, step, local);
      Row::each_with<SumRow::CODED>(thread, [&](int v, uint32_t column, bool in_row) {
        if constexpr (!SumRow::CODED) drop_negative_zeros(own[v]);
        const auto& piece = SumRow::encoded(own[v]);
        if (in_row) call.push(sums, step, local - p.begin, column, piece);
      });
    }
  };
  [[maybe_unused]] const auto load_next = [&](int local) {
    if (local < p.end && sends(0, local)) load_sent(next, 0, local);
  };

  const auto keep = [&](uint64_t row, uint32_t column, const ResultRow::Piece& piece) {
#if SCALE_COLUMNS
    store_result(p.hidden, p.tokens, row, column, piece);
#else
    store(p.hidden + row * HIDDEN + column, received<HIDDEN_TYPE>(piece));
#endif
  };

  // Takes the rows of this number that the peers computed. `found`: what an earlier look has loaded, with EARLY.
  using Results = ResultRow::Piece[PEERS];
  const auto computed_by = [&](int local) {
    return [&call, rank, local](int section) { return local < call.rows_of(peer_after(rank, section)); };
  };
  [[maybe_unused]] const auto take = [&](int local, [[maybe_unused]] Results& found) {
    const auto computed = computed_by(local);
    const auto row_of = [&](int section) { return (uint64_t)(peer_after(rank, section) * per_rank + local); };
    Row::each(thread, [&](int, uint32_t column) {
      Results got;
      if constexpr (EARLY)
        got[0] = found[0];
      else
        call.look(got, normalised, local - p.begin, column, computed);
      call.receive(got, normalised, local - p.begin, column, 2, computed);
      for (int section = 0; section < PEERS; ++section)
        if (computed(section)) keep(row_of(section), column, got[section]);
      if constexpr (RESIDUAL_OUT == ALL_ROWS) {
        Eight<RESIDUAL_OUT_TYPE> kept[PEERS];
        call.look(kept, residuals, local - p.begin, column, computed);
        call.receive(kept, residuals, local - p.begin, column, 3, computed);
        for (int section = 0; section < PEERS; ++section)
          if (computed(section)) store(p.residual_out + row_of(section) * HIDDEN + column, kept[section]);
      }
    });
  };

  // Each thread clears up to `count` more 16-byte vectors of what the call before this one has read.
  const uint32_t previous = call.part == 0 ? PARTS - 1 : call.part - 1;
  uint32_t used = 0;
#pragma unroll
  for (uint32_t i = 0; i < PARTS; ++i)
    if (previous == i) used = state[1 + i];
  uint32_t unit = blockIdx.x * THREADS + threadIdx.x;
  const auto clear = [&](uint32_t count) {
    const uint32_t cleared[4] = {NOT_ARRIVED, NOT_ARRIVED, NOT_ARRIVED, NOT_ARRIVED};
    for (; count > 0 && unit < used; --count, unit += ctas * THREADS)
      store_global(own_inbox + previous * p.part_bytes + unit * 16ull, cleared);
  };

  // This CTA's share of moving the state on. CTA 0 also writes what only later launches read. The GEMM behind this launch has
  // not started, and the one behind the launch before has ended. So CTA 0 may number the fed call and reset its claims, too.
  const auto move_on = [&] {
    warp_sync();
    const uint32_t one = barrier_sync_with(0, THREADS, used);
    if (threadIdx.x > 0) return;
    const uint32_t part = call.part * one;  // so that nothing of what follows is worked out before the rows are sent
    if (blockIdx.x == 0) {
      p.state->used[part] = (uint32_t)(residuals.end() / 16);
#if FED
      add_relaxed_gpu(&p.fed->call, 1);
      p.fed->pairs = 0;
      p.fed->chunks = 0;
#endif
    }
    add_relaxed_gpu(&p.state->phase, one + (blockIdx.x == 0 ? to_next_part(part, ctas) : 0));
  };

  // A CTA sends, computes and takes rows in turn, so that the links have something to carry all the time. What a CTA waits for
  // in a turn, the peers send in the same turn or in an earlier one.
  [[maybe_unused]] const float inverse_scale =
      sizeof(HIDDEN_TYPE) == 1 && SCALE_COLUMNS == 0 ? 1.0f / *p.hidden_scale : 1.0f;
  const int computed_end = smaller(p.end, ONE_SHOT ? p.tokens : call.rows_of(rank));
  if constexpr (EARLY) load_next(first);
  for (int ahead = first; ahead < p.end + (AHEAD + BEHIND) * stride; ahead += stride) {
    const int local = ahead - AHEAD * stride;
    const bool computes = first <= local && local < computed_end;
    const uint64_t row = ONE_SHOT ? local : rank * per_rank + local;
    Eight<X_TYPE> own[VECTORS];
    Loaded<ROW_THREADS, RESIDUAL_TYPE> residual;
    Loaded<ROW_THREADS, WEIGHT_TYPE> weight;
    Loaded<ROW_THREADS, NORM_BIAS_TYPE> norm_bias;
    if (computes) {
      Row::each(thread, [&](int v, uint32_t column) { load(own[v], p.x + row * HIDDEN + column); });
      residual.fetch(p.residual + (RESIDUAL_SHARDED ? local : row) * HIDDEN, thread);
      if constexpr (!SumRow::CODED) weight.fetch(p.weight, thread);
      norm_bias.fetch(p.norm_bias, thread);
    }
    const int behind = local - BEHIND * stride;
    [[maybe_unused]] const auto takes = [&] { return PUBLISHES && behind >= first && behind < p.end; };
    [[maybe_unused]] SumRow::Piece sum[PEERS];
    [[maybe_unused]] Results found;
    if constexpr (EARLY)
      Row::each(thread, [&](int, uint32_t column) {
        if (computes) call.look(sum, sums, local - p.begin, column, [](int) { return true; });
        if (takes()) call.look(found, normalised, behind - p.begin, column, computed_by(behind));
      });
    if (ahead < p.end) send(ahead);
    if constexpr (EARLY) load_next(ahead + stride);
    if (computes) {
      clear(CLEARED_A_TURN);  // while sums are under way
      float h[VECTORS][8];
      Row::each(thread, [&](int v, uint32_t column) {
        SumRow::Piece got[PEERS];
        const auto all = [](int) { return true; };
        if constexpr (EARLY)
          got[0] = sum[0];
        else
          call.look(got, sums, local - p.begin, column, all);
        call.receive(got, sums, local - p.begin, column, 1, all);
        add_up(h[v], own[v], got, rank);
      });
      if constexpr (SumRow::CODED) weight.fetch(p.weight, thread);  // not before: codes need the registers
      const RowStatistics own_part = finish_sum<ROW_THREADS>(h, p.scale, p.bias, residual, thread);
      const auto factor = row_factor(totals.sum(own_part, thread), p.eps);
#if SCALE_COLUMNS
      const auto scales = scales_of_row<ROW_THREADS>(h, factor, weight, p.weight_offset, thread, [&](float value) {
        return totals.largest(value, thread);
      });
#endif

      Row::each_with<ResultRow::CODED>(thread, [&](int v, uint32_t column, bool in_row) {
        if (RESIDUAL_OUT != NO_ROWS && in_row) {
          Eight<RESIDUAL_OUT_TYPE> kept;
          pack(kept, h[v]);
          drop_negative_zeros(kept);
          if constexpr (RESIDUAL_OUT == ALL_ROWS) store(p.residual_out + row * HIDDEN + column, kept);
          if constexpr (RESIDUAL_OUT == OWN_ROWS) store(p.residual_out + (uint64_t)local * HIDDEN + column, kept);
          if constexpr (!ONE_SHOT && RESIDUAL_OUT == ALL_ROWS)
            for (int step = 0; step < PEERS; ++step) call.push(residuals, step, local - p.begin, column, kept);
        }
#if SCALE_COLUMNS
        const auto piece = quantised(h[v], factor, weight.vectors[v], p.weight_offset, scales.of(v));
#else
        Eight<HIDDEN_TYPE> result;
        normalise(result, h[v], factor, weight.vectors[v], norm_bias.vectors[v], p.weight_offset, inverse_scale);
        if constexpr (!ResultRow::CODED) drop_negative_zeros(result);
        const auto& piece = ResultRow::encoded_and_received(result);
#endif
        if (!in_row) return;
#if SCALE_COLUMNS
        keep(row, column, piece);
#else
        store(p.hidden + row * HIDDEN + column, result);
#endif
        if constexpr (PUBLISHES)
          for (int step = 0; step < PEERS; ++step) call.push(normalised, step, local - p.begin, column, piece);
      });
    }
    if (takes()) take(behind, found);
    if (ahead == first) move_on();  // every CTA has a first turn, and has only sent in it
  }
  clear(used);  // the rest, where the call before was larger

  // The next kernel may take the SMs now, and not before: its CTAs wait for this kernel's end, and if they held SMs that CTAs
  // of a call on another slot need, ranks could wait for each other.
  grid_dependency_launch();
}
