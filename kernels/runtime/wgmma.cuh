// Hopper's matmuls of warpgroups, copies of tiles, and signals between the two CTAs of a cluster. For sm_90a.
#pragma once
#include "cluster.cuh"

// A tensor map as cuTensorMapEncodeTiled writes it. Kernels get it as a parameter.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

// The descriptor of rows of 64 16-bit elements in shared memory, swizzled by 128 bytes, at a multiple of 1024 bytes.
DEVICE uint64_t tile_descriptor(const void* shared) {
  constexpr uint64_t SWIZZLE_128 = 1ull << 62, EIGHT_ROWS = (1024ull >> 4) << 32, UNUSED = 1ull << 16;
  return SWIZZLE_128 | EIGHT_ROWS | UNUSED | ((shared_address(shared) & 0x3ffff) >> 4);
}
// What to add to a descriptor so that it begins at element `k` of each row.
constexpr uint64_t columns_on(int k) { return k * 2 >> 4; }

#ifndef TW_EMULATED

// --- arrivals at other CTAs ----------------------------------------------------------------------------------------

// Arrives at a barrier of CTA `rank` of the cluster, which lies at the same place as `barrier` in this CTA. The arrival
// publishes no writes of this thread: a release to the cluster would wait for memory, which takes longer than a stage's
// matmuls.
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
// Loads the box of `map` that begins at (column, row) to this CTA.
DEVICE void load_tile(void* shared, const TensorMap& map, int32_t column, int32_t row, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(shared)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}
// Loads the box to all CTAs in `mask`. Each of them counts its bytes at its own barrier.
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
// Waits until at most PENDING of the committed groups are not complete.
template <int PENDING>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The registers of a thread's sums, eight at a time: their names in the instruction, and the operands themselves.
#define TW_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TW_NAMES_16 TW_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TW_NAMES_20 TW_NAMES_16 ", %16, %17, %18, %19"
#define TW_NAMES_24 TW_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define TW_NAMES_28 TW_NAMES_24 ", %24, %25, %26, %27"
#define TW_NAMES_32 TW_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define TW_NAMES_40 TW_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TW_NAMES_48 TW_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TW_NAMES_56 TW_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define TW_NAMES_64 TW_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define TW_NAMES_72 TW_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define TW_NAMES_80 TW_NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define TW_NAMES_88 TW_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define TW_NAMES_96 TW_NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define TW_NAMES_104 TW_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define TW_NAMES_112 TW_NAMES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define TW_NAMES_120 TW_NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define TW_NAMES_128 TW_NAMES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define TW_SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TW_SUMS_8(d) TW_SUMS_4(d, 0), TW_SUMS_4(d, 4)
#define TW_SUMS_16(d) TW_SUMS_8(d), TW_SUMS_4(d, 8), TW_SUMS_4(d, 12)
#define TW_SUMS_20(d) TW_SUMS_16(d), TW_SUMS_4(d, 16)
#define TW_SUMS_24(d) TW_SUMS_16(d), TW_SUMS_4(d, 16), TW_SUMS_4(d, 20)
#define TW_SUMS_28(d) TW_SUMS_24(d), TW_SUMS_4(d, 24)
#define TW_SUMS_32(d) TW_SUMS_24(d), TW_SUMS_4(d, 24), TW_SUMS_4(d, 28)
#define TW_SUMS_40(d) TW_SUMS_32(d), TW_SUMS_4(d, 32), TW_SUMS_4(d, 36)
#define TW_SUMS_48(d) TW_SUMS_40(d), TW_SUMS_4(d, 40), TW_SUMS_4(d, 44)
#define TW_SUMS_56(d) TW_SUMS_48(d), TW_SUMS_4(d, 48), TW_SUMS_4(d, 52)
#define TW_SUMS_64(d) TW_SUMS_56(d), TW_SUMS_4(d, 56), TW_SUMS_4(d, 60)
#define TW_SUMS_72(d) TW_SUMS_64(d), TW_SUMS_4(d, 64), TW_SUMS_4(d, 68)
#define TW_SUMS_80(d) TW_SUMS_72(d), TW_SUMS_4(d, 72), TW_SUMS_4(d, 76)
#define TW_SUMS_88(d) TW_SUMS_80(d), TW_SUMS_4(d, 80), TW_SUMS_4(d, 84)
#define TW_SUMS_96(d) TW_SUMS_88(d), TW_SUMS_4(d, 88), TW_SUMS_4(d, 92)
#define TW_SUMS_104(d) TW_SUMS_96(d), TW_SUMS_4(d, 96), TW_SUMS_4(d, 100)
#define TW_SUMS_112(d) TW_SUMS_104(d), TW_SUMS_4(d, 104), TW_SUMS_4(d, 108)
#define TW_SUMS_120(d) TW_SUMS_112(d), TW_SUMS_4(d, 112), TW_SUMS_4(d, 116)
#define TW_SUMS_128(d) TW_SUMS_120(d), TW_SUMS_4(d, 120), TW_SUMS_4(d, 124)

// d [64, N] = (keep ? d : 0) + a [64, 16] @ b [N, 16]^T in bf16. A thread has two of each eight columns, in two rows:
// d[4 * n + {0, 1}] is [warp * 16 + lane / 4, 8 * n + lane % 4 * 2 + {0, 1}], and d[4 * n + {2, 3}] eight rows below.
template <int N>
DEVICE void wgmma_64x16(float (&d)[N / 2], uint64_t a, uint64_t b, int keep);

// `SUMS` is N / 2. `A`, `B` and `KEEP` name the operands behind the sums.
#define TW_WGMMA(N, SUMS, A, B, KEEP)                                                                          \
  template <>                                                                                                  \
  DEVICE void wgmma_64x16<N>(float (&d)[N / 2], uint64_t a, uint64_t b, int keep) {                            \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " KEEP                                                      \
                 ", 0;\n"                                                                                      \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" TW_NAMES_##SUMS "}, " A ", " B   \
                 ", p, 1, 1, 0, 0;\n}"                                                                         \
                 : TW_SUMS_##SUMS(d)                                                                           \
                 : "l"(a), "l"(b), "r"(keep));                                                                 \
  }
TW_WGMMA(40, 20, "%20", "%21", "%22")
TW_WGMMA(48, 24, "%24", "%25", "%26")
TW_WGMMA(56, 28, "%28", "%29", "%30")
TW_WGMMA(64, 32, "%32", "%33", "%34")
TW_WGMMA(80, 40, "%40", "%41", "%42")
TW_WGMMA(96, 48, "%48", "%49", "%50")
TW_WGMMA(112, 56, "%56", "%57", "%58")
TW_WGMMA(128, 64, "%64", "%65", "%66")
TW_WGMMA(160, 80, "%80", "%81", "%82")
TW_WGMMA(192, 96, "%96", "%97", "%98")
TW_WGMMA(224, 112, "%112", "%113", "%114")
TW_WGMMA(256, 128, "%128", "%129", "%130")

#endif  // TW_EMULATED
