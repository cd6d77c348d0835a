// How rows travel to other ranks: as they are, or in codes of few bits. The codes are those of collective/codes.py, bit for bit.
//
// A row on its way is its codes in the order of the columns, then a 32-bit word for each group of columns: the scale (bf16) in
// the upper half, the offset (bf16) in the lower one. A thread has eight columns. A group's neighbouring lanes of a warp agree
// on scale and offset, and the first of them stores the group's word.
//
// No word of a row in codes is NOT_ARRIVED (elements.cuh). A code q from 0 to LEVELS is stored as q - LEVELS / 2, so the pattern
// with only the highest bit set does not occur, and it would have to in the highest byte or half of one. A group's word has its
// highest bit clear, as scales are positive, or the positive NaN.
//
// Set by definitions: WIRE, a name of the namespace `wires`, and those of row.cuh, which is included before this.
#pragma once

// A row of T as it is. Accesses are by the eight columns from `column` of a row that begins at `row`.
template <typename T>
struct Exact {
  static constexpr bool CODED = false;
  static constexpr uint64_t ROW_BYTES = HIDDEN * sizeof(T);
  using Piece = Eight<T>;  // of eight columns

  static DEVICE uint8_t* row(uint8_t* rows, uint64_t index) { return (uint8_t*)((T*)rows + index * HIDDEN); }
  static DEVICE const Piece& encoded(const Eight<T>& eight) { return eight; }
  static DEVICE void load(Piece& piece, const uint8_t* row, uint32_t column) {
    load_strong(piece, (const T*)row + column);
  }
  static DEVICE void push(uint8_t* row, uint32_t column, const Piece& piece) { store_strong((T*)row + column, piece); }
  static DEVICE void write(uint8_t* row, uint32_t column, const Piece& piece) { store((T*)row + column, piece); }
};

// Eight columns in codes, and the word of their group.
template <int BITS>
struct InCodes {
  static constexpr int COUNT = 32 / BITS;  // codes of a word
  static constexpr uint32_t MASK = (1u << BITS) - 1;
  static constexpr uint32_t ONES = BITS == 8 ? 0x01010101u : 0x11111111u;  // of each code
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
template <int BITS>
DEVICE void decode(float (&values)[8], const InCodes<BITS>& piece) {
  using In = InCodes<BITS>;
  const float scale = as_float(piece.word[0] & 0xffff0000u), offset = as_float(piece.word[0] << 16);
  for (int i = 0; i < 8; ++i) {
    const uint32_t above = (piece.codes[i / In::COUNT] ^ In::HIGHEST) >> i % In::COUNT * BITS & In::MASK;  // q + 1
    const float q = as_float(0x4b000000u | above) - 8388609.0f;  // 2^23 + q + 1, less 2^23 + 1
    values[i] = offset + multiply_rounded(q, scale);
  }
}

// What is kept of a row that has travelled.
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

// Adds up one vector of all ranks in rank order, `own` as it is in its place. got[i] has come from rank_of(i).
template <int PEERS, typename T, int BITS, typename RankOf>
DEVICE void add_in_rank_order(float (&h)[8], const Eight<T>& own, const InCodes<BITS> (&got)[PEERS], int rank,
                              RankOf rank_of) {
  float exact[8];
  unpack(own, exact);
  for (int i = 0; i < 8; ++i) h[i] = 0.0f;
#pragma unroll
  for (int source = 0; source <= PEERS; ++source) {
    // Registers can't be indexed by a number that only the launch knows, so the peer is selected.
    InCodes<BITS> piece = got[0];
#pragma unroll
    for (int i = 1; i < PEERS; ++i)
      if (rank_of(i) == source) piece = got[i];
    float values[8];
    decode(values, piece);
    for (int i = 0; i < 8; ++i) h[i] += source == rank ? exact[i] : values[i];
  }
}

// Codes of BITS bits with a scale and an offset for each COLUMNS columns.
template <int BITS, int COLUMNS>
struct Codes {
  static constexpr bool CODED = true;
  static constexpr int LANES = COLUMNS / 8;  // that hold a group
  static constexpr int LEVELS = (1 << BITS) - 2;
  static constexpr uint64_t WORDS_OFFSET = HIDDEN * BITS / 8;
  // Rounded up, so that accesses are aligned and no two rows share what a cache loads at a time (travelling_bytes).
  static constexpr uint64_t ROW_BYTES = (WORDS_OFFSET + HIDDEN / COLUMNS * 4 + 31) / 32 * 32;
  using Piece = InCodes<BITS>;

  static DEVICE uint8_t* row(uint8_t* rows, uint64_t index) { return rows + index * ROW_BYTES; }
  // All lanes of a warp call this. Lanes beyond the row may have anything: they are whole groups.
  template <typename T>
  static DEVICE Piece encoded(const Eight<T>& eight) {
    const float infinite = as_float(0x7f800000u);
    float x[8];
    unpack(eight, x);
    float low = x[0], high = x[0];
    bool has_nan = false;
    for (float value : x) {
      low = least(low, value);
      high = greatest(high, value);
      has_nan = has_nan || value != value;
    }
    if (has_nan) high = infinite;  // so that the group's range is
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) {
      low = least(low, shuffle_xor(low, mask));
      high = greatest(high, shuffle_xor(high, mask));
    }
    // The offset is rounded downwards, which is away from zero if it is negative. Of zeros it is the positive one.
    const uint32_t low_bits = as_bits(low + 0.0f);
    const uint32_t offset_bits = ((low_bits >> 31) * 0xffffu + low_bits) & 0xffff0000u;
    const float offset = as_float(offset_bits), width = high - offset;
    const bool lost = !(width < infinite);
    // The scale is rounded upwards, away from zero.
    const uint32_t scale_bits = (as_bits(width / LEVELS) + 0xffffu) & 0xffff0000u;
    const float scale = greatest(as_float(scale_bits), as_float(0x00800000u)), inverse = 1.0f / scale;
    // Every step rounds monotonically, so a quotient is from 0 to LEVELS and less than half: no clamp is needed. Added to this
    // number, its integer to nearest even is in the last bits.
    const float integers = 12582912.0f;
    Piece piece{};
    for (int i = 0; i < 8; ++i) {
      const uint32_t q = as_bits(multiply_rounded(x[i] - offset, inverse) + integers) & Piece::MASK;
      piece.codes[i / Piece::COUNT] |= q << i % Piece::COUNT * BITS;
    }
    // q - LEVELS / 2 is q + 1, which has no carry, with the highest bit turned.
    for (uint32_t& word : piece.codes) word = ((lost ? 0 : word) + Piece::ONES) ^ Piece::HIGHEST;
    piece.word[0] = lost ? 0x7fc00000u : as_bits(scale) | offset_bits >> 16;
    return piece;
  }

  static DEVICE const uint8_t* codes_of(const uint8_t* row, uint32_t column) {
    static_assert(HIDDEN % COLUMNS == 0, "rows are whole groups");
    return row + column * BITS / 8;
  }
  static DEVICE const uint8_t* word_of(const uint8_t* row, uint32_t column) {
    return row + WORDS_OFFSET + column / COLUMNS * 4;
  }
  static DEVICE bool first_of_group(uint32_t column) { return column % COLUMNS == 0; }

  static DEVICE void load(Piece& piece, const uint8_t* row, uint32_t column) {
    load_relaxed_sys(piece.codes, codes_of(row, column));
    load_relaxed_sys(piece.word, word_of(row, column));
  }
  static DEVICE void push(uint8_t* row, uint32_t column, const Piece& piece) {
    store_relaxed_sys((uint8_t*)codes_of(row, column), piece.codes);
    if (first_of_group(column)) store_relaxed_sys((uint8_t*)word_of(row, column), piece.word);
  }
  static DEVICE void write(uint8_t* row, uint32_t column, const Piece& piece) {
    store_global((uint8_t*)codes_of(row, column), piece.codes);
    if (first_of_group(column)) store_global((uint8_t*)word_of(row, column), piece.word);
  }
};

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

// How rows of T travel: in codes if there are some. Rows of e4m3 have 8 bits as they are.
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
using ResultRow = typename Travels<HIDDEN_TYPE, wires::WIRE::Results>::Row;
