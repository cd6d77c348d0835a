// How a GEMM gets the rows of a fused call that other ranks compute. It sends its own rank's rows to the peers, and waits for
// the peers' rows.
//
// The kernel before the GEMM (push.cu with FED=1) has left this rank's rows in this rank's part of the slot's memory. The first
// clusters of the GEMM that run copy rows from there to the peers' parts before they multiply, by bulk copies through shared
// memory. A few SMs send fast enough. The other clusters multiply meanwhile. Clusters claim one pair of tiles after the other,
// so those that send compute fewer. Threads that send claim one chunk of rows after the other. Rows are counted in blocks of
// FED_BLOCK rows. A peer has a flag for each rank and block. When all of a rank's rows of a block have gone to the peer, this
// flag gets the number of the call. A thread that loads rows of a peer waits for the peer's flag first.
//
// Order. A thread waits until its copies of a chunk are complete. Then it adds the chunk's rows to done[block]. That addition
// acquires and releases, so the thread that completes the block knows of all its rows. It stores the flag with a release at
// system scope, which orders all copies before the flag. The reader acquires the flag. It executes a fence before its loads,
// because the async proxy makes them. The writer needs no such fence: by PTX it is part of the end of a copy.
//
// No row is overwritten while a rank still reads it. In call k+1 of the slot, two kinds of kernels write rows of this rank's
// part. This rank's own kernel writes when sums of call k+1 from all ranks have come. The peers' GEMMs write rows to which all
// ranks have added in call k+1. So every rank has begun call k+1 before any rank writes a row of call k+1. A rank begins call
// k+1 when all earlier work on its stream has ended. That includes the GEMM of call k, with its loads and its stores to peers.
// The same holds where calls before and after are not fed: a slot's buffer "fed" belongs to fed calls alone.
//
// Flags need no reset. All ranks make the same fed calls on a slot, so the numbers of calls only grow, and are the same on all
// ranks. They are compared by the sign of the difference. A flag can't be ahead, because the next number is written in the next
// call. The number lives in device memory, so replays of CUDA graphs count on. The kernel before the GEMM resets what clusters
// and threads claim, so a call has one GEMM.
//
// Progress. Whichever clusters run first send, and a thread that sends waits for no peer. So if one cluster of the GEMM runs on
// every rank, all rows arrive and all waits end. Then the other clusters run. Every rank reaches its GEMM: the kernel before it
// waits only for sums of the peers. The peers' kernels of the same call send the sums of a turn before they wait in that turn.
//
// SPIN_LIMIT: polls before a thread gives up and reports phase 4; 0: never.
#pragma once
#include "tiles.cuh"

inline constexpr int32_t FED_BLOCK = 128;  // rows that share a flag; no tile of the GEMM lies in two blocks
inline constexpr int32_t FED_BLOCKS = 512, FED_RANKS = 8;
inline constexpr int64_t FED_ROWS = FED_RANKS * FED_BLOCKS * 4;  // bytes before the rows: flags [FED_RANKS, FED_BLOCKS]
inline constexpr int32_t FED_PHASE = 4;
inline constexpr int32_t FED_THREADS = 4;                       // threads of a CTA that send rows, each with a ring of pieces
inline constexpr int32_t FED_PIECE = 8 * 1024, FED_PIECES = 6;  // bytes of a piece, and pieces of a ring
inline constexpr int32_t FED_TURNS = 16;                        // turns of a thread that sends until they are forgotten
inline constexpr int32_t FED_LETTERS = 8;                       // turns of a cluster until what CTA 0 has told is forgotten

// The state of this rank's fed calls; all zeros at first.
struct FedState {
  uint32_t call;              // the number of the latest call
  uint32_t pairs;             // what clusters have claimed of the latest call: first to send rows, then a pair of tiles each
  uint32_t chunks;            // chunks of rows of the latest call that have been claimed
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
  int32_t senders;    // clusters that send rows before they multiply
  int32_t chunk;      // rows that are claimed at a time: a power of 2 that divides FED_BLOCK
  int32_t unused[4];  // to 64 bytes
};

struct FedPiece {
  int32_t offset;  // 16-byte units from the begin of the rows
  int32_t bytes;
};

// In shared memory of each CTA.
struct FedShared {
  uint64_t arrived[FED_THREADS][FED_PIECES];  // a piece of rows that are sent is in shared memory
  FedPiece pieces[FED_THREADS][FED_PIECES];   // what is there
  int32_t turns[FED_THREADS][FED_TURNS];      // the chunk of which each turn has loaded the last piece; or MORE, or OVER
  uint8_t* to[FED_RANKS];                     // the rows in the memory of this rank, the next one, and so on
  uint64_t mailed[FED_LETTERS];               // a letter has come
  uint32_t letters[FED_LETTERS];              // the pairs that the cluster computes, in turn. A negative one: it sends first
  int32_t pairs[FED_LETTERS];                 // by stage, which are fewer: the pair that begins in this stage
};

// Pairs that are not this rank's own are numbered from the one behind its last own pair on, past the end of the rows to their
// begin. Each peer owns about as many. The peers send at the same time, each from its first row on, so pairs of all peers are
// taken in turn. Returns the number of the pair at place `at` of `others`. Of a rank without own pairs only the order differs.
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

// All lanes of a warp.
DEVICE void init_fed(const FedParams& fed, FedShared& shared) {
  static_assert(FED_THREADS * FED_PIECES <= 32 && FED_LETTERS <= 32 && FED_RANKS <= 32, "a lane for each");
  const int32_t lane = threadIdx.x % 32;
  if (lane < FED_THREADS * FED_PIECES) mbarrier_init(&shared.arrived[0][lane], 1);
  if (lane < FED_LETTERS) mbarrier_init(&shared.mailed[lane], 1);
  if (lane == 0) mbarrier_arrive_expect(&shared.mailed[0], 4);
  if (lane < fed.world) shared.to[lane] = fed.memory[(fed.rank + lane) % fed.world] + FED_ROWS;
  mbarrier_init_fence();
}

// The next pair, for one cluster. Below 0: the cluster sends rows first.
DEVICE int32_t claim_pair(const FedParams& fed) { return (int32_t)fetch_add_relaxed_gpu(&fed.state->pairs, 1) - fed.senders; }
// The next pair for a cluster that has sent. Clusters that have not begun need not send any more: all rows have been claimed.
DEVICE int32_t next_pair(const FedParams& fed) {
  int32_t pair;
  do pair = claim_pair(fed);
  while (pair < 0);
  return pair;
}

// CTA 0 tells both CTAs of a cluster which pair they compute in a turn. The letter of FED_LETTERS turns before has been read.
// That of turn 0 has been read by all threads before any stage is filled. For later ones, CTA 0 has filled a stage of the turn
// before this one. So CTA 1 has read what that stage had before, which was STAGES stages earlier, and a turn has one stage at
// least.
DEVICE void tell(FedShared& shared, int32_t turn, int32_t pair) {
  const int32_t letter = turn % FED_LETTERS;
  for (uint32_t cta = 0; cta < 2; cta++) store_to_cta(cta, &shared.letters[letter], (uint32_t)pair, &shared.mailed[letter]);
}

// One thread of a CTA waits for the letter of a turn. That of turn 0 is expected from the start.
DEVICE int32_t told(FedShared& shared, int32_t turn) {
  const int32_t letter = turn % FED_LETTERS;
  if (turn > 0) mbarrier_arrive_expect(&shared.mailed[letter], 4);
  wait(&shared.mailed[letter], turn / FED_LETTERS & 1);
  return (int32_t)shared.letters[letter];
}

// This rank's rows from `begin` to `end`, in chunks of fed.chunk rows. Only the first and the last one may have fewer.
struct Chunks {
  int32_t begin, end, rows, first, count;

  DEVICE Chunks(const FedParams& fed, int32_t all) {
    const int32_t share = fed_share(fed, all);
    rows = fed.chunk;
    begin = least_of(fed.rank * share, all);
    end = least_of(begin + share, all);
    first = begin / rows;
    count = begin < end ? (end - 1) / rows - first + 1 : 0;
  }
  DEVICE int32_t from(int32_t chunk) const { return chunk ? (first + chunk) * rows : begin; }
  DEVICE int32_t to(int32_t chunk) const { return least_of((first + chunk + 1) * rows, end); }
};

// A thread counts the rows of a chunk. Its copies of them are complete.
DEVICE void count_rows(const FedParams& fed, const Chunks& chunks, int32_t chunk) {
  const int32_t from = chunks.from(chunk), count = chunks.to(chunk) - from;
  const int32_t block = from / FED_BLOCK * FED_BLOCK, block_end = least_of(block + FED_BLOCK, chunks.end);
  const int32_t wanted = block_end - (block < chunks.begin ? chunks.begin : block);
  uint32_t* const done = &fed.state->done[from / FED_BLOCK];
  if ((int32_t)fetch_add_gpu(done, count) + count != wanted) return;
  *done = 0;  // for the next call
  for (int32_t step = 1; step < fed.world; step++) {
    store_release_sys(fed_flag(fed, (fed.rank + step) % fed.world, fed.rank, from), fed.state->call);
  }
}

// Thread `sender` of FED_THREADS sends this rank's rows to the peers, except for chunks that other threads have claimed.
// `ring`: shared memory for all threads' pieces, which nothing else touches meanwhile.
//
// In each turn a piece is loaded, and the piece of AHEAD turns before is sent. A place of the ring is free when the copies have
// read it, which is long before they are complete. So a chunk is counted only LAG turns after its last piece has been sent.
DEVICE void send_rows(const FedParams& fed, FedShared& shared, int32_t sender, uint8_t* ring, int32_t rows, int32_t row_bytes) {
  constexpr int32_t AHEAD = 2, LAG = 6;
  constexpr int32_t MORE = -1, OVER = -2;  // of a turn that has loaded a piece that is not its chunk's last; and nothing
  static_assert(AHEAD + LAG < FED_TURNS, "turns are known until they are counted");
  const Chunks chunks(fed, rows);
  uint64_t* const arrived = shared.arrived[sender];
  FedPiece* const pieces = shared.pieces[sender];
  int32_t* const turns = shared.turns[sender];
  const uint8_t* const own = shared.to[0];
  ring += sender * FED_PIECES * FED_PIECE;
  const auto claim = [&] { return (int32_t)fetch_add_relaxed_gpu(&fed.state->chunks, 1); };
  Ring<FED_PIECES> in, out;
  int64_t at = 0;
  int32_t chunk = claim(), next = claim(), left = 0;
  bool begins = true;
  for (int32_t turn = 0;; turn++) {
    if (begins && chunk < chunks.count) {
      at = (int64_t)chunks.from(chunk) * row_bytes;
      left = (chunks.to(chunk) - chunks.from(chunk)) * row_bytes;
      begins = false;
    }
    int32_t loaded = OVER;
    if (!begins) {
      const int32_t bytes = least_of(left, FED_PIECE);
      mbarrier_arrive_expect(&arrived[in.stage], bytes);
      bulk_load(ring + in.stage * FED_PIECE, own + at, bytes, &arrived[in.stage]);
      pieces[in.stage] = {(int32_t)(at / 16), bytes};
      at += bytes;
      left -= bytes;
      loaded = MORE;
      if (left == 0) {
        loaded = chunk;
        chunk = next;
        next = claim();
        begins = true;
      }
      in.next();
    }
    turns[turn % FED_TURNS] = loaded;
    if (turn < AHEAD) continue;
    if (turns[(turn - AHEAD) % FED_TURNS] != OVER) {
      const FedPiece piece = pieces[out.stage];
      wait(&arrived[out.stage], out.parity);
      for (int32_t step = 1; step < fed.world; step++) {
        bulk_store(shared.to[step] + (int64_t)piece.offset * 16, ring + out.stage * FED_PIECE, piece.bytes);
      }
      out.next();
    }
    bulk_commit();
    bulk_wait_read<FED_PIECES - AHEAD - 1>();
    bulk_wait<LAG>();
    if (turn < AHEAD + LAG) continue;
    const int32_t complete = turns[(turn - AHEAD - LAG) % FED_TURNS];
    if (complete == OVER) return;
    if (complete >= 0) count_rows(fed, chunks, complete);
  }
}
