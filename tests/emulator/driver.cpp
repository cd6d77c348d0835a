// The primitives, called by kernels through emulator.h, and the interface to Python.

#include "driver.h"

extern "C" const uint32_t emulated_params_bytes;

Thread& enter(const char* primitive, const void* at, bool polls) {
  Thread& thread = *current;
  thread.primitive = primitive;
  thread.at = at;
  if (!polls) thread.polls.clear();
  if (machine->random.chance(machine->preempt)) yield();
  ++machine->now;
  return thread;
}

uint32_t check_shared(const void* pointer, uint32_t bytes, uint32_t alignment) {
  const Cta& cta = *current->cta;
  const ptrdiff_t offset = static_cast<const char*>(pointer) - cta.shared;
  if (offset < 0 || offset + bytes > cta.launch->shared_bytes)
    fail("%u bytes at shared memory + %td, of which there are %u bytes", bytes, offset, cta.launch->shared_bytes);
  if (offset % alignment) fail("shared memory + 0x%tx is not a multiple of %u", offset, alignment);
  return uint32_t(offset);
}

static void check_bulk(const void* global, const void* shared, uint32_t bytes) {
  if (bytes % 16) fail("%u bytes, expected a multiple of 16", bytes);
  check_shared(shared, bytes, 16);
  machine->check(global, bytes, 16);
}

// Pieces that the scheduler copies one by one, in any order.
static void push_pieces(const Copy& whole) {
  uint32_t done = 0;
  while (done < whole.bytes) {
    const uint32_t left = (whole.bytes - done) / 16;
    Copy piece = whole;
    piece.shared += done;
    piece.global += done;
    piece.bytes = 16 * (machine->random.chance(0.3) ? left : 1 + machine->random.below(left));
    done += piece.bytes;
    machine->copies.push_back(std::move(piece));
    ++whole.cta->in_flight;
  }
  machine->progress();
}

void synchronise(Cta& cta, const std::vector<Warp*>& warps) {
  auto merged = std::make_shared<Clock>(cta.threads.size());
  const Clock* joined = nullptr;
  auto each_thread = [&](auto visit) {
    for (Warp* warp : warps)
      for (uint32_t lane = 0; lane < 32; ++lane) visit(cta.threads[(warp - cta.warps.data()) * 32 + lane]);
  };
  each_thread([&](Thread& thread) {
    if (thread.clock && thread.clock.get() != joined) merged->join(*thread.clock);
    joined = thread.clock.get();
  });
  each_thread([&](Thread& thread) { merged->note(thread.index, machine->now, thread.fence); });
  each_thread([&](Thread& thread) {
    thread.clock = merged;
    machine->wake(thread);
  });
  for (Warp* warp : warps) warp->arrived = 0;
  machine->progress();
}

static void complete_barrier(Warp& warp) {
  Cta& cta = *warp.cta;
  CtaBarrier& barrier = cta.barriers[warp.id];
  if (barrier.warps.empty()) barrier.threads = warp.threads;
  if (barrier.threads != warp.threads)
    fail("barrier %u of %u threads, but others wait there for %u", warp.id, warp.threads, barrier.threads);
  barrier.warps.push_back(&warp);
  if (barrier.warps.size() * 32 < barrier.threads) return;
  synchronise(cta, barrier.warps);
  barrier.warps.clear();
}

Thread* lanes_of(const Warp& warp) { return &warp.cta->threads[(&warp - warp.cta->warps.data()) * 32]; }

void wake_lanes(Warp& warp) {
  for (uint32_t lane = 0; lane < 32; ++lane) machine->wake(lanes_of(warp)[lane]);
  warp.arrived = 0;
  machine->progress();
}

static void complete_shuffle(Warp& warp) {
  for (uint32_t lane = 0; lane < 32; ++lane) lanes_of(warp)[lane].result = warp.values[warp.sources[lane]];
  wake_lanes(warp);
}

static void complete_warp_sync(Warp& warp) { synchronise(*warp.cta, {&warp}); }

void collective(const char* name, uint32_t id, uint32_t threads, void (*complete)(Warp&)) {
  Thread& thread = *current;
  Warp& warp = *thread.warp;
  if (warp.ended) fail("%d lanes of the warp have ended", __builtin_popcount(warp.ended));
  if (warp.arrived && (warp.collective != name || warp.id != id || warp.threads != threads))
    fail("%s(%u, %u) while other lanes of the warp wait in %s(%u, %u)", name, id, threads, warp.collective, warp.id,
         warp.threads);
  warp.collective = name;
  warp.id = id;
  warp.threads = threads;
  warp.arrived |= 1u << thread.index % 32;
  machine->block(thread);
  if (warp.arrived == ~0u) complete(warp);
  yield();
}

static void check_ordered_store(const Thread& thread, const void* shared, uint32_t bytes) {
  Cta& cta = *thread.cta;
  const uint32_t first = check_shared(shared, bytes, 16) / 4;
  for (uint32_t i = first; i < first + bytes / 4; ++i) {
    const SharedWord& word = cta.shared_words[i];
    const Known known = thread.known(word.thread, machine->now);
    if (word.written > known.access)
      fail("reads shared memory + 0x%x, which thread %u wrote with no barrier since", 4 * i, word.thread);
    if (word.written > known.fence)
      fail("reads shared memory + 0x%x, which thread %u wrote with no fence_proxy_async before the barrier", 4 * i,
           word.thread);
  }
}

void check_fenced_load(const Thread& thread, const void* global, uint32_t bytes) {
  const Allocation& allocation = *machine->find(global);
  const Word* words = allocation.words + (static_cast<const char*>(global) - allocation.base) / 4;
  const uint32_t fence = std::max(thread.fence, thread.clock ? thread.clock->last_fence : 0);
  for (uint32_t i = 0; i < bytes / 4; ++i) {
    if (fence > words[i].written) continue;
    if (words[i].copier && words[i].copier != thread.cta->serial) {
      const Cta& copier = machine->ctas[words[i].copier - 1];
      if (!copier.launch->ended)
        fail("reads %s, which a bulk copy of rank %u, CTA %u wrote, with no fence_proxy_async since",
             machine->describe(*thread.cta, static_cast<const char*>(global) + 4 * i).c_str(), copier.launch->rank,
             copier.index);
    }
    if (!words[i].writer) continue;
    const Cta& writer = machine->ctas[words[i].writer / 1024 - 1];
    if (writer.launch->ended || writer.threads[words[i].writer % 1024].fence > words[i].written) continue;
    fail("reads %s, which rank %u, CTA %u, thread %u wrote with no fence_proxy_async since",
         machine->describe(*thread.cta, static_cast<const char*>(global) + 4 * i).c_str(), writer.launch->rank,
         writer.index, words[i].writer % 1024);
  }
}

static bool is_shared(const Cta& cta, const void* address) {
  const ptrdiff_t offset = static_cast<const char*>(address) - cta.shared;
  return 0 <= offset && offset < ptrdiff_t(cta.launch->shared_bytes);
}

// Polling `address` for the second time, a thread has gone round its loop. It sleeps unless anything in it has changed.
static void park_until_changed(Thread& thread, const void* address) {
  std::vector<Poll>& polls = thread.polls;
  const auto begin =
      std::find_if(polls.begin(), polls.end(), [=](const Poll& poll) { return poll.address == address; });
  if (begin == polls.end()) return;
  std::vector<uint64_t> keys;
  bool changed = false;
  for (auto poll = begin; poll != polls.end(); ++poll) {
    uint32_t value[4];
    if (is_shared(*thread.cta, poll->address)) {
      memcpy(value, poll->address, poll->bytes);
      keys.push_back(thread.cta->key(poll->address));
    } else {
      Allocation& allocation = *machine->find(poll->address);
      machine->read(allocation, poll->address, value, poll->bytes, thread.cta->launch->rank);
      keys.push_back(allocation.key(poll->address));
    }
    changed |= memcmp(value, poll->value, poll->bytes) != 0;
  }
  polls.erase(polls.begin(), begin + 1);
  if (!changed) machine->park(keys.data(), keys.size());
}

// Memory for an atomic of GPU scope, with no store of this rank to it under way.
static Allocation& check_counter(const Thread& thread, void* address, uint32_t bytes) {
  Allocation& allocation = machine->check(address, bytes, bytes);
  const uint32_t rank = thread.cta->launch->rank;
  if (allocation.rank != rank) fail("atomic of GPU scope on memory of rank %u", allocation.rank);
  Word* words = allocation.words + (static_cast<char*>(address) - allocation.base) / 4;
  for (uint32_t i = 0; i < bytes / 4; ++i) machine->commit_own(words[i], rank);
  return allocation;
}

static uint32_t shuffle(const char* primitive, uint32_t value, uint32_t source) {
  Thread& thread = enter(primitive);
  const uint32_t lane = thread.index % 32;
  thread.warp->values[lane] = value;
  thread.warp->sources[lane] = source;
  collective(primitive, 0, 0, complete_shuffle);
  return thread.result;
}

extern "C" {

// --- global memory -------------------------------------------------------------------------------------------------

void emulated_load(const char* primitive, void* words, const void* address, uint32_t bytes, bool polls) {
  Thread& thread = enter(primitive, address, polls);
  Allocation& allocation = machine->check(address, bytes, bytes);
  if (polls) park_until_changed(thread, address);
  check_aliases(thread, allocation, address, bytes, false);
  machine->read(allocation, address, words, bytes, thread.cta->launch->rank);
  if (!polls) return;
  thread.polls.push_back({address, bytes, {}});
  memcpy(thread.polls.back().value, words, bytes);
}

void emulated_store(const char* primitive, void* address, const void* words, uint32_t bytes, bool release) {
  Thread& thread = enter(primitive, address);
  Allocation& allocation = machine->check(address, bytes, bytes);
  if (release) machine->commit_before(thread);
  machine->store(allocation, address, static_cast<const uint32_t*>(words), bytes);
}

void emulated_store_pairs(void* address, const void* words) {
  enter("store_pairs_relaxed_sys", address);
  machine->store(machine->check(address, 16, 16), address, static_cast<const uint32_t*>(words), 16, true);
}

void emulated_fence_sys() { machine->commit_before(enter("fence_sys")); }

// Visible to all at once, and with it what it releases: more than the scope of the GPU promises.
uint32_t emulated_fetch_add(void* address, uint32_t value) {
  Thread& thread = enter("fetch_add_gpu", address);
  Allocation& allocation = check_counter(thread, address, 4);
  machine->commit_before(thread);
  uint32_t* counter = static_cast<uint32_t*>(address);
  const uint32_t before = *counter;
  *counter += value;
  machine->notify(allocation.key(address));
  machine->progress();
  return before;
}

// Visible to all at once, without what the thread has stored before.
void emulated_add_relaxed(void* address, uint64_t value, uint32_t bytes) {
  Allocation& allocation = check_counter(enter("add_relaxed_gpu", address), address, bytes);
  if (bytes == 8)
    *static_cast<uint64_t*>(address) += value;
  else
    *static_cast<uint32_t*>(address) += uint32_t(value);
  machine->notify(allocation.key(address));
  machine->progress();
}

uint32_t emulated_fetch_add_relaxed(void* address, uint32_t value) {
  Allocation& allocation = check_counter(enter("fetch_add_relaxed_gpu", address), address, 4);
  uint32_t* counter = static_cast<uint32_t*>(address);
  const uint32_t before = *counter;
  *counter += value;
  machine->notify(allocation.key(address));
  machine->progress();
  return before;
}

// --- threads of a CTA ----------------------------------------------------------------------------------------------

void emulated_barrier_sync(uint32_t id, uint32_t threads) {
  Thread& thread = enter("barrier_sync");
  if (id > 15 || threads == 0 || threads % 32 || threads > thread.cta->launch->block)
    fail("barrier %u of %u threads; expected 0..15 and a multiple of 32 up to the block's %u", id, threads,
         thread.cta->launch->block);
  collective("barrier_sync", id, threads, complete_barrier);
}

uint32_t emulated_shuffle_xor(uint32_t value, uint32_t mask) {
  if (mask > 31) fail("shuffle_xor of mask %u, expected 0..31", mask);
  return shuffle("shuffle_xor", value, current->index % 32 ^ mask);
}

uint32_t emulated_first_lanes(uint32_t value) { return shuffle("first_lanes", value, 0); }

void emulated_warp_sync() {
  enter("warp_sync");
  collective("warp_sync", 0, 0, complete_warp_sync);
}

void emulated_grid_dependency_wait() {
  Thread& thread = enter("grid_dependency_wait");
  const Launch* launch = thread.cta->launch;
  while (launch->previous && !launch->previous->ended) machine->park({launch->previous->key()});
}

void emulated_grid_dependency_launch() {
  Cta& cta = *enter("grid_dependency_launch").cta;
  if (!cta.triggered) ++cta.launch->triggered;
  cta.triggered = true;
}

// --- shared memory -------------------------------------------------------------------------------------------------

void* emulated_dynamic_shared() { return current->cta->shared; }

uint32_t emulated_shared_address(const void* pointer) { return check_shared(pointer, 0, 1); }

void emulated_load_shared(void* words, const void* pointer, uint32_t bytes) {
  enter("load_shared", pointer);
  check_shared(pointer, bytes, bytes);
  memcpy(words, pointer, bytes);
}

void emulated_store_shared(void* pointer, const void* words, uint32_t bytes) {
  Thread& thread = enter("store_shared", pointer);
  const uint32_t first = check_shared(pointer, bytes, bytes) / 4;
  memcpy(pointer, words, bytes);
  for (uint32_t i = 0; i < bytes / 4; ++i) thread.cta->shared_words[first + i] = {machine->now, thread.index};
  machine->progress();
}

uint32_t emulated_load_acquire_cta(const void* pointer) {
  Thread& thread = enter("load_acquire_cta", pointer, true);
  const uint32_t offset = check_shared(pointer, 4, 4);
  park_until_changed(thread, pointer);
  uint32_t value;
  memcpy(&value, pointer, 4);
  thread.polls.push_back({pointer, 4, {value}});
  const auto released = thread.cta->released.find(offset);
  if (released != thread.cta->released.end() && released->second != thread.clock) {
    auto merged = std::make_shared<Clock>(*released->second);
    if (thread.clock) merged->join(*thread.clock);
    thread.clock = merged;
  }
  return value;
}

void emulated_store_release_cta(void* pointer, uint32_t value) {
  Thread& thread = enter("store_release_cta", pointer);
  const uint32_t offset = check_shared(pointer, 4, 4);
  memcpy(pointer, &value, 4);
  auto known = thread.clock ? std::make_shared<Clock>(*thread.clock) : std::make_shared<Clock>(thread.cta->threads.size());
  known->note(thread.index, machine->now, thread.fence);
  thread.cta->released[offset] = known;
  machine->notify(thread.cta->key(pointer));
  machine->progress();
}

// The bytes move at once, or not before they are waited for; what is read until then is nothing that was ever there.
static void copy_now(const Thread& thread, const SmallCopy& copy) {
  machine->read(*machine->find(copy.global), copy.global, copy.shared, copy.bytes, thread.cta->launch->rank);
}

void emulated_copy_to_shared(void* shared, const void* global, uint32_t bytes) {
  Thread& thread = enter("copy_to_shared", global);
  check_shared(shared, bytes, bytes);
  machine->check(global, bytes, bytes);
  const SmallCopy copy{static_cast<char*>(shared), static_cast<char*>(const_cast<void*>(global)), bytes};
  if (machine->random.chance(0.5)) return copy_now(thread, copy);
  memset(shared, 0xff, bytes);
  thread.small_copies.back().push_back(copy);
}

void emulated_copies_commit() { enter("copies_commit").small_copies.emplace_back(); }

void emulated_copies_wait(uint32_t pending) {
  Thread& thread = enter("copies_wait");
  while (thread.small_copies.size() > pending + 1) {
    for (const SmallCopy& copy : thread.small_copies.front()) copy_now(thread, copy);
    thread.small_copies.pop_front();
  }
}

void emulated_mbarrier_init(void* barrier, uint32_t arrivals) {
  Thread& thread = enter("mbarrier_init", barrier);
  check_shared(barrier, 8, 8);
  if (arrivals == 0 || arrivals >= 1u << 20) fail("%u arrivals, expected 1..2**20 - 1", arrivals);
  Cta& cta = *thread.cta;
  const uint64_t content = uint64_t(MBARRIER) << 32 | cta.mbarriers.size();
  memcpy(barrier, &content, 8);
  cta.mbarriers.emplace_back(arrivals, thread.index, cta.threads.size());
}

void emulated_mbarrier_init_fence() {
  const Thread& thread = enter("mbarrier_init_fence");
  for (MBarrier& barrier : thread.cta->mbarriers) barrier.fenced |= barrier.owner == thread.index;
}

void emulated_mbarrier_arrive(void* address, uint32_t bytes) {
  Thread& thread = enter(bytes ? "mbarrier_arrive_expect" : "mbarrier_arrive", address);
  check_shared(address, 8, 8);
  MBarrier& barrier = machine->mbarrier(*thread.cta, address);
  if (!barrier.pending) fail("more arrivals than mbarrier_init's %u", barrier.count);
  if (thread.clock && thread.clock != barrier.joined) {
    barrier.clock.join(*thread.clock);
    barrier.joined = thread.clock;
  }
  barrier.clock.note(thread.index, machine->now, thread.fence);
  barrier.bytes += bytes;
  --barrier.pending;
  machine->complete_phase(*thread.cta, barrier, address);
  machine->progress();
}

bool emulated_mbarrier_try_wait(void* address, uint32_t parity) {
  Thread& thread = enter("mbarrier_try_wait", address);
  check_shared(address, 8, 8);
  if ((machine->mbarrier(*thread.cta, address).phase & 1) == parity) {
    machine->park({thread.cta->key(address)});
    if ((machine->mbarrier(*thread.cta, address).phase & 1) == parity) return false;
  }
  MBarrier& barrier = machine->mbarrier(*thread.cta, address);
  if (!barrier.done) return true;
  if (!barrier.wait_out || thread.clock != barrier.wait_in) {
    auto merged = std::make_shared<Clock>(*barrier.done);
    if (thread.clock) merged->join(*thread.clock);
    barrier.wait_in = thread.clock;
    barrier.wait_out = merged;
  }
  thread.clock = barrier.wait_out;
  return true;
}

// --- bulk copies ---------------------------------------------------------------------------------------------------

void emulated_bulk_load(void* shared, const void* global, uint32_t bytes, void* barrier) {
  Thread& thread = enter("bulk_load", global);
  check_bulk(global, shared, bytes);
  check_shared(barrier, 8, 8);
  check_fenced_load(thread, global, bytes);
  Cta& cta = *thread.cta;
  if (!machine->mbarrier(cta, barrier).fenced) fail("its mbarrier has had no mbarrier_init_fence");
  char* source = static_cast<char*>(const_cast<void*>(global));
  push_pieces({&cta, true, static_cast<char*>(shared), source, bytes, thread.index, 0, barrier, {}});
}

void emulated_bulk_store(void* global, const void* shared, uint32_t bytes) {
  Thread& thread = enter("bulk_store", global);
  check_bulk(global, shared, bytes);
  check_ordered_store(thread, shared, bytes);
  thread.groups.back().bytes += bytes;
  thread.groups.back().unread += bytes;
  thread.groups.back().unwritten += bytes;
  char* source = static_cast<char*>(const_cast<void*>(shared));
  const uint32_t group = uint32_t(thread.groups.size() - 1);
  push_pieces({thread.cta, false, source, static_cast<char*>(global), bytes, thread.index, group, nullptr, {}});
}

void emulated_bulk_commit() { enter("bulk_commit").groups.emplace_back(); }

void emulated_bulk_wait(bool read, uint32_t pending) {
  Thread& thread = enter(read ? "bulk_wait_read" : "bulk_wait");
  const size_t committed = thread.groups.size() - 1;
  for (size_t i = 0; i + pending < committed; ++i) {
    while (read ? thread.groups[i].unread : thread.groups[i].unwritten) machine->park({thread.cta->key(thread)});
    thread.waited = std::max(thread.waited, i + 1);
  }
}

void emulated_fence_proxy_async() {
  Thread& thread = enter("fence_proxy_async");
  thread.fence = machine->now;
  for (MBarrier& barrier : thread.cta->mbarriers) barrier.fenced |= barrier.owner == thread.index;
}

void emulated_prefetch_l2(const void* address, uint32_t bytes) {
  Thread& thread = enter("prefetch_l2", address);
  if (bytes == 0 || bytes % 16) fail("%u bytes, expected a multiple of 16", bytes);
  machine->check(address, bytes, 16);
  machine->prefetches.push_back({thread.cta->launch->rank, reinterpret_cast<uint64_t>(address), bytes});
}

// --- Python --------------------------------------------------------------------------------------------------------

Machine* emulator_create(uint32_t world_size, uint64_t seed, uint32_t resident, uint64_t stall_limit) {
  return new Machine(world_size, seed, resident, stall_limit);
}

void emulator_destroy(Machine* m) { delete m; }

uint32_t emulator_params_bytes() { return emulated_params_bytes; }

// False when it overlaps another allocation.
bool emulator_alloc(Machine* m, uint32_t rank, void* base, size_t bytes, bool symmetric, const char* name) {
  char* begin = static_cast<char*>(base);
  auto after = m->allocations.begin();
  while (after != m->allocations.end() && after->base < begin) ++after;
  if (after != m->allocations.end() && begin + bytes > after->base) return false;
  if (after != m->allocations.begin() && (after - 1)->base + (after - 1)->bytes > begin) return false;
  Word* words = static_cast<Word*>(calloc(bytes / 4 + 1, sizeof(Word)));
  m->allocations.insert(after, {begin, bytes, rank, symmetric, name, words, m->next_key});
  m->next_key += (bytes + 127) / 64 * 64;
  return true;
}

// The number of the launch.
uint32_t emulator_launch(Machine* m, uint32_t rank, uint32_t stream, uint32_t grid, uint32_t cluster, uint32_t block,
                         uint32_t shared_bytes, const char* params, bool programmatic) {
  Launch* previous = nullptr;
  uint32_t number = 0;
  for (Launch& launch : m->launches) {
    number += launch.rank == rank;
    if (launch.rank == rank && launch.stream == stream) previous = &launch;
  }
  m->launches.push_back({rank, stream, grid, cluster, block, shared_bytes, number,
                         std::string(params, emulated_params_bytes), programmatic, previous});
  m->open.push_back(&m->launches.back());
  ++m->unfinished;
  return uint32_t(m->launches.size() - 1);
}

// False when the memory is not within an allocation.
bool emulator_behind(Machine* m, uint32_t launch, char* address, char* values, uint32_t bytes, bool writes) {
  const Allocation* allocation = m->find(address);
  if (!allocation || address + bytes > allocation->base + allocation->bytes) return false;
  m->launches[launch].behind.push_back({address, values, bytes, writes});
  return true;
}

// How many prefetches there were, and which, as far as there is room for them.
uint32_t emulator_prefetches(const Machine* m, Prefetch* found, uint32_t room) {
  std::copy_n(m->prefetches.begin(), std::min<size_t>(room, m->prefetches.size()), found);
  return uint32_t(m->prefetches.size());
}

// Thread switches made, or -1 after an error.
int64_t emulator_run(Machine* m) {
  machine = m;
  const uint64_t before = m->switches;
  try {
    m->run();
  } catch (const Failure&) {
    return -1;
  }
  return int64_t(m->switches - before);
}

const char* emulator_error(Machine* m) { return m->error.c_str(); }

}  // extern "C"
