// LayerNorm of a reduced row, see row.cuh. The rounding steps are those of reference.add_layer_norm.
//
// The variance is not mean(h^2) - mean(h)^2: where the mean is large against the deviation, both are large numbers that hardly
// differ, and what float32 rounds off of them may be more than the variance. So each part of a row has the squares of the
// distances from its own mean. Parts are put together by how far their means are from the mean of all of them (Chan, Golub and
// LeVeque): first a thread's vectors, then a warp's threads, then the row's warps. For warps and rows that is two sums over lanes,
// and not one sum in which every step divides.
#pragma once
#include "elements.cuh"

struct RowStatistics {
  float count, sum, squares;  // of distances from the mean, sum / count
};

// A part without elements has no mean, and no weight either.
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

// Of the parts of a warp's lanes, which have `count` elements together. All lanes get the same bits.
DEVICE RowStatistics of_lanes(const RowStatistics& part, float count) {
  const RowStatistics all{count, warp_sum(part.sum), 0.0f};
  const float apart = mean_of(part) - mean_of(all);
  return {count, all.sum, warp_sum(part.squares + apart * apart * part.count)};
}

// Where all threads of a group have as many elements, their numbers are known when this is compiled.
inline constexpr bool EVEN = RowPart<THREADS>::EXACT;

DEVICE RowStatistics warp_sum(const RowStatistics& part) {
  return of_lanes(part, EVEN ? 32.0f * HIDDEN / THREADS : warp_sum(part.count));
}

// Each lane has the part of one warp.
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
