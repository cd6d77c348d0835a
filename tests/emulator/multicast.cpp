// Multicast addresses: each stands for the same offset of a buffer of every rank.

#include "driver.h"

void check_aliases(
    const Thread& thread, const Allocation& allocation, const void* global, uint32_t bytes, bool multicast) {
  const Word* words = allocation.words + (static_cast<const char*>(global) - allocation.base) / 4;
  for (uint32_t i = 0; i < bytes / 4; ++i) {
    const Word& word = words[i];
    if (!word.writer || word.multicast == multicast || thread.alias_fence > word.written) continue;
    const Cta& writer = machine->ctas[word.writer / 1024 - 1];
    if (writer.launch->ended || writer.threads[word.writer % 1024].alias_fence > word.written) continue;
    fail("reads %s, which rank %u, CTA %u, thread %u wrote through another address with no fence_proxy_alias since",
         machine->describe(*thread.cta, static_cast<const char*>(global) + 4 * i).c_str(), writer.launch->rank,
         writer.index, word.writer % 1024);
  }
}

// Where the 16 bytes at a multicast address lie in the memory of `rank`.
static char* part_of(const void* address, uint32_t rank) {
  if (reinterpret_cast<uintptr_t>(address) % 16) fail("multicast address %p is not a multiple of 16", address);
  for (const Multicast& multicast : machine->multicasts) {
    const ptrdiff_t offset = static_cast<const char*>(address) - multicast.base;
    if (0 <= offset && offset + 16 <= ptrdiff_t(multicast.bytes)) return multicast.parts[rank] + offset;
  }
  fail("16 bytes at %p, which is no multicast address", address);
}

extern "C" {

uint32_t emulated_world_size() { return machine->world_size; }

void emulated_multicast_load(void* words, const void* address, uint32_t rank) {
  Thread& thread = enter("load_multicast_sum", address);
  const char* part = part_of(address, rank);
  Allocation& allocation = machine->check(part, 16, 16);
  check_aliases(thread, allocation, part, 16, true);
  machine->read(allocation, part, words, 16, thread.cta->launch->rank);
}

void emulated_multicast_store(void* address, const void* words) {
  for (uint32_t rank = 0; rank < machine->world_size; ++rank) {
    enter("store_multicast", address);
    char* part = part_of(address, rank);
    Allocation& allocation = machine->check(part, 16, 16);
    machine->store(allocation, part, static_cast<const uint32_t*>(words), 16);
    for (uint32_t i = 0; i < 4; ++i) allocation.words[(part - allocation.base) / 4 + i].multicast = true;
  }
}

void emulated_fence_proxy_alias() {
  Thread& thread = enter("fence_proxy_alias");
  thread.alias_fence = machine->now;
}

void emulator_multicast(Machine* m, char* base, size_t bytes, char** parts) {
  m->multicasts.push_back({base, bytes, std::vector<char*>(parts, parts + m->world_size)});
}

}  // extern "C"
