// RMSNorm of a reduced row, see row.cuh. The rounding steps are those of reference.add_rms_norm.
#pragma once
#include "elements.cuh"

using RowStatistics = float;  // the sum of squares

DEVICE void observe(RowStatistics& squares, const float (&h)[8]) {
  for (int i = 0; i < 8; ++i) squares += h[i] * h[i];
}

#include "row.cuh"

// One vector of the normalised row from h. `factor` is 1 / rms.
DEVICE void normalise(Eight<Normalised>& result, const float (&h)[8], float factor, const Eight<WEIGHT_TYPE>& weight,
                      const Eight<NORM_BIAS_TYPE>& norm_bias, float weight_offset, float inverse_scale) {
  float y[8];
  for (int i = 0; i < 8; ++i) y[i] = h[i] * factor;
  weigh(result, y, weight, norm_bias, weight_offset, inverse_scale);
}

// 1 / rms.
DEVICE float row_factor(RowStatistics squares, float eps) {
  return reciprocal_sqrt(squares * (1.0f / HIDDEN) + eps);
}
