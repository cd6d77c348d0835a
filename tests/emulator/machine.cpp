#include "machine.h"

extern "C" {
struct Index {
  uint32_t x;
} threadIdx, blockIdx, blockDim, gridDim;
void emulated_entry(const void* params);  // the kernel
}

Machine* machine;
Thread* current;
static Context scheduler;
static Stacks stacks;
static const std::initializer_list<double> LINK_SPEEDS = {1, 1, 0.1, 0.002};

static std::string format_list(const char* format, va_list arguments) {
  char* line = nullptr;
  if (vasprintf(&line, format, arguments) < 0) throw std::bad_alloc();
  std::string result = line;
  free(line);
  return result;
}

std::string text(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string result = format_list(format, arguments);
  va_end(arguments);
  return result;
}

void yield() { switch_context(current->context, scheduler); }

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  machine->error = format_list(format, arguments);
  va_end(arguments);
  if (!current) throw Failure();
  const Cta& cta = *current->cta;
  machine->error = text("%s: rank %u, launch %u, CTA %u, thread %u: ", current->primitive, cta.launch->rank,
                        cta.launch->number, cta.index, current->index) +
                   machine->error;
  yield();
  __builtin_unreachable();
}

static void thread_main() {
  Thread& thread = *current;
  emulated_entry(thread.cta->launch->params.data());
  thread.primitive = "its end";
  Warp& warp = *thread.warp;
  if (warp.arrived) fail("ended while other lanes of its warp wait in %s", warp.collective);
  for (size_t i = thread.waited; i < thread.groups.size(); ++i)
    if (thread.groups[i].bytes) fail("ended without bulk_wait or bulk_wait_read of its last bulk stores");
  if (!warp.matmuls.empty()) fail("ended without wgmma_wait of its last matmuls");
  if (Stacks::overflowed(thread.stack)) fail("needed more than %zu bytes of stack", Stacks::BYTES);
  warp.ended |= 1u << thread.index % 32;
  thread.done = true;
  machine->block(thread);
  yield();
}

Machine::Machine(uint32_t world_size, uint64_t seed, uint32_t resident, uint64_t stall_limit)
    : world_size(world_size), resident(resident), stall_limit(stall_limit), random{(seed + 1) * 0x9e3779b97f4a7c15ull},
      runnable(world_size), running(world_size), paused_until(world_size) {
  for (int i = 0; i < 8; ++i) random.next();
  // Rates differ a lot between seeds: some mistakes show only when stores are late and copies early, others not so.
  preempt = random.one_of({0.25, 0.03, 0.004});
  drain = random.one_of({0.02, 0.3, 4, 32});
  copy = random.one_of({0.01, 0.1, 1, 8});
  start = random.one_of({0.01, 0.1, 1});
  pause = random.one_of({0, 0.0005, 0.01});
  pause_steps = uint32_t(random.one_of({100, 3000, 100000}));
  burst = random.one_of({0, 0.5, 0.95});
  for (uint32_t i = 0; i < world_size * world_size; ++i) links.push_back(random.one_of(LINK_SPEEDS));
}

Machine::~Machine() {
  for (Allocation& allocation : allocations) free(allocation.words);
  for (Cta& cta : ctas) {
    free(cta.shared);
    for (Thread& thread : cta.threads)
      if (thread.stack) stacks.give(thread.stack);
  }
}

// --- memory --------------------------------------------------------------------------------------------------------

Allocation* Machine::find(const void* address) {
  auto after = std::upper_bound(allocations.begin(), allocations.end(), address,
                                [](const void* a, const Allocation& b) { return a < b.base; });
  if (after == allocations.begin()) return nullptr;
  Allocation& allocation = *--after;
  return address < allocation.base + allocation.bytes ? &allocation : nullptr;
}

std::string Machine::describe(const Cta& cta, const void* address) {
  const size_t offset = static_cast<const char*>(address) - cta.shared;
  if (cta.shared && offset < cta.launch->shared_bytes) return text("shared memory + 0x%zx", offset);
  const Allocation* a = find(address);
  if (!a) {
    auto after = std::find_if(allocations.begin(), allocations.end(),
                              [&](const Allocation& b) { return b.base > address; });
    if (after == allocations.begin()) return text("address %p", address);
    a = &*--after;
  }
  return text("rank %u '%s' + 0x%zx", a->rank, a->name.c_str(), static_cast<const char*>(address) - a->base);
}

// The allocation of [address, address + bytes), after checking that the current thread may access that.
Allocation& Machine::check(const void* address, uint32_t bytes, uint32_t alignment) {
  Allocation* allocation = find(address);
  if (!allocation) fail("%u bytes at %s, which is in no allocation", bytes, describe(*current->cta, address).c_str());
  if (reinterpret_cast<uintptr_t>(address) % alignment)
    fail("%s is not a multiple of %u", describe(*current->cta, address).c_str(), alignment);
  if (static_cast<const char*>(address) + bytes > allocation->base + allocation->bytes)
    fail("%u bytes at %s go past its %zu bytes", bytes, describe(*current->cta, address).c_str(), allocation->bytes);
  if (!allocation->symmetric && allocation->rank != current->cta->launch->rank)
    fail("%s is private to its rank", describe(*current->cta, address).c_str());
  return *allocation;
}

void Machine::read(Allocation& allocation, const void* address, void* words, uint32_t bytes, uint32_t rank) {
  memcpy(words, address, bytes);
  const Word* word = allocation.words + (static_cast<const char*>(address) - allocation.base) / 4;
  for (uint32_t i = 0; i < bytes / 4; ++i)
    for (uint32_t id = word[i].pending; id; id = stores[id].next)
      if (stores[id].rank == rank) static_cast<uint32_t*>(words)[i] = stores[id].value;
}

// An ordinary store of the current thread.
void Machine::store(Allocation& allocation, void* address, const uint32_t* words, uint32_t bytes, bool in_pairs) {
  Cta& cta = *current->cta;
  const uint64_t key = allocation.key(address);
  Word* word = allocation.words + (static_cast<char*>(address) - allocation.base) / 4;
  for (uint32_t i = 0; i < bytes / 4; ++i, ++word) {
    commit_own(*word, cta.launch->rank);
    if (free_stores.empty()) {
      free_stores.push_back(uint32_t(stores.size()));
      stores.emplace_back();
    }
    const uint32_t id = free_stores.back();
    free_stores.pop_back();
    stores[id] = {static_cast<uint32_t*>(address) + i, word, &cta, key, words[i], cta.launch->rank, allocation.rank,
                  current->index, now, uint32_t(cta.pending.size()), word->pending, 0};
    if (in_pairs && i % 2) {
      const uint32_t before = cta.pending.back();
      stores[before].pair = id;
      stores[id].pair = before;
    }
    word->pending = id;
    word->writer = cta.serial * 1024 + current->index;
    word->written = now;
    word->copier = 0;
    word->multicast = false;
    cta.pending.push_back(id);
    ++pending;
  }
  if (!cta.dirty) dirty.push_back(&cta);
  cta.dirty = true;
  notify(key);
  progress();
}

void Machine::commit(uint32_t id) {
  PendingStore& store = stores[id];
  *store.address = store.value;
  uint32_t* link = &store.word->pending;
  while (*link != id) link = &stores[*link].next;
  *link = store.next;
  std::vector<uint32_t>& list = store.cta->pending;
  stores[list.back()].position = store.position;
  list[store.position] = list.back();
  list.pop_back();
  free_stores.push_back(id);
  --pending;
  notify(store.key);
  progress();
  if (const uint32_t pair = store.pair) {
    stores[pair].pair = 0;
    commit(pair);
  }
}

// Stores of a rank to one word stay in order.
void Machine::commit_own(Word& word, uint32_t rank) {
  for (uint32_t id = word.pending; id; id = stores[id].next)
    if (stores[id].rank == rank) return commit(id);
}

// What a release of `thread` makes visible.
void Machine::commit_before(Thread& thread) {
  const std::vector<uint32_t>& list = thread.cta->pending;
  for (size_t i = list.size(); i-- > 0;) {
    if (i >= list.size()) continue;  // went with its pair
    const PendingStore& store = stores[list[i]];
    if (store.stamp <= thread.known(store.thread, now).access) commit(list[i]);
  }
}

void Machine::drain_one() {
  if (random.chance(0.002)) links[random.below(uint32_t(links.size()))] = random.one_of(LINK_SPEEDS);
  while (pending) {
    const uint32_t i = random.below(uint32_t(dirty.size()));
    Cta& cta = *dirty[i];
    if (!cta.pending.empty()) {
      const uint32_t id = cta.pending[random.below(uint32_t(cta.pending.size()))];
      if (random.chance(links[stores[id].rank * world_size + stores[id].home])) commit(id);
      return;
    }
    cta.dirty = false;
    dirty[i] = dirty.back();
    dirty.pop_back();
  }
}

void Machine::copy_step(uint32_t index) {
  Copy piece = std::move(copies[index]);
  if (index + 1 < copies.size()) copies[index] = std::move(copies.back());
  copies.pop_back();
  Cta& cta = *piece.cta;
  if (!piece.word.empty()) {
    memcpy(piece.shared, piece.word.data(), 4);
    cta.shared_words[(piece.shared - cta.shared) / 4] = SharedWord();
    --cta.in_flight;
    mbarrier(cta, piece.barrier).bytes -= 4;
    complete_phase(cta, mbarrier(cta, piece.barrier), piece.barrier);
    return progress();
  }
  if (!piece.bytes) {
    --cta.in_flight;
    return arrive(cta, piece.barrier);
  }
  Allocation& allocation = *find(piece.global);
  const uint32_t words = piece.bytes / 4;
  progress();
  if (piece.load) {
    if (piece.tile.kind)
      read_rows(piece);
    else
      read(allocation, piece.global, piece.shared, piece.bytes, cta.launch->rank);
    std::fill_n(cta.shared_words.begin() + (piece.shared - cta.shared) / 4, words, SharedWord());
    --cta.in_flight;
    mbarrier(cta, piece.barrier).bytes -= piece.bytes;
    complete_phase(cta, mbarrier(cta, piece.barrier), piece.barrier);
    return;
  }
  Thread& thread = cta.threads[piece.thread];
  if (piece.buffer.empty()) {
    const uint32_t* from = reinterpret_cast<uint32_t*>(piece.shared);
    piece.buffer.assign(from, from + words);
    --cta.in_flight;
    thread.groups[piece.group].unread -= piece.bytes;
    copies.push_back(std::move(piece));
  } else {
    Word* word = allocation.words + (piece.global - allocation.base) / 4;
    for (uint32_t i = 0; i < words; ++i) {
      commit_own(word[i], cta.launch->rank);
      word[i].writer = 0;
      word[i].written = now;
      word[i].copier = cta.serial;
      reinterpret_cast<uint32_t*>(piece.global)[i] = piece.buffer[i];
      if (i % 16 == 0 || i + 1 == words) notify(allocation.key(piece.global + 4 * i));
    }
    thread.groups[piece.group].unwritten -= piece.bytes;
  }
  notify(cta.key(thread));
}

// --- threads -------------------------------------------------------------------------------------------------------

void Machine::wake(Thread& thread) {
  Warp& warp = *thread.warp;
  std::vector<Warp*>& list = runnable[thread.cta->launch->rank];
  if (!warp.runnable) {
    warp.position = uint32_t(list.size());
    list.push_back(&warp);
  }
  warp.runnable |= 1u << thread.index % 32;
}

void Machine::block(Thread& thread) {
  Warp& warp = *thread.warp;
  std::vector<Warp*>& list = runnable[thread.cta->launch->rank];
  warp.runnable &= ~(1u << thread.index % 32);
  if (!warp.runnable) {
    list[warp.position] = list.back();
    list[warp.position]->position = warp.position;
    list.pop_back();
  }
}

void Machine::notify(uint64_t key) {
  std::vector<Thread*>& list = parked[bucket(key)];
  for (Thread* thread : list) wake(*thread);
  list.clear();
}

// The current thread sleeps until something happens to one of `keys`, or, like a wait with a time limit, for no reason.
// Keys are no addresses, which would make runs differ.
void Machine::park(const uint64_t* keys, size_t count) {
  Thread* const thread = current;
  for (size_t i = 0; i < count; ++i) parked[bucket(keys[i])].push_back(thread);
  block(*thread);
  yield();
  for (size_t i = 0; count > 1 && i < count; ++i) {
    std::vector<Thread*>& list = parked[bucket(keys[i])];
    list.erase(std::remove(list.begin(), list.end(), thread), list.end());
  }
}

bool Machine::wake_parked() {
  bool any = false;
  for (std::vector<Thread*>& list : parked) {
    any |= !list.empty();
    for (Thread* thread : list) wake(*thread);
    list.clear();
  }
  return any;
}

MBarrier& Machine::mbarrier(Cta& cta, void* address) {
  uint64_t content;
  memcpy(&content, address, 8);
  if (content >> 32 != MBARRIER || uint32_t(content) >= cta.mbarriers.size())
    fail("no initialised mbarrier at %s", describe(cta, address).c_str());
  return cta.mbarriers[uint32_t(content)];
}

// Without a clock: it publishes nothing.
void Machine::arrive(Cta& cta, void* address) {
  MBarrier& barrier = mbarrier(cta, address);
  if (!barrier.pending)
    fail("more arrivals than mbarrier_init's %u at %s of CTA %u", barrier.count, describe(cta, address).c_str(), cta.index);
  --barrier.pending;
  complete_phase(cta, barrier, address);
  progress();
}

void Machine::complete_phase(const Cta& cta, MBarrier& barrier, void* address) {
  if (barrier.pending || barrier.bytes) return;
  ++barrier.phase;
  barrier.pending = barrier.count;
  barrier.done = std::make_shared<Clock>(barrier.clock);
  barrier.wait_out = nullptr;
  notify(cta.key(address));
  progress();
}

// Whether `launch` and all before it on its stream have ended; forgets those.
static bool settled(Launch* launch) {
  if (!launch) return true;
  if (!launch->ended || !settled(launch->previous)) return false;
  launch->previous = nullptr;
  return true;
}

bool Machine::start_cta() {
  std::vector<size_t> candidates;
  for (size_t i = 0; i < open.size(); ++i) {
    const Launch& launch = *open[i];
    const Launch* before = launch.previous;
    const bool may = settled(launch.previous) || (launch.programmatic && before->triggered == before->grid);
    if (may && running[launch.rank] + launch.cluster <= resident) candidates.push_back(i);
  }
  if (candidates.empty()) return false;
  const size_t chosen = candidates[random.below(uint32_t(candidates.size()))];
  Launch& launch = *open[chosen];
  for (uint32_t i = 0; i < launch.cluster; ++i) start_cta(launch);
  if (launch.started == launch.grid) open.erase(open.begin() + chosen);
  progress();
  return true;
}

void Machine::start_cta(Launch& launch) {
  ctas.emplace_back();
  Cta& cta = ctas.back();
  cta.launch = &launch;
  cta.index = launch.started++;
  cta.serial = uint32_t(ctas.size());
  cta.running = launch.block;
  ++running[launch.rank];
  const size_t shared_bytes = (launch.shared_bytes + 1024) / 1024 * 1024;
  cta.shared = static_cast<char*>(aligned_alloc(1024, shared_bytes));
  memset(cta.shared, 0xff, shared_bytes);  // NaN in every format
  cta.shared_words.resize(shared_bytes / 4);
  cta.threads = std::vector<Thread>(launch.block);
  cta.warps = std::vector<Warp>(launch.block / 32);
  for (uint32_t i = 0; i < launch.block; ++i) {
    Thread& thread = cta.threads[i];
    thread.cta = &cta;
    thread.warp = &cta.warps[i / 32];
    thread.warp->cta = &cta;
    thread.index = i;
    thread.stack = stacks.take();
    prepare_context(thread.context, thread.stack, Stacks::BYTES, thread_main);
    wake(thread);
  }
}

void Machine::end_cta(Cta& cta) {
  Launch& launch = *cta.launch;
  if (cta.in_flight)
    fail("rank %u, launch %u, CTA %u ended while bulk loads still write its shared memory, or others arrive there",
         launch.rank, launch.number, cta.index);
  for (const Thread& thread : cta.threads)
    for (const std::vector<SmallCopy>& group : thread.small_copies)
      if (!group.empty())
        fail("rank %u, launch %u, CTA %u, thread %u ended with copies to shared memory that it has not waited for",
             launch.rank, launch.number, cta.index, thread.index);
  free(cta.shared);
  cta.shared = nullptr;
  cta.shared_words = {};
  cta.mbarriers = {};
  for (Thread& thread : cta.threads) {
    stacks.give(thread.stack);
    thread.stack = nullptr;
  }
  --running[launch.rank];
  if (!cta.triggered) ++launch.triggered;
  if (++launch.ended_ctas == launch.grid) end_launch(launch);
  progress();
}

// All its memory traffic has happened.
void Machine::end_launch(Launch& launch) {
  for (uint32_t i = 0; i < copies.size();) {
    if (copies[i].cta->launch == &launch)
      copy_step(i);
    else
      ++i;
  }
  for (Cta& cta : ctas) {
    if (cta.launch != &launch) continue;
    while (!cta.pending.empty()) commit(cta.pending.back());
    cta.threads = {};
    cta.warps = {};
  }
  for (const Access& access : launch.behind) {
    Allocation& allocation = *find(access.address);
    if (access.writes) {
      memcpy(access.address, access.values, access.bytes);
      Word* words = allocation.words + (access.address - allocation.base) / 4;
      for (uint32_t i = 0; i < access.bytes / 4; ++i) words[i].writer = words[i].copier = 0;
    } else {
      read(allocation, access.address, access.values, access.bytes, launch.rank);
    }
  }
  launch.ended = true;
  launch.params = {};
  last_warp = nullptr;
  --unfinished;
  notify(launch.key());
}

void Machine::resume(Thread& thread) {
  const Cta& cta = *thread.cta;
  threadIdx = {thread.index};
  blockIdx = {cta.index};
  blockDim = {cta.launch->block};
  gridDim = {cta.launch->grid};
  ++stall;
  ++switches;
  current = &thread;
  switch_context(scheduler, thread.context);
  current = nullptr;
  if (!error.empty()) throw Failure();
}

// --- the scheduler -------------------------------------------------------------------------------------------------

// One thing that no thread does: a store becomes visible, a piece is copied, a CTA starts.
bool Machine::event() {
  for (uint32_t kind = random.below(3), tries = 0; tries < 3; ++tries, kind = (kind + 1) % 3) {
    if (kind == 0 && pending) {
      drain_one();
      return true;
    }
    if (kind == 1 && !copies.empty()) {
      copy_step(random.below(uint32_t(copies.size())));
      return true;
    }
    if (kind == 2 && start_cta()) return true;
  }
  return false;
}

void Machine::background() {
  if (!open.empty() && random.chance(start)) start_cta();
  for (uint32_t n = times(drain); n > 0 && pending; --n) drain_one();
  for (uint32_t n = times(copy); n > 0 && !copies.empty(); --n) copy_step(random.below(uint32_t(copies.size())));
  if (random.chance(pause)) paused_until[random.below(world_size)] = step + random.below(pause_steps);
}

Warp* Machine::pick() {
  if (last_warp && last_warp->runnable && random.chance(burst)) return last_warp;
  uint32_t awake = 0;
  for (uint32_t rank = 0; rank < world_size; ++rank) awake += !runnable[rank].empty() && paused_until[rank] <= step;
  if (!awake) return nullptr;
  uint32_t skip = random.below(awake), rank = 0;
  for (;; ++rank)
    if (!runnable[rank].empty() && paused_until[rank] <= step && skip-- == 0) break;
  return runnable[rank][random.below(uint32_t(runnable[rank].size()))];
}

// Each lane that can runs until it gives way.
void Machine::run_warp(Warp& warp) {
  Cta& cta = *warp.cta;
  uint32_t lanes = warp.runnable & (random.chance(0.1) ? random.next() : ~0u);
  if (!lanes) lanes = warp.runnable;
  const uint32_t first = random.below(32);
  for (uint32_t i = 0; i < 32; ++i) {
    const uint32_t lane = (first + i) % 32;
    if (!(lanes & warp.runnable & 1u << lane)) continue;
    Thread& thread = cta.threads[(&warp - cta.warps.data()) * 32 + lane];
    resume(thread);
    if (thread.done && --cta.running == 0) return end_cta(cta);
  }
}

std::string Machine::waiting() {
  std::string report;
  for (const Cta& cta : ctas) {
    std::map<std::string, std::pair<uint32_t, const Thread*>> places;
    for (const Thread& thread : cta.threads) {
      if (thread.done) continue;
      const Warp& warp = *thread.warp;
      std::string place = thread.primitive;
      if (warp.arrived >> thread.index % 32 & 1 && warp.threads)
        place += text("(%u, %u)", warp.id, warp.threads);
      auto& [count, first] = places[place];
      if (!count++) first = &thread;
    }
    for (const auto& [place, found] : places) {
      const auto& [count, first] = found;
      report += text("\n  rank %u, launch %u, CTA %u: %u threads in %s, thread %u", cta.launch->rank,
                     cta.launch->number, cta.index, count, place.c_str(), first->index);
      if (first->at) report += " at " + describe(cta, first->at);
    }
  }
  for (const Launch* launch : open)
    report += text("\n  rank %u, launch %u: %u of %u CTAs have not started", launch->rank, launch->number,
                   launch->grid - launch->started, launch->grid);
  return report;
}

void Machine::run() {
  while (unfinished) {
    ++step;
    background();
    if (stall > stall_limit / 2) {  // nothing is left to chance before it is called a deadlock
      std::fill(paused_until.begin(), paused_until.end(), 0);
      event();
    }
    if (stall > 4096 && step % 4096 == 0) wake_parked();
    if (stall > stall_limit) fail("deadlock: no progress in %zu steps%s", size_t(stall), waiting().c_str());
    if (Warp* warp = pick()) {
      last_warp = warp;
      run_warp(*warp);
    } else if (!event()) {
      const bool paused = *std::max_element(paused_until.begin(), paused_until.end()) > step;
      std::fill(paused_until.begin(), paused_until.end(), 0);
      if (!paused && !wake_parked()) fail("deadlock: every thread waits%s", waiting().c_str());
    }
  }
}
