// A grouped GEMM for mixtures of experts: each group's rows times the matrix of the group, in bf16 with sums in fp32.
//
// Two CTAs form a cluster. They compute two output tiles of 128 x 256 at a time, and share the operand that both read. Where a
// group has two more tiles of rows, the CTAs share the matrix's columns, and the tiles stand over each other. Where the group
// has one more, the CTAs share its rows and compute two tiles of columns, side by side. So a group is rounded up to 128 rows. A
// kernel that always puts two tiles over each other rounds a group up to 256 rows. With few rows in a group, as in half of the
// tokens, that costs up to a third of its time.
//
// A cluster computes the pair of tiles with the number of the cluster, and every (gridDim / 2)-th pair after it. In a CTA one
// thread keeps a ring of shared-memory stages filled. A stage holds 64 of the depth for both operands. Two warpgroups multiply
// 64 rows each. A stage also takes in copies from the other CTA, so it is filled again only when the warps of both CTAs have
// read it.
//
// Loads and matmuls use Hopper's machine instructions (PTX ISA, wgmma and cp.async.bulk.tensor) in the way that CUTLASS's
// persistent cooperative kernels do.

#include "tiles.cuh"

struct GroupedMmParams {
  TensorMap a;         // [rows, depth], boxes of 64 x 64
  TensorMap weights;   // [groups * columns, depth], boxes of 128 x 64
  uint16_t* out;       // [rows, columns]
  const int32_t* ends; // [groups], ascending: where each group's rows end
  int32_t groups;
  int32_t columns;     // of one matrix, a multiple of TILE_COLUMNS
  int32_t depth;       // a multiple of TILE_DEPTH
  int32_t unused[9];   // to a multiple of 64 bytes
};

inline constexpr int TILE_ROWS = 128, TILE_COLUMNS = 256, TILE_DEPTH = 64;
inline constexpr int STAGES = 4;
inline constexpr int MAX_GROUPS = 1024;
inline constexpr int CONSUMERS = 2;  // warpgroups
inline constexpr int THREADS = 128 * (CONSUMERS + 1);
inline constexpr int ROW_BYTES = TILE_DEPTH * 2;
inline constexpr int HALF_A = TILE_ROWS / 2 * ROW_BYTES, HALF_B = TILE_COLUMNS / 2 * ROW_BYTES;
inline constexpr int STAGE_BYTES = 2 * (HALF_A + HALF_B);
inline constexpr uint16_t BOTH = 3;

struct Shared {
  uint8_t stages[STAGES][STAGE_BYTES];  // a, then b; at a multiple of 1024 bytes
  uint64_t full[STAGES];                // a stage has arrived
  uint64_t empty[STAGES];               // a stage has been read: one arrival of each consuming warp of both CTAs
  int32_t ends[MAX_GROUPS];
};
static_assert(sizeof(Shared) <= 227 * 1024, "an SM's shared memory");

// One CTA's tile of a pair.
struct Tile {
  int32_t group;
  int32_t row, end;  // its first row, and where its group ends
  int32_t column;
  bool over;         // whether the pair's tiles stand over each other; else they are side by side
  bool twice;        // whether it is the other CTA's tile again, because there is no tile beside that one
};

// A cluster's tiles, in order.
struct Tiles {
  const int32_t* ends;
  int32_t groups, wide;  // tiles of columns
  int32_t group = 0, begin = 0, first = 0;  // the group looked at, its first row and its first pair

  DEVICE bool find(int32_t pair, uint32_t rank, Tile& tile) {
    while (group < groups) {
      int32_t end = ends[group];
      int32_t high = (end - begin + TILE_ROWS - 1) / TILE_ROWS, over = high / 2 * wide;
      int32_t pairs = over + high % 2 * ((wide + 1) / 2), number = pair - first;
      if (number < pairs) {
        tile.group = group;
        tile.end = end;
        tile.over = number < over;
        int32_t row = high - 1, column;
        tile.twice = false;
        if (tile.over) {
          row = number % (high / 2) * 2 + (int32_t)rank;
          column = number / (high / 2);
        } else {
          column = (number - over) * 2 + (int32_t)rank;
          tile.twice = column == wide;
          column -= tile.twice;
        }
        tile.row = begin + row * TILE_ROWS;
        tile.column = column * TILE_COLUMNS;
        return true;
      }
      first += pairs;
      begin = end;
      group++;
    }
    return false;
  }
};

DEVICE void fill(const GroupedMmParams& params, Shared& shared, uint32_t rank, Tiles tiles) {
  Ring<STAGES> ring;
  Tile tile;
  for (int32_t pair = blockIdx.x / 2; tiles.find(pair, rank, tile); pair += gridDim.x / 2) {
    int32_t weights_row = tile.group * params.columns + tile.column;
    for (int32_t k = 0; k < params.depth; k += TILE_DEPTH, ring.next()) {
      uint8_t* a = shared.stages[ring.stage];
      uint8_t* b = a + 2 * HALF_A;
      uint64_t* full = &shared.full[ring.stage];
      wait(&shared.empty[ring.stage], ring.parity ^ 1);
      mbarrier_arrive_expect(full, STAGE_BYTES);
      if (tile.over) {
        load_tile(a, params.a, k, tile.row, full);
        load_tile(a + HALF_A, params.a, k, tile.row + TILE_ROWS / 2, full);
        load_tile_to(BOTH, b + rank * HALF_B, params.weights, k, weights_row + (int32_t)rank * (TILE_COLUMNS / 2), full);
      } else {
        load_tile_to(BOTH, a + rank * HALF_A, params.a, k, tile.row + (int32_t)rank * (TILE_ROWS / 2), full);
        load_tile(b, params.weights, k, weights_row, full);
        load_tile(b + HALF_B, params.weights, k, weights_row + TILE_COLUMNS / 2, full);
      }
    }
  }
}

DEVICE void multiply(const GroupedMmParams& params, Shared& shared, uint32_t rank, Tiles tiles) {
  int32_t warp = first_lanes((int32_t)threadIdx.x / 32 - 4);  // counted over both warpgroups
  uint32_t lane = threadIdx.x % 32;
  Ring<STAGES> ring;
  Tile tile;
  for (int32_t pair = blockIdx.x / 2; tiles.find(pair, rank, tile); pair += gridDim.x / 2) {
    float d[128];
    int32_t read = -1;  // the stage that the matmuls before the latest ones read
    for (int32_t k = 0; k < params.depth; k += TILE_DEPTH, ring.next()) {
      wait(&shared.full[ring.stage], ring.parity);
      uint8_t* stage = shared.stages[ring.stage];
      uint64_t a = tile_descriptor(stage + warp / 4 * HALF_A), b = tile_descriptor(stage + 2 * HALF_A);
      wgmma_fence();
#pragma unroll
      for (int32_t step = 0; step < TILE_DEPTH; step += 16) {
        wgmma_64x16<TILE_COLUMNS>(d, a + columns_on(step), b + columns_on(step), k + step);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (read >= 0 && lane < 2) mbarrier_arrive_at(&shared.empty[read], lane);
      read = ring.stage;
    }
    wgmma_wait<0>();
    if (lane < 2) mbarrier_arrive_at(&shared.empty[read], lane);
    int32_t row = tile.row + warp * 16;
    uint16_t* out = params.out + (int64_t)row * params.columns + tile.column;
    auto place = [&](int32_t column) { return Place{out + column, params.columns, true}; };
    auto value = [&](int32_t i) { return d[i]; };
    store_rows<TILE_COLUMNS>(tile.twice ? 0 : tile.end - row, place, value);
  }
}

KERNEL(THREADS, 1) grouped_mm(GRID_CONSTANT GroupedMmParams params) {
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared());
  uint32_t rank = cluster_rank();
  for (int32_t group = threadIdx.x; group < params.groups; group += THREADS) shared.ends[group] = params.ends[group];
  if (threadIdx.x == 0) {
    prefetch_map(params.a);
    prefetch_map(params.weights);
    for (int32_t stage = 0; stage < STAGES; stage++) {
      mbarrier_init(&shared.full[stage], 1);
      mbarrier_init(&shared.empty[stage], 2 * 4 * CONSUMERS);
    }
    mbarrier_init_fence();
  }
  cluster_sync();
  Tiles tiles{shared.ends, params.groups, params.columns / TILE_COLUMNS};
  if (threadIdx.x < 128) {
    fewer_registers<40>();
    if (threadIdx.x == 0) fill(params, shared, rank, tiles);
  } else {
    more_registers<232>();
    multiply(params, shared, rank, tiles);
  }
  cluster_sync();  // CTAs end together: a CTA that has ended takes in no copies and no arrivals
}
