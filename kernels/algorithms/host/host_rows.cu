// all_reduce + bias + residual + RMSNorm for medium and large messages between GPUs that share host memory and nothing else.
//
// Every rank writes to its own outbox in host memory, each byte once. It reads what it needs from the others' outboxes.
//
// one-shot (ONE_SHOT=1): a rank sends all its rows, reads those of all others and computes every row. All ranks add up in
//   rank order: M out and (N-1) x M in, one hop. For two ranks no way needs fewer bytes.
// two-shot: a rank sends each row for its owner, the owner computes it and sends the result to all: M out and
//   2(N-1)/N x M in, two hops.
//
// Latency limits such a kernel, and not the number of SMs: a load from host memory takes 2 to 5 us, and a fence about as long.
// So nothing here waits for one load or one fence alone. A CTA handles its rows in turns of GROUPS rows. It sends AHEAD turns
// before it computes, and loads DEPTH turns into shared memory before it adds them up. All warps but two do that. One of the
// two warps issues the fences and announces how far the others are. The other one reads how far the peers are.
//
//   turn:      sends row t | adds up row t - AHEAD | barrier | stores its result | asks for row t - AHEAD + DEPTH
//   two-shot:              | takes results of t - AHEAD - BEHIND                 | asks for those of t - AHEAD - BEHIND + DEPTH
//   announcer: shared counters -> fence -> counters in host memory
//   listener:  peers' counters in host memory -> shared counters
//
// Why this is correct
// -------------------
// Counters. CTA b of each rank has four counters in its outbox, which no other CTA writes: turns that it has SENT and COMPUTED,
// and turns of the peers that it has READ and TAKEN. They count on from call to call. Grids and turns depend on what all ranks
// share, so at the begin of a call the counters of CTA b are equal on all ranks.
//
// Data before counters. All threads store a turn's rows, meet in the turn's barrier, and one thread per counter releases it.
// The announcer acquires the shared counter, fences at system scope and stores the counter in host memory. Fences are
// cumulative. So a peer's listener that acquires the counter sees the rows, and so does each thread that acquires what the
// listener released. L1 has no older copy of the rows: a counter's acquire comes between two uses of the same memory.
//
// Rings. The outbox of a CTA has two halves that its calls use in turn. A half has a ring of RING turns of partial sums, and a
// ring of RESULT_RING turns of results. A slot of a ring is written again when all peers have counted it as read. Peers count
// it when the copies of all their threads have ended (the turn's barrier). What the call before the last left in a half needs
// no such wait. CTA b of that call has ended on every rank before CTA b of the last call began there. This call's CTA b begins
// after CTA b of the last call has read what CTA b of the last call on every rank sent.
//
// Progress. What a thread waits for in turn t, the peers do in their turns before t, or in turn t before their barrier,
// whatever they wait for themselves:
//   a slot to send turn t to:      peers read turn t - RING in their turn t - RING + AHEAD < t, as RING > AHEAD
//   a slot for turn t's result:    peers take that of t - RESULT_RING in t - RESULT_RING + BEHIND < t, as RESULT_RING > BEHIND
//   rows to load at the end of t:  peers send them in their turn t - AHEAD + DEPTH <= t, as DEPTH <= AHEAD
//   results to load then:          peers compute them in t - BEHIND + DEPTH, and count them a turn later <= t: BEHIND > DEPTH
// CTA b waits only for CTAs b of other ranks. So a call ends if on every rank one of its CTAs at a time can run.
//
// With a wire (wire.cuh) partial sums travel to the owners of their rows in codes, and so do the normalised rows from their
// owners; see push.cu. A warp has the codes of a few groups of columns. If each warp moved the words of its groups, they would
// be transactions of a few bytes, half as many as those of the codes. So a row's words may gather in shared memory, where
// neighbouring threads load them. Before words leave they may gather, too: warp 0 stores them behind the turn's barrier, before
// it counts what the turn has done.
//
// Set by definitions, beside those of row.cuh, wire.cuh and EPILOGUE: WORLD_SIZE, THREADS (of a row), GROUPS, ONE_SHOT, RING,
// AHEAD, BEHIND, RESULT_RING, DEPTH (0: rows are loaded when they are added up), MAX_CTAS, SHARED_BYTES, RESIDUAL_SHARDED,
// RESIDUAL_OUT, SPIN_LIMIT, SUM_WORDS and RESULT_WORDS (of a row of partial sums and of results: its words
// if they gather when they are loaded, or 0), SUMS_LEAVING and RESULTS_LEAVING (the same, before they are stored).

#include "epilogue.cuh"
#include "wire.cuh"
#include "scales.cuh"

struct HostRowsParams {
  const X_TYPE* x;                  // [tokens, HIDDEN], this rank's partial sums
  const RESIDUAL_TYPE* residual;    // [tokens, HIDDEN], or [rows_per_rank, HIDDEN] if RESIDUAL_SHARDED
  const BIAS_TYPE* bias;            // [HIDDEN]
  const WEIGHT_TYPE* weight;        // [HIDDEN]
  const float* hidden_scale;        // [1], of an e4m3 result
  HIDDEN_TYPE* hidden;              // [tokens, HIDDEN]
  RESIDUAL_OUT_TYPE* residual_out;  // [tokens | rows_per_rank, HIDDEN]
  uint8_t* const* outboxes;         // [world]: counters [MAX_CTAS, COUNTERS_WIDTH], then two halves of half_bytes for each CTA
  uint32_t* state;                  // [CTAs, 2]: turns and calls so far
  int32_t* status;                  // [CTAs, 8]: which counter of a peer the listener gave up waiting for, from 1 on
  uint64_t half_bytes;
  int32_t rank;
  int32_t tokens;
  float eps;
  float weight_offset;
  float scale;
  const NORM_BIAS_TYPE* norm_bias;  // [HIDDEN]
};

static_assert(!ONE_SHOT || (!RESIDUAL_SHARDED && RESIDUAL_OUT != OWN_ROWS), "one-shot needs and gives all rows");
static_assert(!ONE_SHOT || !SumRow::CODED, "only owners of rows read codes");

inline constexpr int COUNTERS_WIDTH = 16;  // a CTA's counters have a line of the CPU's caches to themselves
inline constexpr int HALVES_OFFSET = MAX_CTAS * COUNTERS_WIDTH * sizeof(uint32_t);
inline constexpr int PEERS = WORLD_SIZE - 1;
static_assert(RING > AHEAD && DEPTH <= AHEAD && AHEAD >= 1, "or ranks wait for each other");
static_assert(ONE_SHOT ? BEHIND == 0 : BEHIND > DEPTH && RESULT_RING > BEHIND, "or ranks wait for each other");

using Row = RowPart<THREADS>;
inline constexpr int VECTORS = Row::VECTORS;
// Where no row is added up, a thread may have twice as many neighbouring columns in codes. Then a group is in half as many
// lanes, so it takes fewer instructions.
constexpr int width(bool coded) { return coded && VECTORS % 2 == 0 ? 16 : 8; }
using Sent = RowPart<THREADS, width(SumRow::CODED)>;
using Taken = RowPart<THREADS, width(ResultRow::CODED && SCALE_COLUMNS == 0)>;
inline constexpr int STEPS = ONE_SHOT ? 1 : PEERS;  // rows that a turn sends
// Whether a turn loads the row that the next turn sends first. Codes can't be computed before a row has come from memory, and
// all warps would wait for that at once.
inline constexpr bool EARLY = SumRow::CODED;
// Whether the other rows that a turn sends are loaded while the one before is encoded. Longer rows would need too many
// registers.
inline constexpr bool BESIDE = EARLY && VECTORS == 1;
// Exact rows that a turn loads together before it sends them. So it waits for memory once, as far as registers allow.
inline constexpr int MOST_TOGETHER = larger(64 / (VECTORS * (int)sizeof(Eight<X_TYPE>)), 1);
inline constexpr int ROUNDS = (STEPS + MOST_TOGETHER - 1) / MOST_TOGETHER;
inline constexpr int TOGETHER = (STEPS + ROUNDS - 1) / ROUNDS;
inline constexpr int WARPS = THREADS / 32;  // of a row
inline constexpr int WORKERS = GROUPS * THREADS;
inline constexpr int BLOCK = WORKERS + 64;

// The layout of a half, in bytes. Two-shot keeps a section for each peer, with the rows that the peer owns.
inline constexpr uint64_t X_ROW = SumRow::ROW_BYTES;
inline constexpr uint64_t HIDDEN_ROW = (ResultRow::ROW_BYTES + 15) / 16 * 16;  // e4m3 rows may end 8 bytes off
inline constexpr uint64_t KEPT_ROW = RESIDUAL_OUT == ALL_ROWS ? HIDDEN * sizeof(RESIDUAL_OUT_TYPE) : 0;
inline constexpr uint64_t SENT_TURN = (ONE_SHOT ? 1 : PEERS) * GROUPS * X_ROW;
inline constexpr uint64_t COMPUTED_TURN = ONE_SHOT ? 0 : GROUPS * (HIDDEN_ROW + KEPT_ROW);
inline constexpr uint64_t COMPUTED_OFFSET = RING * SENT_TURN;

enum Counter { SENT, COMPUTED, READ, TAKEN, COUNTERS };

// Shared memory of one turn of what comes from the peers: partial sums, and results of an earlier turn. Each thread has bytes
// of its own.
static_assert(SUM_WORDS % larger(SumRow::WORDS, 1) == 0 && RESULT_WORDS % larger(ResultRow::WORDS, 1) == 0, "all of a row");
inline constexpr bool GATHERS = SUM_WORDS + RESULT_WORDS > 0;  // then words lie behind the threads' bytes
inline constexpr int SUM_BYTES = SumRow::STAGED_BYTES / (SUM_WORDS > 0 ? 2 : 1);
inline constexpr int RESULT_BYTES = ONE_SHOT ? 0 : ResultRow::STAGED_BYTES / (RESULT_WORDS > 0 ? 2 : 1);
inline constexpr int KEPT_BYTES = !ONE_SHOT && RESIDUAL_OUT == ALL_ROWS ? sizeof(Eight<RESIDUAL_OUT_TYPE>) : 0;
inline constexpr int WORDS_OFFSET = PEERS * VECTORS * (SUM_BYTES + RESULT_BYTES + KEPT_BYTES) * WORKERS;
inline constexpr int STAGE_BYTES = (WORDS_OFFSET + PEERS * GROUPS * (SUM_WORDS + RESULT_WORDS) * 4 + 15) / 16 * 16;
// Words that are gathered before they leave: of the rows that a turn sends, then of those that it computes. There are two
// sets: other warps gather the next turn's words while warp 0 stores these.
inline constexpr int LEAVING_WORDS = GROUPS * (STEPS * SUMS_LEAVING + RESULTS_LEAVING);

struct Shared {
  uint8_t* halves[WORLD_SIZE];           // of this CTA and call, by rank
  uint32_t done[COUNTERS];               // of this call: what the workers have done
  uint32_t heard[WORLD_SIZE][COUNTERS];  // and what the peers have done, as far as the listener knows
  RowStatistics partials[2][GROUPS][WARPS];
#if SCALE_COLUMNS
  float maxima[GROUPS][WARPS];
#endif
};
inline constexpr int STAGES_OFFSET = (sizeof(Shared) + 2 * LEAVING_WORDS * 4 + 127) / 128 * 128;
static_assert(STAGES_OFFSET + DEPTH * STAGE_BYTES <= SHARED_BYTES, "the launch gives less shared memory than this needs");

// Peer number `step` (0 .. PEERS-1) after `rank`; what this rank sends to it lies in section `step` of this rank's outbox, and
// what that peer sends to this rank in section PEERS - 1 - step of that peer's.
DEVICE int peer_after(int rank, int step) { return (rank + 1 + step) % WORLD_SIZE; }

struct Cta {
  const HostRowsParams& p;
  Shared& shared;
  uint32_t* leaving;
  uint8_t* stages;
  uint32_t base;  // the value of all counters at the begin of the call
  int turns;
  int per_rank;

  DEVICE int rows_of(int owner) const { return smaller(larger(p.tokens - owner * per_rank, 0), per_rank); }
  DEVICE int local_row(int turn, int group) const { return (turn * (int)gridDim.x + (int)blockIdx.x) * GROUPS + group; }
  DEVICE uint32_t* counters(int rank) const { return (uint32_t*)p.outboxes[rank] + blockIdx.x * COUNTERS_WIDTH; }

  // --- the announcer: one thread
  DEVICE void announce() const {
    uint32_t announced[COUNTERS] = {0, 0, 0, 0};
    const uint32_t end[COUNTERS] = {(uint32_t)turns, ONE_SHOT ? 0u : turns, (uint32_t)turns, ONE_SHOT ? 0u : turns};
    bool more = true;
    while (more) {
      uint32_t done[COUNTERS];
      bool news = false;
      more = false;
      for (int i = 0; i < COUNTERS; ++i) {
        done[i] = load_acquire_cta(&shared.done[i]);
        news = news || done[i] != announced[i];
        more = more || done[i] != end[i];
      }
      if (!news) continue;
      // A turn's counters change together. This thread may have read some of them before that, and would need another fence.
      for (int i = 0; i < COUNTERS; ++i) done[i] = load_acquire_cta(&shared.done[i]);
      fence_sys();
      for (int i = 0; i < COUNTERS; ++i) announced[i] = done[i];
      const uint32_t words[4] = {base + done[0], base + done[1], base + done[2], base + done[3]};
      store_relaxed_sys(counters(p.rank), words);
    }
  }

  // --- the listener: a thread for each counter of each peer
  DEVICE void listen(int lane) const {
    const int peer = lane / COUNTERS, counter = lane % COUNTERS;
    // Nobody listens for what nobody waits for: the slots of a ring's last turns are not used again.
    const int needed = counter == SENT || counter == COMPUTED ? turns
                       : counter == READ                       ? turns - RING
                                                               : turns - RESULT_RING;
    if (peer >= WORLD_SIZE || peer == p.rank || (ONE_SHOT && (counter == COMPUTED || counter == TAKEN))) return;
    const uint32_t* const address = counters(peer) + counter;
    int heard = 0;
    [[maybe_unused]] uint32_t polls = 0;
    while (heard < needed) {
      const int now = (int32_t)(load_acquire_sys(address) - base);
      if (now > heard) {
        heard = now;
        store_release_cta(&shared.heard[peer][counter], now);
        continue;
      }
#if SPIN_LIMIT
      if (++polls == SPIN_LIMIT) {
        int32_t* const report = p.status + blockIdx.x * 8 + peer;
        if (*report == 0) *report = counter + 1;
        store_release_cta(&shared.heard[peer][counter], turns);
        break;
      }
#endif
    }
  }

  // Waits until `counter` of all peers has reached `count`. Counters grow, so a thread asks again only when it needs more.
  DEVICE void await(Counter counter, int count, int& known) const {
    if (count <= known) return;
    int least = turns;
    for (int step = 0; step < PEERS; ++step) {
      const uint32_t* const heard = &shared.heard[peer_after(p.rank, step)][counter];
      int now = load_acquire_cta(heard);
      while (now < count) now = load_acquire_cta(heard);
      least = smaller(least, now);
    }
    known = least;
  }
};

struct Worker {
  const Cta& cta;
  const HostRowsParams& p;
  uint32_t worker;  // of the CTA
  int group;
  uint32_t thread;  // of the group
  int known[COUNTERS];
  Eight<X_TYPE> next[VECTORS];  // this thread's part of the row that is sent next

  DEVICE Worker(const Cta& cta, uint32_t worker)
      : cta(cta), p(cta.p), worker(worker), group(worker / THREADS), thread(worker % THREADS), known{} {}

  // A half has a few megabytes, so distances in it have 32 bits. No turn that has a row is negative.
  DEVICE SumRow::Element* sent_row(int owner, int section, uint32_t turn) const {
    const uint32_t distance = turn % RING * (uint32_t)SENT_TURN + (section * GROUPS + group) * (uint32_t)X_ROW;
    return (SumRow::Element*)(cta.shared.halves[owner] + distance);
  }
  DEVICE uint8_t* computed_row(int owner, uint32_t turn) const {
    const uint32_t ring = turn % RESULT_RING * (uint32_t)COMPUTED_TURN;
    return cta.shared.halves[owner] + (ring + group * (uint32_t)(HIDDEN_ROW + KEPT_ROW) + (uint32_t)COMPUTED_OFFSET);
  }

  // Whether a turn has a row for the peer of that step, or for all peers (one-shot).
  DEVICE bool sends(int turn, int step) const {
    return turn < cta.turns && cta.local_row(turn, group) < (ONE_SHOT ? p.tokens : cta.rows_of(peer_after(p.rank, step)));
  }
  // Loads what is sent. Where there is nothing, it loads some row: a register that may keep an older value is never free.
  DEVICE void load_sent(Eight<X_TYPE> (&to)[VECTORS], int turn, int step) const {
    const int local = cta.local_row(turn, group);
    const int row = ONE_SHOT ? local : peer_after(p.rank, step) * cta.per_rank + local;
    const X_TYPE* const from = p.x + (uint64_t)(sends(turn, step) ? row : 0) * HIDDEN;
    Sent::each(thread, [&](int v, Column column) {
      for (int i = 0; i < Sent::EIGHTS; ++i) load(to[v * Sent::EIGHTS + i], from + column + i * 8);
    });
  }
  DEVICE void store_sent(const Eight<X_TYPE> (&row)[VECTORS], int turn, int step) const {
    if (!sends(turn, step)) return;
    SumRow::Element* const to = sent_row(p.rank, step, turn);
    SumRow::PieceOf<Sent::WIDTH> pieces[Sent::VECTORS];
    SumRow::encode(pieces, row);
    Sent::each(thread, [&](int v, Column column) {
      store_gathering<SUMS_LEAVING>(SumRow::at(to, column), pieces[v], sums_leaving(turn, step), column);
    });
  }

  // Where the words of this group's row gather that a turn sends to a peer, or computes.
  DEVICE uint32_t* sums_leaving(int turn, int step) const {
    return cta.leaving + (turn & 1) * LEAVING_WORDS + (group * STEPS + step) * SUMS_LEAVING;
  }
  DEVICE uint32_t* result_leaving(int turn) const {
    return cta.leaving + (turn & 1) * LEAVING_WORDS + GROUPS * STEPS * SUMS_LEAVING + group * RESULTS_LEAVING;
  }
  // For the first warp of a group: stores the words of rows that it sent in this turn, and computed in the one before.
  DEVICE void store_gathered(int turn, int computed) const {
    if constexpr (SUMS_LEAVING > 0)
      for (int step = 0; step < STEPS; ++step)
        if (sends(turn, step)) store_words<SumRow>(sent_row(p.rank, step, turn), sums_leaving(turn, step), thread);
    if constexpr (RESULTS_LEAVING > 0)
      if (computes(computed))
        store_words<ResultRow>((ResultRow::Element*)computed_row(p.rank, computed), result_leaving(computed), thread);
  }
  DEVICE void send(int turn) {
    if (turn >= RING) cta.await(READ, turn - RING + 1, known[READ]);
    if constexpr (EARLY) {
      for (int step = 0; step < STEPS; ++step) {
        if (!BESIDE && step > 0) load_sent(next, turn, step);
        Eight<X_TYPE> row[VECTORS];
        for (int v = 0; v < VECTORS; ++v) row[v] = next[v];
        if (BESIDE && step + 1 < STEPS) load_sent(next, turn, step + 1);
        store_sent(row, turn, step);
      }
    } else {
      for (int first = 0; first < STEPS; first += TOGETHER) {
        Eight<X_TYPE> rows[TOGETHER][VECTORS];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) load_sent(rows[i], turn, smaller(first + i, STEPS - 1));
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i)
          if (first + i < STEPS) store_sent(rows[i], turn, first + i);
      }
    }
  }

  // Where this rank's rows of a turn lie in the outbox of peer number `peer` in rank order.
  DEVICE const SumRow::Element* row_from(int peer, int turn) const {
    const int step = PEERS == 1 ? 0 : peer - p.rank + (peer < p.rank ? PEERS : 0);
    return sent_row(peer_after(p.rank, step), ONE_SHOT ? 0 : PEERS - 1 - step, turn);
  }

  // Where the threads' bytes of a vector lie in the stage of a turn, behind `before` bytes of each thread's vectors.
  DEVICE uint8_t* staged(uint32_t turn, int step, int v, int before, int bytes) const {
    return stage_of(turn) + PEERS * VECTORS * WORKERS * before + (step * VECTORS + v) * WORKERS * bytes;
  }
  DEVICE uint8_t* stage_of(uint32_t turn) const { return cta.stages + turn % (DEPTH > 0 ? DEPTH : 1) * STAGE_BYTES; }
  // Where the words of a row lie there, behind `before` words of each row.
  DEVICE uint8_t* staged_words(uint32_t turn, int step, int before, int words) const {
    return stage_of(turn) + WORDS_OFFSET + (PEERS * GROUPS * before + (step * GROUPS + group) * words) * 4;
  }
  template <int WORDS = 0, int WIDTH = 8, typename T>
  DEVICE void ask_vector(const T* from, uint8_t* to) const {
    constexpr int BYTES = sizeof(Eight<T>), PIECE = smaller(BYTES, 16);
    for (int piece = 0; piece < BYTES / PIECE; ++piece)
      copy_to_shared<PIECE>(to + (piece * WORKERS + worker) * PIECE, (const uint8_t*)from + piece * PIECE);
  }
  template <int WORDS = 0, typename T>
  DEVICE void get_vector(Eight<T>& eight, const uint8_t* from, const uint8_t* = nullptr) const {
    constexpr int PIECE = smaller(sizeof eight, 16);
    for_pieces(eight, [&](auto& words, int offset) { load_shared(words, from + offset * WORKERS + worker * PIECE); });
  }

  // The stage of a wide piece is that of two vectors. If words are gathered, threads ask for other groups' words, so all of
  // them must meet before one reads a word.
  template <int WORDS, int WIDTH = 8, typename Travelling>
  DEVICE void ask_vector(InRow<Travelling> from, uint8_t* to) const {
    constexpr int BYTES = Travelling::BITS * WIDTH / 8;
    copy_to_shared<BYTES>(to + worker * BYTES, from.codes);
    if constexpr (WORDS == 0) copy_to_shared<4>(to + WORKERS * BYTES + worker * 4, from.word);
  }
  template <int WORDS, int BITS, int WIDTH>
  DEVICE void get_vector(InCodes<BITS, WIDTH>& piece, const uint8_t* from, const uint8_t* word) const {
    load_shared(piece.codes, from + worker * sizeof piece.codes);
    load_shared(piece.word, WORDS > 0 ? word : from + WORKERS * sizeof piece.codes + worker * 4);
  }

  // Asks for the peers' partial sums of a turn, and for their results of the earlier turn that is taken together with it.
  DEVICE void ask(int turn) {
    if constexpr (DEPTH > 0) {
      if (turn < cta.turns) {
        cta.await(SENT, turn + 1, known[SENT]);
        if (computes(turn))
          for (int peer = 0; peer < PEERS; ++peer) {
            const SumRow::Element* const from = row_from(peer, turn);
            Row::each(thread, [&](int v, Column column) {
              ask_vector<SUM_WORDS>(SumRow::at(from, column), staged(turn, peer, v, 0, SUM_BYTES));
            });
            if constexpr (SUM_WORDS > 0) ask_words<SumRow, THREADS>(from, staged_words(turn, peer, 0, SUM_WORDS), thread);
          }
      }
      if constexpr (!ONE_SHOT) {
        const int taken = turn - BEHIND;
        if (taken >= 0 && taken < cta.turns) {
          cta.await(COMPUTED, taken + 1, known[COMPUTED]);
          each_owner(taken, [&](int step, const uint8_t* from, uint64_t) {
            Taken::each(thread, [&](int v, Column column) {
              uint8_t* const to = staged(turn, step, v * Taken::EIGHTS, SUM_BYTES, RESULT_BYTES);
              ask_vector<RESULT_WORDS, Taken::WIDTH>(ResultRow::at((const ResultRow::Element*)from, column), to);
            });
            uint8_t* const words = staged_words(turn, step, SUM_WORDS, RESULT_WORDS);
            if constexpr (RESULT_WORDS > 0) ask_words<ResultRow, THREADS>((const ResultRow::Element*)from, words, thread);
            if constexpr (RESIDUAL_OUT == ALL_ROWS)
              Row::each(thread, [&](int v, Column column) {
                ask_vector((const RESIDUAL_OUT_TYPE*)(from + HIDDEN_ROW) + column,
                           staged(turn, step, v, SUM_BYTES + RESULT_BYTES, KEPT_BYTES));
              });
          });
        }
      }
      copies_commit();  // an empty group where there is no such turn, because groups are counted
    }
  }

  // Calls body(step, where its result lies, its first element) for each peer that has computed a row in that turn.
  template <typename Body>
  DEVICE void each_owner(int turn, Body body) const {
    const int local = cta.local_row(turn, group);
#pragma unroll
    for (int step = 0; step < PEERS; ++step) {
      const int owner = peer_after(p.rank, step);
      if (local < cta.rows_of(owner)) body(step, computed_row(owner, turn), (uint64_t)(owner * cta.per_rank + local) * HIDDEN);
    }
  }

  DEVICE bool computes(int turn) const {
    const int local = cta.local_row(turn, group);
    return turn >= 0 && turn < cta.turns && local < (ONE_SHOT ? p.tokens : cta.rows_of(p.rank));
  }

  // Adds up one vector of all ranks in rank order. The sum starts from 0, so the signs of zeros make no difference.
  DEVICE void add_up(float (&h)[8], int turn, int v, Column column, const Eight<X_TYPE>& own) const {
    SumRow::Piece got[PEERS];
#pragma unroll
    for (int peer = 0; peer < PEERS; ++peer) {
      if constexpr (DEPTH > 0)
        get_vector<SUM_WORDS>(got[peer], staged(turn, peer, v, 0, SUM_BYTES),
                              SumRow::word_in(staged_words(turn, peer, 0, SUM_WORDS), column));
      else
        load_strong(got[peer], SumRow::at(row_from(peer, turn), column));
    }
    add_up(h, own, got);
  }
  template <typename T, int BITS>
  DEVICE void add_up(float (&h)[8], const Eight<T>& own, const InCodes<BITS> (&got)[PEERS]) const {
    add_in_rank_order(h, own, got, p.rank);
  }
  template <typename T>
  DEVICE void add_up(float (&h)[8], const Eight<T>& own, const Eight<T> (&got)[PEERS]) const {
    const int place = larger(p.rank, 1);  // the order of the first two makes no difference
    for (int i = 0; i < 8; ++i) h[i] = 0.0f;
#pragma unroll
    for (int i = 0; i <= PEERS; ++i) {
      if (i > 0 && (PEERS == 1 || place == i)) add(h, own);
      if (i < PEERS) add(h, got[i]);
    }
  }

  // Takes the rows that the peers computed in an earlier turn; `turn` is the turn of the partial sums that came with these
  // rows.
  DEVICE void take(int turn) {
    const int taken = turn - BEHIND;
    if constexpr (DEPTH == 0) cta.await(COMPUTED, taken + 1, known[COMPUTED]);
    each_owner(taken, [&](int step, const uint8_t* from, uint64_t element) {
      Taken::each(thread, [&](int v, Column column) {
        ResultRow::PieceOf<Taken::WIDTH> result;
        if constexpr (DEPTH > 0)
          get_vector<RESULT_WORDS>(result, staged(turn, step, v * Taken::EIGHTS, SUM_BYTES, RESULT_BYTES),
                                   ResultRow::word_in(staged_words(turn, step, SUM_WORDS, RESULT_WORDS), column));
        else
          load_strong(result, ResultRow::at((const ResultRow::Element*)from, column));
#if SCALE_COLUMNS
        store_result(p.hidden, p.tokens, element / HIDDEN, column, result);
#else
        for (int i = 0; i < Taken::EIGHTS; ++i)
          store(p.hidden + element + column + i * 8, received<HIDDEN_TYPE>(result, i));
#endif
      });
      if constexpr (RESIDUAL_OUT == ALL_ROWS)
        Row::each(thread, [&](int v, Column column) {
          Eight<RESIDUAL_OUT_TYPE> kept;
          if constexpr (DEPTH > 0)
            get_vector(kept, staged(turn, step, v, SUM_BYTES + RESULT_BYTES, KEPT_BYTES));
          else
            load_strong(kept, (const RESIDUAL_OUT_TYPE*)(from + HIDDEN_ROW) + column);
          store(p.residual_out + element + column, kept);
        });
    });
  }

  DEVICE void work() {
    const int turns = cta.turns, ahead = smaller(AHEAD, turns);
    [[maybe_unused]] const float inverse_scale =
        sizeof(HIDDEN_TYPE) == 1 && SCALE_COLUMNS == 0 ? 1.0f / *p.hidden_scale : 1.0f;
    Loaded<THREADS, WEIGHT_TYPE> kept_weight;
    if constexpr (!EARLY) kept_weight.fetch(p.weight, thread);
    // Results that are loaded when they are taken (DEPTH 0) are counted a turn later.
    constexpr int LATER = !ONE_SHOT && DEPTH == 0 ? 1 : 0;
    const int end = turns + ahead + BEHIND + LATER;
    if constexpr (EARLY) load_sent(next, 0, 0);
    for (int turn = 0; turn < end; ++turn) {
      const int computing = turn - ahead, taking = computing - BEHIND, local = cta.local_row(computing, group);
      const bool computed = computes(computing);
      const uint64_t row = ONE_SHOT ? local : p.rank * cta.per_rank + local;
      RowStatistics* const partials = cta.shared.partials[turn & 1][group];
      Loaded<THREADS, X_TYPE> own;
      Loaded<THREADS, RESIDUAL_TYPE> residual;
      Loaded<THREADS, WEIGHT_TYPE> weight;
      if constexpr (!EARLY) weight = kept_weight;
      // Some row if none is computed, as in load_sent.
      own.fetch(p.x + (computed ? row : 0) * HIDDEN, thread);
      residual.fetch(p.residual + (computed ? (RESIDUAL_SHARDED ? local : row) : 0) * HIDDEN, thread);
      if (turn < turns) send(turn);
      float h[VECTORS][8];
      if constexpr (DEPTH > 0) {
        if (computing >= 0) copies_wait<(DEPTH > 0 ? DEPTH - 1 : 0)>();
        if (GATHERS && computing >= 0) {
          warp_sync();
          barrier_sync(1, WORKERS);
        }
        if (!ONE_SHOT && taking >= 0) take(computing);
      } else {
        if (computing >= 0 && computing < turns) cta.await(SENT, computing + 1, known[SENT]);
      }
      if constexpr (EARLY) weight.fetch(p.weight, thread);  // not before: rows that are sent need the registers
      if (computed) {
        Row::each(thread, [&](int v, Column column) { add_up(h[v], computing, v, column, own.vectors[v]); });
        const RowStatistics statistics = warp_sum(finish_sum<THREADS>(h, p.scale, p.bias, residual, thread));
        if (thread % 32 == 0) partials[thread / 32] = statistics;
      }
      warp_sync();
      barrier_sync(1, WORKERS);
      if (LEAVING_WORDS > 0 && worker < 32) {
#pragma unroll 1
        for (int group = 0; group < GROUPS; ++group) Worker(cta, group * THREADS + worker).store_gathered(turn, computing - 1);
        warp_sync();
      }
      if (worker < COUNTERS) {
        // Selected, as an array would lie in local memory.
        const int sent_or_computed = worker == SENT ? turn + 1 : ONE_SHOT ? 0 : computing;
        const int read_or_taken = worker == READ ? computing + 1 : ONE_SHOT ? 0 : taking + 1 - LATER;
        const int count = worker <= COMPUTED ? sent_or_computed : read_or_taken;
        store_release_cta(&cta.shared.done[worker], smaller(larger(count, 0), turns));
      }
      if (computed) {
        if constexpr (!ONE_SHOT)
          if (computing >= RESULT_RING) cta.await(TAKEN, computing - RESULT_RING + 1, known[TAKEN]);
        const auto factor = row_factor(total<WARPS>(partials), p.eps);
        uint8_t* const to = computed_row(p.rank, computing);
        [[maybe_unused]] uint32_t* const words = result_leaving(computing);
#if SCALE_COLUMNS
        const auto largest = [&](float value) { return group_max<WARPS>(value, cta.shared.maxima[group], thread, 2 + group); };
        const auto scales = scales_of_row<THREADS>(h, factor, weight, p.weight_offset, thread, largest);
#endif
        Row::each(thread, [&](int v, Column column) {
          if constexpr (RESIDUAL_OUT != NO_ROWS) {
            Eight<RESIDUAL_OUT_TYPE> kept;
            pack(kept, h[v]);
            store(p.residual_out + (RESIDUAL_OUT == ALL_ROWS ? row : local) * HIDDEN + column, kept);
            if constexpr (!ONE_SHOT && RESIDUAL_OUT == ALL_ROWS) store((RESIDUAL_OUT_TYPE*)(to + HIDDEN_ROW) + column, kept);
          }
        });
#if SCALE_COLUMNS
        Row::each_with<true>(thread, [&](int v, Column column, bool in_row) {
          const auto piece = quantised(h[v], factor, weight.vectors[v], p.weight_offset, scales.of(v));
          if (!in_row) return;
          store_result(p.hidden, p.tokens, row, column, piece);
          if constexpr (!ONE_SHOT)
            store_gathering<RESULTS_LEAVING>(ResultRow::at((ResultRow::Element*)to, column), piece, words, column);
        });
#else
        Eight<HIDDEN_TYPE> results[VECTORS];
        Row::each(thread, [&](int v, Column column) {
          normalise(results[v], h[v], factor, weight.vectors[v], loaded(p.norm_bias + column), p.weight_offset, inverse_scale);
        });
        ResultRow::Piece pieces[VECTORS];
        ResultRow::encode_and_receive(pieces, results);
        Row::each(thread, [&](int v, Column column) {
          store(p.hidden + row * HIDDEN + column, results[v]);
          if constexpr (!ONE_SHOT)
            store_gathering<RESULTS_LEAVING>(ResultRow::at((ResultRow::Element*)to, column), pieces[v], words, column);
        });
#endif
      }
      if constexpr (LATER == 1)
        if (taking >= 0 && taking < turns) take(computing);
      if constexpr (EARLY) load_sent(next, turn + 1, 0);
      if (computing >= -1)  // the first time for turns 0 to DEPTH - 1
        for (int next = computing < 0 ? 0 : computing + DEPTH; next <= computing + DEPTH; ++next) ask(next);
    }
  }
};

KERNEL(BLOCK, 1) host_rows(GRID_CONSTANT HostRowsParams p) {
  uint8_t* const memory = dynamic_shared();
  Shared& shared = *(Shared*)memory;
  const uint32_t thread = threadIdx.x;
  if (thread < COUNTERS) store_release_cta(&shared.done[thread], 0);
  if (thread < WORLD_SIZE * COUNTERS) store_release_cta(&shared.heard[thread / COUNTERS][thread % COUNTERS], 0);
  grid_dependency_wait();
  const int per_rank = (p.tokens + WORLD_SIZE - 1) / WORLD_SIZE, rows = ONE_SHOT ? p.tokens : per_rank;
  const int rounds = (rows + GROUPS - 1) / GROUPS - blockIdx.x;  // turns of the whole grid, from this CTA's first one on
  const int turns = (rounds + (int)gridDim.x - 1) / (int)gridDim.x;
  const uint32_t base = p.state[blockIdx.x * 2], calls = p.state[blockIdx.x * 2 + 1];
  const Cta cta{p, shared, (uint32_t*)(&shared + 1), memory + STAGES_OFFSET, base, turns, per_rank};
  if (thread < WORLD_SIZE)
    shared.halves[thread] = p.outboxes[thread] + HALVES_OFFSET + (blockIdx.x * 2 + (calls & 1)) * p.half_bytes;
  warp_sync();
  barrier_sync(0, BLOCK);
  if (thread < WORKERS) {
    Worker(cta, thread).work();
  } else if (thread == WORKERS) {
    cta.announce();
  } else if (thread >= WORKERS + 32) {
    cta.listen(thread - WORKERS - 32);
  }
  warp_sync();
  barrier_sync(0, BLOCK);
  grid_dependency_launch();  // not before: see push.cu
  if (thread == 0) {
    p.state[blockIdx.x * 2] = base + turns;
    p.state[blockIdx.x * 2 + 1] = calls + 1;
  }
}
