// The kernel's side of the emulator: the primitives of primitives.cuh and wgmma.cuh as calls of driver.cpp and tiles.cpp. No
// header of the standard library is included, because the integer names of primitives.cuh differ from its.
#pragma once

// What __CUDA_ARCH__ is to primitives.cuh. Its conversions need no other branch here: all instructions give the same bits.
#ifndef EMULATED_ARCH
#define EMULATED_ARCH 900
#endif

#define DEVICE inline
#define KERNEL(threads, ctas_per_sm)                                                                 \
  static_assert((threads) >= 32 && (threads) <= 1024 && (threads) % 32 == 0, "threads of a launch"); \
  extern "C" void
#define GRID_CONSTANT const

struct EmulatedIndex {
  uint32_t x;
};
struct TensorMap;  // of wgmma.cuh; what Python fills in is machine.h's TileMap

extern "C" {
extern EmulatedIndex threadIdx, blockIdx, blockDim, gridDim;
void emulated_load(const char* primitive, void* words, const void* address, uint32_t bytes, bool polls);
void emulated_store(const char* primitive, void* address, const void* words, uint32_t bytes, bool release);
void emulated_store_pairs(void* address, const void* words);
void emulated_fence_sys();
uint32_t emulated_fetch_add(void* address, uint32_t value);
void emulated_add_relaxed(void* address, uint64_t value, uint32_t bytes);
uint32_t emulated_fetch_add_relaxed(void* address, uint32_t value);
uint32_t emulated_world_size();
void emulated_multicast_load(void* words, const void* address, uint32_t rank);
void emulated_multicast_store(void* address, const void* words);
void emulated_fence_proxy_alias();
void emulated_barrier_sync(uint32_t id, uint32_t threads);
uint32_t emulated_shuffle_xor(uint32_t value, uint32_t mask);
uint32_t emulated_first_lanes(uint32_t value);
void emulated_warp_sync();
void emulated_grid_dependency_wait();
void emulated_grid_dependency_launch();
void* emulated_dynamic_shared();
uint32_t emulated_shared_address(const void* pointer);
void emulated_load_shared(void* words, const void* pointer, uint32_t bytes);
void emulated_store_shared(void* pointer, const void* words, uint32_t bytes);
uint32_t emulated_load_acquire_cta(const void* pointer);
void emulated_store_release_cta(void* pointer, uint32_t value);
void emulated_copy_to_shared(void* shared, const void* global, uint32_t bytes);
void emulated_copies_commit();
void emulated_copies_wait(uint32_t pending);
void emulated_mbarrier_init(void* barrier, uint32_t arrivals);
void emulated_mbarrier_init_fence();
void emulated_mbarrier_arrive(void* barrier, uint32_t bytes);
bool emulated_mbarrier_try_wait(void* barrier, uint32_t parity);
void emulated_bulk_load(void* shared, const void* global, uint32_t bytes, void* barrier);
void emulated_bulk_store(void* global, const void* shared, uint32_t bytes);
void emulated_bulk_commit();
void emulated_bulk_wait(bool read, uint32_t pending);
void emulated_fence_proxy_async();
void emulated_prefetch_l2(const void* address, uint32_t bytes);
uint32_t emulated_cluster_rank();
void emulated_cluster_sync();
void emulated_store_to_cta(uint32_t rank, void* pointer, uint32_t word, void* barrier);
void emulated_load_from_cta(void* words, uint32_t rank, const void* pointer);
void emulated_mbarrier_arrive_at(void* barrier, uint32_t rank);
void emulated_load_tile(const char* primitive, uint32_t ranks, void* shared, const TensorMap* map, int32_t column,
                        int32_t row, void* barrier);
void emulated_wgmma_fence();
void emulated_wgmma(float* d, uint32_t columns, uint64_t a, uint64_t b, bool keep);
void emulated_wgmma_commit();
void emulated_wgmma_wait(uint32_t pending);
}

// --- global memory -------------------------------------------------------------------------------------------------

DEVICE void load_global(uint32_t (&w)[4], const void* address) { emulated_load("load_global", w, address, 16, false); }
DEVICE void load_global(uint32_t (&w)[2], const void* address) { emulated_load("load_global", w, address, 8, false); }
DEVICE void load_global(uint32_t (&w)[1], const void* address) { emulated_load("load_global", w, address, 4, false); }
DEVICE void load_global(uint64_t (&w)[1], const void* address) { emulated_load("load_global", w, address, 8, false); }
DEVICE void store_global(void* address, const uint32_t (&w)[4]) {
  emulated_store("store_global", address, w, 16, false);
}
DEVICE void store_global(void* address, const uint32_t (&w)[2]) {
  emulated_store("store_global", address, w, 8, false);
}
DEVICE void store_global(void* address, const uint32_t (&w)[1]) {
  emulated_store("store_global", address, w, 4, false);
}
DEVICE void load_relaxed_sys(uint32_t (&w)[4], const void* address) {
  emulated_load("load_relaxed_sys", w, address, 16, true);
}
DEVICE void load_relaxed_sys(uint32_t (&w)[2], const void* address) {
  emulated_load("load_relaxed_sys", w, address, 8, true);
}
DEVICE void load_relaxed_sys(uint32_t (&w)[1], const void* address) {
  emulated_load("load_relaxed_sys", w, address, 4, true);
}
DEVICE void store_relaxed_sys(void* address, const uint32_t (&w)[4]) {
  emulated_store("store_relaxed_sys", address, w, 16, false);
}
DEVICE void store_relaxed_sys(void* address, const uint32_t (&w)[2]) {
  emulated_store("store_relaxed_sys", address, w, 8, false);
}
DEVICE void store_relaxed_sys(void* address, const uint32_t (&w)[1]) {
  emulated_store("store_relaxed_sys", address, w, 4, false);
}
DEVICE uint32_t load_acquire_sys(const uint32_t* address) {
  uint32_t value;
  emulated_load("load_acquire_sys", &value, address, 4, true);
  return value;
}
DEVICE void store_release_sys(uint32_t* address, uint32_t value) {
  emulated_store("store_release_sys", address, &value, 4, true);
}
DEVICE void load_pairs_relaxed_sys(uint64_t (&w)[2], const void* address) {
  emulated_load("load_pairs_relaxed_sys", w, address, 16, true);
}
DEVICE void store_pairs_relaxed_sys(void* address, const uint64_t (&w)[2]) { emulated_store_pairs(address, w); }
DEVICE void fence_sys() { emulated_fence_sys(); }
DEVICE uint32_t fetch_add_gpu(uint32_t* address, uint32_t value) { return emulated_fetch_add(address, value); }
DEVICE uint32_t fetch_add_relaxed_gpu(uint32_t* address, uint32_t value) {
  return emulated_fetch_add_relaxed(address, value);
}
DEVICE void add_relaxed_gpu(uint32_t* address, uint32_t value) { emulated_add_relaxed(address, value, 4); }
DEVICE void add_relaxed_gpu(uint64_t* address, uint64_t value) { emulated_add_relaxed(address, value, 8); }

template <typename T>
DEVICE T* settled(T* address) {
  return address;
}

// --- conversions ---------------------------------------------------------------------------------------------------

DEVICE float as_float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
DEVICE uint32_t as_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}

// |value|, finite, to nearest even with MANTISSA bits and an exponent biased by BIAS; large ones run past the format.
template <int MANTISSA, int BIAS>
DEVICE uint32_t round_magnitude(float value) {
  constexpr int SHIFT = 23 - MANTISSA;
  constexpr float SUBNORMAL_SCALE = float(1 << MANTISSA) * float(1 << (BIAS - 1));
  const uint32_t bits = as_bits(value) & 0x7fffffffu;
  if (int(bits >> 23) - 127 < 1 - BIAS) return uint32_t(__builtin_rintf(as_float(bits) * SUBNORMAL_SCALE));
  const uint32_t half = (1u << (SHIFT - 1)) - 1 + (bits >> SHIFT & 1);
  return ((bits + half) >> SHIFT) - (uint32_t(127 - BIAS) << MANTISSA);
}
DEVICE uint32_t round_bf16(float value) {
  const uint32_t bits = as_bits(value);
  if (value != value) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
DEVICE uint32_t round_fp16(float value) {
  if (value != value) return 0x7fff;
  const uint32_t magnitude = __builtin_fabsf(value) >= 65520.0f ? 0x7c00 : round_magnitude<10, 15>(value);
  return (as_bits(value) >> 16 & 0x8000) | magnitude;
}
DEVICE uint32_t round_e4m3(float value) {
  if (value != value) return 0x7f;
  const uint32_t magnitude = __builtin_fabsf(value) >= 448.0f ? 0x7e : round_magnitude<3, 7>(value);
  return (as_bits(value) >> 24 & 0x80) | magnitude;
}
DEVICE uint32_t pack_bf16(float low, float high) { return round_bf16(low) | round_bf16(high) << 16; }
DEVICE uint32_t pack_fp16(float low, float high) { return round_fp16(low) | round_fp16(high) << 16; }
DEVICE uint16_t pack_e4m3(float low, float high) { return uint16_t(round_e4m3(low) | round_e4m3(high) << 8); }
DEVICE float unpack_fp16(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 0x1f, mantissa = bits & 0x3ff;
  if (exponent == 0) return as_float(sign | as_bits(float(mantissa) * 0x1p-24f));
  return as_float(sign | (exponent == 31 ? 0xffu : exponent + 112) << 23 | mantissa << 13);
}
// A product of two such numbers is exact in float, so this rounds once.
DEVICE uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  return pack_bf16(as_float(a << 16) * as_float(b << 16), as_float(a & 0xffff0000u) * as_float(b & 0xffff0000u));
}
DEVICE uint32_t multiply_fp16(uint32_t a, uint32_t b) {
  return pack_fp16(unpack_fp16(uint16_t(a)) * unpack_fp16(uint16_t(b)),
                   unpack_fp16(uint16_t(a >> 16)) * unpack_fp16(uint16_t(b >> 16)));
}
DEVICE float greatest_or_nan(float a, float b) { return a != a ? a : b != b ? b : __builtin_fmaxf(a, b); }
DEVICE uint32_t greatest_bf16(uint32_t a, uint32_t b) {
  return pack_bf16(greatest_or_nan(as_float(a << 16), as_float(b << 16)),
                   greatest_or_nan(as_float(a & 0xffff0000u), as_float(b & 0xffff0000u)));
}
DEVICE uint32_t greatest_fp16(uint32_t a, uint32_t b) {
  return pack_fp16(greatest_or_nan(unpack_fp16(uint16_t(a)), unpack_fp16(uint16_t(b))),
                   greatest_or_nan(unpack_fp16(uint16_t(a >> 16)), unpack_fp16(uint16_t(b >> 16))));
}
DEVICE uint32_t least_bf16(uint32_t a, uint32_t b) { return greatest_bf16(a ^ 0x80008000u, b ^ 0x80008000u) ^ 0x80008000u; }
DEVICE uint32_t least_fp16(uint32_t a, uint32_t b) { return greatest_fp16(a ^ 0x80008000u, b ^ 0x80008000u) ^ 0x80008000u; }
DEVICE uint32_t bytes_of(uint32_t a, uint32_t b, uint32_t which) {
  const uint64_t both = uint64_t(b) << 32 | a;
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word |= uint32_t(both >> (which >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return word;
}
DEVICE float least(float a, float b) { return __builtin_fminf(a, b); }
DEVICE float greatest(float a, float b) { return __builtin_fmaxf(a, b); }
DEVICE float multiply_rounded(float a, float b) { return a * b; }
// A product of two floats is exact in double.
DEVICE float multiply_up(float a, float b) {
  const float near = a * b;
  return (double)near < (double)a * (double)b ? __builtin_nextafterf(near, __builtin_inff()) : near;
}
DEVICE float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE float reciprocal_of_bf16(float value) { return 1.0f / value; }
DEVICE float reciprocal_sqrt(float value) { return 1.0f / __builtin_sqrtf(value); }
DEVICE float exp2_near(float value) { return __builtin_exp2f(value); }
DEVICE float reciprocal_near(float value) { return 1.0f / value; }

// --- multicast addresses -------------------------------------------------------------------------------------------

// Adds up what the ranks have, in rank order. add(sums, words) and pack(words, sums) know the type of the elements.
template <int COUNT, typename Add, typename Pack>
DEVICE void emulated_multicast_sum(uint32_t (&w)[4], const void* multicast, Add add, Pack pack) {
  float sums[COUNT] = {};
  for (uint32_t rank = 0; rank < emulated_world_size(); ++rank) {
    uint32_t words[4];
    emulated_multicast_load(words, multicast, rank);
    for (int i = 0; i < 4; ++i) add(sums + i * COUNT / 4, words[i]);
  }
  for (int i = 0; i < 4; ++i) w[i] = pack(sums + i * COUNT / 4);
}
DEVICE void load_multicast_sum_bf16(uint32_t (&w)[4], const void* multicast) {
  const auto add = [](float* sums, uint32_t word) {
    sums[0] += as_float(word << 16);
    sums[1] += as_float(word & 0xffff0000u);
  };
  emulated_multicast_sum<8>(w, multicast, add, [](const float* sums) { return pack_bf16(sums[0], sums[1]); });
}
DEVICE void load_multicast_sum_fp16(uint32_t (&w)[4], const void* multicast) {
  const auto add = [](float* sums, uint32_t word) {
    sums[0] += unpack_fp16(uint16_t(word));
    sums[1] += unpack_fp16(uint16_t(word >> 16));
  };
  emulated_multicast_sum<8>(w, multicast, add, [](const float* sums) { return pack_fp16(sums[0], sums[1]); });
}
DEVICE void load_multicast_sum_fp32(uint32_t (&w)[4], const void* multicast) {
  const auto add = [](float* sums, uint32_t word) { sums[0] += as_float(word); };
  emulated_multicast_sum<4>(w, multicast, add, [](const float* sums) { return as_bits(sums[0]); });
}
DEVICE void store_multicast(void* multicast, const uint32_t (&w)[4]) { emulated_multicast_store(multicast, w); }
DEVICE void fence_proxy_alias() { emulated_fence_proxy_alias(); }

// --- threads of a CTA ----------------------------------------------------------------------------------------------

DEVICE void barrier_sync(uint32_t id, uint32_t threads) { emulated_barrier_sync(id, threads); }
DEVICE uint32_t barrier_sync_with(uint32_t id, uint32_t threads, uint32_t) {
  emulated_barrier_sync(id, threads);
  return 1;
}
DEVICE float shuffle_xor(float value, int mask) { return as_float(emulated_shuffle_xor(as_bits(value), mask)); }
DEVICE uint32_t shuffle_xor(uint32_t value, int mask) { return emulated_shuffle_xor(value, mask); }
DEVICE int32_t first_lanes(int32_t value) { return int32_t(emulated_first_lanes(uint32_t(value))); }
DEVICE void warp_sync() { emulated_warp_sync(); }
#if EMULATED_ARCH >= 900
DEVICE void grid_dependency_wait() { emulated_grid_dependency_wait(); }
DEVICE void grid_dependency_launch() { emulated_grid_dependency_launch(); }
#else
DEVICE void grid_dependency_wait() {}
DEVICE void grid_dependency_launch() {}
#endif

// --- shared memory, mbarriers, bulk copies -------------------------------------------------------------------------

DEVICE uint8_t* dynamic_shared() { return static_cast<uint8_t*>(emulated_dynamic_shared()); }
DEVICE uint32_t shared_address(const void* pointer) { return emulated_shared_address(pointer); }
DEVICE void load_shared(uint32_t (&w)[4], const void* pointer) { emulated_load_shared(w, pointer, 16); }
DEVICE void load_shared(uint32_t (&w)[2], const void* pointer) { emulated_load_shared(w, pointer, 8); }
DEVICE void load_shared(uint32_t (&w)[1], const void* pointer) { emulated_load_shared(w, pointer, 4); }
DEVICE void store_shared(void* pointer, const uint32_t (&w)[4]) { emulated_store_shared(pointer, w, 16); }
DEVICE void store_shared(void* pointer, const uint32_t (&w)[2]) { emulated_store_shared(pointer, w, 8); }
DEVICE uint32_t load_acquire_cta(const uint32_t* pointer) { return emulated_load_acquire_cta(pointer); }
DEVICE void store_release_cta(uint32_t* pointer, uint32_t value) { emulated_store_release_cta(pointer, value); }
template <int BYTES>
DEVICE void copy_to_shared(void* shared, const void* global) {
  emulated_copy_to_shared(shared, global, BYTES);
}
DEVICE void copies_commit() { emulated_copies_commit(); }
template <int PENDING>
DEVICE void copies_wait() {
  emulated_copies_wait(PENDING);
}
DEVICE void mbarrier_init(uint64_t* barrier, uint32_t arrivals) { emulated_mbarrier_init(barrier, arrivals); }
DEVICE void mbarrier_init_fence() { emulated_mbarrier_init_fence(); }
DEVICE void mbarrier_arrive(uint64_t* barrier) { emulated_mbarrier_arrive(barrier, 0); }
DEVICE void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) { emulated_mbarrier_arrive(barrier, bytes); }
DEVICE bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity) {
  return emulated_mbarrier_try_wait(barrier, parity);
}
DEVICE void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  emulated_bulk_load(shared, global, bytes, barrier);
}
DEVICE void bulk_store(void* global, const void* shared, uint32_t bytes) { emulated_bulk_store(global, shared, bytes); }
DEVICE void bulk_commit() { emulated_bulk_commit(); }
template <int PENDING>
DEVICE void bulk_wait_read() {
  emulated_bulk_wait(true, PENDING);
}
template <int PENDING = 0>
DEVICE void bulk_wait() {
  emulated_bulk_wait(false, PENDING);
}
DEVICE void fence_proxy_async() { emulated_fence_proxy_async(); }
DEVICE void fence_proxy_async_shared() { emulated_fence_proxy_async(); }

// As primitives.cuh has them before sm_90. From then on: smaller, so that short tensors have more pieces than a grid has lanes.
#if EMULATED_ARCH >= 900
inline constexpr uint32_t PREFETCH_BYTES = 64, PREFETCH_LANES = 2;
#else
inline constexpr uint32_t PREFETCH_BYTES = 32, PREFETCH_LANES = 32;
#endif
DEVICE void prefetch_l2(const void* address, uint32_t bytes) { emulated_prefetch_l2(address, bytes); }

// --- cluster.cuh ---------------------------------------------------------------------------------------------------

DEVICE uint32_t cluster_rank() { return emulated_cluster_rank(); }
DEVICE void cluster_sync() { emulated_cluster_sync(); }
DEVICE void cluster_arrive() {}  // all meet in cluster_wait
DEVICE void cluster_wait() { emulated_cluster_sync(); }
DEVICE void store_to_cta(uint32_t rank, uint32_t* address, uint32_t word, uint64_t* barrier) {
  emulated_store_to_cta(rank, address, word, barrier);
}
DEVICE void load_from_cta(uint32_t (&w)[4], uint32_t rank, const void* address) { emulated_load_from_cta(w, rank, address); }

// --- wgmma.cuh: arrivals at other CTAs, copies of tiles, matmuls of a warpgroup -------------------------------------

DEVICE void mbarrier_arrive_at(uint64_t* barrier, uint32_t rank) { emulated_mbarrier_arrive_at(barrier, rank); }
DEVICE void prefetch_map(const TensorMap&) {}
DEVICE void load_tile(void* shared, const TensorMap& map, int32_t column, int32_t row, uint64_t* barrier) {
  emulated_load_tile("load_tile", 1u << emulated_cluster_rank(), shared, &map, column, row, barrier);
}
DEVICE void load_tile_to(
    uint16_t mask, void* shared, const TensorMap& map, int32_t column, int32_t row, uint64_t* barrier) {
  emulated_load_tile("load_tile_to", mask, shared, &map, column, row, barrier);
}
template <int REGISTERS>
DEVICE void more_registers() {
  static_assert(REGISTERS >= 24 && REGISTERS <= 256 && REGISTERS % 8 == 0, "what setmaxnreg takes");
}
template <int REGISTERS>
DEVICE void fewer_registers() {
  more_registers<REGISTERS>();
}
DEVICE void wgmma_fence() { emulated_wgmma_fence(); }
DEVICE void wgmma_commit() { emulated_wgmma_commit(); }
template <int PENDING>
DEVICE void wgmma_wait() {
  emulated_wgmma_wait(PENDING);
}
template <int N>
DEVICE void wgmma_64x16(float (&d)[N / 2], uint64_t a, uint64_t b, int keep) {
  emulated_wgmma(d, N, a, b, keep != 0);
}
