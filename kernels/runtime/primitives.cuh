// The machine instructions that the kernels need, one function for each. For tests without a GPU, TW_EMULATED replaces these
// functions and those of wgmma.cuh.
#pragma once

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int32_t = int;
using uint64_t = unsigned long long;
using int64_t = long long;

#ifdef TW_EMULATED
#include TW_EMULATED
#else

#define DEVICE __device__ __forceinline__
#define KERNEL(threads, ctas_per_sm) extern "C" __global__ void __launch_bounds__(threads, ctas_per_sm)
#define GRID_CONSTANT const __grid_constant__

// --- global memory: weak accesses, for data that no other thread of the system touches meanwhile -------------------

DEVICE void load_global(uint32_t (&w)[4], const void* address) {
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "l"(address)
               : "memory");
}
DEVICE void load_global(uint32_t (&w)[2], const void* address) {
  asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(address) : "memory");
}
DEVICE void load_global(uint32_t (&w)[1], const void* address) {
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(w[0]) : "l"(address) : "memory");
}
DEVICE void load_global(uint64_t (&w)[1], const void* address) {
  asm volatile("ld.global.b64 %0, [%1];" : "=l"(w[0]) : "l"(address) : "memory");
}
DEVICE void store_global(void* address, const uint32_t (&w)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
               : "memory");
}
DEVICE void store_global(void* address, const uint32_t (&w)[2]) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(w[0]), "r"(w[1]) : "memory");
}
DEVICE void store_global(void* address, const uint32_t (&w)[1]) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(address), "r"(w[0]) : "memory");
}

// --- global memory that peers access at the same time: each 32-bit word is read and written whole ------------------

DEVICE void load_relaxed_sys(uint32_t (&w)[4], const void* address) {
  asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "l"(address)
               : "memory");
}
DEVICE void load_relaxed_sys(uint32_t (&w)[2], const void* address) {
  asm volatile("ld.relaxed.sys.global.v2.b32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(address) : "memory");
}
DEVICE void load_relaxed_sys(uint32_t (&w)[1], const void* address) {
  asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(w[0]) : "l"(address) : "memory");
}
DEVICE void store_relaxed_sys(void* address, const uint32_t (&w)[4]) {
  asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(w[0]), "r"(w[1]), "r"(w[2]),
               "r"(w[3])
               : "memory");
}
DEVICE void store_relaxed_sys(void* address, const uint32_t (&w)[2]) {
  asm volatile("st.relaxed.sys.global.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(w[0]), "r"(w[1]) : "memory");
}
DEVICE void store_relaxed_sys(void* address, const uint32_t (&w)[1]) {
  asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(address), "r"(w[0]) : "memory");
}
DEVICE uint32_t load_acquire_sys(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
DEVICE void store_release_sys(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.global.b32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
// Each 64-bit word is read and written whole.
DEVICE void load_pairs_relaxed_sys(uint64_t (&w)[2], const void* address) {
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(w[0]), "=l"(w[1]) : "l"(address) : "memory");
}
DEVICE void store_pairs_relaxed_sys(void* address, const uint64_t (&w)[2]) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(address), "l"(w[0]), "l"(w[1]) : "memory");
}
// What this thread knows of before the fence comes before what it stores after the fence, for every thread of the system.
DEVICE void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
DEVICE uint32_t fetch_add_gpu(uint32_t* address, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}

// The same without order: the answer is the only thing that other threads learn.
DEVICE uint32_t fetch_add_relaxed_gpu(uint32_t* address, uint32_t value) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}

// An addition without an answer and without order. It waits for none of the thread's stores, and whoever reads the sum learns
// of none of them.
DEVICE void add_relaxed_gpu(uint32_t* address, uint32_t value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
DEVICE void add_relaxed_gpu(uint64_t* address, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// --- multicast addresses, which stand for the memory of all ranks at once; from sm_90 on ----------------------------

// Loads the sums of what the ranks have at this address. 16-bit elements are added in float32. The switch chooses the order.
DEVICE void load_multicast_sum_bf16(uint32_t (&w)[4], const void* multicast) {
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "l"(multicast)
               : "memory");
}
DEVICE void load_multicast_sum_fp16(uint32_t (&w)[4], const void* multicast) {
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "l"(multicast)
               : "memory");
}
DEVICE void load_multicast_sum_fp32(uint32_t (&w)[4], const void* multicast) {
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "l"(multicast)
               : "memory");
}
// Stores to all ranks, this one included. The instruction moves bits, whatever they mean, so .f32 serves all types.
DEVICE void store_multicast(void* multicast, const uint32_t (&w)[4]) {
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(multicast), "r"(w[0]), "r"(w[1]),
               "r"(w[2]), "r"(w[3])
               : "memory");
}
// Orders accesses to a memory location through one address before the fence with accesses through another address behind it.
DEVICE void fence_proxy_alias() { asm volatile("fence.proxy.alias;" ::: "memory"); }

// --- threads of a CTA ----------------------------------------------------------------------------------------------

// Barrier number `id` (0..15) of `threads` threads, a multiple of 32.
DEVICE void barrier_sync(uint32_t id, uint32_t threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// The same barrier for threads that have loaded the same `number`. A thread may come to other barriers while its loads are
// under way. It comes to this one when it has its number, because the threads vote with the number's lowest bit. The result is
// 1. The compiler does not know that, so what is made of the result comes after the loads of all these threads.
DEVICE uint32_t barrier_sync_with(uint32_t id, uint32_t threads, uint32_t number) {
  uint32_t one;
  asm volatile(
      "{\n.reg .pred vote;\n.reg .b32 bit, other;\n"
      "and.b32 bit, %3, 1;\n"
      "xor.b32 other, bit, 1;\n"
      "setp.ne.u32 vote, bit, 0;\n"
      "barrier.red.or.aligned.pred vote, %1, %2, vote;\n"
      "selp.u32 %0, bit, other, vote;\n}"
      : "=r"(one)
      : "r"(id), "r"(threads), "r"(number)
      : "memory");
  return one;
}
DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DEVICE uint32_t shuffle_xor(uint32_t value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
// Lane 0's value. The compiler then knows that all lanes of the warp have the same value.
DEVICE int32_t first_lanes(int32_t value) { return __shfl_sync(0xffffffffu, value, 0); }
DEVICE void warp_sync() { __syncwarp(); }

// Programmatic dependent launch. Wait: the kernel before this one has ended and its writes are visible. Launch: the next kernel
// may start. Before sm_90 kernels of a stream follow each other anyway.
#if __CUDA_ARCH__ >= 900
DEVICE void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void grid_dependency_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
DEVICE void grid_dependency_wait() {}
DEVICE void grid_dependency_launch() {}
#endif

// --- shared memory, mbarriers, bulk copies -------------------------------------------------------------------------

DEVICE uint8_t* dynamic_shared() {
  extern __shared__ __align__(1024) uint8_t tw_dynamic_shared[];
  return tw_dynamic_shared;
}
DEVICE uint32_t shared_address(const void* pointer) { return (uint32_t)__cvta_generic_to_shared(pointer); }
DEVICE void load_shared(uint32_t (&w)[4], const void* pointer) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(shared_address(pointer))
               : "memory");
}
DEVICE void load_shared(uint32_t (&w)[2], const void* pointer) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(shared_address(pointer)) : "memory");
}
DEVICE void load_shared(uint32_t (&w)[1], const void* pointer) {
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(w[0]) : "r"(shared_address(pointer)) : "memory");
}
DEVICE void store_shared(void* pointer, const uint32_t (&w)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(pointer)), "r"(w[0]), "r"(w[1]),
               "r"(w[2]), "r"(w[3])
               : "memory");
}
DEVICE void store_shared(void* pointer, const uint32_t (&w)[2]) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(shared_address(pointer)), "r"(w[0]), "r"(w[1]) : "memory");
}
// Counters in shared memory by which threads of a CTA tell each other how far they are.
DEVICE uint32_t load_acquire_cta(const uint32_t* pointer) {
  uint32_t value;
  asm volatile("ld.acquire.cta.shared.b32 %0, [%1];" : "=r"(value) : "r"(shared_address(pointer)) : "memory");
  return value;
}
DEVICE void store_release_cta(uint32_t* pointer, uint32_t value) {
  asm volatile("st.release.cta.shared.b32 [%0], %1;" ::"r"(shared_address(pointer)), "r"(value) : "memory");
}
// Starts a copy of 16, 8 or 4 bytes from global to shared memory. The copy may be under way until this thread waits for the
// group that the copy is committed to.
template <int BYTES>
DEVICE void copy_to_shared(void* shared, const void* global) {
  static_assert(BYTES == 16 || BYTES == 8 || BYTES == 4, "what a copy can have");
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(shared)), "l"(global), "n"(BYTES)
                 : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING of this thread's groups are still under way.
template <int PENDING>
DEVICE void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
DEVICE void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives, and makes the phase wait for `bytes` more of bulk copies.
DEVICE void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
DEVICE bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}
// Bulk copies: addresses and sizes are multiples of 16 bytes. The copy engine of the SM makes them, not the thread.
DEVICE void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
DEVICE void bulk_store(void* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
}
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most PENDING of this thread's groups have not read all of their shared memory yet.
template <int PENDING>
DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
// Waits until all of this thread's groups but the latest PENDING are complete. Their writes are then visible to this thread.
template <int PENDING = 0>
DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}
// Orders ordinary accesses (generic proxy) and bulk copies (async proxy) of this thread, in all state spaces.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
// The same for shared memory alone. This fence does not wait for the thread's global stores.
DEVICE void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- prefetches: memory that L2 may bring in; nothing waits for it and nothing is read ------------------------------

// PREFETCH_BYTES: what one instruction asks for at most; addresses and sizes are multiples of 16 bytes. PREFETCH_LANES: how
// many lanes of a warp execute an instruction each.
#if __CUDA_ARCH__ >= 900
inline constexpr uint32_t PREFETCH_BYTES = 4096, PREFETCH_LANES = 1;
DEVICE void prefetch_l2(const void* address, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
}
#else
// It is not said how much of an L2 line such an instruction brings in: a sector at least.
inline constexpr uint32_t PREFETCH_BYTES = 32, PREFETCH_LANES = 32;
DEVICE void prefetch_l2(const void* address, uint32_t) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}
#endif

// The same address. The compiler computes it once, and what lies at known distances from it with the offsets of instructions.
// Otherwise it puts distances and indices together first, and computes each address of its own.
template <typename T>
DEVICE T* settled(T* address) {
  uint64_t bits;
  asm("mov.b64 %0, %1;" : "=l"(bits) : "l"(address));
  return (T*)bits;
}

// --- conversions ---------------------------------------------------------------------------------------------------

DEVICE float as_float(uint32_t bits) { return __uint_as_float(bits); }
DEVICE uint32_t as_bits(float value) { return __float_as_uint(value); }
#if __CUDA_ARCH__ >= 800
DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
#else
DEVICE uint32_t round_bf16(float value) {
  const uint32_t bits = as_bits(value);
  return value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
DEVICE uint32_t pack_bf16(float low, float high) { return round_bf16(low) | round_bf16(high) << 16; }
#endif
DEVICE uint32_t pack_fp16(float low, float high) {
  uint32_t word;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
  asm("{\n.reg .b16 first, second;\n"
      "cvt.rn.f16.f32 first, %1;\n"
      "cvt.rn.f16.f32 second, %2;\n"
      "mov.b32 %0, {first, second};\n}"
      : "=r"(word)
      : "f"(low), "f"(high));
#endif
  return word;
}
DEVICE float unpack_fp16(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
// Two products, each rounded once.
#if __CUDA_ARCH__ >= 900
DEVICE uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
#else
// A product of two bf16 numbers is exact in float32.
DEVICE uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  return pack_bf16(as_float(a << 16) * as_float(b << 16), as_float(a & 0xffff0000u) * as_float(b & 0xffff0000u));
}
#endif
DEVICE uint32_t multiply_fp16(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
// Saturates at +-448. Devices before sm_89 have no such instruction, and nothing that is compiled for them may ask for it.
DEVICE uint16_t pack_e4m3(float low, float high) {
  uint16_t bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
  return bits;
}
// The larger or smaller numbers of two pairs; NaN where either number is NaN. -0.0 is less than 0.0.
#if __CUDA_ARCH__ >= 800
DEVICE uint32_t greatest_bf16(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}
DEVICE uint32_t least_bf16(uint32_t a, uint32_t b) {
  uint32_t smaller;
  asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(smaller) : "r"(a), "r"(b));
  return smaller;
}
DEVICE uint32_t greatest_fp16(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}
DEVICE uint32_t least_fp16(uint32_t a, uint32_t b) {
  uint32_t smaller;
  asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(smaller) : "r"(a), "r"(b));
  return smaller;
}
#else
DEVICE float greatest_or_nan(float a, float b) { return a != a ? a : b != b ? b : fmaxf(a, b); }
DEVICE uint32_t greatest_bf16(uint32_t a, uint32_t b) {
  return pack_bf16(greatest_or_nan(as_float(a << 16), as_float(b << 16)),
                   greatest_or_nan(as_float(a & 0xffff0000u), as_float(b & 0xffff0000u)));
}
DEVICE uint32_t greatest_fp16(uint32_t a, uint32_t b) {
  return pack_fp16(greatest_or_nan(unpack_fp16((uint16_t)a), unpack_fp16((uint16_t)b)),
                   greatest_or_nan(unpack_fp16((uint16_t)(a >> 16)), unpack_fp16((uint16_t)(b >> 16))));
}
DEVICE uint32_t least_bf16(uint32_t a, uint32_t b) { return greatest_bf16(a ^ 0x80008000u, b ^ 0x80008000u) ^ 0x80008000u; }
DEVICE uint32_t least_fp16(uint32_t a, uint32_t b) { return greatest_fp16(a ^ 0x80008000u, b ^ 0x80008000u) ^ 0x80008000u; }
#endif
// Four of the eight bytes of b (upper) and a (lower), by the four numbers in the lower half of `which`.
DEVICE uint32_t bytes_of(uint32_t a, uint32_t b, uint32_t which) { return __byte_perm(a, b, which); }
// Where one argument is NaN, the result is the other one.
DEVICE float least(float a, float b) { return fminf(a, b); }
DEVICE float greatest(float a, float b) { return fmaxf(a, b); }
// A product that is rounded before anything is added to it.
DEVICE float multiply_rounded(float a, float b) { return __fmul_rn(a, b); }
// A product that is rounded upwards.
DEVICE float multiply_up(float a, float b) { return __fmul_ru(a, b); }
// a * b + c, rounded once.
DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// 1 / value, rounded to nearest, for bf16 values from 2^-126 to 2^126. That is one step of Newton's method from the machine's
// reciprocal. A division has code for all other values, too.
DEVICE float reciprocal_of_bf16(float value) {
  float near;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(value));
  return __fmaf_rn(near, __fmaf_rn(-value, near, 1.0f), near);
}
DEVICE float reciprocal_sqrt(float value) { return rsqrtf(value); }
// This function and the next one are right within 2 units in the last place. Numbers below the normal ones become 0.
DEVICE float exp2_near(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
DEVICE float reciprocal_near(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

#endif  // TW_EMULATED
