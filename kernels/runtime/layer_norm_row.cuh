// LayerNorm of a reduced row, see row.cuh. The rounding steps are those of reference.add_layer_norm.
//
// The variance is not mean(h^2) - mean(h)^2. Where the mean is large against the deviation, both terms are large numbers that
// hardly differ, and their rounding errors in float32 may exceed the variance. So each part of a row has its own mean, and
// squares of the distances from it. Parts are put together by how far their means are from the common mean, or from that of the first part (Chan, Golub and
// LeVeque: Algorithms for computing the sample variance, 1983): first a thread's vectors, then a warp's threads, then the row's
// warps.
#pragma once
#include "elements.cuh"

// The threads that have a row: of a group, or of all CTAs of a cluster that share rows.
#ifdef CLUSTER
inline constexpr int THREADS_OF_ROW = CLUSTER * THREADS;
#else
inline constexpr int THREADS_OF_ROW = THREADS;
#endif
// Whether all of them have equally many elements.
inline constexpr bool EVEN = HIDDEN / 8 % THREADS_OF_ROW == 0;
// Whether results have all digits of the float32 numbers that they are computed from.
inline constexpr bool ALL_DIGITS = sizeof(HIDDEN_TYPE) == 4;

// --- parts of one size -----------------------------------------------------------------------------------------------
//
// Where all threads have equally many elements, nobody needs to know how many: the mean of a row is the mean of its parts' means.
// Short calls wait for all of this, so it has few instructions, and few that wait for each other. Distances are measured from
// the mean of the first part. Then two sums are enough, of the distances and of their squares, and neither waits for the other:
//
//   variance = mean(variances + distances^2) - mean(distances)^2
//
// The difference has fewer digits than its terms if the first part is far from the others. The mean of one of 32 equal parts is
// at most sqrt(31) deviations from the mean of all, whatever the values are, so mean(distances)^2 is at most 31 times the
// variance. The two steps, over a warp's threads and over a row's warps, cost 7 of float32's 24 bits at worst, and usually none.
// That is nothing to results of 16 bits or fewer.
struct alignas(8) EqualPart {
  float mean, variance;
};

// --- parts of any size, and results with all digits --------------------------------------------------------------------
//
// Here distances are measured from the common mean itself, so the sum of their squares waits for the sum of the elements.
struct AnyPart {
  float count, sum, squares;  // squares: of the distances from the mean, which is sum / count
};

using RowStatistics = Either<EVEN && !ALL_DIGITS, EqualPart, AnyPart>::Type;

DEVICE float mean_of_eight(const float (&h)[8]) {
  return (((h[0] + h[1]) + (h[2] + h[3])) + ((h[4] + h[5]) + (h[6] + h[7]))) * 0.125f;
}
// The sum of the squares of the distances from `mean`.
DEVICE float squares_of_eight(const float (&h)[8], float mean) {
  float squares = (h[0] - mean) * (h[0] - mean);
  for (int i = 1; i < 8; ++i) squares += (h[i] - mean) * (h[i] - mean);
  return squares;
}

// `before`: how many vectors the part has already.
DEVICE void observe(EqualPart& part, const float (&h)[8], int before) {
  const float mean = mean_of_eight(h), variance = squares_of_eight(h, mean) * 0.125f;
  if (before == 0) {
    part = {mean, variance};
    return;
  }
  const float weight = 1.0f / (float)(before + 1), apart = mean - part.mean;
  part.variance += (variance - part.variance) * weight + apart * apart * (weight * (1.0f - weight));
  part.mean += apart * weight;
}
DEVICE void observe(AnyPart& part, const float (&h)[8], int before) {
  const float mean = mean_of_eight(h), squares = squares_of_eight(h, mean);
  if (before == 0) {
    part = {8.0f, mean * 8.0f, squares};
    return;
  }
  const float apart = part.sum * (0.125f / (float)before) - mean;
  part.squares += squares + apart * apart * (8.0f * (float)before / (float)(before + 1));
  part.sum += mean * 8.0f;
  part.count += 8.0f;
}

#include "row.cuh"

// --- parts of one size -----------------------------------------------------------------------------------------------

// Puts together PARTS parts. The lower half of a warp adds up distances from `shift`, and the upper half adds up what becomes the
// variance, so both sums take the shuffles of one. `number`: a lane's share of its sum, of LANES shares that neighbouring lanes
// have. All lanes get the same bits.
template <int PARTS, int LANES>
DEVICE EqualPart put_together(float number, float shift) {
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2) number += shuffle_xor(number, mask);
  const float other = shuffle_xor(number, 16);
  const bool upper = threadIdx.x & 16;
  const float apart = (upper ? other : number) * (1.0f / PARTS);
  return {shift + apart, (upper ? number : other) * (1.0f / PARTS) - apart * apart};
}

// Puts together the parts of a warp's lanes.
DEVICE EqualPart warp_sum(const EqualPart& part) {
  const float shift = as_float((uint32_t)first_lanes((int32_t)as_bits(part.mean)));
  const float distance = part.mean - shift, square = part.variance + distance * distance;
  const bool upper = threadIdx.x & 16;
  const float number = (upper ? square : distance) + shuffle_xor(upper ? distance : square, 16);
  return put_together<32, 16>(number, shift);
}

// Puts together the parts of a row's warps. A lane of each half takes a part, or two neighbouring ones.
template <int COUNT>
DEVICE EqualPart total(const EqualPart* parts) {
  static_assert(COUNT <= 32, "two for each lane of half a warp");
  if constexpr (COUNT == 1) return parts[0];
  constexpr int EACH = COUNT > 16 ? 2 : 1, LANES = power_of_two_from((COUNT + EACH - 1) / EACH);
  const uint32_t first = threadIdx.x % LANES * EACH;
  const float shift = parts[0].mean;
  float distances = 0.0f, squares = 0.0f;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    EqualPart part{shift, 0.0f};
    if (COUNT == LANES * EACH || first + i < COUNT) part = parts[first + i];
    const float distance = part.mean - shift, square = part.variance + distance * distance;
    distances = i == 0 ? distance : distances + distance;
    squares = i == 0 ? square : squares + square;
  }
  return put_together<COUNT, LANES>(threadIdx.x & 16 ? squares : distances, shift);
}

// --- parts of any size -----------------------------------------------------------------------------------------------

// The divisor of a part's mean. A part without elements has no mean, and no weight either.
DEVICE float at_least_one(float count) { return count > 0.0f ? count : 1.0f; }
DEVICE float mean_of(const AnyPart& part) { return part.sum * (1.0f / at_least_one(part.count)); }

// Puts together the parts of a warp's lanes, which have `count` elements together. All lanes get the same bits.
DEVICE AnyPart of_lanes(const AnyPart& part, float count) {
  const AnyPart all{count, warp_sum(part.sum), 0.0f};
  const float apart = mean_of(part) - mean_of(all);
  return {count, all.sum, warp_sum(part.squares + apart * apart * part.count)};
}

DEVICE AnyPart warp_sum(const AnyPart& part) {
  return of_lanes(part, EVEN ? 32.0f * HIDDEN / THREADS_OF_ROW : warp_sum(part.count));
}

// Puts together the parts of a row's warps. Each lane takes the part of one warp.
template <int COUNT>
DEVICE AnyPart total(const AnyPart* parts) {
  static_assert(COUNT <= 32, "a lane for each part");
  const uint32_t lane = threadIdx.x % 32;
  AnyPart part{0.0f, 0.0f, 0.0f};
  if (lane < COUNT) part = parts[lane];
  return of_lanes(part, HIDDEN);
}

// --- the row ---------------------------------------------------------------------------------------------------------

struct RowFactor {
  float mean, inverse_deviation;
};

DEVICE RowFactor row_factor(const EqualPart& total, float eps) {
  return {total.mean, reciprocal_sqrt(total.variance + eps)};
}
DEVICE RowFactor row_factor(const AnyPart& total, float eps) {
  return {mean_of(total), reciprocal_sqrt(total.squares * (1.0f / HIDDEN) + eps)};
}

// One vector of the normalised row from h.
DEVICE void normalise(Eight<Normalised>& result, const float (&h)[8], const RowFactor& factor,
                      const Eight<WEIGHT_TYPE>& weight, const Eight<NORM_BIAS_TYPE>& norm_bias, float weight_offset,
                      float inverse_scale) {
  float y[8];
  if constexpr (ALL_DIGITS) {
    for (int i = 0; i < 8; ++i) y[i] = (h[i] - factor.mean) * factor.inverse_deviation;
  } else {
    // One instruction for each element. The shift is rounded, which is an error of the same size as that of the mean.
    const float shift = -factor.mean * factor.inverse_deviation;
    for (int i = 0; i < 8; ++i) y[i] = multiply_add(h[i], factor.inverse_deviation, shift);
  }
  weigh(result, y, weight, norm_bias, weight_offset, inverse_scale);
}
