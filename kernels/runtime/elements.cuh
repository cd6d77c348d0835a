// Element types, and eight neighbouring elements of a row as they lie in memory: the unit that a thread handles.
#pragma once
#include "primitives.cuh"

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};
struct e4m3 {
  uint8_t bits;
};
using fp32 = float;
struct none {};  // the type of an argument that is not there

template <typename T>
inline constexpr bool present = true;
template <>
inline constexpr bool present<none> = false;

template <bool FIRST, typename A, typename B>
struct Either {
  using Type = A;
};
template <typename A, typename B>
struct Either<false, A, B> {
  using Type = B;
};

template <typename A, typename B>
inline constexpr bool same = false;
template <typename A>
inline constexpr bool same<A, A> = true;
// Types that the machine multiplies two at a time, rounding each product once, to nearest even.
template <typename T>
inline constexpr bool pairs = same<T, bf16> || same<T, fp16>;

template <typename T>
struct Eight {
  uint32_t words[2 * sizeof(T)];
};
template <>
struct Eight<none> {};

constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int larger(int a, int b) { return a > b ? a : b; }

// --- memory --------------------------------------------------------------------------------------------------------

// Calls access(piece, byte offset) for the 16-byte (e4m3: 8-byte) pieces of `eight`.
template <typename T, typename Access>
DEVICE void for_pieces(Eight<T>& eight, Access access) {
  if constexpr (sizeof(T) == 4) {
    access(*reinterpret_cast<uint32_t(*)[4]>(&eight.words[0]), 0);
    access(*reinterpret_cast<uint32_t(*)[4]>(&eight.words[4]), 16);
  } else {
    access(eight.words, 0);
  }
}
template <typename T>
DEVICE void load(Eight<T>& eight, const T* address) {
  for_pieces(eight, [=](auto& words, int offset) { load_global(words, (const uint8_t*)address + offset); });
}
template <typename T>
DEVICE void load_shared_eight(Eight<T>& eight, const void* pointer) {
  for_pieces(eight, [=](auto& words, int offset) { load_shared(words, (const uint8_t*)pointer + offset); });
}
template <typename T>
DEVICE void load_strong(Eight<T>& eight, const T* address) {
  for_pieces(eight, [=](auto& words, int offset) { load_relaxed_sys(words, (const uint8_t*)address + offset); });
}
// Loads the sums of all ranks' elements, in whole accesses of 16 bytes. `address` is a multicast address.
template <typename T>
DEVICE void load_multicast_sum(Eight<T>& eight, const T* address) {
  for_pieces(eight, [=](auto& words, int offset) {
    const uint8_t* const piece = (const uint8_t*)address + offset;
    if constexpr (same<T, bf16>) load_multicast_sum_bf16(words, piece);
    if constexpr (same<T, fp16>) load_multicast_sum_fp16(words, piece);
    if constexpr (same<T, fp32>) load_multicast_sum_fp32(words, piece);
  });
}
template <typename T>
DEVICE void store(T* address, Eight<T> eight) {
  for_pieces(eight, [=](auto& words, int offset) { store_global((uint8_t*)address + offset, words); });
}
template <typename T>
DEVICE void store_shared_eight(void* pointer, Eight<T> eight) {
  if constexpr (sizeof(T) == 4) {
    // Each thread writes 32 bytes in two stores. Half of the threads store the upper 16 bytes first, so that there are no bank
    // conflicts.
    const bool turned = shared_address(pointer) & 128;
    uint32_t lower[4], upper[4];
    for (int i = 0; i < 4; ++i) {
      lower[i] = turned ? eight.words[4 + i] : eight.words[i];
      upper[i] = turned ? eight.words[i] : eight.words[4 + i];
    }
    store_shared((uint8_t*)pointer + (turned ? 16 : 0), lower);
    store_shared((uint8_t*)pointer + (turned ? 0 : 16), upper);
  } else {
    for_pieces(eight, [=](auto& words, int offset) { store_shared((uint8_t*)pointer + offset, words); });
  }
}
template <typename T>
DEVICE void store_strong(T* address, Eight<T> eight) {
  for_pieces(eight, [=](auto& words, int offset) { store_relaxed_sys((uint8_t*)address + offset, words); });
}

// The column that one of a thread's vectors begins with. Its two parts are kept apart, so that the addresses of a thread's
// vectors differ by numbers that the compiler knows.
struct Column {
  uint32_t of_thread, further;
  DEVICE operator uint32_t() const { return of_thread + further; }
};
template <typename T>
DEVICE T* operator+(T* row, Column column) {
  return settled(row + column.of_thread) + column.further;
}

// --- values --------------------------------------------------------------------------------------------------------

DEVICE void unpack(const Eight<bf16>& eight, float (&values)[8]) {
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = as_float(eight.words[i] << 16);
    values[2 * i + 1] = as_float(eight.words[i] & 0xffff0000u);
  }
}
DEVICE void unpack(const Eight<fp16>& eight, float (&values)[8]) {
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = unpack_fp16((uint16_t)eight.words[i]);
    values[2 * i + 1] = unpack_fp16((uint16_t)(eight.words[i] >> 16));
  }
}
DEVICE void unpack(const Eight<fp32>& eight, float (&values)[8]) {
  for (int i = 0; i < 8; ++i) values[i] = as_float(eight.words[i]);
}
DEVICE void pack(Eight<bf16>& eight, const float (&values)[8]) {
  for (int i = 0; i < 4; ++i) eight.words[i] = pack_bf16(values[2 * i], values[2 * i + 1]);
}
DEVICE void pack(Eight<fp16>& eight, const float (&values)[8]) {
  for (int i = 0; i < 4; ++i) eight.words[i] = pack_fp16(values[2 * i], values[2 * i + 1]);
}
DEVICE void pack(Eight<fp32>& eight, const float (&values)[8]) {
  for (int i = 0; i < 8; ++i) eight.words[i] = as_bits(values[i]);
}
DEVICE void pack(Eight<e4m3>& eight, const float (&values)[8]) {
  for (int i = 0; i < 2; ++i) {
    const uint32_t low = pack_e4m3(values[4 * i], values[4 * i + 1]);
    const uint32_t high = pack_e4m3(values[4 * i + 2], values[4 * i + 3]);
    eight.words[i] = low | high << 16;
  }
}
DEVICE void unpack(const Eight<none>&, float (&)[8]) {}
DEVICE void pack(Eight<none>&, const float (&)[8]) {}
template <typename T>
DEVICE void add(float (&total)[8], const Eight<T>& eight) {
  float values[8];
  unpack(eight, values);
  for (int i = 0; i < 8; ++i) total[i] += values[i];
}

template <typename T>
DEVICE void multiply(Eight<T>& product, const Eight<T>& a, const Eight<T>& b) {
  for (int i = 0; i < 4; ++i)
    product.words[i] = same<T, bf16> ? multiply_bf16(a.words[i], b.words[i]) : multiply_fp16(a.words[i], b.words[i]);
}

// --- words that say of themselves whether they have arrived ---------------------------------------------------------

// In every element type this word holds a negative zero. Data is sent without negative zeros, so it never has this word.
inline constexpr uint32_t NOT_ARRIVED = 0x80000000u;

template <typename T>
DEVICE void drop_negative_zeros(Eight<T>& eight) {
  constexpr uint32_t signs = sizeof(T) == 4 ? 0x80000000u : sizeof(T) == 2 ? 0x80008000u : 0x80808080u;
  for (uint32_t& word : eight.words) {
    const uint32_t other = word ^ signs;  // 0 in lanes with a negative zero. `found`: the sign bits of these lanes alone
    const uint32_t found = ~(((other & ~signs) + ~signs) | other | ~signs);
    word &= ~found;
  }
}
template <typename T>
DEVICE bool arrived(const Eight<T>& eight) {
  bool all = true;
  for (uint32_t word : eight.words) all = all && word != NOT_ARRIVED;
  return all;
}
