// What the primitives share: driver.cpp has them.
#pragma once
#include "machine.h"

// Every primitive begins here: now and then another thread runs first.
Thread& enter(const char* primitive, const void* at = nullptr, bool polls = false);
// Offset of [pointer, pointer + bytes) in the CTA's shared memory.
uint32_t check_shared(const void* pointer, uint32_t bytes, uint32_t alignment);
// Words that an ordinary store of a running launch wrote need a proxy fence of the writer or of this side since.
void check_fenced_load(const Thread& thread, const void* global, uint32_t bytes);
// Words that were written to a multicast address and are read at another one, or the other way round, need an alias fence of
// the writer or of this side since.
void check_aliases(const Thread& thread, const Allocation& allocation, const void* global, uint32_t bytes, bool multicast);
// All that any of `warps` knows, all of them know from now on; wakes them.
void synchronise(Cta& cta, const std::vector<Warp*>& warps);
// Waits for the other lanes of the warp; the last one calls `complete`, which wakes them.
void collective(const char* name, uint32_t id, uint32_t threads, void (*complete)(Warp&));
Thread* lanes_of(const Warp& warp);
void wake_lanes(Warp& warp);
