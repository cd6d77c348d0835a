// The primitives of wgmma.cuh: clusters, copies of tiles, matmuls of a warpgroup.

#include "driver.h"

// 16-byte chunks of shared memory trade places within their 128 bytes, by the number of these 128 bytes.
static uint32_t swizzled(uint32_t offset) { return offset ^ (offset >> 7 & 7) << 4; }

// The CTA `rank` of the cluster, which must still be there.
static Cta& cta_at(const Cta& cta, uint32_t rank) {
  if (rank >= cta.launch->cluster) fail("CTA %u of a cluster of %u", rank, cta.launch->cluster);
  Cta& found = machine->ctas[cta.serial - 1 - cta.cluster_rank() + rank];
  if (!found.shared) fail("CTA %u of the cluster has ended", rank);
  return found;
}

// Rows of a tile to shared memory, swizzled; zeros where there is no tensor.
void Machine::read_rows(const Copy& piece) {
  const TileMap& tile = piece.tile;
  Allocation& allocation = *find(tile.base);
  const uint32_t row_bytes = uint32_t(tile.box_columns) * 2;
  for (uint32_t done = 0; done < piece.bytes; done += 16) {
    const int64_t row = piece.row + int64_t(done / row_bytes), column = piece.column + int64_t(done % row_bytes / 2);
    const bool inside = row >= 0 && row < int64_t(tile.rows) && column >= 0 && column < int64_t(tile.columns);
    uint32_t words[4] = {};
    if (inside) read(allocation, tile.base + row * tile.row_bytes + column * 2, words, 16, piece.cta->launch->rank);
    memcpy(piece.cta->shared + swizzled(uint32_t(piece.shared + done - piece.cta->shared)), words, 16);
  }
}

// It is a release: arrivals from before it have arrived.
static void complete_cluster_sync(Warp& warp) {
  const Cta& cta = *warp.cta;
  const uint32_t first = cta.serial - cta.cluster_rank();
  std::vector<Warp*>& warps = cta_at(cta, 0).cluster_warps;
  warps.push_back(&warp);
  if (warps.size() * 32 < cta.launch->cluster * cta.launch->block) return;
  for (uint32_t i = uint32_t(machine->copies.size()); i-- > 0;) {
    const Copy& copy = machine->copies[i];
    const bool arrival = !copy.bytes && copy.word.empty();
    if (arrival && copy.cta->serial - first < cta.launch->cluster) machine->copy_step(i);
  }
  for (uint32_t rank = 0; rank < cta.launch->cluster; ++rank) {
    Cta& one = cta_at(cta, rank);
    std::vector<Warp*> own;
    for (Warp& each : one.warps) own.push_back(&each);
    synchronise(one, own);
    one.cluster_synced = machine->now;
  }
  warps.clear();
}

// An operand's 8 elements from `chunk` * 8 on of a row, where a descriptor says that they are.
static void read_operand(const Cta& cta, uint64_t descriptor, uint32_t row, uint32_t chunk, float* elements) {
  const uint32_t eight_rows = (descriptor >> 32 & 0x3fff) << 4, start = (descriptor & 0x3fff) << 4;
  const uint32_t offset = swizzled(start + row / 8 * eight_rows + row % 8 * 128 + chunk * 16);
  if (offset + 16 > cta.launch->shared_bytes)
    fail("reads shared memory + 0x%x, of which there are %u bytes", offset, cta.launch->shared_bytes);
  for (uint32_t i = 0; i < 4; ++i)
    if (cta.shared_words[offset / 4 + i].written)
      fail("reads shared memory + 0x%x, which an ordinary store wrote: not modelled", offset);
  uint32_t words[4];
  memcpy(words, cta.shared + offset, 16);
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t pair[2] = {words[i] << 16, words[i] & 0xffff0000u};
    memcpy(elements + 2 * i, pair, 8);
  }
}

// 16 of the 64 rows.
static void multiply(const Warp& warp, const Matmul& matmul) {
  static float a[16][16], b[16][256], sums[256];  // too much for a thread's stack
  const Cta& cta = *warp.cta;
  const uint32_t first_row = uint32_t(&warp - cta.warps.data()) % 4 * 16;
  for (uint32_t chunk = 0; chunk < 2; ++chunk) {
    for (uint32_t row = 0; row < 16; ++row) read_operand(cta, matmul.a, first_row + row, chunk, a[row] + 8 * chunk);
    for (uint32_t column = 0; column < matmul.columns; ++column) {
      float elements[8];
      read_operand(cta, matmul.b, column, chunk, elements);
      for (uint32_t k = 0; k < 8; ++k) b[8 * chunk + k][column] = elements[k];
    }
  }
  for (uint32_t row = 0; row < 16; ++row) {
    std::fill_n(sums, matmul.columns, 0.0f);
    for (uint32_t k = 0; k < 16; ++k)
      for (uint32_t column = 0; column < matmul.columns; ++column) sums[column] += a[row][k] * b[k][column];
    for (uint32_t column = 0; column < matmul.columns; ++column) {
      float& d = matmul.d[row % 8 * 4 + column % 8 / 2][column / 8 * 4 + row / 8 * 2 + column % 2];
      d = matmul.keep ? d + sums[column] : sums[column];
    }
  }
}

// In order, those of which `groups` groups were committed later.
static void multiply_before(Warp& warp, uint32_t groups) {
  while (!warp.matmuls.empty() && warp.matmuls.front().group < groups) {
    multiply(warp, warp.matmuls.front());
    warp.matmuls.pop_front();
  }
}

static void complete_wgmma(Warp& warp) {
  warp.matmul.group = warp.matmul_groups;
  warp.matmuls.push_back(warp.matmul);
  if (machine->eager < 0) machine->eager = machine->random.one_of({0, 0.1, 1});
  if (machine->random.chance(machine->eager)) multiply_before(warp, ~0u);
  wake_lanes(warp);
}

static void complete_wgmma_commit(Warp& warp) {
  ++warp.matmul_groups;
  wake_lanes(warp);
}

static void complete_wgmma_wait(Warp& warp) {
  if (warp.matmul_groups > warp.id) multiply_before(warp, warp.matmul_groups - warp.id);
  if (warp.id == 0) warp.matmul_fence = 0;
  wake_lanes(warp);
}

extern "C" {

// --- clusters ------------------------------------------------------------------------------------------------------

uint32_t emulated_cluster_rank() { return current->cta->cluster_rank(); }

void emulated_cluster_sync() {
  enter("cluster_sync");
  collective("cluster_sync", 0, 0, complete_cluster_sync);
}

void emulated_mbarrier_arrive_at(void* pointer, uint32_t rank) {
  const Thread& thread = enter("mbarrier_arrive_at", pointer);
  Cta& there = cta_at(*thread.cta, rank);
  void* address = there.shared + check_shared(pointer, 8, 8);
  machine->mbarrier(there, address);
  if (&there == thread.cta) return machine->arrive(there, address);
  machine->copies.push_back({&there, true, there.shared, nullptr, 0, thread.index, 0, address, {}});
  ++there.in_flight;
  machine->progress();
}

void emulated_store_to_cta(uint32_t rank, void* pointer, uint32_t word, void* barrier) {
  const Thread& thread = enter("store_to_cta", pointer);
  Cta& there = cta_at(*thread.cta, rank);
  void* counter = there.shared + check_shared(barrier, 8, 8);
  machine->mbarrier(there, counter);
  machine->copies.push_back(
      {&there, true, there.shared + check_shared(pointer, 4, 4), nullptr, 0, thread.index, 0, counter, {}});
  machine->copies.back().word = {word};
  ++there.in_flight;
  machine->progress();
}

void emulated_load_from_cta(void* words, uint32_t rank, const void* pointer) {
  const Thread& thread = enter("load_from_cta", pointer);
  const Cta& there = cta_at(*thread.cta, rank);
  const uint32_t offset = check_shared(pointer, 16, 16);
  for (uint32_t i = 0; i < 4; ++i)
    if (there.shared_words[offset / 4 + i].written > there.cluster_synced)
      fail("reads shared memory + 0x%x of CTA %u, which was written with no cluster_sync since", offset, rank);
  memcpy(words, there.shared + offset, 16);
}

// --- copies of tiles -----------------------------------------------------------------------------------------------

void emulated_load_tile(const char* primitive, uint32_t ranks, void* shared, const void* map, int32_t column,
                        int32_t row, void* barrier) {
  const Thread& thread = enter(primitive, shared);
  TileMap tile;
  memcpy(&tile, map, sizeof tile);
  if (tile.kind != TILE_MAP) fail("its tensor map is none");
  if (tile.box_columns != 64 || tile.columns % 8 || column % 8)
    fail("columns %d.. of %zu, %zu of them: expected 64 of multiples of 8", column, size_t(tile.columns),
         size_t(tile.box_columns));
  const uint32_t row_bytes = uint32_t(tile.box_columns) * 2, bytes = uint32_t(tile.box_rows) * row_bytes;
  const uint32_t offset = check_shared(shared, bytes, 128), barrier_offset = check_shared(barrier, 8, 8);
  const int64_t first_column = std::max(column, 0), end = std::min(int64_t(column) + 64, int64_t(tile.columns));
  for (uint32_t i = 0; i < tile.box_rows; ++i) {
    const int64_t at = int64_t(row) + i;
    if (at < 0 || at >= int64_t(tile.rows) || first_column >= end) continue;
    const char* begin = tile.base + at * tile.row_bytes + first_column * 2;
    machine->check(begin, uint32_t(end - first_column) * 2, 16);
    check_fenced_load(thread, begin, uint32_t(end - first_column) * 2);
  }
  if (ranks == 0) fail("to none of the cluster's CTAs");
  for (uint32_t rank = 0; ranks >> rank; ++rank) {
    if (!(ranks >> rank & 1)) continue;
    Cta& there = cta_at(*thread.cta, rank);
    char* there_barrier = there.shared + barrier_offset;
    if (!machine->mbarrier(there, there_barrier).fenced)
      fail("its mbarrier in CTA %u of the cluster has had no mbarrier_init_fence", rank);
    for (uint32_t done = 0; done < tile.box_rows;) {
      const uint32_t left = uint32_t(tile.box_rows) - done;
      const uint32_t rows = machine->random.chance(0.3) ? left : 1 + machine->random.below(left);
      machine->copies.push_back({&there, true, there.shared + offset + done * row_bytes, tile.base, rows * row_bytes,
                                 thread.index, 0, there_barrier, {}, tile, column, row + int32_t(done)});
      ++there.in_flight;
      done += rows;
    }
  }
  machine->progress();
}

// --- matmuls of a warpgroup ----------------------------------------------------------------------------------------

void emulated_wgmma_fence() {
  const Thread& thread = enter("wgmma_fence");
  thread.warp->matmul_fence |= 1u << thread.index % 32;
}

void emulated_wgmma(float* d, uint32_t columns, uint64_t a, uint64_t b, bool keep) {
  const Thread& thread = enter("wgmma");
  const uint32_t lane = thread.index % 32;
  Warp& warp = *thread.warp;
  Matmul& matmul = warp.matmul;
  if (thread.cta->launch->block % 128) fail("%u threads are no warpgroups", thread.cta->launch->block);
  if (!(warp.matmul_fence >> lane & 1)) fail("no wgmma_fence since its registers were accessed");
  for (const uint64_t descriptor : {a, b})
    if (descriptor >> 62 != 1 || descriptor >> 49 & 7) fail("descriptor %zx, expected 128-byte swizzle", size_t(descriptor));
  const bool differs = matmul.a != a || matmul.b != b || matmul.keep != keep || matmul.columns != columns;
  if (!warp.arrived)
    matmul = {a, b, keep, columns, 0, {}};
  else if (differs && !strcmp(warp.collective, "wgmma"))
    fail("other operands than those of the warp's other lanes");
  matmul.d[lane] = d;
  collective("wgmma", 0, 0, complete_wgmma);
}

void emulated_wgmma_commit() {
  enter("wgmma_commit");
  collective("wgmma_commit", 0, 0, complete_wgmma_commit);
}

void emulated_wgmma_wait(uint32_t pending) {
  enter("wgmma_wait");
  collective("wgmma_wait", pending, 0, complete_wgmma_wait);
}

}  // extern "C"
