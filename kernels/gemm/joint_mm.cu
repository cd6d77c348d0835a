// GEMMs that read one input, in one launch: the same rows times several matrices, in bf16 with sums in fp32.
//
// Two CTAs form a cluster. They compute a pair of output tiles over each other, of 128 rows x COLUMNS each, and share the
// matrices' columns. The last pairs may be narrow, where that fills the last wave: narrow pairs have half of the columns. Where
// 128 rows or fewer are left at the end, their pairs are low: each CTA computes 64 rows.
//
// The columns of all matrices lie beside each other, as if they were one matrix. A tile may have the last columns of one matrix
// and the first ones of the next. Columns are loaded in boxes, each of one matrix, so a matrix begins with a box.
//
// A cluster computes the pair with the number of the cluster, and every (gridDim / 2)-th pair after it: whole pairs first, then
// narrow ones, then low ones. In a CTA one thread keeps a ring of shared-memory stages filled. A stage holds 64 of the depth
// for both operands. Two warpgroups multiply 64 rows each. Of a low pair they multiply the same 64 rows by half of the columns
// each. A stage also takes in copies from the other CTA, so it is filled again only when the warps of both CTAs have read it.
//
// BIASED: each matrix has a vector that is added to all rows of its result, before the result is rounded.
//
// GATED: there are two matrices, and silu(rows * the first) * (rows * the second) is stored. The matrices don't lie beside each
// other then: half of each tile's columns are the first matrix's, and half the second matrix's. CTA 0 loads the first matrix for
// both CTAs, and CTA 1 loads the second one.
//
// FED: rows that other ranks compute arrive while the kernel runs (fed.cuh). Pairs of this rank's own rows come first. The
// other ranks' rows follow in the order in which they arrive, with all columns of a pair before the next one. The thread that
// loads rows waits for them. The first clusters that run send this rank's rows before they compute pairs. So it is not fixed
// which cluster computes what: each one claims its next pair, in this order.
//
// Loads and matmuls use Hopper's machine instructions (PTX ISA, wgmma and cp.async.bulk.tensor) in the way that CUTLASS's
// persistent cooperative kernels do.

#include "matrices.cuh"
#if FED
#include "fed.cuh"
#endif

static_assert(!(BIASED && GATED), "biases are added to what is stored");

struct JointMmParams {
  TensorMap a;                       // [rows, depth], boxes of TILE_ROWS / boxes_a x 64
  TensorMap matrices[MATRICES];      // [columns, depth], boxes of COLUMNS / boxes_b x 64
  uint16_t* out[MATRICES];           // [rows, columns]; GATED: only the first is used
  const uint16_t* biases[MATRICES];  // [columns]; for BIASED
  int32_t columns[MATRICES];         // multiples of 8
  int32_t begins[MATRICES];          // where a matrix's columns begin; NO_MATRIX where there is none
  int32_t boxes_a, boxes_b;          // of a tile that is neither narrow nor low; boxes_a is 2 if any pair is low
  int32_t wide;                      // tiles beside each other
  int32_t rows;
  int32_t depth;      // a multiple of TILE_DEPTH
  int32_t whole;      // pairs that are neither narrow nor low
  int32_t unused[8];  // to a multiple of 64 bytes
#if FED
  FedParams fed;
#endif
};

inline constexpr int TILE_ROWS = 128, TILE_DEPTH = 64;
inline constexpr int OUT_COLUMNS = GATED ? COLUMNS / 2 : COLUMNS;  // columns that a tile stores
inline constexpr int BAND = 8;       // pairs over each other that are computed before the pairs beside them
inline constexpr int CONSUMERS = 2;  // warpgroups
inline constexpr int THREADS = 128 * (CONSUMERS + 1);
inline constexpr int ROW_BYTES = TILE_DEPTH * 2;
inline constexpr int HALF_A = TILE_ROWS / 2 * ROW_BYTES, HALF_B = COLUMNS / 2 * ROW_BYTES;
inline constexpr int STAGE_BYTES = 2 * HALF_A + 2 * HALF_B;
inline constexpr int STAGES = 225 * 1024 / STAGE_BYTES;
inline constexpr uint16_t BOTH = 3;
inline constexpr int MOST_BOXES = GATED ? 2 : 4;  // of columns, that a CTA loads into a stage
static_assert(GATED || COLUMNS / 32 <= 2 * MOST_BOXES, "a box has 32 columns at least");
#if FED
static_assert(FED_BLOCK == TILE_ROWS, "a tile lies in one block");
static_assert(FED_THREADS * FED_PIECES * FED_PIECE <= STAGES * STAGE_BYTES, "rows are sent through the stages");
static_assert(STAGES < FED_LETTERS, "see tell");
#endif

struct Shared {
  uint8_t stages[STAGES][STAGE_BYTES];  // a, then b; at a multiple of 1024 bytes
  uint64_t full[STAGES];                // a stage has arrived
  uint64_t empty[STAGES];               // a stage has been read: one arrival of each consuming warp of both CTAs
#if FED
  FedShared fed;
#endif
};
static_assert(sizeof(Shared) <= 227 * 1024, "an SM's shared memory");

// One CTA's tile of a pair.
struct Tile {
  int32_t row, column;  // its first row, and its first column of all matrices'
  bool narrow, low;     // half of the columns; 64 rows, not 128
};

// Finds the tile of CTA `rank` in pair `number` of all pairs. Two narrow pairs take the place of one whole pair. Returns false
// beyond the last pair.
DEVICE bool find(const JointMmParams& params, int32_t number, int32_t rank, Tile& tile) {
  const int32_t wide = params.wide;
  int32_t high = (params.rows + TILE_ROWS - 1) / (2 * TILE_ROWS);  // pairs over each other that have more than 128 rows
  int32_t behind = number - params.whole;
  int32_t pairs = high * wide, pair = behind < 0 ? number : params.whole + behind / 2, column, row;
  tile.low = pair >= pairs;
  tile.narrow = behind >= 0 && !tile.low;
  if (!tile.low) {
    int32_t over = high, most = BAND;  // pairs over each other, and how many of them a band has
#if FED
    const int32_t own = params.fed.own, others = high - own;
    const bool is_own = pair < own * wide;
    if (is_own) {
      over = own;
    } else {
      pair -= own * wide;
      over = others, most = 1;  // all columns of the rows that arrive first
    }
#endif
    int32_t band = pair / (most * wide), in_band = pair % (most * wide);
    int32_t here = over - band * most < most ? over - band * most : most;
    int32_t place = band * most + in_band % here;
    column = in_band / here;
#if FED
    place = params.fed.first + (is_own ? place : own + by_arrival(params.fed, others, place));
    if (place >= high) place -= high;
#endif
    row = place * 2 * TILE_ROWS;
  } else {
    row = high * 2 * TILE_ROWS;
    column = behind - 2 * (pairs - params.whole);
    if (row >= params.rows || column >= wide) return false;
  }
  tile.row = row + rank * (tile.low ? TILE_ROWS / 2 : TILE_ROWS);
  tile.column = column * OUT_COLUMNS + (tile.narrow ? behind % 2 * (OUT_COLUMNS / 2) : 0);
  return true;
}

// Fills the stages of one pair of tiles. between(k) is called when the stage of depth k has been filled.
template <class Between>
DEVICE void fill_pair(
    const JointMmParams& params, Shared& shared, Ring<STAGES>& ring, const Tile& tile, int32_t rank, Between between) {
  const int32_t bytes = (tile.low ? 1 : 2) * HALF_A + (tile.narrow ? 1 : 2) * HALF_B;
  const int32_t boxes_a = tile.low ? 1 : params.boxes_a;
  const int32_t boxes_b = params.boxes_b / (tile.narrow ? 2 : 1), box_columns = COLUMNS / params.boxes_b;
  // Each CTA loads half of the boxes of columns for both. CTA 0 loads one more if they are odd. They are found here, once.
  const int32_t first = rank * ((boxes_b + 1) / 2), own = (rank ? boxes_b : boxes_b + 1) / 2;
  const TensorMap* maps[MOST_BOXES];
  int32_t columns[MOST_BOXES];
#pragma unroll
  for (int32_t box = 0; box < MOST_BOXES; box++) {
    const int32_t column = tile.column + (GATED ? box : first + box) * box_columns;
    const int32_t matrix = GATED ? rank : matrix_of(params, column);
    maps[box] = &params.matrices[matrix];
    columns[box] = column - (GATED ? 0 : params.begins[matrix]);
  }
  for (int32_t k = 0; k < params.depth; k += TILE_DEPTH, ring.next()) {
    uint8_t* a = shared.stages[ring.stage];
    uint8_t* b = a + 2 * HALF_A + first * box_columns * ROW_BYTES;
    uint64_t* full = &shared.full[ring.stage];
    wait(&shared.empty[ring.stage], ring.parity ^ 1);
    mbarrier_arrive_expect(full, bytes);
    load_tile(a, params.a, k, tile.row, full);
    if (boxes_a > 1) load_tile(a + HALF_A, params.a, k, tile.row + TILE_ROWS / 2, full);
#pragma unroll
    for (int32_t box = 0; box < MOST_BOXES; box++) {
      if (box == own) break;
      load_tile_to(BOTH, b + box * box_columns * ROW_BYTES, *maps[box], k, columns[box], full);
    }
    between(k);
  }
}

#if FED
// Fills stages from `turn` on. CTA 0 has told of that turn. CTA 0 claims the next pair in the middle of a pair, not earlier, so
// that a pair goes to the cluster that can begin it soonest. Later in the pair it tells of it. Before a pair's first stage this
// thread waits for the pair's rows. Meanwhile the warps store the sums of the pair before.
DEVICE void fill(const JointMmParams& params, Shared& shared, int32_t rank, int32_t turn) {
  const uint32_t call = params.fed.state->call;
  const int32_t claims = params.depth / 2 / TILE_DEPTH * TILE_DEPTH, tells = params.depth * 3 / 4 / TILE_DEPTH * TILE_DEPTH;
  Ring<STAGES> ring;
  Tile tile;
  for (;; turn++) {
    const int32_t pair = told(shared.fed, turn);
    wait(&shared.empty[ring.stage], ring.parity ^ 1);
    shared.fed.pairs[ring.stage] = pair;
    if (!find(params, pair, rank, tile)) {
      mbarrier_arrive(&shared.full[ring.stage]);
      return;
    }
    await_rows(params.fed, call, params.rows, tile.row, tile.low ? TILE_ROWS / 2 : TILE_ROWS);
    int32_t next = 0;
    fill_pair(params, shared, ring, tile, rank, [&](int32_t k) {
      if (rank > 0) return;
      if (k == claims) next = claim_pair(params.fed);
      if (k == tells) tell(shared.fed, turn + 1, next);
    });
  }
}
#else
DEVICE void fill(const JointMmParams& params, Shared& shared, int32_t rank) {
  Ring<STAGES> ring;
  Tile tile;
  for (int32_t number = blockIdx.x / 2; find(params, number, rank, tile); number += gridDim.x / 2) {
    fill_pair(params, shared, ring, tile, rank, [](int32_t) {});
  }
}
#endif

DEVICE float silu(float x) { return x * reciprocal_near(1.0f + exp2_near(-1.4426950408889634f * x)); }

// Computes a warpgroup's 64 rows by N columns, in PARTS parts of N / PARTS columns that lie beside each other. In each stage
// rows begin at byte `a` and columns at byte `b`. The second part of the columns begins half of a stage's columns further on.
template <int N, int PARTS>
DEVICE void multiply(
    const JointMmParams& params, Shared& shared, Ring<STAGES>& ring, const Tile& tile, int32_t a, int32_t b, int32_t row,
    int32_t column) {
  constexpr int EACH = N / 2 / PARTS;
  const uint32_t lane = threadIdx.x % 32;
  float d[PARTS][EACH] = {};  // else registers of all kinds of tiles are kept over the loop around this: too many
  int32_t read = -1;  // the stage that the matmuls before the latest ones read
  for (int32_t k = 0; k < params.depth; k += TILE_DEPTH, ring.next()) {
    wait(&shared.full[ring.stage], ring.parity);
    uint8_t* stage = shared.stages[ring.stage];
    uint64_t rows = tile_descriptor(stage + a), columns = tile_descriptor(stage + 2 * HALF_A + b);
    wgmma_fence();
#pragma unroll
    for (int32_t step = 0; step < TILE_DEPTH; step += 16) {
#pragma unroll
      for (int32_t part = 0; part < PARTS; part++) {
        wgmma_64x16<N / PARTS>(
            d[part], rows + columns_on(step), columns + part * (HALF_B >> 4) + columns_on(step), 1);
      }
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (read >= 0 && lane < 2) mbarrier_arrive_at(&shared.empty[read], lane);
    read = ring.stage;
  }
  wgmma_wait<0>();
  if (lane < 2) mbarrier_arrive_at(&shared.empty[read], lane);
  const auto place = [&](int32_t further) {
    const int32_t at = column + further, matrix = GATED ? 0 : matrix_of(params, at), in = at - params.begins[matrix];
    const int64_t row_elements = params.columns[matrix];
    return Place{params.out[matrix] + row * row_elements + in, row_elements, in < row_elements};
  };
  if constexpr (GATED) {
    auto value = [&](int32_t i) { return silu(d[0][i]) * d[(N / 4 + i) / EACH][(N / 4 + i) % EACH]; };
    store_rows<N / 2>(params.rows - row, place, value);
  } else {
    if constexpr (BIASED) add_bias<N>(params, d[0], column);
    store_rows<N>(params.rows - row, place, [&](int32_t i) { return d[0][i]; });
  }
}

KERNEL(THREADS, 1) joint_mm(GRID_CONSTANT JointMmParams params) {
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared());
  int32_t rank = (int32_t)cluster_rank();
#if FED
  int32_t first = 0, turn = 0;
  if (rank == 0 && threadIdx.x == 0) first = claim_pair(params.fed);
#endif
  if (threadIdx.x == 0) {
    prefetch_map(params.a);
    for (int32_t matrix = 0; matrix < MATRICES; matrix++) {
      if (GATED ? matrix < 2 : params.begins[matrix] < NO_MATRIX) prefetch_map(params.matrices[matrix]);
    }
    for (int32_t stage = 0; stage < STAGES; stage++) {
      mbarrier_init(&shared.full[stage], 1);
      mbarrier_init(&shared.empty[stage], 2 * 4 * CONSUMERS);
    }
    mbarrier_init_fence();
  }
#if FED
  if (threadIdx.x < 32) {
    warp_sync();
    init_fed(params.fed, shared.fed);
  }
  warp_sync();
#endif
  cluster_sync();
#if FED
  if (rank == 0 && threadIdx.x == 0) tell(shared.fed, 0, first);
  const bool sends = told(shared.fed, 0) < 0;
  warp_sync();
  barrier_sync(0, THREADS);  // all have read the letter, whose place later letters take
  if (sends) {
    const int32_t sender = first_lanes((int32_t)threadIdx.x / 32);
    if (sender < FED_THREADS && threadIdx.x % 32 == 0) {
      send_rows(params.fed, shared.fed, sender, shared.stages[0], params.rows, params.depth * 2);
    }
    warp_sync();
    cluster_sync();  // both CTAs' shared memory is free for stages
    turn = 1;
    if (rank == 0 && threadIdx.x == 0) tell(shared.fed, turn, next_pair(params.fed));
    warp_sync();  // registers are given back by whole warps
  }
#endif
  if (threadIdx.x < 128) {
    fewer_registers<40>();
#if FED
    if (threadIdx.x == 0) fill(params, shared, rank, turn);
#else
    if (threadIdx.x == 0) fill(params, shared, rank);
#endif
  } else {
    more_registers<232>();
    int32_t warp = first_lanes((int32_t)threadIdx.x / 32 - 4), warpgroup = warp / 4;  // `warp` counts over both warpgroups
    Ring<STAGES> ring;
    Tile tile = {};
    const auto compute = [&] {
      const int32_t below = tile.low ? 0 : warpgroup, beside = warpgroup - below;
      const int32_t row = tile.row + below * 64 + warp % 4 * 16, column = tile.column + beside * (OUT_COLUMNS / 2);
      const int32_t a = below * HALF_A;
      if (!tile.low && !tile.narrow) {
        multiply<COLUMNS, 1>(params, shared, ring, tile, a, 0, row, column);
      } else if (GATED && tile.low) {  // a quarter of each matrix's columns
        multiply<COLUMNS / 2, GATED ? 2 : 1>(params, shared, ring, tile, a, beside * HALF_B / 2, row, column);
      } else {
        multiply<COLUMNS / 2, 1>(params, shared, ring, tile, a, beside * HALF_B, row, column);
      }
    };
#if FED
    for (;;) {
      wait(&shared.full[ring.stage], ring.parity);
      if (!find(params, shared.fed.pairs[ring.stage], rank, tile)) break;
      compute();
    }
#else
    for (int32_t number = blockIdx.x / 2; find(params, number, rank, tile); number += gridDim.x / 2) compute();
#endif
  }
  cluster_sync();  // CTAs end together: a CTA that has ended takes in no copies and no arrivals
}
