// A spike: the GEMM of joint_mm.cu with one matrix, which stores the tiles of rows that a peer owns where SEND says. It is for two
// ranks, of which each owns half of the rows, a multiple of 256. carried_mm.py says what is measured with it.
//
// Pairs of tiles of the peer's rows come first, or are spread evenly over the first `spread` pairs.
//
// SEND 0: to `out`, as tiles of own rows.
// SEND 1: to `remote` from registers, 16 bytes at a time, as store_rows does. With SIGNAL each warp then adds to the peer's counter.
// SEND 2: by way of shared memory that is there for nothing else, at the cost of a stage. A warp for each of the two warpgroups
//         sends its 64 rows by bulk copies, waits until they are complete, and adds to the peer's counter.
// SEND 3: as 2, with no stage less. The first warpgroup's rows lie in the stage that the tile's last matmuls have read, which is
//         given back to the ring when they have been sent; the second one's lie in what the ring leaves free.
//
// counters[block of 128 rows] grows by 8 * columns in a call: by the columns that have arrived, for each 16 rows.

#include "tiles.cuh"

struct CarriedMmParams {
  TensorMap a;         // [rows, depth], boxes of 64 x 64
  TensorMap matrix;    // [columns, depth], boxes of COLUMNS / 4 x 64
  uint16_t* out;       // [rows, columns]
  uint16_t* remote;    // where the first row of [rows, columns] would lie that has the peer's rows in the peer's memory
  uint32_t* counters;  // [rows / 128], of which the peer's are used
  int32_t columns;     // a multiple of 8
  int32_t rows;        // a multiple of 256
  int32_t depth;       // a multiple of TILE_DEPTH
  int32_t whole;       // pairs that are not narrow
  int32_t first;       // of the pairs over each other, the first that has the peer's rows
  int32_t peers;       // how many of them have
  int32_t spread;      // how many pairs of all columns those of the peer's rows are among; at least as many as they are
  int32_t unused[3];   // to a multiple of 64 bytes
};

inline constexpr int TILE_ROWS = 128, TILE_DEPTH = 64;
inline constexpr int BAND = 8;       // pairs over each other that are computed before those beside them
inline constexpr int CONSUMERS = 2;  // warpgroups
inline constexpr int THREADS = 128 * (CONSUMERS + 1);
inline constexpr int ROW_BYTES = TILE_DEPTH * 2;
inline constexpr int HALF_A = TILE_ROWS / 2 * ROW_BYTES, QUARTER_B = COLUMNS / 4 * ROW_BYTES;
inline constexpr int STAGE_BYTES = 2 * HALF_A + 4 * QUARTER_B;
inline constexpr int HALF_OUT = TILE_ROWS / 2 * COLUMNS * 2;  // bytes of a warpgroup's results
inline constexpr int REGIONS = SEND == 2 ? 2 : SEND == 3 ? 1 : 0;
inline constexpr int STAGES = (227 * 1024 - 1024 - REGIONS * HALF_OUT) / STAGE_BYTES;
inline constexpr uint16_t BOTH = 3;
static_assert(HALF_OUT <= STAGE_BYTES, "a stage has room for a warpgroup's results");

struct Shared {
  uint8_t stages[STAGES][STAGE_BYTES];  // a, then b; at a multiple of 1024 bytes
#if SEND >= 2
  uint8_t regions[REGIONS][HALF_OUT];
#endif
  uint64_t full[STAGES];        // a stage has arrived
  uint64_t empty[STAGES];       // it has been read: one arrival of each consuming warp of both CTAs
  uint64_t staged[CONSUMERS];   // a warpgroup's results are in shared memory: one arrival of each of its warps
  uint64_t left[CONSUMERS];     // they have been read from there
};
static_assert(sizeof(Shared) <= 227 * 1024, "an SM's shared memory");

// One CTA's tile of a pair.
struct Tile {
  int32_t row, column;  // its first
  bool narrow;          // half of the columns
  bool peers;           // of the peer's rows
};

#ifdef TW_EMULATED
// The emulator has no additions to memory of peers: there the counters lie in the sender's.
DEVICE void add_release_sys(uint32_t* address, uint32_t value) { fetch_add_gpu(address, value); }
#else
DEVICE void add_release_sys(uint32_t* address, uint32_t value) {
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
#endif

DEVICE int32_t quotient_up(int32_t n, int32_t d) { return (n + d - 1) / d; }
DEVICE int32_t least_of(int32_t a, int32_t b) { return a < b ? a : b; }

// The tile of CTA `rank` in the pair that is `number` of all, of which narrow ones are half of one; false beyond the last.
DEVICE bool find(const CarriedMmParams& params, int32_t number, int32_t rank, Tile& tile) {
  const int32_t wide = quotient_up(params.columns, COLUMNS), high = params.rows / (2 * TILE_ROWS);
  const int32_t behind = number - params.whole, theirs = params.peers * wide;
  int32_t pair = behind < 0 ? number : params.whole + behind / 2;
  if (pair >= high * wide) return false;
  tile.narrow = behind >= 0;
  const int32_t before = pair < params.spread ? pair * theirs / params.spread : theirs;  // those of the peer's rows
  const int32_t until = pair < params.spread ? (pair + 1) * theirs / params.spread : theirs;
  tile.peers = until > before;
  pair = tile.peers ? before : pair - before;
  const int32_t over = tile.peers ? params.peers : high - params.peers;
  const int32_t band = pair / (BAND * wide), in_band = pair % (BAND * wide);
  const int32_t here = over - band * BAND < BAND ? over - band * BAND : BAND;
  int32_t row = band * BAND + in_band % here + params.first + (tile.peers ? 0 : params.peers);
  if (row >= high) row -= high;
  tile.row = row * 2 * TILE_ROWS + rank * TILE_ROWS;
  tile.column = in_band / here * COLUMNS + (tile.narrow ? behind % 2 * (COLUMNS / 2) : 0);
  return true;
}

DEVICE void fill(const CarriedMmParams& params, Shared& shared, int32_t rank) {
  Ring<STAGES> ring;
  Tile tile;
  for (int32_t number = blockIdx.x / 2; find(params, number, rank, tile); number += gridDim.x / 2) {
    const int32_t quarters = tile.narrow ? 1 : 2;  // that this CTA loads
    const int32_t column = tile.column + rank * quarters * (COLUMNS / 4);
    for (int32_t k = 0; k < params.depth; k += TILE_DEPTH, ring.next()) {
      uint8_t* a = shared.stages[ring.stage];
      uint8_t* b = a + 2 * HALF_A;
      uint64_t* full = &shared.full[ring.stage];
      wait(&shared.empty[ring.stage], ring.parity ^ 1);
      mbarrier_arrive_expect(full, 2 * HALF_A + 2 * quarters * QUARTER_B);
      for (int32_t half = 0; half < 2; half++) {
        load_tile(a + half * HALF_A, params.a, k, tile.row + half * (TILE_ROWS / 2), full);
      }
      for (int32_t quarter = 0; quarter < quarters; quarter++) {
        load_tile_to(
            BOTH, b + (rank * quarters + quarter) * QUARTER_B, params.matrix, k, column + quarter * (COLUMNS / 4), full);
      }
    }
  }
}

// As store_rows, to the warp's 16 rows of N columns in shared memory. All rows begin at the same bank, and two of them are stored
// at a time: they differ in which 64 bytes of 128 come first.
template <int N, class Value>
DEVICE void stage_rows(uint8_t* place, Value value) {
  static_assert(N % 64 == 0, "pairs of four blocks of eight columns");
  const uint32_t lane = threadIdx.x % 32, quad_lane = lane % 4, odd = lane / 4 % 2;
#pragma unroll
  for (int32_t below = 0; below < 2; below++) {
    uint8_t* row = place + (below * 8 + (int32_t)(lane / 4)) * N * 2 + quad_lane * 16;
#pragma unroll
    for (int32_t block = 0; block < N / 8; block += 8) {
      uint32_t w[2][4], first[4], second[4];
#pragma unroll
      for (int32_t four = 0; four < 2; four++) {
#pragma unroll
        for (int32_t one = 0; one < 4; one++) {
          const int32_t at = (block + four * 4 + one) * 4 + below * 2;
          w[four][one] = pack_bf16(value(at), value(at + 1));
        }
        gather_block(w[four], quad_lane);
      }
#pragma unroll
      for (int32_t i = 0; i < 4; i++) {
        first[i] = odd ? w[1][i] : w[0][i];
        second[i] = odd ? w[0][i] : w[1][i];
      }
      store_shared(row + block * 16 + odd * 64, first);
      store_shared(row + block * 16 + (odd ^ 1) * 64, second);
    }
  }
}

#if SEND >= 2
// Where a warpgroup's results lie; `read`: the stage that the tile's last matmuls have read.
DEVICE uint8_t* place_of(Shared& shared, int32_t warpgroup, int32_t read) {
  if (SEND == 2) return shared.regions[warpgroup];
  return warpgroup ? shared.regions[0] : shared.stages[read];
}

// One warp: sends what a warpgroup has staged.
DEVICE void send(const CarriedMmParams& params, Shared& shared, int32_t rank, int32_t warpgroup) {
  const uint32_t lane = threadIdx.x % 32;
  const int32_t steps = params.depth / TILE_DEPTH;
  int32_t stage = STAGES - 1;  // the last one of the tile before
  uint32_t sent = 0;
  Tile tile;
  for (int32_t number = blockIdx.x / 2; find(params, number, rank, tile); number += gridDim.x / 2) {
    stage = (stage + steps) % STAGES;
    if (!tile.peers) continue;
    const int32_t n = tile.narrow ? COLUMNS / 2 : COLUMNS, columns = least_of(n, params.columns - tile.column);
    const int32_t row = tile.row + warpgroup * 64;
    const uint8_t* place = place_of(shared, warpgroup, stage);
    wait(&shared.staged[warpgroup], sent & 1);
    if (columns > 0) {
      for (int32_t i = (int32_t)lane; i < 64; i += 32) {
        bulk_store(params.remote + (int64_t)(row + i) * params.columns + tile.column, place + i * n * 2, columns * 2);
      }
    }
    bulk_commit();
    bulk_wait_read<0>();
    warp_sync();
    // For the eight warps of this CTA, at both CTAs.
    if (SEND == 3 && warpgroup == 0 && lane < 2 * 4 * CONSUMERS) mbarrier_arrive_at(&shared.empty[stage], lane % 2);
    if (lane == 0) mbarrier_arrive(&shared.left[warpgroup]);
    sent++;
    bulk_wait();
    fence_proxy_async();
    warp_sync();
    if (lane == 0 && columns > 0) add_release_sys(params.counters + row / TILE_ROWS, 4 * columns);
  }
}
#endif

// A warpgroup's 64 rows by N columns; `staged`: how many tiles it has left in shared memory.
template <int N>
DEVICE void multiply(
    const CarriedMmParams& params, Shared& shared, Ring<STAGES>& ring, const Tile& tile, int32_t warpgroup, int32_t warp,
    uint32_t& staged) {
  const uint32_t lane = threadIdx.x % 32;
  float d[N / 2] = {};
  int32_t read = -1;  // the stage that the matmuls before the latest ones read
  for (int32_t k = 0; k < params.depth; k += TILE_DEPTH, ring.next()) {
    wait(&shared.full[ring.stage], ring.parity);
    uint8_t* stage = shared.stages[ring.stage];
    uint64_t rows = tile_descriptor(stage + warpgroup * HALF_A), columns = tile_descriptor(stage + 2 * HALF_A);
    wgmma_fence();
#pragma unroll
    for (int32_t step = 0; step < TILE_DEPTH; step += 16) {
      wgmma_64x16<N>(d, rows + columns_on(step), columns + columns_on(step), 1);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (read >= 0 && lane < 2) mbarrier_arrive_at(&shared.empty[read], lane);
    read = ring.stage;
  }
  wgmma_wait<0>();
  const bool is_held = SEND == 3 && tile.peers;  // then who sends what lies there says that the stage is free
  if (!is_held && lane < 2) mbarrier_arrive_at(&shared.empty[read], lane);
  const auto value = [&](int32_t i) { return d[i]; };
#if SEND >= 2
  if (tile.peers) {
    if (SEND == 3) barrier_sync(1, 128 * CONSUMERS);  // the other warps have read the stage, too
    wait(&shared.left[warpgroup], (staged & 1) ^ 1);
    stage_rows<N>(place_of(shared, warpgroup, read) + warp * 16 * N * 2, value);
    fence_proxy_async_shared();
    warp_sync();
    if (lane == 0) mbarrier_arrive(&shared.staged[warpgroup]);
    staged++;
    return;
  }
#endif
  const int32_t row = tile.row + warpgroup * 64 + warp * 16;
  uint16_t* base = SEND == 1 && tile.peers ? params.remote : params.out;
  uint16_t* out = base + (int64_t)row * params.columns + tile.column;
  const auto place = [&](int32_t column) { return Place{out + column, params.columns, tile.column + column < params.columns}; };
  store_rows<N>(params.rows - row, place, value);
#if SIGNAL
  if (SEND == 1 && tile.peers) {
    warp_sync();
    const int32_t columns = least_of(N, params.columns - tile.column);
    if (lane == 0 && columns > 0) add_release_sys(params.counters + row / TILE_ROWS, columns);
  }
#endif
}

KERNEL(THREADS, 1) carried_mm(GRID_CONSTANT CarriedMmParams params) {
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared());
  int32_t rank = (int32_t)cluster_rank();
  if (threadIdx.x == 0) {
    prefetch_map(params.a);
    prefetch_map(params.matrix);
    for (int32_t stage = 0; stage < STAGES; stage++) {
      mbarrier_init(&shared.full[stage], 1);
      mbarrier_init(&shared.empty[stage], 2 * 4 * CONSUMERS);
    }
    for (int32_t warpgroup = 0; warpgroup < CONSUMERS; warpgroup++) {
      mbarrier_init(&shared.staged[warpgroup], 4);
      mbarrier_init(&shared.left[warpgroup], 1);
    }
    mbarrier_init_fence();
  }
  cluster_sync();
  if (threadIdx.x < 128) {
    fewer_registers<40>();
    if (threadIdx.x == 0) fill(params, shared, rank);
#if SEND >= 2
    const int32_t warp = first_lanes((int32_t)threadIdx.x / 32);
    if (warp == 1 || warp == 2) send(params, shared, rank, warp - 1);
#endif
  } else {
    more_registers<232>();
    int32_t warp = first_lanes((int32_t)threadIdx.x / 32 - 4), warpgroup = warp / 4;  // of both warpgroups
    Ring<STAGES> ring;
    Tile tile;
    uint32_t staged = 0;
    for (int32_t number = blockIdx.x / 2; find(params, number, rank, tile); number += gridDim.x / 2) {
      if (tile.narrow) {
        multiply<COLUMNS / 2>(params, shared, ring, tile, warpgroup, warp % 4, staged);
      } else {
        multiply<COLUMNS>(params, shared, ring, tile, warpgroup, warp % 4, staged);
      }
    }
  }
  cluster_sync();  // a CTA that has ended takes in no copies and no arrivals
}
