// Slots that are read one by one, wherever they lie: which they are, and their rows together.
#pragma once
#include <algorithm>
#include <vector>

#include "coded.h"
#include "slots.h"

namespace lists {

// The slots of `count` listed pages (-1: none) that a query sees, each once, in the order of memory.
inline void slots(const int64_t* pages, int64_t count, int64_t page, const ::slots::Slots& held, int64_t C,
                  ::slots::Range seen, std::vector<int64_t>& out) {
  thread_local std::vector<uint64_t> marks;  // a bit for each slot
  marks.assign((C + 63) / 64, 0);
  int64_t most = C / page;
  for (int64_t i = 0; i < count; ++i) {
    if (pages[i] < 0 || pages[i] >= most) continue;
    for (int64_t slot = pages[i] * page; slot < (pages[i] + 1) * page; ++slot) {
      int32_t p = held.pos[slot];
      marks[slot / 64] |= uint64_t(p >= seen.first && p <= seen.last) << slot % 64;
    }
  }
  out.clear();
  for (size_t w = 0; w < marks.size(); ++w)
    for (uint64_t left = marks[w]; left; left &= left - 1) out.push_back(w * 64 + __builtin_ctzll(left));
}

// `count` rows from one on as floats, to a place of their own.
inline void copy(const coded::Rows& rows, int64_t row, int64_t count, float* to) {
  const float* found = rows.at(row).read(count, to);
  if (found != to) std::copy(found, found + count * rows.width, to);
}

// Rows of these slots as floats, one after another: as they lie where they are neighbours, else in `room`.
inline const float* read(const coded::Rows& rows, const int64_t* listed, int64_t count, float* room) {
  if (count && listed[count - 1] - listed[0] == count - 1) return rows.at(listed[0]).read(count, room);
  for (int64_t i = 0; i < count; ++i) copy(rows, listed[i], 1, room + i * rows.width);
  return room;
}

}  // namespace lists
