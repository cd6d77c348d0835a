// LayerNorm of a reduced row, see row.cuh; as toy_epilogue.add_layer_norm.
#pragma once
#include "elements.cuh"

struct RowStatistics {
  float sum, squares;
  DEVICE RowStatistics& operator+=(const RowStatistics& other) {
    sum += other.sum;
    squares += other.squares;
    return *this;
  }
};

DEVICE RowStatistics shuffle_xor(const RowStatistics& value, int mask) {
  return {shuffle_xor(value.sum, mask), shuffle_xor(value.squares, mask)};
}

DEVICE void observe(RowStatistics& statistics, const float (&h)[8]) {
  for (int i = 0; i < 8; ++i) {
    statistics.sum += h[i];
    statistics.squares += h[i] * h[i];
  }
}

#include "row.cuh"

struct RowFactor {
  float mean, inverse_deviation;
};

DEVICE RowFactor row_factor(const RowStatistics& total, float eps) {
  const float mean = total.sum * (1.0f / HIDDEN);
  return {mean, reciprocal_sqrt(total.squares * (1.0f / HIDDEN) - mean * mean + eps)};
}

DEVICE void normalise(Eight<HIDDEN_TYPE>& result, const float (&h)[8], RowFactor factor, const Eight<WEIGHT_TYPE>& weight,
                      const Eight<NORM_BIAS_TYPE>& norm_bias, float weight_offset, float inverse_scale) {
  float y[8];
  for (int i = 0; i < 8; ++i) y[i] = (h[i] - factor.mean) * factor.inverse_deviation;
  if constexpr (present<WEIGHT_TYPE>) {
    float w[8];
    unpack(weight, w);
    for (int i = 0; i < 8; ++i) y[i] *= w[i] + weight_offset;
  }
  if constexpr (present<NORM_BIAS_TYPE>) add(y, norm_bias);
  pack(result, y);
}
