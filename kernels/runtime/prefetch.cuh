// CTAs of a call that have no rows. They ask L2 for weights that the next kernel reads, while the message is under way.
//
// They begin before grid_dependency_wait, because the weights don't depend on earlier kernels, and they end at once. They take
// no part in the call: they don't wait, touch none of its memory, and are not counted. Nor do they meet CTAs with rows in a
// cluster: row_ctas is a multiple of a cluster's CTAs, so all CTAs of a cluster have rows, or none. One CTA or more has rows.
// It ends no sooner than the kernel before this grid. So a kernel that waits for this grid has waited for that kernel, too.
//
// Set by definitions: PREFETCH (0: the grid has no such CTAs), THREADS.
#pragma once

#include "primitives.cuh"

inline constexpr int MOST_PREFETCHED = 4;

struct Prefetched {
  uint64_t begin[MOST_PREFETCHED];  // addresses, multiples of 16
  uint32_t bytes[MOST_PREFETCHED];  // multiples of 16; 0: none
  int32_t row_ctas;                 // CTAs with an index below this have rows
};

// The number of CTAs of the grid that have rows.
DEVICE int row_ctas([[maybe_unused]] const Prefetched& prefetch) {
#if PREFETCH
  return prefetch.row_ctas;
#else
  return gridDim.x;
#endif
}

// Whether this CTA has no rows. If so, it has asked L2 for its share. Pieces are dealt out to neighbouring CTAs, then to
// neighbouring warps.
DEVICE bool only_prefetches([[maybe_unused]] const Prefetched& prefetch) {
#if PREFETCH
  if (blockIdx.x < (uint32_t)prefetch.row_ctas) return false;
  const uint32_t cta = blockIdx.x - prefetch.row_ctas, ctas = gridDim.x - prefetch.row_ctas;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane >= PREFETCH_LANES) return true;
  constexpr uint64_t STRIDE = PREFETCH_LANES * PREFETCH_BYTES;  // of a warp
  for (int tensor = 0; tensor < MOST_PREFETCHED; ++tensor) {
    const uint64_t bytes = prefetch.bytes[tensor];
    for (uint64_t at = (warp * ctas + cta) * STRIDE + lane * PREFETCH_BYTES; at < bytes; at += THREADS / 32 * ctas * STRIDE)
      prefetch_l2((const uint8_t*)prefetch.begin[tensor] + at, bytes - at < PREFETCH_BYTES ? bytes - at : PREFETCH_BYTES);
  }
  return true;
#else
  return false;
#endif
}
