// all_reduce + bias + residual + RMSNorm for small messages between GPUs that share host memory and nothing else.
//
// Every rank writes its rows to its own outbox in host memory, once. Every rank reads the rows of all others, computes all
// rows, and adds up in rank order, so all ranks have equal bits. There is no barrier and no fence: a row is sent as 64-bit
// words, each with 32 bits of data and the number of the call (NCCL calls this protocol LL). A word is read and written whole,
// so whoever reads the number of the call has the data, too. That doubles the bytes, which costs small messages little.
//
// Why this is correct
// -------------------
// An outbox is two parts that calls use in turn. Call k+2 overwrites what call k left. It starts when this rank's call k+1 has
// ended, and that call needed words of every peer's call k+1. A peer starts its call k+1 when its call k has ended, with all
// its reads. Words of earlier calls have another number, those of unused memory have 0, and calls count from 1.
//
// CTA b of a rank waits only for words that the peers' CTAs send. CTAs send a row before they wait for one, and take their rows
// in turn. So a call ends if on every rank at least one of its CTAs can run at a time. The state lives in device memory, so
// graph replays and launches of other shapes may follow each other.
//
// Set by definitions, beside those of row.cuh and EPILOGUE: WORLD_SIZE, THREADS, RESIDUAL_SHARDED (0), RESIDUAL_OUT,
// SPIN_LIMIT, PREFETCH.

#include "epilogue.cuh"
#include "wire.cuh"
#include "scales.cuh"
#include "prefetch.cuh"

struct HostWordsState {
  uint32_t calls;     // calls that have ended
  uint32_t finished;  // CTAs of the running call that have finished
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
inline constexpr int LINES = sizeof(X_TYPE);  // lines of 16 bytes, two words each, that a vector takes
inline constexpr uint64_t ROW_BYTES = LINES * ROW_VECTORS * 16ull;

struct Call {
  const HostWordsParams& p;
  uint32_t number;

  // Neighbouring threads access neighbouring lines: lines with the same index, of all vectors, lie together.
  DEVICE uint8_t* line(int rank, int row, int index, uint32_t column) const {
    return p.outboxes[rank] + (number & 1) * p.part_bytes + row * ROW_BYTES + (index * ROW_VECTORS + column / 8) * 16ull;
  }

  DEVICE void send(int row, uint32_t column, const Eight<X_TYPE>& eight) const {
#pragma unroll
    for (int index = 0; index < LINES; ++index) {
      const uint64_t flag = (uint64_t)number << 32;
      const uint64_t words[2] = {flag | eight.words[2 * index], flag | eight.words[2 * index + 1]};
      store_pairs_relaxed_sys(line(p.rank, row, index, column), words);
    }
  }

  // Polls until one vector of a row has arrived from all peers.
  DEVICE void receive(Eight<X_TYPE> (&got)[WORLD_SIZE], int row, uint32_t column) const {
    [[maybe_unused]] uint32_t polls = 0;
    uint32_t missing;
    do {
      missing = 0;
#pragma unroll
      for (int rank = 0; rank < WORLD_SIZE; ++rank) {
        if (rank == p.rank) continue;
#pragma unroll
        for (int index = 0; index < LINES; ++index) {
          uint64_t words[2];
          load_pairs_relaxed_sys(words, line(rank, row, index, column));
          if ((uint32_t)(words[0] >> 32) != number || (uint32_t)(words[1] >> 32) != number) missing |= 1u << rank;
          got[rank].words[2 * index] = (uint32_t)words[0];
          got[rank].words[2 * index + 1] = (uint32_t)words[1];
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
};

KERNEL(THREADS, 1) host_words(GRID_CONSTANT HostWordsParams p) {
  if (only_prefetches(p.prefetch)) return;
  RowStatistics* const partials = (RowStatistics*)dynamic_shared();  // [2, WARPS]: rows take turns
  grid_dependency_wait();

  const uint32_t thread = threadIdx.x;
  const Call call{p, p.state->calls + 1};
  const int first = blockIdx.x, stride = row_ctas(p.prefetch);
  [[maybe_unused]] const float inverse_scale =
      sizeof(HIDDEN_TYPE) == 1 && SCALE_COLUMNS == 0 ? 1.0f / *p.hidden_scale : 1.0f;
  const auto send = [&](int row) {
    Row::each(thread, [&](int, uint32_t column) {
      Eight<X_TYPE> own;
      load(own, p.x + (uint64_t)row * HIDDEN + column);
      call.send(row, column, own);
    });
  };

  int parity = 0;
  send(first);
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
    Row::each(thread, [&](int v, uint32_t column) {
      Eight<X_TYPE> got[WORLD_SIZE];
      call.receive(got, row, column);
      // The sum starts from 0, so the signs of zeros make no difference.
      for (int i = 0; i < 8; ++i) h[v][i] = 0.0f;
#pragma unroll
      for (int rank = 0; rank < WORLD_SIZE; ++rank) add(h[v], rank == p.rank ? own.vectors[v] : got[rank]);
    });
    const RowStatistics own_part = finish_sum<THREADS>(h, p.scale, p.bias, residual, thread);
    const auto factor = row_factor(group_sum<WARPS>(own_part, partials + parity * WARPS, thread, 0), p.eps);
    parity ^= 1;
#if SCALE_COLUMNS
    float* const maxima = (float*)(partials + 2 * WARPS);  // see push.cu
    const auto scales = scales_of_row<THREADS>(h, factor, weight, p.weight_offset, maxima, thread, 0);
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

  // The last CTA counts the call: by then every CTA has read its number.
  warp_sync();
  barrier_sync(0, THREADS);
  if (thread == 0 && fetch_add_gpu(&p.state->finished, 1) == (uint32_t)stride - 1) {
    p.state->finished = 0;
    p.state->calls = call.number;
  }
}
