// GEMMs that read one input of few rows, in one launch: in bf16 with sums in fp32, and with their depth split (split-K).
//
// Few rows have few tiles, which would leave most SMs idle. So a cluster of `parts` CTAs computes a tile of 128 rows x COLUMNS,
// and each of its CTAs multiplies a part of the depth. Then the CTAs add up what they have: each one adds all CTAs' sums of
// some columns, in the order of the CTAs, and stores them.
//
// The columns of all matrices lie beside each other, as in joint_mm.cu. In a CTA one thread keeps a ring of shared-memory stages
// filled, of 64 of the depth each. Two warpgroups multiply 64 rows each. If a tile has at most 64 rows, the second one does
// nothing.
//
// BIASED: each matrix has a vector that is added to all rows of its result, before the result is rounded.

#include "matrices.cuh"

struct SplitKMmParams {
  TensorMap a;                       // [rows, depth], boxes of 64 x 64
  TensorMap matrices[MATRICES];      // [columns, depth], boxes of COLUMNS / boxes x 64
  uint16_t* out[MATRICES];           // [rows, columns]
  const uint16_t* biases[MATRICES];  // [columns]; for BIASED
  int32_t columns[MATRICES];         // multiples of 8
  int32_t begins[MATRICES];          // where a matrix's columns begin; NO_MATRIX where there is none
  int32_t boxes;                     // of a tile's columns
  int32_t high;                      // tiles over each other
  int32_t rows;
  int32_t depth;      // a multiple of TILE_DEPTH, and parts times that or more
  int32_t parts;      // 2 or 4
  int32_t unused[9];  // to a multiple of 64 bytes
};

inline constexpr int TILE_ROWS = 128, TILE_DEPTH = 64;
inline constexpr int GROUP = 32;  // columns of one matrix, that a CTA adds and stores at a time
inline constexpr int CONSUMERS = 128 * 2, THREADS = CONSUMERS + 128;
inline constexpr int ROW_BYTES = TILE_DEPTH * 2;
inline constexpr int HALF_A = TILE_ROWS / 2 * ROW_BYTES;
inline constexpr int STAGE_BYTES = 2 * HALF_A + COLUMNS * ROW_BYTES;
inline constexpr int STAGES = 225 * 1024 / STAGE_BYTES;
inline constexpr int MOST_BOXES = COLUMNS / 32;
static_assert(COLUMNS % GROUP == 0, "a CTA adds whole groups of columns");
static_assert(TILE_ROWS * COLUMNS * 4 <= STAGES * STAGE_BYTES, "sums lie where the stages were");

struct Shared {
  uint8_t stages[STAGES][STAGE_BYTES];  // a, then b; at a multiple of 1024 bytes
  uint64_t full[STAGES];                // a stage has arrived
  uint64_t empty[STAGES];               // a stage has been read: one arrival of each consuming warp
};
static_assert(sizeof(Shared) <= 227 * 1024, "an SM's shared memory");

// A CTA's part of a tile.
struct Tile {
  int32_t row, column;  // its first row, and its first column of all matrices'
  int32_t begin, end;   // of the depth
  int32_t halves;       // of its rows, that exist
};

DEVICE void fill(const SplitKMmParams& params, Shared& shared, const Tile& tile) {
  const int32_t box_columns = COLUMNS / params.boxes;
  const TensorMap* maps[MOST_BOXES];
  int32_t columns[MOST_BOXES];
#pragma unroll
  for (int32_t box = 0; box < MOST_BOXES; box++) {
    const int32_t column = tile.column + box * box_columns, matrix = matrix_of(params, column);
    maps[box] = &params.matrices[matrix];
    columns[box] = column - params.begins[matrix];
  }
  Ring<STAGES> ring;
  for (int32_t k = tile.begin; k < tile.end; k += TILE_DEPTH, ring.next()) {
    uint8_t* a = shared.stages[ring.stage];
    uint64_t* full = &shared.full[ring.stage];
    wait(&shared.empty[ring.stage], ring.parity ^ 1);
    mbarrier_arrive_expect(full, tile.halves * HALF_A + COLUMNS * ROW_BYTES);
#pragma unroll
    for (int32_t box = 0; box < MOST_BOXES; box++) {
      if (box == params.boxes) break;
      load_tile(a + 2 * HALF_A + box * box_columns * ROW_BYTES, *maps[box], k, columns[box], full);
    }
    for (int32_t half = 0; half < tile.halves; half++) {
      load_tile(a + half * HALF_A, params.a, k, tile.row + half * (TILE_ROWS / 2), full);
    }
  }
}

// Computes a warpgroup's 64 rows by COLUMNS columns, and leaves the sums where the stages were: 16 bytes of each thread for every
// eight columns.
DEVICE void multiply(Shared& shared, const Tile& tile, int32_t half) {
  float d[COLUMNS / 2] = {};
  int32_t read = -1;  // the stage that the matmuls before the latest ones read
  int32_t k = tile.begin;
  Ring<STAGES> ring;
  do {  // if the loop could be skipped, the compiler would let matmuls wait for each other
    wait(&shared.full[ring.stage], ring.parity);
    uint8_t* stage = shared.stages[ring.stage];
    uint64_t rows = tile_descriptor(stage + half * HALF_A), columns = tile_descriptor(stage + 2 * HALF_A);
    wgmma_fence();
#pragma unroll
    for (int32_t step = 0; step < TILE_DEPTH; step += 16) {
      wgmma_64x16<COLUMNS>(d, rows + columns_on(step), columns + columns_on(step), 1);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (read >= 0 && threadIdx.x % 32 == 0) mbarrier_arrive(&shared.empty[read]);
    read = ring.stage;
    ring.next();
    k += TILE_DEPTH;
  } while (k < tile.end);
  wgmma_wait<0>();
  barrier_sync(1, 128 * tile.halves);  // all have read the stages
#pragma unroll
  for (int32_t block = 0; block < COLUMNS / 8; block++) {
    const float* sums = &d[block * 4];
    const uint32_t w[4] = {as_bits(sums[0]), as_bits(sums[1]), as_bits(sums[2]), as_bits(sums[3])};
    store_shared(shared.stages[0] + (block * CONSUMERS + threadIdx.x) * 16, w);
  }
}

// All CTAs' sums of GROUP columns from `column` of the tile on.
template <int PARTS>
DEVICE void add_up(const Shared& shared, int32_t column, float (&sums)[GROUP / 2]) {
#pragma unroll
  for (int32_t block = 0; block < GROUP / 8; block++) {
    uint32_t w[PARTS][4];
#pragma unroll
    for (uint32_t part = 0; part < PARTS; part++) {
      load_from_cta(w[part], part, shared.stages[0] + ((column / 8 + block) * CONSUMERS + threadIdx.x) * 16);
    }
#pragma unroll
    for (int32_t i = 0; i < 4; i++) {
      float sum = as_float(w[0][i]);
#pragma unroll
      for (int32_t part = 1; part < PARTS; part++) sum += as_float(w[part][i]);
      sums[block * 4 + i] = sum;
    }
  }
}

template <int PARTS>
DEVICE void finish(const SplitKMmParams& params, const Shared& shared, const Tile& tile, int32_t half) {
  const int32_t row = tile.row + half * (TILE_ROWS / 2) + (int32_t)threadIdx.x / 32 % 4 * 16;
  for (int32_t first = (int32_t)cluster_rank() * GROUP; first < COLUMNS; first += PARTS * GROUP) {
    float sums[GROUP / 2];
    add_up<PARTS>(shared, first, sums);
    const int32_t column = tile.column + first, matrix = matrix_of(params, column), in = column - params.begins[matrix];
    const int64_t row_elements = params.columns[matrix];
    uint16_t* out = params.out[matrix] + row * row_elements + in;
    if constexpr (BIASED) add_bias<GROUP>(params, sums, column);
    const auto place = [&](int32_t further) { return Place{out + further, row_elements, in + further < row_elements}; };
    store_rows<GROUP>(params.rows - row, place, [&](int32_t i) { return sums[i]; });
  }
}

KERNEL(THREADS, 1) split_k_mm(GRID_CONSTANT SplitKMmParams params) {
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared());
  const int32_t part = (int32_t)cluster_rank(), number = (int32_t)blockIdx.x / params.parts;
  const int32_t stages = params.depth / TILE_DEPTH;
  Tile tile;
  tile.row = number % params.high * TILE_ROWS;
  tile.column = number / params.high * COLUMNS;
  tile.begin = part * stages / params.parts * TILE_DEPTH;
  tile.end = (part + 1) * stages / params.parts * TILE_DEPTH;
  tile.halves = tile.row + TILE_ROWS / 2 < params.rows ? 2 : 1;
  if (threadIdx.x == 0) {
    prefetch_map(params.a);
    for (int32_t matrix = 0; matrix < MATRICES; matrix++) {
      if (params.begins[matrix] < NO_MATRIX) prefetch_map(params.matrices[matrix]);
    }
    for (int32_t stage = 0; stage < STAGES; stage++) {
      mbarrier_init(&shared.full[stage], 1);
      mbarrier_init(&shared.empty[stage], 4 * tile.halves);
    }
    mbarrier_init_fence();
  }
  barrier_sync(0, THREADS);
  const int32_t half = first_lanes((int32_t)threadIdx.x / 32) / 4;  // of the rows, that the warpgroup multiplies
  if (half < tile.halves) {
    multiply(shared, tile, half);
  } else if (threadIdx.x == CONSUMERS) {
    fill(params, shared, tile);
  }
  warp_sync();
  cluster_sync();  // all sums are there
  if (half < tile.halves) {
    if (params.parts == 4) {
      finish<4>(params, shared, tile, half);
    } else {
      finish<2>(params, shared, tile, half);
    }
  }
  cluster_sync();  // a CTA that has ended has no sums
}
