// Float8 results with scales that are computed from the results (NormSpec of collective/spec.py). There is a float32 scale for
// each row and SCALE_COLUMNS neighbouring columns, which may be the whole row. The scales of all rows lie behind the rows, from
// a multiple of 16 bytes on.
//
// A vector of such a result is an InCodes<8> of wire.cuh, even where it does not travel. It has its codes, and the scale in the
// place of a group's word. No scale is NOT_ARRIVED, because NOT_ARRIVED has the sign of a negative number.
//
// Include this file behind wire.cuh. It is empty if SCALE_COLUMNS is 0. Also set by definitions: MIN_SCALE, DIVIDES_BY_SCALE.
#pragma once
#if SCALE_COLUMNS

inline constexpr int SCALES = HIDDEN / SCALE_COLUMNS;  // of a row
inline constexpr bool SCALE_OF_ROW = SCALES == 1;
static_assert(HIDDEN % SCALE_COLUMNS == 0 && same<HIDDEN_TYPE, e4m3>, "whole groups of columns share the scales of float8");
static_assert(!present<NORM_BIAS_TYPE>, "a norm with a bias makes no scales here");
static_assert(SCALE_OF_ROW || (SCALE_COLUMNS <= 256 && (SCALE_COLUMNS & (SCALE_COLUMNS - 1)) == 0), "lanes of a warp share one");

DEVICE float warp_max(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value = greatest(value, shuffle_xor(value, mask));
  return value;
}
template <int COUNT>
DEVICE float largest_of(const float* maxima) {
  return combined<COUNT>(maxima, [](float a, float b) { return greatest(a, b); });
}

// The largest of the values of WARPS warps. `maxima`: WARPS values of shared memory. All threads must meet between two uses of
// `maxima`.
template <int WARPS>
DEVICE float group_max(float value, float* maxima, uint32_t thread, uint32_t barrier) {
  value = warp_max(value);
  if constexpr (WARPS > 1) {
    if (thread % 32 == 0) maxima[thread / 32] = value;
    warp_sync();
    barrier_sync(barrier, WARPS * 32);
    value = largest_of<WARPS>(maxima);
  }
  return value;
}

// The scales of one thread's part of a row.
template <int GROUP>
struct RowScales {
  float scales[SCALE_OF_ROW ? 1 : RowPart<GROUP>::VECTORS];

  DEVICE float of(int v) const { return scales[SCALE_OF_ROW ? 0 : v]; }
};

// The values of one vector before they are rounded to codes.
template <typename Factor>
DEVICE void values_of(float (&values)[8], const float (&h)[8], const Factor& factor, const Eight<WEIGHT_TYPE>& weight,
                      float weight_offset) {
  Eight<Normalised> y;
  normalise(y, h, factor, weight, Eight<NORM_BIAS_TYPE>{}, weight_offset, 1.0f);
  unpack(y, values);
}

// Computes the scales of a row. All threads of the group call it, with the arguments of normalise. `largest_of_row(value)` gives
// the largest value of all of them. It is called only if there is one scale for a row.
template <int GROUP, typename Factor, typename Largest>
DEVICE RowScales<GROUP> scales_of_row(const float (&h)[RowPart<GROUP>::VECTORS][8], const Factor& factor,
                                      const Loaded<GROUP, WEIGHT_TYPE>& weight, float weight_offset,
                                      uint32_t thread, Largest largest_of_row) {
  const auto scale_of = [](float largest) { return greatest(largest / 448.0f, MIN_SCALE); };
  RowScales<GROUP> result;
  float largest_of_thread = 0.0f;
  RowPart<GROUP>::template each_with<!SCALE_OF_ROW>(thread, [&](int v, uint32_t, bool in_row) {
    float largest = 0.0f, values[8];
    if (in_row) {
      values_of(values, h[v], factor, weight.vectors[v], weight_offset);
      for (float value : values) largest = greatest(largest, as_float(as_bits(value) & 0x7fffffffu));
    }
    if constexpr (SCALE_OF_ROW) {
      largest_of_thread = greatest(largest_of_thread, largest);
    } else {
#pragma unroll
      for (int mask = SCALE_COLUMNS / 16; mask > 0; mask /= 2) largest = greatest(largest, shuffle_xor(largest, mask));
      result.scales[v] = scale_of(largest);
    }
  });
  if constexpr (SCALE_OF_ROW) result.scales[0] = scale_of(largest_of_row(largest_of_thread));
  return result;
}

// One vector of the result: codes and scale.
template <typename Factor>
DEVICE InCodes<8> quantised(const float (&h)[8], const Factor& factor, const Eight<WEIGHT_TYPE>& weight, float weight_offset,
                            float scale) {
  float values[8];
  values_of(values, h, factor, weight, weight_offset);
  const float inverse = 1.0f / scale;
  for (float& value : values) value = DIVIDES_BY_SCALE ? value / scale : value * inverse;
  Eight<e4m3> codes;
  pack(codes, values);
  drop_negative_zeros(codes);
  return {{codes.words[0], codes.words[1]}, {as_bits(scale)}};
}

// Where the scales of a row lie, behind all rows of `hidden`.
DEVICE float* scales_at(HIDDEN_TYPE* hidden, int tokens, uint64_t row) {
  return (float*)((uint8_t*)hidden + ((uint64_t)tokens * HIDDEN + 15) / 16 * 16) + row * SCALES;
}

// Stores one vector of a row to `hidden`. The vector with the first of a scale's columns stores the scale, too.
DEVICE void store_result(HIDDEN_TYPE* hidden, int tokens, uint64_t row, uint32_t column, const InCodes<8>& piece) {
  store_global((uint8_t*)hidden + row * HIDDEN + column, piece.codes);
  if (column % SCALE_COLUMNS == 0) store_global((uint8_t*)(scales_at(hidden, tokens, row) + column / SCALE_COLUMNS), piece.word);
}

#endif
