// LayerNorm of a reduced row, see row.cuh. The rounding steps are those of reference.add_layer_norm.
//
// The variance is not mean(h^2) - mean(h)^2. Where the mean is large against the deviation, both terms are large numbers that
// hardly differ, and their rounding errors in float32 may exceed the variance. So each part of a row has the sum of the squared
// distances from the part's own mean. Parts are put together by how far their means are from the common mean (Chan, Golub and
// LeVeque): first a thread's vectors, then a warp's threads, then the row's warps. For warps and rows that takes two sums over
// lanes. One sum would have to divide in every step.
#pragma once
#include "elements.cuh"

struct RowStatistics {
  float count, sum, squares;  // squares: of the distances from the mean, which is sum / count
};

// The divisor of a part's mean. A part without elements has no mean, and no weight either.
DEVICE float at_least_one(float count) { return count > 0.0f ? count : 1.0f; }
DEVICE float mean_of(const RowStatistics& part) { return part.sum * (1.0f / at_least_one(part.count)); }

DEVICE void observe(RowStatistics& statistics, const float (&h)[8]) {
  RowStatistics eight{8.0f, 0.0f, 0.0f};
  for (int i = 0; i < 8; ++i) eight.sum += h[i];
  const float mean = eight.sum * 0.125f;
  for (int i = 0; i < 8; ++i) eight.squares += (h[i] - mean) * (h[i] - mean);
  const float apart = mean_of(statistics) - mean, both = statistics.count + 8.0f;
  statistics.squares += eight.squares + apart * apart * (statistics.count * 8.0f / both);
  statistics.sum += eight.sum;
  statistics.count = both;
}

#include "row.cuh"

// Puts together the parts of a warp's lanes, which have `count` elements together. All lanes get the same bits.
DEVICE RowStatistics of_lanes(const RowStatistics& part, float count) {
  const RowStatistics all{count, warp_sum(part.sum), 0.0f};
  const float apart = mean_of(part) - mean_of(all);
  return {count, all.sum, warp_sum(part.squares + apart * apart * part.count)};
}

// The threads that have a row: of a group, or of all CTAs of a cluster that share rows.
#ifdef CLUSTER
inline constexpr int THREADS_OF_ROW = CLUSTER * THREADS;
#else
inline constexpr int THREADS_OF_ROW = THREADS;
#endif
// Whether all of them have equally many elements. These numbers are then known at compile time.
inline constexpr bool EVEN = RowPart<THREADS_OF_ROW>::EXACT;

DEVICE RowStatistics warp_sum(const RowStatistics& part) {
  return of_lanes(part, EVEN ? 32.0f * HIDDEN / THREADS_OF_ROW : warp_sum(part.count));
}

// Puts together the parts of a row's warps. Each lane takes the part of one warp.
template <int COUNT>
DEVICE RowStatistics total(const RowStatistics* parts) {
  static_assert(COUNT <= 32, "a lane for each part");
  const uint32_t lane = threadIdx.x % 32;
  RowStatistics part{0.0f, 0.0f, 0.0f};
  if (lane < COUNT) part = parts[lane];
  return of_lanes(part, HIDDEN);
}

struct RowFactor {
  float mean, inverse_deviation;
};

DEVICE RowFactor row_factor(const RowStatistics& total, float eps) {
  return {mean_of(total), reciprocal_sqrt(total.squares * (1.0f / HIDDEN) + eps)};
}

// One vector of the normalised row from h.
DEVICE void normalise(Eight<Normalised>& result, const float (&h)[8], const RowFactor& factor,
                      const Eight<WEIGHT_TYPE>& weight, const Eight<NORM_BIAS_TYPE>& norm_bias, float weight_offset,
                      float inverse_scale) {
  float y[8];
  for (int i = 0; i < 8; ++i) y[i] = (h[i] - factor.mean) * factor.inverse_deviation;
  weigh(result, y, weight, norm_bias, weight_offset, inverse_scale);
}
