// How a GEMM gets the rows of a fused call that other ranks compute. It sends its own rank's rows to the peers, and waits for
// the peers' rows.
//
// The kernel before the GEMM (push.cu with FED=1) has left this rank's rows in this rank's part of the slot's memory. In each
// CTA of the GEMM a few warps copy rows from there to the peers' parts. The warps of all CTAs claim one row after the other.
// Meanwhile other threads multiply. Rows are counted in blocks of FED_BLOCK rows. A peer has a flag for each rank and block.
// When all of a rank's rows of a block have gone to the peer, this flag gets the number of the call. A thread that loads rows
// of a peer waits for the peer's flag first.
//
// Order. The lanes of a warp meet behind their stores of a row. Then one lane adds the row to done[block]. That addition acquires
// and releases, so the lane that completes the block knows of all its rows. It stores the flag with a release at system scope,
// which orders all stores before the flag. The reader acquires the flag. It executes a fence before its loads, because the async
// proxy makes these loads. By PTX's memory model that is enough. The lanes' fences at system scope are there besides, because the
// stores that are handed on go to other GPUs.
//
// No row is overwritten while a rank still reads it. In call k+1 of the slot, two kinds of kernels write rows of this rank's
// part. This rank's own kernel writes when sums of call k+1 from all ranks have come. The peers' GEMMs write rows to which all
// ranks have added in call k+1. So every rank has begun call k+1 before any rank writes a row of call k+1. A rank begins call
// k+1 when all earlier work on its stream has ended. That includes the GEMM of call k, with its loads and its stores to peers.
// The same holds where calls before and after are not fed: a slot's buffer "fed" belongs to fed calls alone.
//
// Flags need no reset. All ranks make the same fed calls on a slot, so the numbers of calls only grow, and are the same on all
// ranks. They are compared by the sign of the difference. A flag can't be ahead, because the next number is written in the next
// call. The number lives in device memory, so replays of CUDA graphs count on. A second GEMM of a call finds all flags set.
//
// Progress. A rank's rows are sent by whichever of its CTAs run, and a sending warp waits for no peer. So if one cluster of
// the GEMM runs on every rank, all rows arrive and all waits end. Then the other clusters run. Every rank reaches its GEMM: the
// kernel before it waits only for sums of the peers. The peers' kernels of the same call send the sums of a turn before they
// wait in that turn.
//
// SPIN_LIMIT: polls before a thread gives up and reports phase 4; 0: never.
#pragma once
#include "primitives.cuh"

inline constexpr int32_t FED_BLOCK = 128;  // rows that share a flag; no tile of the GEMM lies in two blocks
inline constexpr int32_t FED_BLOCKS = 512, FED_RANKS = 8;
inline constexpr int64_t FED_ROWS = FED_RANKS * FED_BLOCKS * 4;  // bytes before the rows: flags [FED_RANKS, FED_BLOCKS]
inline constexpr int32_t FED_PHASE = 4;

// The state of this rank's fed calls; all zeros at first.
struct FedState {
  uint32_t call;              // the number of the latest call
  uint32_t claimed;           // rows of the latest call that warps have claimed
  uint32_t done[FED_BLOCKS];  // rows of this rank that have been sent, for each block that is not complete
};

struct FedParams {
  uint8_t* const* memory;  // [world], each rank's flags and rows [rows, row_bytes]
  FedState* state;
  int32_t* status;  // [CTAs, FED_RANKS]
  int32_t rank;
  int32_t world;
  int32_t first;      // the first pair of tiles over each other that has rows of this rank alone
  int32_t own;        // how many such pairs there are
  int32_t unused[6];  // to 64 bytes
};

// Pairs that are not this rank's own are numbered from the one behind its last own pair on, past the end of the rows to their
// begin. Each peer owns about as many. The peers send at the same time, each from its first row on, so pairs of all peers are taken
// in turn. Returns the number of the pair at place `at` of `others`. Of a rank without own pairs only the order is another one.
DEVICE int32_t by_arrival(const FedParams& fed, int32_t others, int32_t at) {
  const int32_t peers = fed.world - 1, peer = at % peers, more = others % peers;
  return peer * (others / peers) + (peer < more ? peer : more) + at / peers;
}

DEVICE int32_t fed_share(const FedParams& fed, int32_t rows) { return (rows + fed.world - 1) / fed.world; }
DEVICE int32_t least_of(int32_t a, int32_t b) { return a < b ? a : b; }

DEVICE uint32_t* fed_flag(const FedParams& fed, int32_t of, int32_t owner, int32_t row) {
  return (uint32_t*)fed.memory[of] + owner * FED_BLOCKS + row / FED_BLOCK;
}

// One thread waits until the first `height` rows from `row` on have arrived. They lie in one block. `rows`: rows of the call.
DEVICE void await_rows(const FedParams& fed, uint32_t call, int32_t rows, int32_t row, int32_t height) {
  const int32_t share = fed_share(fed, rows), end = least_of(row + height, rows);
  if (row >= end) return;
  for (int32_t owner = row / share; owner * share < end; owner++) {
    if (owner == fed.rank) continue;
    const uint32_t* flag = fed_flag(fed, fed.rank, owner, row);
    [[maybe_unused]] uint32_t polls = 0;
    while ((int32_t)(load_acquire_sys(flag) - call) < 0) {
#if SPIN_LIMIT
      if (++polls == SPIN_LIMIT) {
        int32_t* report = fed.status + blockIdx.x * FED_RANKS + owner;
        if (*report == 0) *report = FED_PHASE;
        break;
      }
#endif
    }
  }
  fence_proxy_async();
}

// Warps of each CTA that send rows. A warp stores what it loads to all peers. Larger groups have fewer warps: with more stores
// under way than the links take, the GEMM's own loads became slower.
DEVICE int32_t fed_senders(const FedParams& fed) { return fed.world == 2 ? 3 : 1; }

// A warp sends this rank's rows to the peers, except for rows that other warps have claimed.
DEVICE void send_rows(const FedParams& fed, int32_t rows, int32_t row_bytes) {
  constexpr int32_t LOADS = 4, LANE_BYTES = 16, WARP_BYTES = 32 * LANE_BYTES;  // loads of each lane that are under way
  const int32_t share = fed_share(fed, rows), begin = least_of(fed.rank * share, rows), end = least_of(begin + share, rows);
  const int32_t lane = threadIdx.x % 32;
  const uint32_t call = fed.state->call;
  for (;;) {
    int32_t claimed = 0;
    if (lane == 0) claimed = (int32_t)fetch_add_relaxed_gpu(&fed.state->claimed, 1);
    const int32_t row = begin + first_lanes(claimed);
    if (row >= end) return;
    int64_t at = FED_ROWS + (int64_t)row * row_bytes + lane * LANE_BYTES;
    // These loops stay loops: sending warps have 40 registers.
#pragma unroll 1
    for (int32_t left = row_bytes - lane * LANE_BYTES; left > 0; left -= LOADS * WARP_BYTES, at += LOADS * WARP_BYTES) {
      const uint8_t* const own = settled(fed.memory[fed.rank] + at);
      uint32_t w[LOADS][4];
#pragma unroll
      for (int32_t i = 0; i < LOADS; i++) {
        if (i * WARP_BYTES < left) load_global(w[i], own + i * WARP_BYTES);
      }
#pragma unroll 1
      for (int32_t step = 1; step < fed.world; step++) {
        uint8_t* const to = settled(fed.memory[(fed.rank + step) % fed.world] + at);
#pragma unroll
        for (int32_t i = 0; i < LOADS; i++) {
          if (i * WARP_BYTES < left) store_global(to + i * WARP_BYTES, w[i]);
        }
      }
    }
    fence_sys();
    warp_sync();
    if (lane > 0) continue;
    const int32_t block = row / FED_BLOCK * FED_BLOCK, block_end = least_of(block + FED_BLOCK, end);
    const int32_t wanted = block_end - (block < begin ? begin : block);
    uint32_t* const done = &fed.state->done[row / FED_BLOCK];
    if ((int32_t)fetch_add_gpu(done, 1) + 1 == wanted) {
      *done = 0;  // for the next call
      for (int32_t step = 1; step < fed.world; step++) {
        store_release_sys(fed_flag(fed, (fed.rank + step) % fed.world, fed.rank, row), call);
      }
    }
  }
}
