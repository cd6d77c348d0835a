// all_reduce + bias + residual + RMSNorm for small messages between GPUs that share host memory and nothing else.
//
// Every rank writes its rows to its own outbox in host memory, once. Every rank reads the rows of all others, computes all
// rows, and adds up in rank order, so all ranks have equal bits. There is no barrier and no fence: a row is sent as 64-bit
// words, each with 48 bits of data and 16 bits that name the call. (NCCL's protocol LL has 32 of each.) A word is read and
// written whole, so whoever reads the name of the call has the data, too. Four thirds of the bytes travel.
//
// Why this is correct
// -------------------
// An outbox is two parts that calls use in turn. Call k+2 overwrites what call k left. It starts when this rank's call k+1 has
// ended, and that call needed words of every peer's call k+1. A peer starts its call k+1 when its call k has ended, with all
// its reads.
//
// Names. Unused memory has 0, and calls have 1 .. NAMES in turn. So a name comes back in a part after NAMES of its calls, and
// no word may lie there for so long. A call writes the words of its rows. Of all other words of its part each call erases a
// few, so that after NAMES / 4 calls of a part none has been left out. Nobody reads them meanwhile: the calls that did have
// ended. The count of calls starts again from 0 after 2^32 of them. There the order of names breaks: a name comes back in a
// part after half as many of its calls. The erased lines start again, too. That is why it is a quarter and not the whole.
//
// CTA b of a rank waits only for words that the peers' CTAs send. CTAs send a row before they wait for one, and take their rows
// in turn. So a call ends if on every rank at least one of its CTAs can run at a time. The state lives in device memory, so
// graph replays and launches of other shapes may follow each other.
//
// All CTAs together count the call: each adds 1 to the state, and CTA 0 also adds what is left of 2^32. So until the last CTA
// has added, the upper half is the number of calls before this one. A CTA adds when all its threads have read that. push.cu
// says why it may add early, and without a release.
//
// Set by definitions, beside those of row.cuh and EPILOGUE: WORLD_SIZE, THREADS, RESIDUAL_SHARDED (0), RESIDUAL_OUT,
// SPIN_LIMIT, PREFETCH, AT_ONCE (vectors of a row that a thread receives at a time), NAMES.

#include "epilogue.cuh"
#include "wire.cuh"
#include "scales.cuh"
#include "prefetch.cuh"

struct HostWordsState {
  uint64_t calls;  // upper half: calls that have ended; lower half: 0 between calls
};

struct HostWordsParams {
  const X_TYPE* x;                  // [tokens, HIDDEN], this rank's partial sums
  const RESIDUAL_TYPE* residual;    // [tokens, HIDDEN]
  const BIAS_TYPE* bias;            // [HIDDEN]
  const WEIGHT_TYPE* weight;        // [HIDDEN]
  const float* hidden_scale;        // [1], of an e4m3 result
  HIDDEN_TYPE* hidden;              // [tokens, HIDDEN]
  RESIDUAL_OUT_TYPE* residual_out;  // [tokens, HIDDEN]
  uint8_t* const* outboxes;         // [world], two parts of part_bytes each
  HostWordsState* state;
  int32_t* status;                  // [grid, 8]: what a thread gave up waiting for
  uint64_t part_bytes;
  int32_t erased;  // lines of a part that a call erases
  int32_t rank;
  int32_t tokens;
  float eps;
  float weight_offset;
  float scale;
  const NORM_BIAS_TYPE* norm_bias;  // [HIDDEN]
  Prefetched prefetch;
};

static_assert(!RESIDUAL_SHARDED && RESIDUAL_OUT != OWN_ROWS, "every rank needs and gives all rows");

using Row = RowPart<THREADS>;
inline constexpr int VECTORS = Row::VECTORS;
inline constexpr int WARPS = THREADS / 32;
inline constexpr int PIECES = 2 * sizeof(X_TYPE);  // 32-bit pieces of a vector

// A line is 16 bytes: two words, with three pieces of a thread's vectors. A line may begin in one vector and end in the next.
// Vectors are received AT_ONCE at a time, and each such set begins a line of its own. Lines with the same number, of all
// threads, lie together, so neighbouring threads access neighbouring lines. A thread that lacks the last vector lacks the lines
// that begin in it, and no room is left for them.
inline constexpr int SETS = (VECTORS + AT_ONCE - 1) / AT_ONCE;
constexpr int lines_of(int vectors) { return (vectors * PIECES + 2) / 3; }
inline constexpr int SET_LINES = lines_of(AT_ONCE);
inline constexpr int LINES = (SETS - 1) * SET_LINES + lines_of(VECTORS - (SETS - 1) * AT_ONCE);
inline constexpr int LINES_OF_ALL = (SETS - 1) * SET_LINES + lines_of(VECTORS - (SETS - 1) * AT_ONCE - 1);
inline constexpr int THREADS_WITH_LAST = ROW_VECTORS - (VECTORS - 1) * THREADS;
constexpr uint32_t begin_of(int line) {
  return smaller(line, LINES_OF_ALL) * THREADS + larger(line - LINES_OF_ALL, 0) * THREADS_WITH_LAST;
}
inline constexpr uint32_t ROW_LINES = begin_of(LINES);

struct Call {
  const HostWordsParams& p;
  uint32_t number, thread, name;
  uint8_t* parts[WORLD_SIZE];  // of the ranks' outboxes, from this thread's first line on

  DEVICE Call(const HostWordsParams& p, uint32_t number, uint32_t thread)
      : p(p), number(number), thread(thread), name(number % NAMES + 1) {
    for (int rank = 0; rank < WORLD_SIZE; ++rank) parts[rank] = part_of(rank) + thread * 16;
  }

  DEVICE uint8_t* part_of(int rank) const { return p.outboxes[rank] + (number & 1) * p.part_bytes; }
  static DEVICE uint64_t offset(int row, int line) { return ((uint64_t)row * ROW_LINES + begin_of(line)) * 16; }
  DEVICE bool has(int line) const {
    return line < LINES_OF_ALL || (line < LINES && (THREADS_WITH_LAST == THREADS || (int)thread < THREADS_WITH_LAST));
  }
  // Piece number `piece` of a set; 0 behind the last one.
  static DEVICE uint32_t piece_of(const Eight<X_TYPE> (&vectors)[VECTORS], int set, int piece) {
    const int vector = set * AT_ONCE + piece / PIECES;
    return piece < AT_ONCE * PIECES && vector < VECTORS ? vectors[smaller(vector, VECTORS - 1)].words[piece % PIECES] : 0;
  }

  DEVICE void send(int row, const Eight<X_TYPE> (&vectors)[VECTORS]) const {
    uint8_t* const to = part_of(p.rank) + thread * 16;
    const uint64_t named = (uint64_t)name << 48;
#pragma unroll
    for (int set = 0; set < SETS; ++set)
#pragma unroll
      for (int index = 0; index < SET_LINES; ++index) {
        if (!has(set * SET_LINES + index)) continue;
        const uint32_t halves = piece_of(vectors, set, 3 * index + 1);
        const uint64_t words[2] = {named | (uint64_t)(halves & 0xffff) << 32 | piece_of(vectors, set, 3 * index),
                                   named | (uint64_t)(halves >> 16) << 32 | piece_of(vectors, set, 3 * index + 2)};
        store_pairs_relaxed_sys(to + offset(row, set * SET_LINES + index), words);
      }
  }

  // Polls until a set of a row's vectors has arrived from all peers.
  DEVICE void receive(Eight<X_TYPE> (&got)[WORLD_SIZE][AT_ONCE], int row, int set) const {
    [[maybe_unused]] uint32_t polls = 0;
    uint32_t missing;
    do {
      // All loads of a poll are on their way at once: one load takes as long as ten that are issued together.
      uint64_t words[WORLD_SIZE][SET_LINES][2];
#pragma unroll
      for (int rank = 0; rank < WORLD_SIZE; ++rank)
#pragma unroll
        for (int index = 0; index < SET_LINES; ++index)
          if (rank != p.rank && has(set * SET_LINES + index))
            load_pairs_relaxed_sys(words[rank][index], parts[rank] + offset(row, set * SET_LINES + index));
      missing = 0;
#pragma unroll
      for (int rank = 0; rank < WORLD_SIZE; ++rank)
#pragma unroll
        for (int index = 0; index < SET_LINES; ++index) {
          const uint64_t(&line)[2] = words[rank][index];
          const bool wanted = rank != p.rank && has(set * SET_LINES + index);
          if (wanted && (line[0] >> 48 != name || line[1] >> 48 != name)) missing |= 1u << rank;
          const uint32_t halves = (uint32_t)(line[0] >> 32 & 0xffff) | (uint32_t)(line[1] >> 32) << 16;
          const uint32_t pieces[3] = {(uint32_t)line[0], halves, (uint32_t)line[1]};
#pragma unroll
          for (int i = 0; i < 3; ++i) {
            const int piece = 3 * index + i;
            if (piece < AT_ONCE * PIECES) got[rank][piece / PIECES].words[piece % PIECES] = pieces[i];
          }
        }
#if SPIN_LIMIT
      if (missing != 0 && ++polls == SPIN_LIMIT) {
        for (int rank = 0; rank < WORLD_SIZE; ++rank) {
          int32_t* report = p.status + blockIdx.x * 8 + rank;
          if (missing >> rank & 1 && *report == 0) *report = 1;
        }
        return;
      }
#endif
    } while (missing != 0);
  }

  // Erases this call's share of the lines that it does not use.
  DEVICE void erase() const {
    if ((int)thread >= p.erased) return;
    const uint32_t lines = p.part_bytes / 16, shares = (lines + p.erased - 1) / p.erased;
    const uint32_t begin = (number >> 1) % shares * p.erased;
    const uint64_t nothing[2] = {0, 0};
#pragma unroll 1
    for (uint32_t i = thread; i < (uint32_t)p.erased; i += THREADS)
      if (begin + i >= p.tokens * ROW_LINES && begin + i < lines)
        store_pairs_relaxed_sys(part_of(p.rank) + (begin + i) * 16ull, nothing);
  }
};

KERNEL(THREADS, 1) host_words(GRID_CONSTANT HostWordsParams p) {
  if (only_prefetches(p.prefetch)) return;
  RowStatistics* const partials = (RowStatistics*)dynamic_shared();  // [2, WARPS]: rows take turns
  grid_dependency_wait();

  const uint32_t thread = threadIdx.x;
  uint64_t calls[1];
  load_global(calls, p.state);
  const uint32_t before = calls[0] >> 32;
  const Call call(p, before + 1, thread);
  const int first = blockIdx.x, stride = row_ctas(p.prefetch);
  [[maybe_unused]] const float inverse_scale =
      sizeof(HIDDEN_TYPE) == 1 && SCALE_COLUMNS == 0 ? 1.0f / *p.hidden_scale : 1.0f;
  const auto send = [&](int row) {
    Loaded<THREADS, X_TYPE> own{};
    own.fetch(p.x + (uint64_t)row * HIDDEN, thread);
    call.send(row, own.vectors);
  };

  int parity = 0;
  send(first);
  if (blockIdx.x == 0) call.erase();  // now, because the end of the call waits for what has been stored
  warp_sync();
  const uint64_t one = barrier_sync_with(0, THREADS, before);
  if (thread == 0) add_relaxed_gpu(&p.state->calls, one + (blockIdx.x == 0 ? (1ull << 32) - stride : 0));
  for (int row = first; row < p.tokens; row += stride) {
    const uint64_t element = (uint64_t)row * HIDDEN;
    Loaded<THREADS, X_TYPE> own;
    Loaded<THREADS, RESIDUAL_TYPE> residual;
    Loaded<THREADS, WEIGHT_TYPE> weight;
    Loaded<THREADS, NORM_BIAS_TYPE> norm_bias;
    own.fetch(p.x + element, thread);
    residual.fetch(p.residual + element, thread);
    weight.fetch(p.weight, thread);
    norm_bias.fetch(p.norm_bias, thread);
    if (row + stride < p.tokens) send(row + stride);
    float h[VECTORS][8];
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
      Eight<X_TYPE> got[WORLD_SIZE][AT_ONCE];
      call.receive(got, row, set);
      Row::each(thread, [&](int v, uint32_t) {
        if (v / AT_ONCE != set) return;
        // The sum starts from 0, so the signs of zeros make no difference.
        for (int i = 0; i < 8; ++i) h[v][i] = 0.0f;
#pragma unroll
        for (int rank = 0; rank < WORLD_SIZE; ++rank) {
          Eight<X_TYPE> part;
          for (int i = 0; i < PIECES; ++i)
            part.words[i] = rank == p.rank ? own.vectors[v].words[i] : got[rank][v % AT_ONCE].words[i];
          add(h[v], part);
        }
      });
    }
    const RowStatistics own_part = finish_sum<THREADS>(h, p.scale, p.bias, residual, thread);
    const auto factor = row_factor(group_sum<WARPS>(own_part, partials + parity * WARPS, thread, 0), p.eps);
    parity ^= 1;
#if SCALE_COLUMNS
    float* const maxima = (float*)(partials + 2 * WARPS);  // see push.cu
    const auto scales = scales_of_row<THREADS>(h, factor, weight, p.weight_offset, thread, [&](float value) {
      return group_max<THREADS / 32>(value, maxima, thread, 0);
    });
#endif
    Row::each(thread, [&](int v, uint32_t column) {
      if constexpr (RESIDUAL_OUT == ALL_ROWS) {
        Eight<RESIDUAL_OUT_TYPE> kept;
        pack(kept, h[v]);
        store(p.residual_out + element + column, kept);
      }
#if SCALE_COLUMNS
      store_result(p.hidden, p.tokens, row, column, quantised(h[v], factor, weight.vectors[v], p.weight_offset, scales.of(v)));
#else
      Eight<HIDDEN_TYPE> result;
      normalise(result, h[v], factor, weight.vectors[v], norm_bias.vectors[v], p.weight_offset, inverse_scale);
      store(p.hidden + element + column, result);
#endif
    });
  }
  grid_dependency_launch();  // not before: see push.cu
}
