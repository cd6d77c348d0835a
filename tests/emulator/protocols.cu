// Kernels that test the emulator: each is right with `broken` NOTHING, and wrong in one way with any other value.
#include "primitives.cuh"

enum Broken : uint32_t {
  NOTHING,
  FLAG_BEFORE_DATA,
  NO_BARRIER,
  SILENT_PEER,
  OUT_OF_BOUNDS,
  PRIVATE_OF_PEER,
  NO_FENCE,
  NO_WAIT_READ,
  NO_WAIT,
  NO_EMPTY_WAIT,
  MISALIGNED,
  ENDS_EARLY,
  DIVERGED_SHUFFLE,
  TOO_FEW_BUFFERS,
  NO_RECEIVER_BARRIER,
  NO_DEPENDENCY_WAIT,
  NO_STAGING_FENCE,
  WAITS_FOR_ALL,
  SHUFFLE_FOR_BARRIER,
  RELAXED_COUNT,
};

constexpr uint32_t MAX_RANKS = 8, SENTINEL = 0x80000000;

struct Params {
  uint64_t buffers[MAX_RANKS];  // of every rank, symmetric
  uint64_t pads[MAX_RANKS];     // flags of every rank, symmetric
  uint64_t input, output;       // of this rank
  uint32_t rank, world_size, launch, rows, broken;
};

DEVICE uint8_t* at(uint64_t base, uint32_t offset) { return reinterpret_cast<uint8_t*>(base) + offset; }
DEVICE void add(float (&sum)[4], const uint32_t (&w)[4]) {
  for (int i = 0; i < 4; ++i) sum[i] += as_float(w[i]);
}
DEVICE void bits(uint32_t (&w)[4], const float (&values)[4]) {
  for (int i = 0; i < 4; ++i) w[i] = as_bits(values[i]);
}

// Lane p of the first warp signals rank p and waits for it. `value` only grows.
DEVICE void exchange_flags(const Params& p, uint32_t value) {
  const uint32_t peer = threadIdx.x, slot = blockIdx.x * MAX_RANKS;
  if (peer >= p.world_size) return;
  if (!(p.broken == SILENT_PEER && p.rank == 1))
    store_release_sys(reinterpret_cast<uint32_t*>(p.pads[peer]) + slot + p.rank, value);
  while (int32_t(load_acquire_sys(reinterpret_cast<uint32_t*>(p.pads[p.rank]) + slot + peer) - value) < 0) {
  }
}

// Sum over the ranks of `input`, float [grid, block, 4]; rows are stored over sentinels, which the receiver puts back a
// launch later. Two buffers are too few: the sentinels of a launch and its rows reach a peer in any order.
KERNEL(1024, 1) push(GRID_CONSTANT Params p) {
  const uint32_t mine = (blockIdx.x * blockDim.x + threadIdx.x) * 16, row = gridDim.x * blockDim.x * 16;
  const uint32_t buffers = p.broken == TOO_FEW_BUFFERS ? 2 : 3;
  const uint32_t buffer = p.launch % buffers, before = (p.launch + buffers - 1) % buffers;
  if (p.broken != NO_DEPENDENCY_WAIT) grid_dependency_wait();
  const uint32_t sentinels[4] = {SENTINEL, SENTINEL, SENTINEL, SENTINEL};
  for (uint32_t peer = 0; peer < p.world_size; ++peer)
    store_global(at(p.buffers[p.rank], (before * p.world_size + peer) * row + mine), sentinels);
  uint32_t w[4];
  load_global(w, at(p.input, mine));
  for (uint32_t peer = 0; peer < p.world_size; ++peer)
    store_relaxed_sys(at(p.buffers[peer], (buffer * p.world_size + p.rank) * row + mine), w);
  grid_dependency_launch();
  float sum[4] = {};
  for (uint32_t peer = 0; peer < p.world_size; ++peer) {
    do {
      load_relaxed_sys(w, at(p.buffers[p.rank], (buffer * p.world_size + peer) * row + mine));
    } while (w[0] == SENTINEL || w[1] == SENTINEL || w[2] == SENTINEL || w[3] == SENTINEL);
    add(sum, w);
  }
  bits(w, sum);
  store_global(at(p.output, mine), w);
}

// The same sum, then scaled, with one flag a CTA after the rows and one before they are overwritten. An mbarrier orders
// the rows before the flag.
KERNEL(1024, 1) flags(GRID_CONSTANT Params p) {
  const uint32_t mine = (blockIdx.x * blockDim.x + threadIdx.x) * 16, row = gridDim.x * blockDim.x * 16;
  uint64_t* stored = reinterpret_cast<uint64_t*>(dynamic_shared());
  if (threadIdx.x == 0) mbarrier_init(stored, blockDim.x);
  barrier_sync(0, blockDim.x);
  uint32_t w[4];
  load_global(w, at(p.input, mine));
  if (p.broken == FLAG_BEFORE_DATA) exchange_flags(p, 2 * p.launch + 1);
  for (uint32_t peer = 0; peer < p.world_size; ++peer) {
    const uint64_t buffer = p.broken == PRIVATE_OF_PEER ? p.output + p.launch : p.buffers[peer];
    const uint32_t past_the_end = p.broken == OUT_OF_BOUNDS ? (p.world_size - p.rank) * row : 0;
    store_global(at(buffer, p.rank * row + mine + past_the_end), w);
  }
  mbarrier_arrive(stored);
  if (p.broken == SHUFFLE_FOR_BARRIER) shuffle_xor(0u, 1);
  while (p.broken != NO_BARRIER && p.broken != SHUFFLE_FOR_BARRIER && !mbarrier_try_wait(stored, 0)) {
  }
  if (p.broken != FLAG_BEFORE_DATA) exchange_flags(p, 2 * p.launch + 1);
  if (p.broken != NO_RECEIVER_BARRIER) barrier_sync(1, blockDim.x);
  float sum[4] = {}, squares = 0;
  for (uint32_t peer = 0; peer < p.world_size; ++peer) {
    load_global(w, at(p.buffers[p.rank], peer * row + mine));
    add(sum, w);
  }
  for (float value : sum) squares += value * value;
  if (p.broken == DIVERGED_SHUFFLE && threadIdx.x == 33) warp_sync();
  for (int mask = 16; mask > 0; mask /= 2) squares += shuffle_xor(squares, mask);
  for (float& value : sum) value *= reciprocal_sqrt(squares);
  bits(w, sum);
  store_global(at(p.output, mine), w);
  barrier_sync(0, blockDim.x);
  exchange_flags(p, 2 * p.launch + 2);
}

// The same sum, `rows` rows of float [CONSUMERS, 4]. Every rank copies its input to the first half of its buffer. A
// rank adds the rows it owns, loaded by a warp from there into a ring, and sends them to all buffers' second halves.
constexpr uint32_t CONSUMERS = 128, STAGES = 3, ROW = CONSUMERS * 16;

struct Shared {
  uint8_t ring[STAGES][ROW];
  uint8_t staging[ROW];
  uint64_t full[STAGES], empty[STAGES];
};

KERNEL(CONSUMERS + 32, 1) relay(GRID_CONSTANT Params p) {
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared());
  const uint32_t thread = threadIdx.x, first = p.rank + p.world_size * blockIdx.x, step = p.world_size * gridDim.x;
  if (thread == CONSUMERS) {
    for (uint32_t i = 0; i < STAGES; ++i) {
      mbarrier_init(&shared.full[i], 1);
      mbarrier_init(&shared.empty[i], CONSUMERS / 32);
    }
    mbarrier_init_fence();
  }
  uint32_t w[4];
  for (uint32_t base = p.world_size * blockIdx.x; base < p.rows && thread < CONSUMERS; base += step)
    for (uint32_t row = base; row < base + p.world_size && row < p.rows; ++row) {
      load_global(w, at(p.input, row * ROW + thread * 16));
      store_global(at(p.buffers[p.rank], row * ROW + thread * 16), w);
    }
  if (p.broken != NO_STAGING_FENCE) fence_proxy_async();
  barrier_sync(0, blockDim.x);
  exchange_flags(p, 1);
  barrier_sync(0, blockDim.x);
  if (thread >= CONSUMERS) {
    if (thread > CONSUMERS) return;
    if (p.broken != NO_STAGING_FENCE) fence_proxy_async();
    uint32_t item = 0;
    for (uint32_t row = first; row < p.rows; row += step)
      for (uint32_t peer = 0; peer < p.world_size; ++peer, ++item) {
        const uint32_t stage = item % STAGES, parity = item / STAGES % 2;
        if (p.broken != NO_EMPTY_WAIT)
          while (!mbarrier_try_wait(&shared.empty[stage], parity ^ 1)) {
          }
        mbarrier_arrive_expect(&shared.full[stage], ROW);
        const uint32_t shift = p.broken == MISALIGNED ? 8 : 0;
        bulk_load(shared.ring[stage], at(p.buffers[peer], row * ROW + shift), ROW, &shared.full[stage]);
      }
    return;
  }
  uint32_t item = 0;
  for (uint32_t row = first; row < p.rows; row += step) {
    float sum[4] = {};
    for (uint32_t peer = 0; peer < p.world_size; ++peer, ++item) {
      const uint32_t stage = item % STAGES, parity = item / STAGES % 2;
      while (!mbarrier_try_wait(&shared.full[stage], parity)) {
      }
      load_shared(w, shared.ring[stage] + thread * 16);
      add(sum, w);
      warp_sync();
      if (thread % 32 == 0) mbarrier_arrive(&shared.empty[stage]);
    }
    bits(w, sum);
    if (thread == 0 && p.broken != NO_WAIT_READ) bulk_wait_read<0>();
    barrier_sync(1, CONSUMERS);
    store_shared(shared.staging + thread * 16, w);
    if (p.broken != NO_FENCE) fence_proxy_async();
    if (p.broken != NO_BARRIER) barrier_sync(2, CONSUMERS);
    if (thread == 0) {
      for (uint32_t peer = 0; peer < p.world_size; ++peer)
        bulk_store(at(p.buffers[peer], (p.rows + row) * ROW), shared.staging, ROW);
      bulk_commit();
    }
  }
  if (p.broken == ENDS_EARLY) return;
  if (thread == 0) {
    if (p.broken == NO_WAIT)
      bulk_wait_read<0>();
    else
      bulk_wait();
  }
  barrier_sync(1, CONSUMERS);
  exchange_flags(p, 2);
  barrier_sync(1, CONSUMERS);
  for (uint32_t base = p.world_size * blockIdx.x; base < p.rows; base += step)
    for (uint32_t row = base; row < base + p.world_size && row < p.rows; ++row) {
      load_global(w, at(p.buffers[p.rank], (p.rows + row) * ROW + thread * 16));
      store_global(at(p.output, row * ROW + thread * 16), w);
    }
}

// `input` float [grid * block, 2] as pairs of bf16, fp16, e4m3, and its first fp16 widened; uint32 [grid * block, 4].
KERNEL(1024, 1) convert(GRID_CONSTANT Params p) {
  const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
  uint32_t pair[2];
  load_global(pair, at(p.input, index * 8));
  const float low = as_float(pair[0]), high = as_float(pair[1]);
  const uint32_t half = pack_fp16(low, high);
  const uint32_t w[4] = {pack_bf16(low, high), half, pack_e4m3(low, high), as_bits(unpack_fp16(half & 0xffff))};
  store_global(at(p.output, index * 16), w);
}

// Counts CTAs in `buffers`; number `rows` writes that, followed by what shared memory held at its start.
KERNEL(64, 1) tickets(GRID_CONSTANT Params p) {
  uint32_t* counter = reinterpret_cast<uint32_t*>(p.buffers[p.rank]);
  uint32_t w[4];
  load_shared(w, dynamic_shared());
  if (threadIdx.x > 0) return;
  w[0] = 1 + fetch_add_gpu(counter, 1);
  if (w[0] == p.rows) store_global(at(p.output, 0), w);
  while (p.broken == WAITS_FOR_ALL && load_acquire_sys(counter) < p.rows) {
  }
}

// Each rank stores its `input` to the next rank, in all CTAs but the last, which tells that rank when the others have been
// counted; the last CTA then waits for what the rank before stores, and writes it. float [grid - 1, block, 4].
KERNEL(1024, 1) counts(GRID_CONSTANT Params p) {
  const uint32_t next = (p.rank + 1) % p.world_size, others = gridDim.x - 1, cta_bytes = blockDim.x * 16;
  const uint32_t mine = threadIdx.x * 16;
  uint32_t* const counter = reinterpret_cast<uint32_t*>(p.pads[p.rank]);
  uint32_t w[4];
  if (blockIdx.x < others) {
    load_global(w, at(p.input, blockIdx.x * cta_bytes + mine));
    store_global(at(p.buffers[next], blockIdx.x * cta_bytes + mine), w);
    const uint32_t one = barrier_sync_with(0, blockDim.x, others);
    if (threadIdx.x > 0) return;
    if (p.broken == RELAXED_COUNT)
      add_relaxed_gpu(counter, one);
    else
      fetch_add_gpu(counter, one);
    return;
  }
  while (load_acquire_sys(counter) < others) {
  }
  barrier_sync(0, blockDim.x);
  if (threadIdx.x == 0) store_release_sys(reinterpret_cast<uint32_t*>(p.pads[next]) + 1, 1);
  while (load_acquire_sys(counter + 1) == 0) {
  }
  for (uint32_t cta = 0; cta < others; ++cta) {
    load_global(w, at(p.buffers[p.rank], cta * cta_bytes + mine));
    store_global(at(p.output, cta * cta_bytes + mine), w);
  }
}
