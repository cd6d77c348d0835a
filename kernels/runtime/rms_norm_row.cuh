// What happens to one reduced row: scale, bias, residual, RMSNorm. A row is spread over the threads of a group.
//
// Set by definitions: HIDDEN; the types X_TYPE, RESIDUAL_TYPE, BIAS_TYPE, WEIGHT_TYPE, HIDDEN_TYPE, RESIDUAL_OUT_TYPE
// (`none` where absent); CAST_TYPE, the type that the normalised row is rounded to before the weight, or none.
// The rounding steps are those of reference.add_rms_norm.
#pragma once
#include "elements.cuh"

inline constexpr int ROW_VECTORS = HIDDEN / 8;
static_assert(HIDDEN % 8 == 0, "a thread handles eight elements at a time");

enum ResidualOut { NO_ROWS, OWN_ROWS, ALL_ROWS };

// One thread's part of a row held by GROUP threads: vectors thread, thread + GROUP, ...
template <int GROUP>
struct RowPart {
  static constexpr int VECTORS = (ROW_VECTORS + GROUP - 1) / GROUP;
  static constexpr bool EXACT = ROW_VECTORS % GROUP == 0;

  // Calls body(index of the vector in this part, first column).
  template <typename Body>
  static DEVICE void each(uint32_t thread, Body body) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const uint32_t vector = v * GROUP + thread;
      if (EXACT || vector < ROW_VECTORS) body(v, vector * 8);
    }
  }
};

template <int GROUP, typename T>
struct Loaded {
  Eight<T> vectors[RowPart<GROUP>::VECTORS];

  // Issues the loads; nothing waits for them before they are used.
  DEVICE void fetch(const T* row, uint32_t thread) {
    if constexpr (present<T>)
      RowPart<GROUP>::each(thread, [&](int v, uint32_t column) { load(vectors[v], row + column); });
  }
};

DEVICE float warp_sum(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

// All threads that add up the same numbers get the same bits.
template <int COUNT>
DEVICE float total(const float* numbers) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) sum += numbers[i];
  return sum;
}

// Sum over the threads of one group of WARPS warps. `partials`: WARPS floats of shared memory, not used by the sum
// before this one.
template <int WARPS>
DEVICE float group_sum(float value, float* partials, uint32_t thread, uint32_t barrier) {
  value = warp_sum(value);
  if (thread % 32 == 0) partials[thread / 32] = value;
  warp_sync();
  barrier_sync(barrier, WARPS * 32);
  return total<WARPS>(partials);
}

// h = scale * sum + bias + residual; returns this thread's part of the sum of squares.
template <int GROUP>
DEVICE float finish_sum(float (&h)[RowPart<GROUP>::VECTORS][8], float scale, const BIAS_TYPE* bias,
                        const Loaded<GROUP, RESIDUAL_TYPE>& residual, uint32_t thread) {
  float squares = 0.0f;
  RowPart<GROUP>::each(thread, [&](int v, uint32_t column) {
    if (scale != 1.0f)
      for (int i = 0; i < 8; ++i) h[v][i] *= scale;
    if constexpr (present<BIAS_TYPE>) {
      Eight<BIAS_TYPE> eight;
      load(eight, bias + column);
      add(h[v], eight);
    }
    if constexpr (present<RESIDUAL_TYPE>) add(h[v], residual.vectors[v]);
    for (int i = 0; i < 8; ++i) squares += h[v][i] * h[v][i];
  });
  return squares;
}

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

DEVICE float inverse_rms(float sum_of_squares, float eps) {
  return reciprocal_sqrt(sum_of_squares * (1.0f / HIDDEN) + eps);
}
