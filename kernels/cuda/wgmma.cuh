// Hopper's matmuls of warpgroups, copies of tiles, and what two CTAs of a cluster say to each other. sm_90a.
#pragma once
#include "primitives.cuh"

// As cuTensorMapEncodeTiled writes it; a kernel's parameter.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

// Rows of 64 16-bit elements in shared memory, swizzled by 128 bytes, at a multiple of 1024 bytes.
DEVICE uint64_t tile_descriptor(const void* shared) {
  constexpr uint64_t SWIZZLE_128 = 1ull << 62, EIGHT_ROWS = (1024ull >> 4) << 32, UNUSED = 1ull << 16;
  return SWIZZLE_128 | EIGHT_ROWS | UNUSED | ((shared_address(shared) & 0x3ffff) >> 4);
}
// What to add to a descriptor for the elements `k` of each row and the following ones.
constexpr uint64_t columns_on(int k) { return k * 2 >> 4; }

#ifndef TW_EMULATED

// --- clusters ------------------------------------------------------------------------------------------------------

DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of the cluster meet; what they wrote to shared memory before is seen by all.
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Arrives at the barrier that lies where `barrier` does in CTA `rank` of the cluster. It publishes no writes of this thread: a
// release to the cluster would wait for memory, which takes longer than a stage's matmuls.
DEVICE void mbarrier_arrive_at(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}
// --- copies of tiles -----------------------------------------------------------------------------------------------

DEVICE void prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
// The box of `map` that begins at (column, row), to this CTA.
DEVICE void load_tile(void* shared, const TensorMap& map, int32_t column, int32_t row, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(shared)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}
// The same to the CTAs in `mask`, each of which counts its bytes at its own barrier.
DEVICE void load_tile_to(
    uint16_t mask, void* shared, const TensorMap& map, int32_t column, int32_t row, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"(mask)
      : "memory");
}

// --- matmuls of a warpgroup ----------------------------------------------------------------------------------------

template <int REGISTERS>
DEVICE void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
DEVICE void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// At most PENDING of the committed groups are not complete.
template <int PENDING>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define TW_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TW_16(d, i) TW_4(d, i), TW_4(d, i + 4), TW_4(d, i + 8), TW_4(d, i + 12)
#define TW_64(d, i) TW_16(d, i), TW_16(d, i + 16), TW_16(d, i + 32), TW_16(d, i + 48)

// d [64, 256] = (keep ? d : 0) + a [64, 16] @ b [256, 16]^T in bf16. Of each eight columns a thread has two, of two rows:
// d[4 * n + {0, 1}] is [warp * 16 + lane / 4, 8 * n + lane % 4 * 2 + {0, 1}], and d[4 * n + {2, 3}] eight rows below.
DEVICE void wgmma_64x256x16(float (&d)[128], uint64_t a, uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "%128, %129, p, 1, 1, 0, 0;\n}"
      : TW_64(d, 0), TW_64(d, 64)
      : "l"(a), "l"(b), "r"(keep));
}

#endif  // TW_EMULATED
