// Kernels that test what the emulator does for wgmma.cuh; right with `broken` NOTHING, else wrong in one way.
#include "wgmma.cuh"

enum Broken : uint32_t {
  NOTHING,
  NO_TENSOR_MAP,
  MISALIGNED,
  NO_INIT_FENCE,
  NO_SUCH_CTA,
  NO_LAST_SYNC,
  TOO_MANY_ARRIVALS,
  LANES_DIFFER,
  NO_SWIZZLE,
  OUT_OF_BOUNDS,
  ORDINARY_STORE,
  NO_FENCE,
  NO_COMMIT,
  NO_WAIT,
  WAITS_FOR_OTHERS,
};

struct Params {
  TensorMap a, b;  // boxes of [64, 64]
  uint8_t* out;
  int32_t column, row;
  uint32_t broken, unused[11];
};

constexpr uint32_t BOX = 64 * 64 * 2;

DEVICE void wait(uint64_t* barrier, uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

// Two boxes of `a` beside each other, from (column, row) on, as they lie in shared memory: uint8 [grid, 2, BOX]. Each of a
// cluster's two CTAs loads one for both; then each tells both that it has them, and waits for that.
KERNEL(32, 1) load_boxes(GRID_CONSTANT Params p) {
  uint8_t* shared = dynamic_shared();
  uint64_t *full = reinterpret_cast<uint64_t*>(shared + 2 * BOX), *met = full + 1;
  const uint32_t rank = cluster_rank(), thread = threadIdx.x;
  if (thread == 0) {
    mbarrier_init(full, 1);
    mbarrier_init(met, gridDim.x);
    if (p.broken != NO_INIT_FENCE) mbarrier_init_fence();
  }
  cluster_sync();
  if (thread == 0) {
    mbarrier_arrive_expect(full, 2 * BOX);
    uint8_t* to = shared + (p.broken == MISALIGNED ? 16 : 0);
    if (gridDim.x == 1) {
      load_tile(to, p.broken == NO_TENSOR_MAP ? p.b : p.a, p.column, p.row, full);
      load_tile(shared + BOX, p.a, p.column + 64, p.row, full);
    } else {
      load_tile_to(p.broken == NO_SUCH_CTA ? 5 : 3, to + rank * BOX, p.a, p.column + int32_t(rank) * 64, p.row, full);
    }
  }
  wait(full, 0);
  if (thread < gridDim.x) mbarrier_arrive_at(met, thread);
  if (p.broken == TOO_MANY_ARRIVALS && thread == 0) {
    mbarrier_arrive_expect(full, 16);
    mbarrier_arrive_at(full, rank);
  }
  if (p.broken != NO_LAST_SYNC) wait(met, 0);
  for (uint32_t i = thread * 16; i < 2 * BOX; i += 512) {
    uint32_t w[4];
    load_shared(w, shared + i);
    store_global(p.out + blockIdx.x * 2 * BOX + i, w);
  }
  if (p.broken != NO_LAST_SYNC) cluster_sync();
}

// a [64, 64] @ b [256, 64]^T, twice into the same sums and each time a group, as threads have them: float [128, 128].
KERNEL(128, 1) multiply(GRID_CONSTANT Params p) {
  uint8_t* shared = dynamic_shared();
  uint64_t* full = reinterpret_cast<uint64_t*>(shared + 5 * BOX);
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(full, 5 * BOX);
    load_tile(shared, p.a, 0, 0, full);
    for (int32_t part = 0; part < 4; ++part) load_tile(shared + BOX + part * BOX, p.b, 0, part * 64, full);
  }
  barrier_sync(0, 128);
  wait(full, 0);
  uint64_t a = tile_descriptor(shared), b = tile_descriptor(shared + BOX);
  if (p.broken == LANES_DIFFER) b += threadIdx.x % 2;
  if (p.broken == NO_SWIZZLE) b ^= 3ull << 62;
  if (p.broken == OUT_OF_BOUNDS) b += 6 * BOX >> 4;
  const uint32_t zeros[4] = {};
  if (p.broken == ORDINARY_STORE) store_shared(shared + threadIdx.x * 16, zeros);
  barrier_sync(0, 128);
  float d[128];
  for (int32_t time = 0; time < 2; ++time) {
    if (p.broken != NO_FENCE) wgmma_fence();
    for (int32_t step = 0; step < 64; step += 16)
      wgmma_64x16<256>(d, a + columns_on(step), b + columns_on(step), time + step);
    if (p.broken != NO_COMMIT) wgmma_commit();
  }
  if (p.broken == WAITS_FOR_OTHERS)
    wgmma_wait<1>();
  else if (p.broken != NO_WAIT)
    wgmma_wait<0>();
  for (uint32_t i = 0; i < 128; i += 4) {
    const uint32_t w[4] = {as_bits(d[i]), as_bits(d[i + 1]), as_bits(d[i + 2]), as_bits(d[i + 3])};
    store_global(p.out + (threadIdx.x * 128 + i) * 4, w);
  }
  if (p.broken == WAITS_FOR_OTHERS) wgmma_wait<0>();
}

// Each lane's value, that of lane ^ 5, that of lane 0, and the rank in the cluster: uint32 [grid, 32, 4].
KERNEL(32, 1) shuffles(GRID_CONSTANT Params p) {
  const uint32_t value = 0xfff00000u + threadIdx.x;
  const uint32_t w[4] = {value, shuffle_xor(value, 5), uint32_t(first_lanes(int32_t(value))), cluster_rank()};
  store_global(p.out + (blockIdx.x * 32 + threadIdx.x) * 16, w);
}
