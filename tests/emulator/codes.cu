// Rows of X_TYPE in the codes that the wire has for sums, and back: what wire.cuh does, without a protocol around it.
#include "elements.cuh"
#include "wire.cuh"

struct CodesParams {
  const X_TYPE* x;  // [grid, HIDDEN]
  uint8_t* packed;  // [grid, SumRow::ROW_BYTES]
  float* decoded;   // [grid, HIDDEN]
};

KERNEL(THREADS, 1) codes(GRID_CONSTANT CodesParams p) {
  uint8_t* const row = p.packed + blockIdx.x * SumRow::ROW_BYTES;
  const uint64_t first = (uint64_t)blockIdx.x * HIDDEN;
  for (uint32_t before = 0; before < HIDDEN; before += THREADS * 8) {
    const uint32_t column = before + threadIdx.x * 8;
    const bool in_row = column < HIDDEN;
    Eight<X_TYPE> eight;
    if (in_row) load(eight, p.x + first + column);
    const auto& piece = SumRow::encoded(eight);
    if (in_row) store_strong(SumRow::at(row, column), piece);
  }
  warp_sync();
  barrier_sync(0, THREADS);
  for (uint32_t column = threadIdx.x * 8; column < HIDDEN; column += THREADS * 8) {
    SumRow::Piece piece;
    load_strong(piece, SumRow::at(row, column));
    store(p.decoded + first + column, received<fp32>(piece));
  }
}
