// How rows travel to other ranks: as they are, or in codes of few bits. Codes equal those of collective/codes.py bit for bit.
//
// A row in codes has its codes in the order of the columns, then a 32-bit word for each group of columns. The word has the
// scale (bf16) in the upper half and the offset (bf16) in the lower half. A thread has eight or 16 columns, so a group lies in
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
  static constexpr int WORDS = 0;
  static constexpr int ROW = HIDDEN;  // elements
  static constexpr uint64_t ROW_BYTES = HIDDEN * sizeof(T);
  static constexpr int STAGED_BYTES = sizeof(Eight<T>);  // bytes of eight columns in shared memory
  using Element = T;
  using Piece = Eight<T>;  // a thread's part of the row: eight columns
  template <int WIDTH>
  using PieceOf = Piece;

  template <typename Place>
  static DEVICE T* at(T* row, Place column) { return row + column; }
  template <typename Place>
  static DEVICE const T* at(const T* row, Place column) { return row + column; }
  static DEVICE const uint8_t* word_in(const uint8_t*, uint32_t) { return nullptr; }
  template <int COUNT>
  static DEVICE void encode(Piece (&pieces)[COUNT], const Eight<T> (&eights)[COUNT]) {
    for (int v = 0; v < COUNT; ++v) pieces[v] = eights[v];
  }
  template <int COUNT>
  static DEVICE void encode_and_receive(Piece (&pieces)[COUNT], Eight<T> (&eights)[COUNT]) {
    encode(pieces, eights);
  }
  static DEVICE Piece encoded_and_received(Eight<T>& eight) { return eight; }
  static DEVICE const Piece& encoded(const Eight<T>& eight) { return eight; }
};

// WIDTH columns of one group in codes, and the word of the group.
template <int BITS, int WIDTH = 8>
struct InCodes {
  static constexpr int COUNT = 32 / BITS;  // codes of a word
  static constexpr uint32_t MASK = (1u << BITS) - 1;
  static constexpr uint32_t ONES = BITS == 8 ? 0x01010101u : 0x11111111u;  // the lowest bit of each code
  static constexpr uint32_t HIGHEST = ONES << (BITS - 1);

  uint32_t codes[WIDTH / COUNT];
  uint32_t word[1];
};
template <int BITS>
DEVICE bool arrived(const InCodes<BITS>& piece) {
  bool all = piece.word[0] != NOT_ARRIVED;
  for (uint32_t word : piece.codes) all = all && word != NOT_ARRIVED;
  return all;
}
// The eight columns of `piece` from column 8 * part on. No value is -0.0: the offset never is, and a sum is -0.0 only if both
// of its parts are.
template <int BITS, int WIDTH>
DEVICE void decode(float (&values)[8], const InCodes<BITS, WIDTH>& piece, int part = 0) {
  using In = InCodes<BITS, WIDTH>;
  const float scale = as_float(piece.word[0] & 0xffff0000u), offset = as_float(piece.word[0] << 16);
  for (int i = 0; i < 8; ++i) {
    const uint32_t word = piece.codes[(part * 8 + i) / In::COUNT] ^ In::HIGHEST;  // of codes q + 1
    const int place = i % In::COUNT;
    // The bits of 2^23 + q + 1.
    const uint32_t above = BITS == 8 ? bytes_of(word, 0x4b000000u, 0x7440u | place)
                                     : 0x4b000000u | (word >> place * BITS & In::MASK);
    values[i] = multiply_add(as_float(above) - 8388609.0f, scale, offset);
  }
}

// What a rank keeps of a row that has travelled.
template <typename T>
DEVICE const Eight<T>& received(const Eight<T>& piece, int = 0) {
  return piece;
}
template <typename T, int BITS, int WIDTH>
DEVICE Eight<T> received(const InCodes<BITS, WIDTH>& piece, int part = 0) {
  float values[8];
  decode(values, piece, part);
  Eight<T> eight;
  pack(eight, values);
  return eight;
}

// Adds up one vector of all ranks in rank order. This rank's vector `own` is added as it is, in this rank's place. `others` are
// the peers' in rank order. No sum has to start from 0: decode gives no -0.0, so the first two numbers are not both -0.0.
template <int PEERS, typename T, int BITS>
DEVICE void add_in_rank_order(float (&h)[8], const Eight<T>& own, const InCodes<BITS> (&others)[PEERS], int rank) {
  const int place = larger(rank, 1);  // the order of the first two makes no difference
  decode(h, others[0]);
#pragma unroll
  for (int i = 1; i <= PEERS; ++i) {
    if (PEERS == 1 || place == i) add(h, own);
    if (i == PEERS) break;
    float values[8];
    decode(values, others[i]);
    for (int j = 0; j < 8; ++j) h[j] += values[j];
  }
}
// The same, if got[i] has come from rank_of(i). Registers can't be indexed by a number that is known only at run time, so peers
// are selected.
template <int PEERS, typename T, int BITS, typename RankOf>
DEVICE void add_in_rank_order(float (&h)[8], const Eight<T>& own, const InCodes<BITS> (&got)[PEERS], int rank,
                              RankOf rank_of) {
  InCodes<BITS> others[PEERS];
#pragma unroll
  for (int place = 0; place < PEERS; ++place) {
    others[place] = got[0];
#pragma unroll
    for (int i = 1; i < PEERS; ++i)
      if (rank_of(i) == place + (place >= rank)) others[place] = got[i];
  }
  add_in_rank_order(h, own, others, rank);
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

// The smallest and the largest values of COUNT groups, whose columns are in LANES neighbouring lanes, EACH eights of them in
// every lane. Either is NaN or infinite if the group has such a value. A smallest value of -0.0 may be returned as 0.0 or -0.0.
// Groups take turns in each exchange between lanes, so that a warp does not wait for each of them.
template <int LANES, int EACH, int COUNT, int ALL>
DEVICE void extremes(Extremes (&found)[COUNT], const Eight<fp32> (&eights)[ALL]) {
  const float infinite = as_float(0x7f800000u);
  for (int v = 0; v < COUNT; ++v) {
    float low = as_float(eights[v * EACH].words[0]), high = low;
    bool has_nan = false;
    for (int i = 0; i < EACH * 8; ++i) {
      const float value = as_float(eights[v * EACH + i / 8].words[i % 8]);
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
template <int LANES, int EACH, int COUNT, int ALL, typename T>
DEVICE void extremes(Extremes (&found)[COUNT], const Eight<T> (&eights)[ALL]) {
  const auto larger = [](uint32_t a, uint32_t b) { return same<T, bf16> ? greatest_bf16(a, b) : greatest_fp16(a, b); };
  const auto smaller = [](uint32_t a, uint32_t b) { return same<T, bf16> ? least_bf16(a, b) : least_fp16(a, b); };
  uint32_t both[COUNT];
  for (int v = 0; v < COUNT; ++v) {
    uint32_t low = eights[v * EACH].words[0], high = low;
    for (int i = 1; i < EACH * 4; ++i) {
      const uint32_t word = eights[v * EACH + i / 4].words[i % 4];
      low = smaller(low, word);
      high = larger(high, word);
    }
    low ^= 0x80008000u;
    both[v] = larger(bytes_of(low, high, 0x5410u), bytes_of(low, high, 0x7632u));
  }
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2)
    for (uint32_t& of : both) of = larger(of, shuffle_xor(of, mask));
  for (int v = 0; v < COUNT; ++v) {
    Eight<T> pair{{both[v]}};
    float values[8];
    unpack(pair, values);
    found[v] = {-values[0], values[1]};
  }
}

// Codes of BITS bits with a scale and an offset for each COLUMNS columns.
template <int BITS_, int COLUMNS>
struct Codes {
  static constexpr int BITS = BITS_;
  static constexpr bool CODED = true;
  static constexpr int LANES = COLUMNS / 8;  // lanes that hold a group
  static constexpr int WORDS = HIDDEN / COLUMNS;
  static constexpr int LEVELS = (1 << BITS) - 2;
  static constexpr uint64_t WORDS_OFFSET = HIDDEN * BITS / 8;
  // Rounded up to 32 bytes, so that accesses are aligned and no two rows share what a cache loads at a time (travelling_bytes).
  static constexpr uint64_t ROW_BYTES = (WORDS_OFFSET + HIDDEN / COLUMNS * 4 + 31) / 32 * 32;
  static constexpr uint64_t ROW = ROW_BYTES;
  static constexpr int STAGED_BYTES = 2 * BITS;  // at least the bytes of the codes and of the group's word; codes have half
  using Element = uint8_t;
  using Piece = InCodes<BITS>;
  template <int WIDTH>
  using PieceOf = InCodes<BITS, WIDTH>;

  // How the values of a group become codes.
  struct Scaling {
    float offset, inverse;  // 1 / scale
    uint32_t lost;          // all bits, if the group has no codes, or none
    uint32_t word;

    // VALUES: what the group's values are.
    template <typename VALUES>
    static DEVICE Scaling of(VALUES, Extremes found) {
      // The offset is rounded down, which is away from zero if it is negative. Adding 0.0f makes a negative zero positive.
      const uint32_t low_bits = as_bits(found.low + 0.0f);
      const uint32_t offset_bits =
          same<VALUES, bf16> ? low_bits : ((low_bits >> 31) * 0xffffu + low_bits) & 0xffff0000u;
      const float offset = as_float(offset_bits), width = found.high - offset;
      const bool lost = !(width < as_float(0x7f800000u));
      // The scale is rounded upwards, away from zero. It is the smallest bf16 number that is no less than the quotient, be the
      // quotient rounded or not: a width beyond LEVELS * scale is so by more than half a unit in the last place of the scale.
      // So a product will do, if it is not more than scale for LEVELS * scale, and more than scale for larger widths.
      const uint32_t up = as_bits(multiply_up(width, INVERSE_LEVELS)) + 0xffffu;
      const uint32_t scale_bits = (uint32_t)larger((int32_t)up, 0x00800000) & 0xffff0000u;
      const uint32_t word = lost ? 0x7fc00000u : bytes_of(offset_bits, scale_bits, 0x7632u);
      return {offset, reciprocal_of_bf16(as_float(scale_bits)), lost ? ~0u : 0u, word};
    }
  };
  // 1 / LEVELS, rounded down.
  static constexpr float INVERSE_LEVELS = BITS == 8 ? 0.00393700786f : 0.0714285671f;

  // FROM - q for eight columns; the last bits of FROM are ABOVE. Every step rounds monotonically, so a quotient is at least 0
  // and less than LEVELS + 1/2: no clamp is needed. FROM - quotient is rounded to the nearest integer. Ties go to even numbers,
  // and FROM is even, so q is what the definition rounds to. Stored codes are q - LEVELS / 2: those are the flipped bits of
  // LEVELS / 2 - 1 - q.
  static constexpr int ABOVE = BITS == 8 ? 126 : 14;  // no code of 4 bits may borrow from the next one
  static constexpr float FROM = 12582912.0f + ABOVE;
  template <typename T>
  static DEVICE void quantise(float (&q)[8], const Eight<T>& eight, const Scaling& scaling) {
    unpack(eight, q);
    for (float& x : q) x = FROM - multiply_rounded(x - scaling.offset, scaling.inverse);
  }
  // The words of eight columns.
  static DEVICE void join(uint32_t* codes, const float (&q)[8], const Scaling& scaling) {
    constexpr uint32_t FLIPPED = BITS == 8 ? ~0u : 0x77777777u, ZEROS = Piece::ONES ^ Piece::HIGHEST;  // codes of q = 0
    uint32_t bytes[BITS];  // the last byte counts
    for (int i = 0; i < BITS; ++i) bytes[i] = BITS == 8 ? as_bits(q[i]) : as_bits(q[2 * i]) + (as_bits(q[2 * i + 1]) << 4);
    for (int i = 0; i < BITS / 4; ++i) {
      const uint32_t* const four = bytes + 4 * i;
      const uint32_t word = bytes_of(bytes_of(four[0], four[1], 0x0040u), bytes_of(four[2], four[3], 0x0040u), 0x5410u);
      codes[i] = (scaling.lost & ZEROS) | (~scaling.lost & (word ^ FLIPPED));
    }
  }

  // Encodes the vectors of COUNT groups. Each lane has WIDTH neighbouring columns of a group. All lanes of a warp call this.
  // Lanes beyond the row may have any values, because they form whole groups of their own.
  template <int WIDTH, int COUNT, int ALL, typename T>
  static DEVICE void encode(InCodes<BITS, WIDTH> (&pieces)[COUNT], const Eight<T> (&eights)[ALL]) {
    static_assert(COUNT * WIDTH == ALL * 8, "pieces of all vectors");
    Extremes found[COUNT];
    extremes<COLUMNS / WIDTH, WIDTH / 8>(found, eights);
    for (int v = 0; v < COUNT; ++v) {
      const Scaling scaling = Scaling::of(T{}, found[v]);
      for (int i = 0; i < WIDTH / 8; ++i) {
        float q[8];
        quantise(q, eights[v * WIDTH / 8 + i], scaling);
        join(pieces[v].codes + i * BITS / 4, q, scaling);
      }
      pieces[v].word[0] = scaling.word;
    }
  }
  // The same for eight columns in a lane; then `eights` has what the receivers decode.
  template <int COUNT, typename T>
  static DEVICE void encode_and_receive(Piece (&pieces)[COUNT], Eight<T> (&eights)[COUNT]) {
    Extremes found[COUNT];
    extremes<LANES, 1>(found, eights);
    for (int v = 0; v < COUNT; ++v) {
      const Scaling scaling = Scaling::of(T{}, found[v]);
      float q[8];
      quantise(q, eights[v], scaling);
      join(pieces[v].codes, q, scaling);
      pieces[v].word[0] = scaling.word;
      const float scale = as_float(scaling.word & 0xffff0000u), offset = as_float(scaling.word << 16);
      for (float& x : q) x = multiply_add(FROM - x, scale, offset);
      pack(eights[v], q);
    }
  }
  template <typename T>
  static DEVICE Piece encoded(const Eight<T>& eight) {
    const Eight<T> eights[1] = {eight};
    Piece pieces[1];
    encode(pieces, eights);
    return pieces[0];
  }
  template <typename T>
  static DEVICE Piece encoded_and_received(Eight<T>& eight) {
    Eight<T> eights[1] = {eight};
    Piece pieces[1];
    encode_and_receive(pieces, eights);
    eight = eights[0];
    return pieces[0];
  }

  static DEVICE uint8_t* word_at(const uint8_t* row, uint32_t group) { return (uint8_t*)row + WORDS_OFFSET + group * 4; }
  // The word of the column's group, if the words of a row lie at `words`.
  static DEVICE const uint8_t* word_in(const uint8_t* words, uint32_t column) { return words + column / COLUMNS * 4; }

  static DEVICE InRow<Codes> at(const uint8_t* row, uint32_t column) {
    static_assert(HIDDEN % COLUMNS == 0, "rows are whole groups");
    return {(uint8_t*)row + column * BITS / 8, (uint8_t*)row + WORDS_OFFSET + column / COLUMNS * 4, column % COLUMNS == 0};
  }
  static DEVICE InRow<Codes> at(const uint8_t* row, Column column) {
    if (column.further % COLUMNS != 0) return at(row, (uint32_t)column);
    const uint32_t first = column.of_thread, further = column.further;
    uint8_t* const codes = settled((uint8_t*)row + first * BITS / 8);
    uint8_t* const word = settled((uint8_t*)row + first / COLUMNS * 4);
    return {codes + further * BITS / 8, word + (WORDS_OFFSET + further / COLUMNS * 4), first % COLUMNS == 0};
  }
};

// The loads and stores that elements.cuh has for rows as they are, here for rows in codes.
template <typename Row, int BITS, int WIDTH>
DEVICE void load_strong(InCodes<BITS, WIDTH>& piece, InRow<Row> place) {
  load_relaxed_sys(piece.codes, place.codes);
  load_relaxed_sys(piece.word, place.word);
}
template <typename Row>
DEVICE void store_strong(InRow<Row> place, const typename Row::Piece& piece) {
  store_relaxed_sys(place.codes, piece.codes);
  if (place.first_of_group) store_relaxed_sys(place.word, piece.word);
}
template <typename Row, int BITS, int WIDTH>
DEVICE void store(InRow<Row> place, const InCodes<BITS, WIDTH>& piece) {
  store_global(place.codes, piece.codes);
  if (place.first_of_group) store_global(place.word, piece.word);
}

// Rows whose words gather in shared memory, so that few threads move them together. Stores a thread's part of a row; `words`
// are those of the row. If no WORDS gather, the word is stored with the codes.
template <int WORDS, typename T>
DEVICE void store_gathering(T* to, const Eight<T>& piece, uint32_t*, uint32_t) {
  store(to, piece);
}
template <int WORDS, typename Row, int BITS, int WIDTH>
DEVICE void store_gathering(InRow<Row> to, const InCodes<BITS, WIDTH>& piece, uint32_t* words, uint32_t column) {
  if constexpr (WORDS == 0) return store(to, piece);
  store_global(to.codes, piece.codes);
  if (to.first_of_group) *(uint32_t*)Row::word_in((uint8_t*)words, column) = piece.word[0];
}
// For a whole warp, when all words have gathered.
template <typename Row>
DEVICE void store_words(typename Row::Element* row, const uint32_t* words, uint32_t lane) {
  if constexpr (Row::CODED)
    for (int first = 0; first < Row::WORDS; first += 32) {
      if (first + lane >= Row::WORDS) break;
      const uint32_t word[1] = {words[first + lane]};
      store_global(Row::word_at(row, first + lane), word);
    }
}
// For all GROUP threads of a row: copies its words to shared memory.
template <typename Row, int GROUP>
DEVICE void ask_words(const typename Row::Element* row, uint8_t* to, uint32_t thread) {
  if constexpr (Row::CODED)
    for (int first = 0; first < Row::WORDS; first += GROUP) {
      if (first + thread >= Row::WORDS) break;
      copy_to_shared<4>(to + (first + thread) * 4, Row::word_at(row, first + thread));
    }
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
