// RMSNorm of a reduced row, see row.cuh. The rounding steps are those of reference.add_rms_norm.
#pragma once
#include "elements.cuh"

using RowStatistics = float;  // the sum of squares

DEVICE void observe(RowStatistics& squares, const float (&h)[8]) {
  for (int i = 0; i < 8; ++i) squares += h[i] * h[i];
}

#include "row.cuh"

// One vector of the normalised row from h. `factor` is 1 / rms. A template, so that only the way taken must compile.
template <typename Cast = CAST_TYPE>
DEVICE void normalise(Eight<HIDDEN_TYPE>& result, const float (&h)[8], float factor, const Eight<WEIGHT_TYPE>& weight,
                      float weight_offset, float inverse_scale) {
  float y[8];
  for (int i = 0; i < 8; ++i) y[i] = h[i] * factor;
  if constexpr (present<Cast>) {
    Eight<Cast> rounded;
    pack(rounded, y);
    if constexpr (pairs<Cast> && same<Cast, WEIGHT_TYPE> && same<Cast, HIDDEN_TYPE>) {
      multiply(result, rounded, weight);
      return;
    } else {
      unpack(rounded, y);
    }
  }
  if constexpr (present<WEIGHT_TYPE>) {
    float w[8];
    unpack(weight, w);
    for (int i = 0; i < 8; ++i) y[i] *= present<Cast> ? w[i] : w[i] + weight_offset;
  }
  if constexpr (sizeof(HIDDEN_TYPE) == 1)
    for (int i = 0; i < 8; ++i) y[i] *= inverse_scale;
  pack(result, y);
}

// 1 / rms.
DEVICE float row_factor(RowStatistics squares, float eps) {
  return reciprocal_sqrt(squares * (1.0f / HIDDEN) + eps);
}
