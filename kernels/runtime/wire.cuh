// How rows travel to other ranks: as they are, or in codes of few bits. Codes equal those of collective/codes.py bit for bit.
//
// A row in codes has its codes in the order of the columns, then a 32-bit word for each group of columns. The word has the
// scale (bf16) in the upper half and the offset (bf16) in the lower half. A thread has eight columns, so a group lies in
// neighbouring lanes of a warp. These lanes agree on scale and offset, and the first of them stores the group's word.
//
// No word of a row in codes is NOT_ARRIVED (elements.cuh). A code q from 0 to LEVELS is stored as q - LEVELS / 2, so no code
// has only its highest bit set. NOT_ARRIVED would have such a code in its highest byte or half byte. A group's word has its
// highest bit clear, because scales are positive, or the positive NaN.
//
// Set by definitions: WIRE, a name in the namespace `wires`, and the definitions of row.cuh, which comes before this file.
#pragma once

// A row of T as it is.
template <typename T>
struct Exact {
  static constexpr bool CODED = false;
  static constexpr int ROW = HIDDEN;  // elements
  static constexpr uint64_t ROW_BYTES = HIDDEN * sizeof(T);
  static constexpr int STAGED_BYTES = sizeof(Eight<T>);  // bytes of eight columns in shared memory
  using Element = T;
  using Piece = Eight<T>;  // a thread's part of the row: eight columns

  static DEVICE T* at(T* row, uint32_t column) { return row + column; }
  static DEVICE const T* at(const T* row, uint32_t column) { return row + column; }
  static DEVICE const Piece& encoded(const Eight<T>& eight) { return eight; }
  template <int COUNT>
  static DEVICE void encode(Piece (&pieces)[COUNT], const Eight<T> (&eights)[COUNT]) {
    for (int v = 0; v < COUNT; ++v) pieces[v] = eights[v];
  }
};

// Eight columns in codes, and the word of their group.
template <int BITS>
struct InCodes {
  static constexpr int COUNT = 32 / BITS;  // codes of a word
  static constexpr uint32_t MASK = (1u << BITS) - 1;
  static constexpr uint32_t ONES = BITS == 8 ? 0x01010101u : 0x11111111u;  // the lowest bit of each code
  static constexpr uint32_t HIGHEST = ONES << (BITS - 1);

  uint32_t codes[8 / COUNT];
  uint32_t word[1];
};
template <int BITS>
DEVICE bool arrived(const InCodes<BITS>& piece) {
  bool all = piece.word[0] != NOT_ARRIVED;
  for (uint32_t word : piece.codes) all = all && word != NOT_ARRIVED;
  return all;
}
// No value is -0.0: the offset never is, and a sum is -0.0 only if both of its parts are.
template <int BITS>
DEVICE void decode(float (&values)[8], const InCodes<BITS>& piece) {
  using In = InCodes<BITS>;
  const float scale = as_float(piece.word[0] & 0xffff0000u), offset = as_float(piece.word[0] << 16);
  for (int i = 0; i < 8; ++i) {
    const uint32_t word = piece.codes[i / In::COUNT] ^ In::HIGHEST;  // of codes q + 1
    const int place = i % In::COUNT;
    // The bits of 2^23 + q + 1.
    const uint32_t above = BITS == 8 ? bytes_of(word, 0x4b000000u, 0x7440u | place)
                                     : 0x4b000000u | (word >> place * BITS & In::MASK);
    values[i] = multiply_add(as_float(above) - 8388609.0f, scale, offset);
  }
}

// What a rank keeps of a row that has travelled.
template <typename T>
DEVICE const Eight<T>& received(const Eight<T>& piece) {
  return piece;
}
template <typename T, int BITS>
DEVICE Eight<T> received(const InCodes<BITS>& piece) {
  float values[8];
  decode(values, piece);
  Eight<T> eight;
  pack(eight, values);
  return eight;
}

// Adds up one vector of all ranks in rank order. This rank's vector `own` is added as it is, in this rank's place. got[i] has
// come from rank_of(i).
template <int PEERS, typename T, int BITS, typename RankOf>
DEVICE void add_in_rank_order(float (&h)[8], const Eight<T>& own, const InCodes<BITS> (&got)[PEERS], int rank,
                              RankOf rank_of) {
  float exact[8];
  unpack(own, exact);
  float values[8];
  if constexpr (PEERS == 1) {  // the order of two makes no difference, and no sum with what decode gives is -0.0
    decode(values, got[0]);
    for (int i = 0; i < 8; ++i) h[i] = exact[i] + values[i];
  } else {
    for (int i = 0; i < 8; ++i) h[i] = 0.0f;
#pragma unroll
    for (int source = 0; source <= PEERS; ++source) {
      // Registers can't be indexed by a number that is known only at run time, so the peer is selected.
      InCodes<BITS> piece = got[0];
#pragma unroll
      for (int i = 1; i < PEERS; ++i)
        if (rank_of(i) == source) piece = got[i];
      decode(values, piece);
      for (int i = 0; i < 8; ++i) h[i] += source == rank ? exact[i] : values[i];
    }
  }
}

// Where a thread's eight columns of a row in codes lie.
template <typename Row>
struct InRow {
  uint8_t* codes;
  uint8_t* word;
  bool first_of_group;
};

struct Extremes {
  float low, high;
};

// The smallest and the largest values of COUNT groups, whose columns are in LANES neighbouring lanes. Either is NaN or infinite if
// the group has such a value. A smallest value of -0.0 may be returned as 0.0 or -0.0. Groups take turns in each exchange between
// lanes, so that a warp does not wait for each of them.
template <int LANES, int COUNT>
DEVICE void extremes(Extremes (&found)[COUNT], const Eight<fp32> (&eights)[COUNT]) {
  const float infinite = as_float(0x7f800000u);
  for (int v = 0; v < COUNT; ++v) {
    float x[8];
    unpack(eights[v], x);
    float low = x[0], high = x[0];
    bool has_nan = false;
    for (float value : x) {
      low = least(low, value);
      high = greatest(high, value);
      has_nan = has_nan || value != value;
    }
    if (has_nan) high = infinite;
    found[v] = {low, high};
  }
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2)
    for (Extremes& of : found) {
      of.low = least(of.low, shuffle_xor(of.low, mask));
      of.high = greatest(of.high, shuffle_xor(of.high, mask));
    }
}
// Pairs are compared as pairs. Then -low and high are one pair, so that lanes exchange one word.
template <int LANES, int COUNT, typename T>
DEVICE void extremes(Extremes (&found)[COUNT], const Eight<T> (&eights)[COUNT]) {
  const auto larger = [](uint32_t a, uint32_t b) { return same<T, bf16> ? greatest_bf16(a, b) : greatest_fp16(a, b); };
  const auto smaller = [](uint32_t a, uint32_t b) { return same<T, bf16> ? least_bf16(a, b) : least_fp16(a, b); };
  uint32_t both[COUNT];
  for (int v = 0; v < COUNT; ++v) {
    const uint32_t (&words)[4] = eights[v].words;
    uint32_t low = words[0], high = low;
    for (int i = 1; i < 4; ++i) {
      low = smaller(low, words[i]);
      high = larger(high, words[i]);
    }
    low ^= 0x80008000u;
    both[v] = larger(bytes_of(low, high, 0x5410u), bytes_of(low, high, 0x7632u));
  }
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2)
    for (uint32_t& of : both) of = larger(of, shuffle_xor(of, mask));
  for (int v = 0; v < COUNT; ++v) {
    Eight<T> pair{{both[v] ^ 0x8000u}};
    float values[8];
    unpack(pair, values);
    found[v] = {values[0], values[1]};
  }
}

// value / DIVISOR, rounded to nearest, if that is at least 2^-126: P. Markstein, Computation of elementary functions on the IBM
// RISC System/6000 processor, 1990. A division has code for all other values, too.
template <int DIVISOR>
DEVICE float divided(float value) {
  constexpr float inverse = 1.0f / DIVISOR;
  const float near = multiply_rounded(value, inverse);
  return multiply_add(multiply_add(-(float)DIVISOR, near, value), inverse, near);
}

// Codes of BITS bits with a scale and an offset for each COLUMNS columns.
template <int BITS_, int COLUMNS>
struct Codes {
  static constexpr int BITS = BITS_;
  static constexpr bool CODED = true;
  static constexpr int LANES = COLUMNS / 8;  // lanes that hold a group
  static constexpr int LEVELS = (1 << BITS) - 2;
  static constexpr uint64_t WORDS_OFFSET = HIDDEN * BITS / 8;
  // Rounded up to 32 bytes, so that accesses are aligned and no two rows share what a cache loads at a time (travelling_bytes).
  static constexpr uint64_t ROW_BYTES = (WORDS_OFFSET + HIDDEN / COLUMNS * 4 + 31) / 32 * 32;
  static constexpr uint64_t ROW = ROW_BYTES;
  static constexpr int STAGED_BYTES = 2 * BITS;  // at least the bytes of the codes and of the group's word
  using Element = uint8_t;
  using Piece = InCodes<BITS>;
  // All lanes of a warp call this. Lanes beyond the row may have any values, because they form whole groups of their own.
  template <int COUNT, typename T>
  static DEVICE void encode(Piece (&pieces)[COUNT], const Eight<T> (&eights)[COUNT]) {
    Extremes found[COUNT];
    extremes<LANES>(found, eights);
    for (int v = 0; v < COUNT; ++v) pieces[v] = encoded(eights[v], found[v]);
  }
  template <typename T>
  static DEVICE Piece encoded(const Eight<T>& eight) {
    const Eight<T> eights[1] = {eight};
    Piece pieces[1];
    encode(pieces, eights);
    return pieces[0];
  }
  template <typename T>
  static DEVICE Piece encoded(const Eight<T>& eight, Extremes of) {
    const float low = of.low, high = of.high;
    // The offset is rounded down, which is away from zero if it is negative. Adding 0.0f makes a negative zero positive.
    const uint32_t low_bits = as_bits(low + 0.0f);
    const uint32_t offset_bits = ((low_bits >> 31) * 0xffffu + low_bits) & 0xffff0000u;
    const float offset = as_float(offset_bits), width = high - offset;
    const bool lost = !(width < as_float(0x7f800000u));
    // The scale is rounded upwards, away from zero.
    const uint32_t scale_bits = (as_bits(divided<LEVELS>(width)) + 0xffffu) & 0xffff0000u;
    const float scale = greatest(as_float(scale_bits), as_float(0x00800000u)), inverse = reciprocal_of_bf16(scale);
    // Every step rounds monotonically, so a quotient is at least 0 and less than LEVELS + 1/2: no clamp is needed. Adding
    // `integers` to a quotient rounds it to the nearest integer, ties to even. The last bits of the sum are this integer.
    const float integers = 12582912.0f;
    float x[8];
    unpack(eight, x);
    uint32_t q[8], bytes[BITS];  // the last byte counts
    for (int i = 0; i < 8; ++i) q[i] = as_bits(multiply_rounded(x[i] - offset, inverse) + integers);
    for (int i = 0; i < BITS; ++i) bytes[i] = BITS == 8 ? q[i] : q[2 * i] + (q[2 * i + 1] << 4);
    Piece piece;
    for (int i = 0; i < BITS / 4; ++i) {
      const uint32_t *const four = bytes + 4 * i;
      const uint32_t word = bytes_of(bytes_of(four[0], four[1], 0x0040u), bytes_of(four[2], four[3], 0x0040u), 0x5410u);
      // q - LEVELS / 2 is q + 1 with the highest bit flipped. q + 1 has no carry.
      piece.codes[i] = ((lost ? 0 : word) + Piece::ONES) ^ Piece::HIGHEST;
    }
    piece.word[0] = lost ? 0x7fc00000u : as_bits(scale) | offset_bits >> 16;
    return piece;
  }

  static DEVICE InRow<Codes> at(const uint8_t* row, uint32_t column) {
    static_assert(HIDDEN % COLUMNS == 0, "rows are whole groups");
    return {(uint8_t*)row + column * BITS / 8, (uint8_t*)row + WORDS_OFFSET + column / COLUMNS * 4, column % COLUMNS == 0};
  }
};

// The loads and stores that elements.cuh has for rows as they are, here for rows in codes.
template <typename Row>
DEVICE void load_strong(typename Row::Piece& piece, InRow<Row> place) {
  load_relaxed_sys(piece.codes, place.codes);
  load_relaxed_sys(piece.word, place.word);
}
template <typename Row>
DEVICE void store_strong(InRow<Row> place, const typename Row::Piece& piece) {
  store_relaxed_sys(place.codes, piece.codes);
  if (place.first_of_group) store_relaxed_sys(place.word, piece.word);
}
template <typename Row>
DEVICE void store(InRow<Row> place, const typename Row::Piece& piece) {
  store_global(place.codes, piece.codes);
  if (place.first_of_group) store_global(place.word, piece.word);
}

namespace wires {
struct exact {
  using Sums = none;
  using Results = none;
};
struct int8 {
  using Sums = Codes<8, 128>;
  using Results = Codes<8, 128>;
};
struct int6 {
  using Sums = Codes<4, 32>;
  using Results = Codes<8, 128>;
};
struct int4 {
  using Sums = Codes<4, 32>;
  using Results = Codes<4, 32>;
};
}  // namespace wires

// How rows of T travel: in codes if the wire has codes for them. Rows of e4m3 have 8 bits already, and travel as they are.
template <typename T, typename Coding>
struct Travels {
  using Row = Coding;
};
template <typename T>
struct Travels<T, none> {
  using Row = Exact<T>;
};
template <typename Coding>
struct Travels<e4m3, Coding> {
  using Row = Exact<e4m3>;
};
template <>
struct Travels<e4m3, none> {
  using Row = Exact<e4m3>;
};
using SumRow = typename Travels<X_TYPE, wires::WIRE::Sums>::Row;
#if SCALE_COLUMNS
using ResultRow = Codes<8, SCALE_COLUMNS>;  // codes of e4m3, and their scales in the places of the words: scales.cuh
#else
using ResultRow = typename Travels<HIDDEN_TYPE, wires::WIRE::Results>::Row;
#endif
