// State of the emulated machine, its memory and its scheduler. driver.cpp has what kernels and Python call.
//
// Memory. An ordinary store waits in `Cta::pending`, a word on its own, and only its rank sees it, until the scheduler
// or a release commits it. Every word of an allocation has a `Word` that finds its pending stores at once.
//
// Clusters. Their CTAs are neighbours in `Machine::ctas`; clocks know of accesses within a CTA alone.
//
// Order. "Happened before", within a CTA, is kept as vector clocks: `Machine::now` counts primitives, a thread's
// `Clock` says up to which count it knows of the others' accesses and proxy fences. Barriers and mbarriers join clocks.
#pragma once

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>

#include "fiber.h"

struct Random {
  uint64_t state;
  uint32_t next() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return uint32_t((state * 0x2545f4914f6cdd1dull) >> 32);
  }
  uint32_t below(uint32_t count) { return uint32_t(uint64_t(next()) * count >> 32); }
  bool chance(double probability) { return next() < probability * 4294967296.0; }
  double one_of(std::initializer_list<double> values) { return values.begin()[below(uint32_t(values.size()))]; }
};

struct Known {
  uint32_t access = 0, fence = 0;
};
struct Clock {
  std::vector<Known> threads;
  uint32_t last_fence = 0;  // of any of the threads

  explicit Clock(size_t count) : threads(count) {}
  void note(uint32_t thread, uint32_t now, uint32_t fence) {
    threads[thread] = {now, fence};
    last_fence = std::max(last_fence, fence);
  }
  void join(const Clock& other) {
    for (size_t i = 0; i < threads.size(); ++i) {
      threads[i].access = std::max(threads[i].access, other.threads[i].access);
      threads[i].fence = std::max(threads[i].fence, other.threads[i].fence);
    }
    last_fence = std::max(last_fence, other.last_fence);
  }
};
using ClockRef = std::shared_ptr<const Clock>;

struct Word {
  uint32_t pending;  // index of the first PendingStore, 0 for none
  uint32_t writer;   // serial of the CTA * 1024 + thread of the last ordinary store, 0 for none or a bulk copy
  uint32_t written;  // Machine::now then
  uint32_t copier;   // serial of the CTA whose bulk copy wrote it last, 0 for none or an ordinary store since
  bool multicast;    // that store went to a multicast address
};
struct Allocation {
  char* base;
  size_t bytes;
  uint32_t rank;
  bool symmetric;
  std::string name;
  Word* words;
  uint64_t first_key;  // of its bytes, see Machine::park

  uint64_t key(const void* address) const { return first_key + (static_cast<const char*>(address) - base); }
};
// A range of addresses that stands for an allocation of each rank.
struct Multicast {
  char* base;
  size_t bytes;
  std::vector<char*> parts;  // [rank]
};
struct PendingStore {
  uint32_t* address;
  Word* word;
  struct Cta* cta;
  uint64_t key;
  uint32_t value, rank, home, thread, stamp, position, next;  // `home`: rank of the memory
  uint32_t pair;  // the store that becomes visible with this one, 0 for none
};
struct SharedWord {
  uint32_t written = 0, thread = 0;  // Machine::now and thread of the last ordinary store, 0 for none or a bulk copy
};
constexpr uint32_t MBARRIER = 0x6d626172;  // upper half of an mbarrier's 8 bytes; the lower is its number in the CTA
struct MBarrier {
  uint32_t count, owner, pending, phase = 0;
  int64_t bytes = 0;
  bool fenced = false;
  Clock clock;
  ClockRef joined, done, wait_in, wait_out;  // `joined`, `wait_*`: the last join, which the next thread likely repeats

  MBarrier(uint32_t count, uint32_t owner, size_t threads)
      : count(count), owner(owner), pending(count), clock(threads) {}
};
struct BulkGroup {
  uint32_t bytes = 0, unread = 0, unwritten = 0;
};
// What a thread has asked for in shared memory.
struct SmallCopy {
  char *shared, *global;
  uint32_t bytes;
};
struct Poll {
  const void* address;
  uint32_t bytes, value[4];
};
struct Thread {
  Context context;
  char* stack = nullptr;
  struct Cta* cta;
  struct Warp* warp;
  uint32_t index, result = 0, fence = 0;
  uint32_t alias_fence = 0;  // Machine::now at the last one
  bool done = false;
  const char* primitive = "its start";
  const void* at = nullptr;      // what it accesses or waits for
  std::vector<Poll> polls;       // the loads just before, if they were ones that poll
  ClockRef clock;
  std::vector<BulkGroup> groups{1};  // the last one is not committed yet
  size_t waited = 0;                 // groups known to be read
  std::deque<std::vector<SmallCopy>> small_copies{1};  // by group; the last one is not committed yet

  Known known(uint32_t other, uint32_t now) const {
    if (other == index) return {now, fence};
    return clock ? clock->threads[other] : Known();
  }
};
// What Python writes into a kernel's TensorMap: rows of 16-bit elements, and the box of them that one load copies.
struct TileMap {
  char* base;
  uint64_t columns, rows, row_bytes, box_columns, box_rows, kind;
};
constexpr uint64_t TILE_MAP = 0x74696c656d6170;
// A warp's part of a wgmma that it has issued. `d`: accumulators of each lane.
struct Matmul {
  uint64_t a, b;
  bool keep;
  uint32_t columns;
  uint32_t group;  // wgmma_commits before it
  float* d[32];
};
struct Warp {
  struct Cta* cta;
  uint32_t first, runnable = 0, ended = 0, position = 0;
  uint32_t arrived = 0, id = 0, threads = 0;  // lanes that wait together in `collective`
  const char* collective = "";
  uint32_t values[32], sources[32];
  Matmul matmul;  // that the lanes issue now
  std::deque<Matmul> matmuls;  // that are not done
  uint32_t matmul_groups = 0, matmul_fence = 0;  // commits; lanes that may issue
};
struct CtaBarrier {
  uint32_t threads = 0;
  std::vector<Warp*> warps;
};
// What a kernel right behind a launch does: reads `bytes` at `address` into `values`, or writes them there.
struct Access {
  char *address, *values;
  uint32_t bytes;
  bool writes;
};
struct Launch {
  uint32_t rank, stream, grid, cluster, block, shared_bytes, number;  // `number`: among those of the rank
  std::string params;
  bool programmatic;
  Launch* previous;
  uint32_t started = 0, ended_ctas = 0, triggered = 0;
  bool ended = false;
  std::vector<Access> behind;

  uint64_t key() const { return 1ull << 63 | uint64_t(rank) << 32 | number << 6; }
};
struct Cta {
  Launch* launch;
  uint32_t index, serial, running;
  uint32_t in_flight = 0;  // pieces of bulk copies, and arrivals, that will touch shared memory
  bool triggered = false, dirty = false;
  char* shared;
  std::vector<SharedWord> shared_words;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<MBarrier> mbarriers;
  std::vector<uint32_t> pending;
  CtaBarrier barriers[16];
  std::map<uint32_t, ClockRef> released;  // by offset of a counter in shared memory: what its last release knew
  std::vector<Warp*> cluster_warps;  // of the cluster's first CTA: that wait in cluster_sync
  uint32_t cluster_synced = 0;       // Machine::now at the last one

  uint32_t cluster_rank() const { return index % launch->cluster; }
  uint64_t key(const void* address) const {
    return 1ull << 62 | uint64_t(serial) << 32 | uint32_t(static_cast<const char*>(address) - shared);
  }
  uint64_t key(const Thread& thread) const {
    return 1ull << 62 | uint64_t(serial) << 32 | 1u << 31 | thread.index << 6;
  }
};
// A piece of a bulk copy. A store is read into `buffer` first and written later. A piece of a tile, if `tile` says so, is whole
// rows of it from `row` on, and `global` any address in the tensor. Without bytes, it is an arrival from another CTA, or a word
// that another CTA stores to `shared`, if `word` has it.
struct Copy {
  Cta* cta;
  bool load;
  char *shared, *global;
  uint32_t bytes, thread, group;
  void* barrier;
  std::vector<uint32_t> buffer;
  TileMap tile{};
  int32_t column = 0, row = 0;
  std::vector<uint32_t> word{};
};

// What a thread has asked L2 for.
struct Prefetch {
  uint64_t rank, address, bytes;
};

struct Failure {};

struct Machine {
  uint32_t world_size, resident;
  uint64_t stall_limit;
  Random random;
  double preempt, drain, copy, start, pause, burst;
  uint32_t pause_steps;
  double eager = -1;  // how likely a wgmma is done when it is issued; else when it is waited for
  std::vector<double> links;  // [rank of the thread, rank of the memory]: how likely a store goes when its turn comes

  std::vector<Allocation> allocations;  // by address
  std::vector<Multicast> multicasts;
  std::deque<Launch> launches;
  std::deque<Cta> ctas;  // [serial - 1]
  std::vector<Cta*> dirty;
  std::vector<PendingStore> stores{1};
  std::vector<uint32_t> free_stores;
  std::vector<Copy> copies;
  std::vector<Prefetch> prefetches;
  std::vector<std::vector<Warp*>> runnable;  // [rank]
  std::vector<uint32_t> running;             // CTAs [rank]
  std::vector<uint64_t> paused_until;        // [rank]
  std::vector<std::vector<Thread*>> parked{1024};
  std::vector<Launch*> open;                 // launches with CTAs that have not started
  uint32_t now = 0, unfinished = 0;
  size_t pending = 0;
  uint64_t next_key = 0;
  uint64_t step = 0, stall = 0, switches = 0;
  Warp* last_warp = nullptr;
  std::string error;

  Machine(uint32_t world_size, uint64_t seed, uint32_t resident, uint64_t stall_limit);
  ~Machine();

  void run();

  // --- memory
  Allocation* find(const void* address);
  std::string describe(const Cta& cta, const void* address);
  Allocation& check(const void* address, uint32_t bytes, uint32_t alignment);
  void read(Allocation& allocation, const void* address, void* words, uint32_t bytes, uint32_t rank);
  void store(Allocation& allocation, void* address, const uint32_t* words, uint32_t bytes, bool in_pairs = false);
  void commit(uint32_t id);
  void commit_own(Word& word, uint32_t rank);
  void commit_before(Thread& thread);
  void copy_step(uint32_t index);
  void arrive(Cta& cta, void* address);
  void read_rows(const Copy& piece);

  // --- threads
  void wake(Thread& thread);
  void block(Thread& thread);
  void notify(uint64_t key);
  void park(std::initializer_list<uint64_t> keys) { park(keys.begin(), keys.size()); }
  void park(const uint64_t* keys, size_t count);
  void progress() { stall = 0; }
  MBarrier& mbarrier(Cta& cta, void* address);
  void complete_phase(const Cta& cta, MBarrier& barrier, void* address);

 private:
  size_t bucket(uint64_t key) { return (key >> 6) * 0x9e3779b97f4a7c15ull >> 54; }
  uint32_t times(double rate) { return uint32_t(rate) + random.chance(rate - uint32_t(rate)); }
  bool start_cta();
  void start_cta(Launch& launch);
  void resume(Thread& thread);
  void end_cta(Cta& cta);
  void end_launch(Launch& launch);
  void drain_one();
  void background();
  Warp* pick();
  bool event();
  void run_warp(Warp& warp);
  bool wake_parked();
  std::string waiting();
};

extern Machine* machine;
extern Thread* current;  // nullptr while the scheduler runs
void yield();            // to the scheduler
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
