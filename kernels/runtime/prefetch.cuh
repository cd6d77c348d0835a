// CTAs of a call that have no rows: they ask L2 for weights that the next kernel reads, while the message is under way.
//
// What they ask for is spread evenly over the weights, in pieces: one at the beginning of each period. So all tiles of the next
// kernel, and all parts of their depth, find the same share in L2. They are computed at the same time, so weights of a few tiles
// alone would not end the kernel sooner.
//
// They begin before grid_dependency_wait, as the weights don't depend on earlier kernels, and end at once. They take no part
// in the call: they don't wait, touch none of its memory, and are not counted. Some CTA of the grid has rows, and ends no
// sooner than the kernel before this one; so who waits for this grid has waited for that kernel, too.
//
// Set by definitions: PREFETCH (0: the grid has no such CTAs), THREADS.
#pragma once

#include "primitives.cuh"

inline constexpr int MOST_PREFETCHED = 4;
inline constexpr uint32_t PREFETCH_PIECE = 1024;  // bytes
static_assert(PREFETCH_PIECE % PREFETCH_BYTES == 0, "lanes ask for whole pieces");

struct Prefetched {
  uint64_t begin[MOST_PREFETCHED];  // addresses, multiples of 16
  uint32_t bytes[MOST_PREFETCHED];  // multiples of 16; 0: none
  int32_t row_ctas;                 // those before them have rows
  uint32_t period;                  // bytes from one piece to the next; a multiple of 16
};

// CTAs of the grid that have rows.
DEVICE int row_ctas([[maybe_unused]] const Prefetched& prefetch) {
#if PREFETCH
  return prefetch.row_ctas;
#else
  return gridDim.x;
#endif
}

// Whether this CTA has no rows; it has asked for its share then. Neighbouring CTAs have neighbouring pieces, then warps.
DEVICE bool only_prefetches([[maybe_unused]] const Prefetched& prefetch) {
#if PREFETCH
  if (blockIdx.x < (uint32_t)prefetch.row_ctas) return false;
  const uint32_t cta = blockIdx.x - prefetch.row_ctas, ctas = gridDim.x - prefetch.row_ctas;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane >= PREFETCH_LANES) return true;
  constexpr uint32_t LANES_EACH = PREFETCH_PIECE / PREFETCH_BYTES;  // of a piece
  const uint64_t first = (warp * ctas + cta) * PREFETCH_LANES + lane;
  const uint64_t stride = (uint64_t)(THREADS / 32 * ctas * PREFETCH_LANES / LANES_EACH) * prefetch.period;
  for (int tensor = 0; tensor < MOST_PREFETCHED; ++tensor) {
    const uint64_t bytes = prefetch.bytes[tensor];
    for (uint64_t at = first / LANES_EACH * prefetch.period + first % LANES_EACH * PREFETCH_BYTES; at < bytes; at += stride)
      prefetch_l2((const uint8_t*)prefetch.begin[tensor] + at, bytes - at < PREFETCH_BYTES ? bytes - at : PREFETCH_BYTES);
  }
  return true;
#else
  return false;
#endif
}
