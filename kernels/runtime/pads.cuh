// Barriers between equal CTAs of the ranks: the protocol of kernels/runtime/barrier.py, on the same pads and epochs.
//
// In barrier.py the flags are atomics, here they are stores and loads. The order is the same. What all threads of the CTA wrote
// comes before the barrier_sync, hence before the release. What they read next comes after the acquire and its barrier_sync.
#pragma once
#include "primitives.cuh"

inline constexpr int PAD_WIDTH = 8;  // MAX_WORLD_SIZE of barrier.py

// Waits for the CTAs of the same index on all other ranks. All threads of the CTA call it, converged. `pads`: [world], the
// addresses of the ranks' pads. `status`: this rank's status. `phase`: the barrier's number in the launch. After SPIN_LIMIT
// polls `phase` is reported for each silent peer; 0: no limit.
DEVICE void meet_peers(uint32_t* const* pads, int32_t* status, uint32_t epoch, int rank, int phase, uint32_t threads) {
  const uint32_t peer = threadIdx.x;
  barrier_sync(0, threads);
  if (peer < WORLD_SIZE && peer != rank) {
    store_release_sys(pads[peer] + blockIdx.x * PAD_WIDTH + rank, epoch);
    const uint32_t* flag = pads[rank] + blockIdx.x * PAD_WIDTH + peer;
    [[maybe_unused]] uint32_t polls = 0;
    while ((int32_t)(load_acquire_sys(flag) - epoch) < 0) {
#if SPIN_LIMIT
      if (++polls == SPIN_LIMIT) {
        int32_t* report = status + blockIdx.x * PAD_WIDTH + peer;
        if (*report == 0) *report = phase;
        break;
      }
#endif
    }
  }
  warp_sync();
  barrier_sync(0, threads);
}
