// accel::Attention: softmax(scale q k^T + mask) v over the slots of a KV cache, by positions: those that every
// step writes, and before them those that were kept, if any, of which each head has its own: as many as every other,
// or so many as it says, one head's after another's.
//
// AttentionInt8: the same of keys and values in codes (coded.h), which are decoded a few rows at a time, as
// they are read; its results are those of Attention over the decoded ones, bit for bit.
//
// AttentionFloat16: the same of keys and values in half precision, which are widened as they are read (tiles.h).
//
// AttentionTable: the same of bytes, each of which stands for a number of a table; rows may have scales, which must be
// there for int8.
//
// AttentionGroups: the same, where what was kept lies in blocks (stored.h), and what came since as it is. A call may read
// it `coarse`ly, without finer codes.
// AttentionCodes: the same, where each slot is such a block by itself, of what was kept and of what came since.
//
// What was read elsewhere (a partial result and the log-sum-exp of its scores) is merged in, and the second result
// is the log-sum-exp of everything.
//
// What was kept may lie in blocks of a pool, of which a table lists those of each row in order: they are read where they
// are, in the order of the slots that they stand for, so that results are those over the gathered slots, bit for bit.
//
// Where each query of a group lists the pages that it reads, so many slots each, the others are passed over; small
// pages, single tokens among them, are read slot by slot (lists.h).
//
// Where the queries of all rows lie one after another, without padding, an owner says whose each is.
//
// Where the call's own tokens are a tree of guesses, each sees of them what it would see in a row of its
// ancestors: those lie for it where they would lie then (`Lane`), so that its result is the same, too. A token of a
// block that sees both ways sees such a row of all of them, those at later positions too.
//
// DrawnAttention, DrawnAttentionInt8, DrawnAttentionFloat16: the same, and how much of it each slot draws (drawn.h).
//
// Keys are taken in chunks of kChunk, each gives a partial result, and partial results are merged in
// order. So where `exact` is set, a row's result is the same bit for bit whatever the other rows, the
// number of threads and the way the work is cut.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "abi.h"
#include "coded.h"
#include "drawn.h"
#include "lists.h"
#include "slots.h"
#include "tiles.h"
#include "vector.h"

namespace {

using coded::Rows;
using slots::kChunk, slots::kFar, slots::kFull, slots::kTile, slots::Range, slots::Slots, slots::Span;

constexpr int64_t kRows = 64;    // rows that share a chunk's turned keys
constexpr int64_t kTurned = 16;  // rows from which on keys are turned, unless results are to be exact
constexpr int64_t kNear = 16;    // slots that are read together where keys are not turned
constexpr int64_t kFarther = 4;  // so many times kNear, slots ahead that are asked for where each lies by itself
constexpr int64_t kLanes = 16;   // that many at least add up what slots draw, each by itself
constexpr int64_t kGroup = 8;    // rows that go through it together, at most
constexpr int64_t kItems = 12;   // of work at least, where there are so many keys: keys are cut in halves, quarters, ..
constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr float kLeast = std::numeric_limits<float>::lowest();  // log-sum-exp of nothing

struct Settings {
  float scale, softcap;
  int64_t mask, window, exact, packed;  // packed: queries and results by token, [B,T,H,D] and [B,T,H W]
  int64_t page, partial;  // partial: whether the log-sum-exp is wanted
  int64_t k_bits, v_bits, rows, k_group, v_group, k_along, v_along, v_width;  // of blocks; no bits: of few numbers
  int64_t k_down, v_down;  // whether numbers at places are those of channels
  float noise;  // of what slots draw, and its seed
  int64_t seed;
};

// What may lie beside the codes of keys or values.
struct Beside {
  abi::Tensor finer, left, right, numbers, places;
};

struct Call;

// Slots that lie one after another: what was kept, each head's own or of the same tokens, and what came since.
struct Segment {
  abi::Tensor k, v, k_scale, v_scale, k_least, v_least;  // with scales keys and values are codes
  Beside k_beside, v_beside;
  stored::Blocks k_blocks, v_blocks;
  std::vector<float> k_table, v_table;  // what bytes stand for
  int64_t C, first, last;           // slots; the chunks of the call that they are
  bool by_head;                     // whether heads have slots of their own
  bool ragged;                      // whether these lie one head's after another's, C of a row in all
  abi::Tensor table;                // [B,M]: `k` and `v` are a pool's blocks [Z,G,E,..], of which these are the rows'
  std::vector<Span> spans;                          // of positions: [B], or [B G]
  std::shared_ptr<const std::vector<Slots>> slots;  // the same

  // Where the keys of a head of a row lie among all, and how many.
  Span of(int64_t pair) const { return ragged ? spans[pair] : Span{pair * C, C}; }
  int64_t page() const { return k.size[2]; }  // slots of a block
  int64_t rows(const Call& c) const;          // of keys and values, over all heads
};

// Pages of `size` slots: slot j is number `skip` + j of them, and page p starts at p * step + first.
struct Paging {
  int64_t size, step, first, skip;

  int64_t place(const int64_t* pages, int64_t j) const {
    return std::max<int64_t>(0, pages[(skip + j) / size]) * step + first + (skip + j) % size;
  }
  // Slots from j on that lie together.
  int64_t together(int64_t j) const { return size - (skip + j) % size; }
};

// Slots of a segment that are gone through together: tiles [from, to) of its C slots.
struct Piece {
  Rows k, v;  // from the first tile on
  const Slots* slots;
  int64_t C, from, to;
  Range held;  // positions
  bool full;   // no slot is empty
  bool on;     // what comes after it is read too
  bool fetch = true;  // memory is asked for before it is needed
  const int64_t* pages = nullptr;  // pages that the slots lie in; none: they lie as they are
  Paging paging = {};
  const int64_t* listed = nullptr;  // the slots, one by one, counted from `k` and `v`
  int64_t more = 0;                 // those of `pages` or `listed`, of the pieces after it too

  // Where slot j lies, from `k` and `v`.
  int64_t place(int64_t j) const { return pages ? paging.place(pages, j) : j; }
  int64_t used() const { return std::min(to * kTile, C) - from * kTile; }

  // `count` rows of `k` or `v` from number j on.
  const float* read(const Rows& rows, int64_t j, int64_t count, float* room) const {
    if (listed) return lists::read(rows, listed + j, count, room);
    if (!pages || paging.together(j) >= count) return rows.at(place(j)).read(count, room);
    for (int64_t i = 0, some; i < count; i += some) {
      some = std::min(paging.together(j + i), count - i);
      lists::copy(rows, place(j + i), some, room + i * rows.width);
    }
    return room;
  }
  // The same as they lie, floats or halves, where they lie together: use(rows, how many bytes ahead it is to ask for more).
  template <typename F>
  void with(const Rows& rows, int64_t j, int64_t count, float* room, F use) const {
    bool together = !listed && (!pages || paging.together(j) >= count), more = fetch && on && !listed && !pages;
    if (together && rows.halves) return use(rows.at(place(j)).halves, more ? tiles::kAhead : 0);
    if (together && rows.floats) return use(rows.at(place(j)).floats, more ? tiles::kAhead : 0);
    if (fetch) ahead(rows, j + (listed ? kFarther : 2) * count, count);
    use(static_cast<const float*>(read(rows, j, count, room)), int64_t(0));
  }
  void ahead(const Rows& rows, int64_t j, int64_t count) const {
    if (listed)
      for (int64_t i = j; i < std::min(j + count, more); ++i) rows.ahead(listed[i], 1);
    else if (!pages ? on || j < used() : j < more)
      rows.ahead(place(j), count);
  }
};

struct Call {
  Settings set;
  abi::Tensor q, q_pos, bias, sink, pages, tree, first, beside, beside_lse, owner;
  Segment segments[2];
  float *out, *lse;
  int64_t B, H, G, T, D, W, R, rows, chunks, blocks, splits;  // T, rows: of the row that has most
  std::vector<Span> tokens;  // of each row among all, where there is no padding
  int64_t listed;  // pages that a query lists; 0: it reads everything
  int64_t own;     // slots from `first` on of which each token sees those of its row of `tree`; 0: no tree
  bool turned;  // whether many rows share each key, so that it pays to turn keys first
  std::unique_ptr<float[]> partial;  // [B G, rows, chunks, W + 2], where keys are split
  drawn::Draw draw;
};

int64_t Segment::rows(const Call& c) const {
  return table.rank ? k.size[0] * k.size[1] * page() : c.B * (ragged ? 1 : c.G) * C;
}

struct Row {
  const Slots* slots;
  const float* q;
  int64_t head, position;
  Range seen;
  drawn::Row draw = {};
};

// The tokens of a row among all: where they start, and how many.
Span tokens_of(const Call& c, int64_t b) { return c.tokens.empty() ? Span{b * c.T, c.T} : c.tokens[b]; }

// Where a row of queries and of results lies, among rows by head.
int64_t by_head(const Call& c, int64_t b, int64_t head, int64_t t) {
  return c.tokens.empty() ? (b * c.H + head) * c.T + t : head * c.owner.size[0] + c.tokens[b].start + t;
}

// The same, by token where they lie so.
int64_t place(const Call& c, int64_t b, int64_t head, int64_t t) {
  return c.set.packed ? (tokens_of(c, b).start + t) * c.H + head : by_head(c, b, head, t);
}

Row row_of(const Call& c, int64_t b, int64_t g, int64_t r) {
  auto [start, count] = tokens_of(c, b);
  int64_t head = g * c.R + r / count, t = r % count;
  int64_t position = c.q_pos.as<int64_t>()[start + t];
  const float* q = c.q.as<float>() + place(c, b, head, t) * c.D;
  return {nullptr, q, head, position, slots::seen(c.set.mask, c.set.window, position)};
}

bool hidden(const Row& row, int64_t tile) { return row.slots->tiles[tile].misses(row.seen); }

// Whether one of N rows sees some of tiles [from, to); whether all see all of a tile.
template <int N>
bool seen_by(const Row* rows, int64_t from, int64_t to) {
  for (int64_t tile = from; tile < to; ++tile)
    for (int n = 0; n < N; ++n)
      if (!hidden(rows[n], tile)) return true;
  return false;
}
template <int N>
bool seen_whole(const Row* rows, int64_t tile) {
  bool all = !rows[0].slots->holes[tile];
  for (int n = 0; n < N; ++n) all = all && rows[0].slots->tiles[tile].within(rows[n].seen);
  return all;
}

float biased(const Call& c, const Row& row, int32_t k) {
  const float* bias = c.bias.as<float>();
  int64_t q = row.position;
  if (c.bias.rank == 3) {
    int64_t m = c.bias.size[1], n = c.bias.size[2];
    int64_t i = std::clamp<int64_t>(q, 0, m - 1), j = std::clamp<int64_t>(k, 0, n - 1);
    return bias[(row.head * m + i) * n + j];
  }
  int64_t m = c.bias.size[1], zero = c.set.mask == kFull ? m / 2 : 0;
  return bias[row.head * m + std::clamp<int64_t>(q - k + zero, 0, m - 1)];
}

// Keys [count, D] -> [count / 8, D, 8], so that eight slots are one vector; missing ones are 0.
void turn(const float* k, int64_t D, int64_t count, float* out) {
  for (int64_t j = 0; j < count; j += 8, out += 8 * D) {
    int64_t d = 0;
    for (; j + 8 <= count && d + 8 <= D; d += 8) transpose(k + j * D + d, D, out + d * 8);
    for (; d < D; ++d)
      for (int64_t i = 0; i < 8; ++i) out[d * 8 + i] = j + i < count ? k[(j + i) * D + d] : 0.0f;
  }
}

// Products of N rows with kNear keys, those from slot `start` of a chunk on; 0 for tiles that no row sees.
template <int N, typename E>
void direct(const Call& c, const Row* rows, const E* k, int64_t from, int64_t start, int64_t used, bool whole, int64_t ahead,
            const float* const* q, float* const* out) {
  for (int64_t j = start; j < std::min(start + kNear, used); j += kTile) {
    int64_t tile = from + j / kTile;
    if (whole || seen_by<N>(rows, tile, tile + 1))
      tiles::products<N>(q, k + (j - start) * c.D, c.D, std::min(kTile, used - j), ahead, out, j);
    else
      for (int n = 0; n < N; ++n) std::fill_n(out[n] + j, kTile, 0.0f);
  }
}

// Products of N rows with V vectors of turned keys.
template <int N, int V>
void products(const float* const* q, const float* keys, int64_t D, float* const* out) {
  v8 acc[N][V] = {};
  for (int64_t d = 0; d < D; ++d) {
    v8 key[V];
    for (int i = 0; i < V; ++i) key[i] = held(keys + (i * D + d) * 8);
    for (int n = 0; n < N; ++n) {
      v8 x = all(q[n][d]);
      for (int i = 0; i < V; ++i) acc[n][i] = fused(x, key[i], acc[n][i]);
    }
  }
  for (int n = 0; n < N; ++n)
    for (int i = 0; i < V; ++i) store(out[n] + 8 * i, acc[n][i]);
}

// Products of one row with `count` slots -> scores: scaled, capped, biased, and hidden where it does not see.
void finish(const Call& c, const Row& row, int64_t from, int64_t to, int64_t count, bool whole, float* s) {
  v8 scale = all(c.set.scale), cap = all(c.set.softcap);
  for (int64_t j = 0; j < count; j += 8) store(s + j, load(s + j) * scale);
  if (c.set.softcap > 0)
    for (int64_t j = 0; j < count; j += 8) store(s + j, hyperbolic(load(s + j) / cap) * cap);
  const int32_t* pos = row.slots->pos.data() + from * kTile;
  if (c.bias.data)
    for (int64_t j = 0; j < (to - from) * kTile; ++j) s[j] += biased(c, row, pos[j]);
  for (int64_t tile = from; tile < to && !whole; ++tile) {
    if (!row.slots->holes[tile] && row.slots->tiles[tile].within(row.seen)) continue;
    for (int64_t j = (tile - from) * kTile; j < (tile - from + 1) * kTile; ++j)
      if (pos[j] < row.seen.first || pos[j] > row.seen.last) s[j] = kNone;
  }
}

// Values of slots [from, from + count) of a piece mixed by the weights p of N rows, a few slots at a time, so that memory
// is read as it lies.
template <int N>
void mix(const Call& c, const float* const* p, const Piece& x, int64_t from, int64_t count, float* room,
         float* const* out) {
  const float* weights[N];
  for (int64_t j = from, some; j < from + count; j += some) {
    some = c.turned ? count : std::min(kNear, from + count - j);
    for (int n = 0; n < N; ++n) weights[n] = p[n] + j;
    x.with(x.v, j, some, room,
           [&](const auto* values, int64_t ahead) { tiles::mix<N>(weights, values, c.W, some, ahead, out); });
  }
}

// The same of all slots from one on that these rows, which see the same, see: the others may hold anything.
template <int N>
void mix_seen(const Call& c, const Row& row, const float* const* p, const Piece& x, int64_t from, float* room,
              float* const* out) {
  const int32_t* pos = row.slots->pos.data() + x.from * kTile;
  auto sees = [&](int64_t j) { return pos[j] >= row.seen.first && pos[j] <= row.seen.last; };
  for (int64_t j = from, used = x.used(); j < used;) {
    if (!sees(j)) {
      j += j % kTile == 0 && hidden(row, x.from + j / kTile) ? kTile : 1;
      continue;
    }
    int64_t start = j;
    while (j < used && sees(j)) ++j;
    mix<N>(c, p, x, start, j - start, room, out);
  }
}

// The partial result [largest score, sum of weights, mixed values] of N rows over a piece; `turned` keys, or
// none: as they lie. There is room for kNear keys or values.
template <int N>
void go(const Call& c, const Row* rows, const Piece& x, const float* turned, float* room, float** out) {
  int64_t from = x.from, to = x.to, used = x.used(), full = (used + 7) / 8 * 8;
  bool whole = x.full;  // every row sees every slot
  for (int n = 0; n < N; ++n) whole = whole && x.held.within(rows[n].seen);
  alignas(32) float s[N][kChunk];
  const float* q[N];
  float* at[N];
  for (int n = 0; n < N; ++n) q[n] = rows[n].q, at[n] = s[n];
  for (int64_t j = 0; !turned && j < used; j += kNear) {
    int64_t some = std::min(kNear, used - j);
    x.with(x.k, j, some, room, [&](const auto* keys, int64_t ahead) {
      direct<N>(c, rows, keys, from, j, used, whole, ahead, q, at);
    });
  }
  constexpr int V = tiles::kRegisters > 16 && N <= 6 ? 4 : 2;  // so that the sums stay in registers
  for (int64_t j = 0, some; turned && j < full; j += some) {
    some = j + 8 * V <= full ? 8 * V : kTile;
    for (int n = 0; n < N; ++n) at[n] = s[n] + j;
    if (!whole && !seen_by<N>(rows, from + j / kTile, from + (j + some) / kTile))
      for (int n = 0; n < N; ++n) std::fill_n(at[n], some, 0.0f);
    else if (some > kTile)
      products<N, V>(q, turned + j * c.D, c.D, at);
    else
      products<N, 1>(q, turned + j * c.D, c.D, at);
  }
  const float* weights[N];
  float* mixed[N];
  for (int n = 0; n < N; ++n) {
    finish(c, rows[n], from, to, full, whole, s[n]);
    std::fill(s[n] + used, s[n] + full, kNone);
    const drawn::Row& draw = rows[n].draw;
    if (draw.colder != 0)
      drawn::keep_noisy(draw, c.draw.set.noise, s[n], rows[n].slots->pos.data() + from * kTile, full);
    v8 high = all(kNone);
    for (int64_t j = 0; j < full; j += 8) {
      v8 x = load(s[n] + j);
      high = x > high ? x : high;
    }
    float top = largest(high);
    v8 total = {};
    for (int64_t j = 0; j < full; j += 8) {
      v8 p = exponential(load(s[n] + j) - all(top == kNone ? 0.0f : top));
      store(s[n] + j, p);
      total += p;
    }
    out[n][0] = top;
    out[n][1] = sum(total);
    if (draw.weights && draw.colder == 0) drawn::keep(draw, s[n], top, out[n][1], full);
    weights[n] = s[n];
    mixed[n] = out[n] + 2;
    std::fill(mixed[n], mixed[n] + c.W, 0.0f);
  }
  if (whole) return mix<N>(c, weights, x, 0, used, room, mixed);
  bool alike = true;
  for (int n = 1; n < N; ++n) alike = alike && rows[n].seen == rows[0].seen;
  if (alike) return mix_seen<N>(c, rows[0], weights, x, 0, room, mixed);
  int64_t both = 0;  // slots that all rows see, up to the first that one does not
  for (int64_t tile = from; tile < to && seen_whole<N>(rows, tile); ++tile) both += kTile;
  both = std::min(both, used);
  if (both) mix<N>(c, weights, x, 0, both, room, mixed);
  for (int n = 0; n < N; ++n) mix_seen<1>(c, rows[n], weights + n, x, both, room, mixed + n);
}

constexpr decltype(&go<1>) kGo[] = {go<1>, go<2>, go<3>, go<4>, go<5>, go<6>, go<7>, go<8>};

// What is known so far of a row, and one more partial result.
void merge(float* sofar, const float* part, int64_t W) {
  if (part[0] == kNone && !std::isnan(part[1])) return;
  float top = std::max(sofar[0], part[0]);
  float a = sofar[0] == kNone ? 0.0f : std::exp(sofar[0] - top), b = std::exp(part[0] - top);
  sofar[0] = top;
  sofar[1] = std::fma(part[1], b, sofar[1] * a);
  for (int64_t w = 0; w < W; ++w) sofar[2 + w] = std::fma(part[2 + w], b, sofar[2 + w] * a);
}

void write(const Call& c, int64_t b, const Row& row, int64_t r, float* sofar) {
  if (c.sink.data) {  // one more key, whose value is nothing
    float sink = c.sink.as<float>()[row.head], top = std::max(sofar[0], sink);
    float a = sofar[0] == kNone ? 0.0f : std::exp(sofar[0] - top);
    sofar[1] = std::fma(sofar[1], a, std::exp(sink - top));
    sofar[0] = top;
    for (int64_t w = 0; w < c.W; ++w) sofar[2 + w] *= a;
  }
  int64_t t = r % tokens_of(c, b).count, at = by_head(c, b, row.head, t);
  if (c.beside.data) {  // one more key of that score
    float lse = std::max(kLeast, c.beside_lse.as<float>()[at]), top = std::max(sofar[0], lse);
    float a = sofar[0] == kNone ? 0.0f : std::exp(sofar[0] - top), share = std::exp(lse - top);
    const float* value = c.beside.as<float>() + at * c.W;
    sofar[0] = top;
    sofar[1] = std::fma(sofar[1], a, share);
    for (int64_t w = 0; w < c.W; ++w) sofar[2 + w] = std::fma(value[w], share, sofar[2 + w] * a);
  }
  if (c.lse) c.lse[at] = sofar[1] == 0 ? kLeast : sofar[0] + std::log(sofar[1]);
  float* out = c.out + place(c, b, row.head, t) * c.W;
  float weight = sofar[1] > 0 ? 1 / sofar[1] : 0.0f;
  for (int64_t w = 0; w < c.W; ++w) out[w] = sofar[2 + w] * weight;
}

void empty(float* sofar, int64_t W) {
  std::fill(sofar, sofar + W + 2, 0.0f);
  sofar[0] = kNone;
}

// How many of the rows that are left go together.
int64_t group(int64_t left) { return left > kGroup ? 6 : left; }

// Keys or values of a segment from a slot on, counted over the heads of all rows.
Rows rows_at(const abi::Tensor& x, const abi::Tensor& scale, const std::vector<float>& table, const stored::Blocks& blocks,
             int64_t slot) {
  if (blocks.codes.codes) return {nullptr, nullptr, nullptr, blocks.codes.width, &blocks, slot};
  if (!table.empty()) return Rows{nullptr, x.as<int8_t>(), scale.as<float>(), x.size[3], nullptr, 0, table.data()}.at(slot);
  return coded::rows_of(x, scale).at(slot);
}

// Tiles [from, to) of a segment, for one head of one batch row.
Piece piece_of(const Call& c, const Segment& s, int64_t pair, int64_t from, int64_t to) {
  const Slots* slots = &(*s.slots)[s.by_head ? pair : pair / c.G];
  Span mine = s.of(pair);
  int64_t slot = s.table.rank ? 0 : mine.start + from * kTile;
  Rows k = rows_at(s.k, s.k_scale, s.k_table, s.k_blocks, slot), v = rows_at(s.v, s.v_scale, s.v_table, s.v_blocks, slot);
  Piece x = {k, v, slots, mine.count, from, to, {kFar, -1}, true, true};
  if (s.table.rank) {
    x.pages = s.table.as<int64_t>() + pair / c.G * s.table.size[1], x.more = s.C - from * kTile;
    x.paging = {s.page(), c.G * s.page(), pair % c.G * s.page(), from * kTile};
  }
  return x;
}

// The rows that go together: `first`, then one every `step`. Where queries list pages, they are of one token.
struct Block {
  int64_t first, step, count;
};

Block block_of(const Call& c, int64_t b, int64_t block) {
  if (!c.listed) return {block * kRows, 1, std::min(kRows, c.R * tokens_of(c, b).count - block * kRows)};
  int64_t head = block / c.T * kRows;
  return {head * c.T + block % c.T, c.T, std::min(kRows, c.R - head)};
}

// The pages that a token's queries read, in the order of memory.
void list(const Call& c, int64_t pair, int64_t token, std::vector<int64_t>& out) {
  const int64_t* pages = c.pages.as<int64_t>() + (pair * c.T + token) * c.listed;
  out.clear();
  for (int64_t i = 0; i < c.listed; ++i)
    if (pages[i] >= 0 && pages[i] < c.segments[1].C / c.set.page) out.push_back(pages[i]);
  std::sort(out.begin(), out.end());
}

// So many of the slots that queries read one by one, all of which they see.
Piece slots_of(const Call& c, int64_t pair, const int64_t* listed, int64_t count, int64_t more, Range seen) {
  Piece x = piece_of(c, c.segments[1], pair, 0, (count + kTile - 1) / kTile);
  x.listed = listed, x.more = more, x.C = count, x.held = seen;
  return x;
}

// A page by itself.
Piece page_of(const Call& c, int64_t pair, int64_t page) {
  int64_t tiles = c.set.page / kTile;
  Piece x = piece_of(c, c.segments[1], pair, page * tiles, (page + 1) * tiles);
  x.on = false;
  for (int64_t tile = x.from; tile < x.to; ++tile) {
    x.held.add(x.slots->tiles[tile]);
    x.full = x.full && !x.slots->holes[tile];
  }
  return x;
}

// Goes over the listed pages [at, end): those that queries see whole are one piece, the others each their own.
template <typename F>
void over_pages(const Call& c, int64_t pair, const std::vector<int64_t>& pages, size_t at, size_t end, Range seen, F over) {
  thread_local std::vector<int64_t> whole;
  whole.clear();
  for (; at < end; ++at) {
    Piece x = page_of(c, pair, pages[at]);
    if (x.full && x.held.within(seen) && !c.turned && !c.bias.data)
      whole.push_back(pages[at] * c.set.page);
    else
      over(x);
  }
  if (whole.empty()) return;
  Piece x = piece_of(c, c.segments[1], pair, 0, whole.size() * c.set.page / kTile);
  x.held = seen, x.pages = whole.data(), x.paging = {c.set.page, 1, 0, 0}, x.more = x.used();
  over(x);
}

// A chunk of slots with those of a token's ancestors and itself in a row, the other guesses left out.
struct Lane {
  std::vector<float> k, v;
  std::vector<int64_t> pos;
  Slots slots;
  int64_t before;  // slots before the call's own, which all of its tokens see
  int32_t last;    // the latest position of what a token sees of its own

  // Of chunk `index` of what came since; its slots before the call's own.
  void begin(const Call& c, int64_t pair, int64_t index) {
    Piece x = piece_of(c, c.segments[1], pair, index * kChunk / kTile, 0);
    before = std::clamp<int64_t>(c.first.as<int64_t>()[pair / c.G] - index * kChunk, 0, kChunk);
    k.resize(kChunk * c.D), v.resize(kChunk * c.W), pos.resize(kChunk);
    lists::copy(x.k, 0, before, k.data()), lists::copy(x.v, 0, before, v.data());
  }

  // And those that token t sees of its own, and of what lies behind them: nothing, in a session.
  Piece of(const Call& c, int64_t pair, int64_t index, int64_t t, Range sight) {
    int64_t b = pair / c.G, first = c.first.as<int64_t>()[b], next = first - index * kChunk, count = before;
    const bool* seen = c.tree.as<bool>() + (b * c.T + t) * c.own;
    Piece x = piece_of(c, c.segments[1], pair, 0, 0);
    auto near = [&](int32_t p) {  // as the mask has it of positions in either direction
      return c.set.mask != slots::kChunked || slots::seen(c.set.mask, c.set.window, p).first == sight.first;
    };
    last = sight.last;
    auto take = [&](int64_t slot) {
      if (int64_t at = next++; at >= 0) {
        lists::copy(x.k, slot, 1, k.data() + at * c.D), lists::copy(x.v, slot, 1, v.data() + at * c.W);
        pos[at] = x.slots->pos[slot], count = at + 1;
      }
    };
    for (int64_t w = 0; w < c.own && next < kChunk; ++w)
      if (int32_t p = x.slots->pos[first + w]; seen[w] && near(p)) take(first + w), last = std::max(last, p);
    for (int64_t slot = first + c.own; slot < x.C && next < kChunk; slot = (slot / kTile + 1) * kTile) {
      if (x.slots->tiles[slot / kTile].misses(sight)) continue;
      for (int64_t i = slot; i < std::min((slot / kTile + 1) * kTile, x.C) && next < kChunk; ++i)
        if (int32_t p = x.slots->pos[i]; p >= sight.first && p <= sight.last) take(i);
    }
    const int32_t* held = x.slots->pos.data() + index * kChunk;
    for (int64_t i = 0; i < before; ++i) pos[i] = held[i] > sight.last ? -1 : held[i];
    slots = slots::sorted(pos.data(), count);
    Rows keys{k.data(), nullptr, nullptr, c.D}, values{v.data(), nullptr, nullptr, c.W};
    if (!count) return {keys, values, &slots, 0, 0, 0, {kFar, -1}, true, false};
    return {keys, values, &slots, count, 0, (count + kTile - 1) / kTile, slots.chunks[0], bool(slots.full[0]), false};
  }
};

// Whether a chunk of what came since holds some of the call's guesses, or what would come after them.
bool guesses(const Call& c, int64_t b, int64_t index) {
  return (index + 1) * kChunk > c.first.as<int64_t>()[b];
}

// Goes over a chunk that holds guesses of the call, for the tokens of a block one by one.
template <typename F>
void over_guesses(const Call& c, int64_t pair, int64_t index, const Block& block, F over) {
  thread_local Lane lane;
  lane.begin(c, pair, index);
  for (int64_t t = 0; t < c.T; ++t) {
    int64_t rows[kRows], count = 0;
    for (int64_t r = 0; r < block.count; ++r)
      if ((block.first + r * block.step) % c.T == t) rows[count++] = r;
    if (!count) continue;
    Piece x = lane.of(c, pair, index, t, row_of(c, pair / c.G, pair % c.G, t).seen);
    for (int64_t r = 0; r < count && x.C; r += kGroup) over(x, rows + r, std::min(kGroup, count - r), lane.last);
  }
}

// Adds up what slots draw of rows `first`, first + step, … of a pair, whose weights are kept from `weights` on.
void draw(const Call& c, int64_t pair, const Block& block, const float* weights, const float* tops, const float* totals,
          const drawn::Whole* whole, float* out) {
  float shares[kRows];
  for (int64_t r = 0; r < block.count; ++r) {
    int64_t at = pair / c.G * c.T + (block.first + r * block.step) % c.T;
    shares[r] = c.q_pos.as<int64_t>()[at] < 0 ? 0 : c.draw.share.as<float>()[at];
  }
  auto where = [&](int64_t i) {
    const Segment& s = c.segments[i >= c.segments[0].last];
    bool recent = &s == &c.segments[1];
    int64_t from = (i - s.first) * kChunk, count = recent ? s.C : s.of(pair).count;
    int64_t start = recent ? c.segments[0].C : s.ragged ? s.of(pair).start - pair / c.G * s.C : 0;
    return std::pair(start + from, std::clamp<int64_t>(count - from, 0, kChunk));
  };
  drawn::add(c.draw, weights, tops, totals, shares, whole, block.count, where, out);
}

// A block of rows over a range of chunks: merged at once, or kept as partial results.
void go_through(Call& c, int64_t pair, int64_t block, int64_t split, float* drawing) {
  int64_t b = pair / c.G, g = pair % c.G, width = c.W + 2;
  Block mine = block_of(c, b, block);
  auto [first, step, count] = mine;
  if (count <= 0) return;  // another row has more tokens
  int64_t each = (c.chunks + c.splits - 1) / c.splits;
  int64_t start = split * each, end = std::min(c.chunks, start + each);
  thread_local std::vector<float> buffer, keys, room;
  thread_local std::vector<int64_t> pages;
  buffer.resize((kRows + kGroup) * width);
  keys.resize(kChunk * c.D);
  room.resize((c.turned ? kChunk : kNear) * std::max(c.D, c.W));
  float* parts[kGroup];
  for (int64_t n = 0; n < kGroup; ++n) parts[n] = buffer.data() + (kRows + n) * width;
  Row rows[kRows];
  Range seen = {kFar, -1};  // by any row
  for (int64_t r = 0; r < count; ++r) {
    rows[r] = row_of(c, b, g, first + r * step);
    seen.add(rows[r].seen);
    empty(buffer.data() + r * width, c.W);
  }
  auto known = [&, first = first, step = step](int64_t r, int64_t i) {  // of a row, of chunk i where they are kept
    if (c.splits == 1) return buffer.data() + r * width;
    return c.partial.get() + ((pair * c.rows + first + r * step) * c.chunks + i) * width;
  };
  thread_local std::vector<float> weights, tops, totals;  // of what slots draw
  int64_t row = pair * c.rows + first;  // of what is kept of all rows
  if (drawing) {
    weights.resize(kRows * c.chunks * kChunk), totals.resize(kRows * c.chunks);
    tops.assign(kRows * c.chunks, kNone);
  }
  auto over = [&, count = count, step = step](Piece x, int64_t i) {
    if (c.turned) {
      turn(x.read(x.k, 0, x.used(), room.data()), c.D, x.used(), keys.data());
      x.v = Rows{x.read(x.v, 0, x.used(), room.data()), nullptr, nullptr, c.W};
      x.listed = x.pages = nullptr;
    }
    for (int64_t r = 0; r < count; ++r) rows[r].slots = x.slots;
    for (int64_t r = 0; r < count && c.draw.asked(); ++r) {
      drawn::Draw& d = c.draw;
      rows[r].draw = drawing ? d.row(weights.data(), tops.data(), totals.data(), r, i)
                             : d.row(d.weights.data(), d.tops.data(), d.totals.data(), row + r * step, i);
      d.tune(rows[r].draw, b, rows[r].head, rows[r].position);
    }
    for (int64_t r = 0, n; r < count; r += n) {
      n = group(count - r);
      x.fetch = r == 0 && !c.turned;
      kGo[n - 1](c, rows + r, x, c.turned ? keys.data() : nullptr, room.data(), parts);
      for (int64_t j = 0; j < n; ++j) merge(known(r + j, i), parts[j], c.W);
    }
  };
  auto guessed = [&](const Piece& x, const int64_t* which, int64_t n, int32_t last, int64_t i) {
    Row some[kGroup];
    for (int64_t j = 0; j < n; ++j) some[j] = rows[which[j]], some[j].slots = x.slots, some[j].seen.last = last;
    kGo[n - 1](c, some, x, nullptr, room.data(), parts);
    for (int64_t j = 0; j < n; ++j) merge(known(which[j], i), parts[j], c.W);
  };
  bool single = c.listed && c.set.page < kNear;
  if (single) {
    const int64_t* own = c.pages.as<int64_t>() + (pair * c.T + block % c.T) * c.listed;
    lists::slots(own, c.listed, c.set.page, (*c.segments[1].slots)[b], c.segments[1].C, rows[0].seen, pages);
  } else if (c.listed) {
    list(c, pair, block % c.T, pages);
  }
  for (int64_t i = start; i < end; ++i) {
    const Segment& s = c.segments[i >= c.segments[0].last];
    for (int64_t r = 0; r < count && c.splits > 1; ++r) empty(known(r, i), c.W);
    int64_t index = i - s.first;
    if (single && &s == &c.segments[1]) {
      int64_t at = index * kChunk, more = int64_t(pages.size()) - at;
      if (more > 0) over(slots_of(c, pair, pages.data() + at, std::min(kChunk, more), more, rows[0].seen), i);
      continue;
    }
    if (c.listed && &s == &c.segments[1]) {
      size_t some = kChunk / c.set.page, at = index * some, last = std::min(pages.size(), at + some);
      over_pages(c, pair, pages, at, last, seen, [&](const Piece& x) { over(x, i); });
      continue;
    }
    if (c.own && &s == &c.segments[1] && guesses(c, b, index)) {
      over_guesses(c, pair, index, mine, [&](const Piece& x, const int64_t* which, int64_t n, int32_t last) {
        guessed(x, which, n, last, i);
      });
      continue;
    }
    int64_t mine = s.of(pair).count;
    if (index * kChunk >= mine) continue;
    Piece x = piece_of(c, s, pair, index * kChunk / kTile, (std::min((index + 1) * kChunk, mine) + kTile - 1) / kTile);
    x.held = x.slots->chunks[index], x.full = x.slots->full[index];
    if (!x.held.misses(seen)) over(x, i);
  }
  if (c.splits > 1) return;
  drawn::Whole whole[kRows];
  for (int64_t r = 0; r < count; ++r) {
    write(c, b, rows[r], first + r * step, known(r, 0));
    whole[r] = {known(r, 0)[0], known(r, 0)[1]};
  }
  if (drawing) draw(c, pair, mine, weights.data(), tops.data(), totals.data(), whole, drawing);
}

void work(Call& c, int64_t item) {
  if (!c.draw.asked() || c.splits > 1)
    return go_through(c, item / c.splits / c.blocks, item / c.splits % c.blocks, item % c.splits, nullptr);
  int64_t lane = item % c.draw.lanes, pair = item / c.draw.lanes;
  float* drawing = c.draw.lane(pair, lane);
  std::fill(drawing, drawing + c.draw.slots, 0.0f);
  for (int64_t block = lane; block < c.blocks; block += c.draw.lanes) go_through(c, pair, block, 0, drawing);
}

void join(Call& c) {
  int64_t width = c.W + 2;
  std::vector<float> sofar(width);
  std::fill_n(c.draw.out, c.draw.asked() ? c.B * c.G * c.draw.slots : 0, 0.0f);
  for (int64_t pair = 0; pair < c.B * c.G; ++pair)
    for (int64_t r = 0; r < c.R * tokens_of(c, pair / c.G).count; ++r) {
      empty(sofar.data(), c.W);
      for (int64_t i = 0; i < c.chunks; ++i)
        merge(sofar.data(), c.partial.get() + ((pair * c.rows + r) * c.chunks + i) * width, c.W);
      write(c, pair / c.G, row_of(c, pair / c.G, pair % c.G, r), r, sofar.data());
      if (!c.draw.asked()) continue;
      drawn::Draw& d = c.draw;
      drawn::Whole whole = {sofar[0], sofar[1]};
      int64_t at = (pair * c.rows + r) * c.chunks;
      draw(c, pair, {r, 1, 1}, d.weights.data() + at * kChunk, d.tops.data() + at, d.totals.data() + at, &whole,
           d.out + pair * d.slots);
    }
}

typedef abi::Kernel<Settings> Kernel;

enum Form { kFloats, kInt8, kHalves, kTable, kGroups, kCodes };

constexpr const char* kNames[] = {"Attention", "AttentionInt8", "AttentionFloat16", "AttentionTable", "AttentionGroups",
                                  "AttentionCodes"};
constexpr const char* kDrawn[] = {"DrawnAttention", "DrawnAttentionInt8", "DrawnAttentionFloat16"};
constexpr size_t kInputs[] = {11, 15, 11, 19, 15, 19};  // before the tree
constexpr size_t kMore = 7;     // the tree and what follows, of each form
constexpr size_t kBeside = 11;  // of AttentionGroups, then

// Whether a tensor has `count` numbers, of which each of some lines has as many; these.
bool shared(const abi::Tensor& x, int64_t count, int64_t* each) {
  *each = x.rank && count ? x.count() / count : 0;
  return !x.rank || x.count() == count * *each;
}

// What lies beside the codes of blocks, where it is given; whether it is of their sizes.
bool lay_beside(const Beside& more, int64_t blocks, bool coarse, stored::Blocks* out) {
  const grouped::Blocks& codes = out->codes;
  int64_t lines = out->numbers.down ? codes.width : codes.rows, other, places;
  if (more.finer.rank && more.finer.count() != blocks * codes.rows * codes.bytes()) return false;
  out->codes.finer = coarse ? nullptr : more.finer.as<uint8_t>();
  out->product.left = more.left.as<uint16_t>(), out->product.right = more.right.as<uint16_t>();
  out->numbers.numbers = more.numbers.as<uint16_t>(), out->numbers.places = more.places.as<uint8_t>();
  return shared(more.left, blocks * codes.rows, &out->product.rank) && shared(more.right, blocks * codes.width, &other) &&
         other == out->product.rank && shared(more.numbers, blocks * lines, &out->numbers.each) &&
         shared(more.places, blocks * lines, &places) && places == out->numbers.each &&
         (!places || codes.rows <= 256 || !out->numbers.down);
}

// Blocks of `width` channels, and whether the tensors are of their sizes.
bool blocks_of(const Call& c, const Segment& s, bool keys, bool coarse, stored::Blocks* out) {
  const abi::Tensor &x = keys ? s.k : s.v, &scale = keys ? s.k_scale : s.v_scale, &least = keys ? s.k_least : s.v_least;
  int64_t bits = keys ? c.set.k_bits : c.set.v_bits, width = keys ? c.D : c.W, rows = c.set.rows;
  out->codes = {x.as<uint8_t>(), scale.as<uint16_t>(), least.as<uint16_t>(), bits, rows,
                keys ? c.set.k_group : c.set.v_group, width, bool(keys ? c.set.k_along : c.set.v_along)};
  out->numbers.down = keys ? c.set.k_down : c.set.v_down;
  if (rows <= 0 || (s.table.rank ? s.page() : s.C) % rows || x.rank != 4 || !scale.rank) return false;
  int64_t blocks = s.rows(c) / rows;
  if (!bits) {  // a mask, and the numbers that are there
    out->few = {x.as<uint8_t>(), scale.as<uint16_t>(), scale.as<uint16_t>() + scale.count(), 0, width};
    return x.count() == blocks * rows * out->few.bytes() && shared(scale, blocks * rows, &out->few.stay);
  }
  const grouped::Blocks& codes = out->codes;
  if (codes.group <= 0 || (codes.along && rows % codes.group)) return false;
  return (bits == 1 || bits == 2 || bits == 4 || bits == 8) && x.count() == blocks * rows * codes.bytes() &&
         scale.count() == blocks * codes.groups() && least.rank && least.count() == scale.count() &&
         lay_beside(keys ? s.k_beside : s.v_beside, blocks, coarse, out);
}

// Whether keys and values of a segment are of the call's sizes, and so are their scales where they have any; int8 rows must.
bool same(const Call& c, const Segment& s, bool coded) {
  for (const abi::Tensor* scale : {&s.k_scale, &s.v_scale})
    if (scale->rank ? scale->count() != s.rows(c) : coded) return false;
  const int64_t sizes[] = {s.table.rank ? s.k.size[0] : c.B, s.ragged ? 1 : c.G, s.table.rank ? s.page() : s.C};
  return s.k.rank == 4 && s.v.rank == 4 && std::equal(sizes, sizes + 3, s.k.size) && std::equal(sizes, sizes + 3, s.v.size) &&
         s.k.size[3] == c.D && s.v.size[3] == c.W;
}

// Whether the table of a segment, if it has one, lists blocks that are there, as many as it has slots.
bool listed(const Call& c, const Segment& s) {
  if (!s.table.rank) return true;
  if (s.table.rank != 2 || s.ragged || s.k.rank != 4 || s.table.size[0] != c.B || s.k.size[1] != c.G ||
      s.page() < 1 || s.table.size[1] * s.page() != s.C)
    return false;
  const int64_t* block = s.table.as<int64_t>();
  return std::all_of(block, block + s.table.count(), [&](int64_t i) { return i < s.k.size[0]; }) &&
         (!s.C || s.k.size[0]);
}

// The spans of a segment's positions, out of the slots of each head where these are unequal numbers; whether they fit.
bool lay(const Call& c, Segment& s, const abi::Tensor& counts) {
  if (!s.ragged) {
    for (int64_t i = 0; i < (s.by_head ? c.B * c.G : c.B); ++i) s.spans.push_back({i * s.C, s.C});
    return true;
  }
  if (counts.rank != 2 || counts.size[0] != c.B || counts.size[1] != c.G) return false;
  for (int64_t b = 0; b < c.B; ++b) {
    int64_t at = 0;
    for (int64_t g = 0; g < c.G; ++g) {
      int64_t count = counts.as<int64_t>()[b * c.G + g];
      if (count < 0 || count > s.C - at) return false;
      s.spans.push_back({b * s.C + at, count});
      at += count;
    }
  }
  return true;
}

// The tokens of each row by the owner of each; whether these come row by row, one after another.
bool share(Call& c) {
  if (c.owner.rank != 2 || c.owner.size[1] != 2) return false;
  const int64_t* owner = c.owner.as<int64_t>();
  c.tokens.assign(c.B, Span{0, 0});
  for (int64_t i = 0, last = 0; i < c.owner.size[0]; ++i) {
    int64_t b = owner[2 * i];
    if (b < last || b >= c.B || owner[2 * i + 1] != c.tokens[b].count) return false;
    if (c.tokens[b].count++ == 0) c.tokens[b].start = i;
    last = b;
  }
  c.T = 0;
  for (const Span& s : c.tokens) c.T = std::max(c.T, s.count);
  return true;
}

abi::Status* prepare(const Kernel& kernel, abi::Context* context, Form form, Call& c) {
  const abi::Api& api = kernel.api;
  Segment &kept = c.segments[0], &recent = c.segments[1];
  abi::Tensor k_pos, kept_pos, counts;
  abi::Tensor* inputs[] = {&c.q,           &recent.k,       &recent.v,     &c.q_pos, &k_pos,  &c.bias,
                           &c.sink,        &kept.k,         &kept.v,       &kept_pos,
                           &c.pages,       &recent.k_scale, &recent.v_scale, &kept.k_scale, &kept.v_scale,
                           nullptr,        nullptr,         nullptr,         nullptr};
  size_t many = kInputs[form], at = 11;
  if (form >= kGroups)
    for (Segment* s : {&recent, &kept})
      if (s == &kept || form == kCodes)
        for (abi::Tensor* x : {&s->k_scale, &s->k_least, &s->v_scale, &s->v_least}) inputs[at++] = x;
  abi::Tensor tables[4];
  for (size_t i = 0; i < 4 && form == kTable; ++i) inputs[15 + i] = &tables[i];
  bool coded = form == kInt8;
  for (size_t i = 0; i < many; ++i)
    if (abi::Status* s = abi::read(api, context, i, inputs[i])) return s;
  if (abi::Status* s = abi::read(api, context, many, &c.tree)) return s;
  if (abi::Status* s = abi::read(api, context, many + 1, &c.first)) return s;
  if (abi::Status* s = abi::read(api, context, many + 2, &c.beside)) return s;
  if (abi::Status* s = abi::read(api, context, many + 3, &c.beside_lse)) return s;
  if (abi::Status* s = abi::read(api, context, many + 4, &counts)) return s;
  if (abi::Status* s = abi::read(api, context, many + 5, &c.owner)) return s;
  if (abi::Status* s = abi::read(api, context, many + 6, &kept.table)) return s;
  abi::Tensor coarse;
  if (form == kGroups) {
    abi::Tensor* beside[kBeside];
    size_t next = 0;
    for (Beside* x : {&kept.k_beside, &kept.v_beside})
      for (abi::Tensor* part : {&x->finer, &x->places, &x->left, &x->right, &x->numbers}) beside[next++] = part;
    beside[next] = &coarse;
    for (size_t i = 0; i < kBeside; ++i)
      if (abi::Status* s = abi::read(api, context, many + kMore + i, beside[i])) return s;
  }
  bool coarsely = coarse.data && *coarse.as<bool>();
  c.set = kernel.set;
  c.B = c.q.size[0], c.H = c.q.size[1], c.T = c.q.size[2], c.D = c.q.size[3];
  if (c.set.packed) std::swap(c.H, c.T);
  int64_t lines = c.B, all = c.T;  // rows and tokens as they lie
  bool flat = c.owner.rank != 0;
  if (flat) {
    c.B = recent.k.size[0];
    bool plain = !c.pages.rank && !c.tree.rank && !c.beside.rank && !c.beside_lse.rank;
    if (!plain || lines != 1 || c.owner.size[0] != all || c.q_pos.size[1] != all || !share(c))
      return api.fail("Attention: the owners do not fit the queries and the cache");
  }
  c.G = recent.k.size[1], c.W = form == kCodes ? c.set.v_width : recent.v.size[3];
  bool some = kept_pos.rank == 3, whole = some == (kept.k.rank == 4) && some == (kept.v.rank == 4);
  kept.ragged = some && counts.rank, kept.by_head = kept.ragged || kept_pos.size[1] == c.G;
  recent.C = recent.k.size[2], kept.C = some ? kept_pos.size[2] : 0;
  auto sized = [&](Segment& s, bool blocks) {
    if (!blocks) return same(c, s, coded);
    return blocks_of(c, s, true, coarsely, &s.k_blocks) && blocks_of(c, s, false, coarsely, &s.v_blocks);
  };
  if (kept.table.rank && (!some || !listed(c, kept)))
    return api.fail("Attention: the table of blocks does not fit the pool and the slots that were kept");
  bool fits = whole && c.G > 0 && c.H % c.G == 0 && c.q_pos.size[0] == lines && k_pos.size[0] == c.B &&
              k_pos.size[1] == recent.C && sized(recent, form == kCodes) &&
              (!some || (kept_pos.size[0] == c.B && kept_pos.size[1] == (kept.by_head && !kept.ragged ? c.G : 1) &&
                         sized(kept, form >= kGroups) && lay(c, kept, counts)));
  std::vector<float>* numbers[] = {&recent.k_table, &recent.v_table, &kept.k_table, &kept.v_table};
  for (size_t i = 0; i < 4 && form == kTable; ++i)
    fits = fits && (coded::table_of(tables[i].as<float>(), tables[i].rank, tables[i].count(), *numbers[i]) || (i > 1 && !some));
  if (!fits) return api.fail("Attention: the sizes of q, k, v and their positions do not fit");
  c.R = c.H / c.G, c.rows = c.R * c.T;
  c.listed = c.pages.rank == 4 && c.pages.size[2] ? c.pages.size[3] : 0;
  bool small = c.set.page < kNear;
  if (c.listed && (c.set.page < 1 || (small ? c.bias.data != nullptr : kChunk % c.set.page != 0) ||
                   recent.C % c.set.page || c.pages.size[0] != c.B || c.pages.size[1] != c.G || c.pages.size[2] != c.T))
    return api.fail("Attention: the lists of pages do not fit the queries and the cache");
  c.own = c.tree.rank == 3 && c.tree.size[2] > 1 ? c.tree.size[2] : 0;
  if (c.own) {
    bool held = !c.listed && c.tree.size[0] == c.B && c.tree.size[1] == c.T && c.first.rank == 1 && c.first.size[0] == c.B;
    for (int64_t b = 0; held && b < c.B; ++b)
      held = c.first.as<int64_t>()[b] >= 0 && c.first.as<int64_t>()[b] + c.own <= recent.C;
    if (!held) return api.fail("Attention: the tree does not fit the queries and the cache");
  }
  bool merged = c.beside.rank || c.beside_lse.rank;
  if (merged && (c.beside.rank != 4 || c.beside_lse.rank != 3 || c.beside.count() != c.B * c.H * c.T * c.W ||
                 c.beside_lse.count() != c.B * c.H * c.T))
    return api.fail("Attention: what is merged in does not fit the queries and values");
  int64_t longest = 0;
  for (const Span& s : kept.spans) longest = std::max(longest, s.count);
  kept.first = 0, kept.last = recent.first = (longest + kChunk - 1) / kChunk;
  int64_t slots = c.listed ? c.listed * c.set.page : recent.C;
  c.chunks = recent.last = recent.first + (slots + kChunk - 1) / kChunk;
  c.blocks = c.listed ? c.T * ((c.R + kRows - 1) / kRows) : (c.rows + kRows - 1) / kRows;
  int64_t items = std::max<int64_t>(1, c.B * c.G * c.blocks);
  for (c.splits = 1; items * c.splits < kItems && 4 * c.splits <= c.chunks;) c.splits *= 2;
  c.turned = !c.set.exact && (c.listed ? c.R : c.rows) >= kTurned;
  int64_t heads_first[] = {lines, c.H, all, c.W}, by_token[] = {lines, all, c.H * c.W};
  const int64_t* sizes = c.set.packed ? by_token : heads_first;
  abi::Value* out = nullptr;
  if (abi::Status* s = api.output(context, 0, sizes, c.set.packed ? 3 : 4, &out)) return s;
  void* data = nullptr;
  if (abi::Status* s = api.data(out, &data)) return s;
  c.out = static_cast<float*>(data);
  if (c.set.partial) {
    if (abi::Status* s = api.output(context, 1, heads_first, 3, &out)) return s;
    if (abi::Status* s = api.data(out, &data)) return s;
    c.lse = static_cast<float*>(data);
  }
  recent.by_head = false, lay(c, recent, counts);
  recent.slots = slots::of(k_pos.as<int64_t>(), c.B * recent.C, recent.spans);
  if (some) kept.slots = slots::of(kept_pos.as<int64_t>(), kept_pos.count(), kept.spans);
  if (c.splits > 1) c.partial.reset(new float[c.B * c.G * c.rows * c.chunks * (c.W + 2)]);
  return nullptr;
}

// What is asked of what slots draw: after `prepare`.
abi::Status* prepare_draw(const abi::Api& api, abi::Context* context, size_t inputs, Call& c) {
  drawn::Draw& d = c.draw;
  d.set = {c.set.noise, c.set.seed};
  abi::Tensor* given[] = {&d.share, &d.temperature, &d.layer};
  for (size_t i = 0; i < 3; ++i)
    if (abi::Status* s = abi::read(api, context, inputs + i, given[i])) return s;
  bool heard = !d.temperature.rank || d.temperature.count() == c.B;
  bool known = !d.temperature.rank || d.set.noise == 0 || (d.layer.data && d.layer.count() == 1);
  if (d.share.rank != 2 || d.share.size[0] != c.B || d.share.size[1] != c.T || !heard || !known || c.listed || c.own)
    return api.fail("DrawnAttention: the shares and temperatures do not fit the queries");
  d.slots = c.segments[0].C + c.segments[1].C, d.chunks = c.chunks;
  int64_t pairs = c.B * c.G, sizes[] = {c.B, c.G, d.slots};
  d.lanes = std::max<int64_t>(1, std::min(c.blocks, (kLanes + pairs - 1) / std::max<int64_t>(1, pairs)));
  abi::Value* out = nullptr;
  if (abi::Status* s = api.output(context, 2, sizes, 3, &out)) return s;
  void* data = nullptr;
  if (abi::Status* s = api.data(out, &data)) return s;
  d.out = static_cast<float*>(data);
  if (c.splits > 1) {
    int64_t all = pairs * c.rows * c.chunks;
    d.weights.resize(all * kChunk), d.totals.resize(all), d.tops.assign(all, kNone);
    d.lanes = 1;
  }
  if (d.lanes > 1) d.sums.resize(pairs * d.lanes * d.slots);
  return nullptr;
}

template <Form kForm, bool kDraws>
abi::Status* run(const Kernel& self, abi::Context* context) {
  Call c = {};
  if (abi::Status* s = prepare(self, context, kForm, c)) return s;
  if (kDraws)
    if (abi::Status* s = prepare_draw(self.api, context, kInputs[kForm] + kMore, c)) return s;
  size_t items = c.B * c.G * (kDraws && c.splits == 1 ? c.draw.lanes : c.blocks * c.splits);
  if (abi::Status* s = abi::parallel<work>(self.api, context, items, c)) return s;
  if (c.splits > 1) join(c);
  if (kDraws && c.splits == 1) c.draw.join(c.B * c.G);
  return nullptr;
}

constexpr abi::Attribute<Settings> kAttributes[] = {
    {"scale", nullptr, &Settings::scale},
    {"softcap", nullptr, &Settings::softcap},
    {"mask", &Settings::mask, nullptr},
    {"window", &Settings::window, nullptr},
    {"exact", &Settings::exact, nullptr},
    {"packed", &Settings::packed, nullptr},
    {"page", &Settings::page, nullptr},
    {"partial", &Settings::partial, nullptr},
};

constexpr abi::Attribute<Settings> kWithBlocks[] = {
    kAttributes[0], kAttributes[1], kAttributes[2], kAttributes[3], kAttributes[4], kAttributes[5], kAttributes[6],
    kAttributes[7],
    {"k_bits", &Settings::k_bits, nullptr},
    {"v_bits", &Settings::v_bits, nullptr},
    {"rows", &Settings::rows, nullptr},
    {"k_group", &Settings::k_group, nullptr},
    {"v_group", &Settings::v_group, nullptr},
    {"k_along", &Settings::k_along, nullptr},
    {"v_along", &Settings::v_along, nullptr},
    {"v_width", &Settings::v_width, nullptr},
    {"k_down", &Settings::k_down, nullptr},
    {"v_down", &Settings::v_down, nullptr},
};

constexpr abi::Attribute<Settings> kWithDraw[] = {
    kAttributes[0], kAttributes[1], kAttributes[2], kAttributes[3], kAttributes[4], kAttributes[5], kAttributes[6],
    kAttributes[7],
    {"noise", nullptr, &Settings::noise},
    {"seed", &Settings::seed, nullptr},
};

int type_of(Form form, size_t i) {
  if (form == kGroups && i >= kInputs[form] + kMore) {
    size_t at = i - kInputs[form] - kMore;
    return at + 1 == kBeside ? abi::kBool : at % 5 < 2 ? abi::kUint8 : abi::kHalf;
  }
  if (size_t many = kInputs[form]; i >= many)
    return i == many ? abi::kBool
           : i == many + 1 || (i >= many + 4 && i < many + kMore) || i == many + kMore + 2 ? abi::kInt64
                                                                                           : abi::kFloat;
  if (i == 3 || i == 4 || i == 9 || i == 10) return abi::kInt64;
  if (form == kHalves) return i == 1 || i == 2 || i == 7 || i == 8 ? abi::kHalf : abi::kFloat;
  if (form == kInt8) return i == 1 || i == 2 || i == 7 || i == 8 ? abi::kInt8 : abi::kFloat;
  if (form == kTable) return i == 1 || i == 2 || i == 7 || i == 8 ? abi::kUint8 : abi::kFloat;
  if (form == kCodes && (i == 1 || i == 2)) return abi::kUint8;
  if (form >= kGroups && i >= 7) return i < 9 ? abi::kUint8 : abi::kHalf;
  return abi::kFloat;
}

template <Form kForm, bool kDraws = false>
abi::Op op() {
  abi::Op op = {};
  if constexpr (kForm >= kGroups)
    op = abi::op_of<Settings, kWithBlocks, run<kForm, false>>();
  else if constexpr (kDraws)
    op = abi::op_of<Settings, kWithDraw, run<kForm, true>>();
  else
    op = abi::op_of<Settings, kAttributes, run<kForm, false>>();
  op.name = [](const abi::Op*) { return kDraws ? kDrawn[kForm] : kNames[kForm]; };
  op.input_count = [](const abi::Op*) { return kInputs[kForm] + (kDraws ? kMore + 3 : kForm == kGroups ? kMore + kBeside : kMore); };
  op.input_type = [](const abi::Op*, size_t i) { return type_of(kForm, i); };
  op.output_count = [](const abi::Op*) { return size_t(kDraws ? 3 : 2); };
  op.output_presence = [](const abi::Op*, size_t i) { return int(i ? abi::kOptional : abi::kRequired); };
  op.input_presence = [](const abi::Op*, size_t i) { return int(i > 4 ? abi::kOptional : abi::kRequired); };
  return op;
}

}  // namespace

abi::Op attention_op(bool coded) { return coded ? op<kInt8>() : op<kFloats>(); }
abi::Op drawn_attention_op(bool coded) { return coded ? op<kInt8, true>() : op<kFloats, true>(); }
abi::Op attention_halves_op() { return op<kHalves>(); }
abi::Op drawn_attention_halves_op() { return op<kHalves, true>(); }
abi::Op attention_table_op() { return op<kTable>(); }
abi::Op attention_groups_op(bool all) { return all ? op<kCodes>() : op<kGroups>(); }
