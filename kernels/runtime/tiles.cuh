// What persistent matmuls of tiles have in common: a ring of shared-memory stages, and stores that gather a thread's columns.
#pragma once
#include "wgmma.cuh"

// The next one of `STAGES` stages, and the parity of the phase of its barriers.
template <int STAGES>
struct Ring {
  int32_t stage = 0;
  uint32_t parity = 0;
  DEVICE void next() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

DEVICE void wait(uint64_t* barrier, uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

DEVICE uint32_t pick(const uint32_t (&w)[4], uint32_t index) {
  uint32_t low = index & 1 ? w[1] : w[0], high = index & 1 ? w[3] : w[2];
  return index & 2 ? high : low;
}

// Exchanges columns between the four lanes of a quad. Before, a lane has two columns of each of four neighbouring blocks of
// eight columns. After, it has all eight columns of its own block.
DEVICE void gather_block(uint32_t (&w)[4], uint32_t quad_lane) {
  uint32_t received[4];
#pragma unroll
  for (uint32_t step = 0; step < 4; step++) {
    uint32_t sent = pick(w, quad_lane ^ step);
    received[step] = step ? shuffle_xor(sent, step) : sent;
  }
#pragma unroll
  for (uint32_t part = 0; part < 4; part++) w[part] = pick(received, part ^ quad_lane);
}

// Where eight columns of a row are stored.
struct Place {
  uint16_t* out;  // in the warp's first row
  int64_t row_elements;
  bool exists;
};

// Stores 64 rows and N columns in bf16. A thread has them as `value(i)`, in the order of d[i] of a wgmma. Each thread stores 16
// bytes of two rows for every 32 columns. `place(column)` is the place of the eight columns from `column` on, which is counted
// from the first of the N. Of the warp's 16 rows, the first `rows` are stored.
template <int N, class PlaceOf, class Value>
DEVICE void store_rows(int32_t rows, PlaceOf place, Value value) {
  const uint32_t lane = threadIdx.x % 32, quad_lane = lane % 4;
#pragma unroll
  for (int32_t block = 0; block < N / 8; block += 4) {
    const int32_t own = block + (int32_t)quad_lane;
    const Place to = place(own * 8);
#pragma unroll
    for (int32_t below = 0; below < 2; below++) {
      const int32_t row = below * 8 + (int32_t)(lane / 4);
      uint32_t w[4];
#pragma unroll
      for (int32_t one = 0; one < 4; one++) {
        const int32_t found = block + one < N / 8 ? block + one : block;
        w[one] = pack_bf16(value(found * 4 + below * 2), value(found * 4 + below * 2 + 1));
      }
      gather_block(w, quad_lane);
      if (row < rows && own < N / 8 && to.exists) store_global(to.out + row * to.row_elements, w);
    }
  }
}
