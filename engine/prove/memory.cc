#include "prove/memory.h"

#include <algorithm>

#include "plan/lives.h"
#include "prove/join.h"

namespace whale::proof {

Place place_of(const Program& program, BufferId id, int32_t version) {
  const Buffer& b = program.buffers[static_cast<size_t>(id)];
  const Bytes storage = bytes_of_storage(program, id, version);
  return {storage.space, storage.begin + b.at, b.bytes};
}

// [from, from + bytes) of a range that begins at `begin`; null: it begins or ends within an element, or no box is there.
Held Memory::part(const Range& range, int64_t begin, int64_t from, int64_t bytes) {
  const auto size = static_cast<int64_t>(size_of(range.value->dtype));
  if ((from - begin) % size || bytes % size) return nullptr;
  const auto region = range.value->region.run((from - begin) / size, bytes / size);
  if (!region) return nullptr;
  Value out = *range.value;
  out.region = *region;
  return std::make_shared<const Value>(std::move(out));
}

void Memory::write(const Place& place, Held value) {
  Ranges& ranges = spaces_[place.space];
  const int64_t end = place.begin + place.bytes;
  auto at = ranges.upper_bound(place.begin);
  if (at != ranges.begin()) --at;
  while (at != ranges.end() && at->first < end) {
    if (at->second.end <= place.begin) {
      ++at;
      continue;
    }
    const int64_t begin = at->first;
    const Range old = at->second;
    at = ranges.erase(at);
    const auto keep = [&](int64_t from, int64_t to) {
      if (Held rest = part(old, begin, from, to - from)) ranges.emplace(from, Range{to, std::move(rest)});
    };
    if (begin < place.begin) keep(begin, place.begin);
    if (old.end > end) keep(end, old.end);
  }
  ranges[place.begin] = {end, std::move(value)};
}

Held Memory::read(const Place& place, DType dtype) const {
  const auto found = spaces_.find(place.space);
  if (found == spaces_.end()) return nullptr;
  const Ranges& ranges = found->second;
  auto at = ranges.upper_bound(place.begin);
  if (at == ranges.begin()) return nullptr;
  --at;
  const int64_t end = place.begin + place.bytes;
  if (at->first == place.begin && at->second.end == end) return at->second.value;
  const auto size = static_cast<int64_t>(size_of(dtype));
  std::vector<Piece> pieces;
  for (int64_t from = place.begin; from < end; ++at) {
    if (at == ranges.end() || at->first > from || at->second.end <= from) return nullptr;
    const int64_t to = std::min(end, at->second.end);
    Held piece = part(at->second, at->first, from, to - from);
    if (!piece) no_rule("bytes {} to {} of what holds {}", from, to, to_string(at->second.value->region));
    const int64_t begin = (from - place.begin) / size;
    pieces.push_back({std::move(piece), {{begin, begin + (to - from) / size}}});
    from = to;
  }
  if (pieces.size() == 1) return pieces[0].value;
  return joined(pieces, {place.bytes / size});
}

}  // namespace whale::proof
