// The CTAs of a cluster: Hopper and later.
#pragma once
#include "primitives.cuh"

#ifndef TW_EMULATED

DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of the cluster meet. Then all of them see what any of them wrote to shared memory before.
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The two halves of cluster_sync, for mbarriers and mbarrier_init_fence: no other write is published. A release would wait for
// all stores of the thread, also for those on their way to peers.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Stores a word to shared memory of CTA `rank` of the cluster, at the place of `address` in this CTA's. Its four bytes count at
// that CTA's mbarrier at the place of `barrier`: who has waited there sees the word.
DEVICE void store_to_cta(uint32_t rank, uint32_t* address, uint32_t word, uint64_t* barrier) {
  asm volatile(
      "{\n.reg .b32 there, counter;\n"
      "mapa.shared::cluster.u32 there, %0, %3;\n"
      "mapa.shared::cluster.u32 counter, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %1, [counter];\n}" ::"r"(shared_address(address)),
      "r"(word), "r"(shared_address(barrier)), "r"(rank)
      : "memory");
}
// Loads 16 bytes of shared memory of CTA `rank` of the cluster, at the place of `address` in this CTA's. All threads must meet in
// cluster_sync between what that CTA stores there and this, and once more before that CTA ends.
DEVICE void load_from_cta(uint32_t (&w)[4], uint32_t rank, const void* address) {
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %4, %5;\n"
      "ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [there];\n}"
      : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
      : "r"(shared_address(address)), "r"(rank)
      : "memory");
}

#endif
