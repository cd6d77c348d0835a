// Matrices of GEMMs of one input, whose columns lie beside each other: which of them has a column, and their biases.
#pragma once
#include "tiles.cuh"

inline constexpr int MATRICES = 3;
inline constexpr int32_t NO_MATRIX = 0x7fffffff;

// The matrix that has a column, of all matrices' columns. Columns behind a matrix's end count as its own until the next begins.
template <class Params>
DEVICE int32_t matrix_of(const Params& params, int32_t column) {
  int32_t matrix = 0;
#pragma unroll
  for (int32_t next = 1; next < MATRICES; next++) matrix += column >= params.begins[next];
  return matrix;
}

// Adds the biases to all rows of a thread's sums of N columns from `column` on.
template <int N, class Params>
DEVICE void add_bias(const Params& params, float (&d)[N / 2], int32_t column) {
#pragma unroll
  for (int32_t block = 0; block < N / 8; block++) {
    const int32_t matrix = matrix_of(params, column + block * 8), in = column + block * 8 - params.begins[matrix];
    uint32_t two[1] = {0};
    if (in < params.columns[matrix]) load_global(two, params.biases[matrix] + in + threadIdx.x % 4 * 2);
#pragma unroll
    for (int32_t i = 0; i < 4; i++) d[block * 4 + i] += as_float(i % 2 ? two[0] & 0xffff0000u : two[0] << 16);
  }
}
