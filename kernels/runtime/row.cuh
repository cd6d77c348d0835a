// What happens to one reduced row before and around the epilogue: scale, bias, residual, sums over the row. A row is spread
// over the threads of a group. The header of an epilogue includes this file, and has to define:
//
//   RowStatistics             what the row's threads add up: float, a struct with operator+= and shuffle_xor, or a struct with
//                             its own warp_sum and total
//   observe(statistics, h)    adds eight elements of the row to a thread's statistics. Or observe(statistics, h, before), if it
//                             has to know how many vectors of eight elements the statistics have already
//   row_factor(total, eps)    makes the argument of normalise from the row's total statistics
//   normalise(...)            one vector of the result, Eight<Normalised>
//
// Set by definitions: HIDDEN; the types X_TYPE, RESIDUAL_TYPE, BIAS_TYPE, WEIGHT_TYPE, NORM_BIAS_TYPE, HIDDEN_TYPE,
// RESIDUAL_OUT_TYPE (`none` where absent); CAST_TYPE, the type that the normalised row is rounded to before the weight, or
// none; SCALE_COLUMNS, 0 unless the scales of float8 results are computed from the results (scales.cuh).
#pragma once

inline constexpr int ROW_VECTORS = HIDDEN / 8;
static_assert(HIDDEN % 8 == 0, "a thread handles eight elements at a time");

enum ResidualOut { NO_ROWS, OWN_ROWS, ALL_ROWS };

// What normalise gives: results, or the float32 values that scales are computed from.
using Normalised = Either<SCALE_COLUMNS != 0, fp32, HIDDEN_TYPE>::Type;

// One thread's part of a row held by GROUP threads: vectors thread, thread + GROUP, ... of WIDTH columns.
template <int GROUP, int WIDTH_ = 8>
struct RowPart {
  static constexpr int WIDTH = WIDTH_, EIGHTS = WIDTH / 8;
  static constexpr int OF_ROW = HIDDEN / WIDTH;
  static constexpr int VECTORS = (OF_ROW + GROUP - 1) / GROUP;
  static constexpr bool EXACT = OF_ROW % GROUP == 0;

  // Calls body(index of the vector in this part, first column).
  template <typename Body>
  static DEVICE void each(uint32_t thread, Body body) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const uint32_t vector = v * GROUP + thread;
      if (EXACT || vector < OF_ROW) body(v, Column{thread * WIDTH, (uint32_t)(v * GROUP * WIDTH)});
    }
  }

  // Calls body(index, first column, whether the vector is in the row). TOGETHER: all lanes of a warp call body, because they
  // work together there.
  template <bool TOGETHER, typename Body>
  static DEVICE void each_with(uint32_t thread, Body body) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const uint32_t vector = v * GROUP + thread;
      const bool in_row = EXACT || vector < OF_ROW;
      if (TOGETHER || in_row) body(v, Column{thread * WIDTH, (uint32_t)(v * GROUP * WIDTH)}, in_row);
    }
  }
};

template <int GROUP, typename T>
struct Loaded {
  Eight<T> vectors[RowPart<GROUP>::VECTORS];

  // Issues the loads; nothing waits for them before they are used.
  DEVICE void fetch(const T* row, uint32_t thread) {
    if constexpr (present<T>)
      RowPart<GROUP>::each(thread, [&](int v, Column column) { load(vectors[v], row + column); });
  }
};

// Loads one vector where it is used. For operands that are read again from a cache for each row: keeping them would take
// registers that rows need.
template <typename T>
DEVICE Eight<T> loaded(const T* address) {
  Eight<T> eight{};
  if constexpr (present<T>) load(eight, address);
  return eight;
}

template <typename T>
DEVICE T warp_sum(T value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

constexpr int power_of_two_from(int number) {
  int power = 1;
  while (power < number) power *= 2;
  return power;
}

// Puts together COUNT numbers of shared memory, for all lanes of a warp. `combine(a, b)` gives the same whichever of the two is
// first; T{} changes nothing. All threads that put together the same numbers get the same bits. Up to 8 numbers are loaded
// by all lanes. Of more, each lane loads its share: loads that give the same number to all lanes are slow, because an SM
// writes 128 bytes a cycle to registers, however few it has read.
template <int COUNT, typename T, typename Combine>
DEVICE T combined(const T* numbers, Combine combine) {
  T all{};
  if constexpr (COUNT <= 8) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) all = combine(all, numbers[i]);
  } else {
    constexpr int LANES = smaller(power_of_two_from(COUNT), 32);
    const int lane = threadIdx.x % LANES;
#pragma unroll
    for (int first = 0; first < COUNT; first += LANES)
      if (COUNT % LANES == 0 || first + lane < COUNT) all = combine(all, numbers[first + lane]);
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) all = combine(all, shuffle_xor(all, mask));
  }
  return all;
}

template <int COUNT, typename T>
DEVICE T total(const T* numbers) {
  return combined<COUNT>(numbers, [](T a, const T& b) { return a += b; });
}

// Sum over the threads of one group of WARPS warps. `partials`: WARPS values of shared memory, not used by the sum
// before this one.
template <int WARPS, typename T>
DEVICE T group_sum(T value, T* partials, uint32_t thread, uint32_t barrier) {
  value = warp_sum(value);
  if (thread % 32 == 0) partials[thread / 32] = value;
  warp_sync();
  barrier_sync(barrier, WARPS * 32);
  return total<WARPS>(partials);
}

// One vector of the result from the normalised values `y`, with weight and bias. This is a template so that only the branch
// that is taken must compile.
template <typename Cast = CAST_TYPE>
DEVICE void weigh(Eight<Normalised>& result, float (&y)[8], const Eight<WEIGHT_TYPE>& weight,
                  const Eight<NORM_BIAS_TYPE>& norm_bias, float weight_offset, float inverse_scale) {
  if constexpr (present<Cast>) {
    Eight<Cast> rounded;
    pack(rounded, y);
    if constexpr (pairs<Cast> && same<Cast, WEIGHT_TYPE> && same<Cast, Normalised> && !present<NORM_BIAS_TYPE>) {
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
  if constexpr (present<NORM_BIAS_TYPE>) add(y, norm_bias);
  if constexpr (sizeof(Normalised) == 1)
    for (int i = 0; i < 8; ++i) y[i] *= inverse_scale;
  pack(result, y);
}

// For epilogues that need not know how many vectors the statistics have already.
template <typename T>
DEVICE void observe(T& statistics, const float (&h)[8], int) {
  observe(statistics, h);
}

// h = scale * sum + bias + residual; returns this thread's part of the row's statistics.
template <int GROUP>
DEVICE RowStatistics finish_sum(float (&h)[RowPart<GROUP>::VECTORS][8], float scale, const BIAS_TYPE* bias,
                                const Loaded<GROUP, RESIDUAL_TYPE>& residual, uint32_t thread) {
  RowStatistics statistics{};
  RowPart<GROUP>::each(thread, [&](int v, uint32_t column) {
    if (scale != 1.0f)
      for (int i = 0; i < 8; ++i) h[v][i] *= scale;
    if constexpr (present<BIAS_TYPE>) {
      Eight<BIAS_TYPE> eight;
      load(eight, bias + column);
      add(h[v], eight);
    }
    if constexpr (present<RESIDUAL_TYPE>) add(h[v], residual.vectors[v]);
    observe(statistics, h[v], v);
  });
  return statistics;
}
