// LayerNorm of a reduced row, see row.cuh. The rounding steps are those of reference.add_layer_norm.
//
// The variance is not mean(h^2) - mean(h)^2: where the mean is large against the deviation, both are large numbers that hardly
// differ, and what float32 rounds off of them may be more than the variance. So each part of a row has the squares of the
// distances from its own mean, and two parts are put together by how far their means are apart (Chan, Golub and LeVeque).
#pragma once
#include "elements.cuh"

struct RowStatistics {
  float count, sum, squares;  // of distances from the mean, sum / count

  // All that is done with the two is symmetric: threads that exchange theirs get the same bits.
  DEVICE RowStatistics& operator+=(const RowStatistics& other) {
    const float apart = sum / at_least_one(count) - other.sum / at_least_one(other.count);
    const float both = count + other.count;
    squares = (squares + other.squares) + apart * apart * (count * other.count / at_least_one(both));
    sum += other.sum;
    count = both;
    return *this;
  }

  // A part without elements has no mean, and no weight either.
  static DEVICE float at_least_one(float count) { return count > 0.0f ? count : 1.0f; }
};

DEVICE RowStatistics shuffle_xor(const RowStatistics& value, int mask) {
  return {shuffle_xor(value.count, mask), shuffle_xor(value.sum, mask), shuffle_xor(value.squares, mask)};
}

DEVICE void observe(RowStatistics& statistics, const float (&h)[8]) {
  RowStatistics eight{8.0f, 0.0f, 0.0f};
  for (int i = 0; i < 8; ++i) eight.sum += h[i];
  const float mean = eight.sum * 0.125f;
  for (int i = 0; i < 8; ++i) eight.squares += (h[i] - mean) * (h[i] - mean);
  statistics += eight;
}

#include "row.cuh"

struct RowFactor {
  float mean, inverse_deviation;
};

DEVICE RowFactor row_factor(const RowStatistics& total, float eps) {
  return {total.sum * (1.0f / HIDDEN), reciprocal_sqrt(total.squares * (1.0f / HIDDEN) + eps)};
}

// One vector of the normalised row from h.
DEVICE void normalise(Eight<Normalised>& result, const float (&h)[8], const RowFactor& factor,
                      const Eight<WEIGHT_TYPE>& weight, const Eight<NORM_BIAS_TYPE>& norm_bias, float weight_offset,
                      float inverse_scale) {
  float y[8];
  for (int i = 0; i < 8; ++i) y[i] = (h[i] - factor.mean) * factor.inverse_deviation;
  weigh(result, y, weight, norm_bias, weight_offset, inverse_scale);
}
