#include "prove/memory.h"

#include <algorithm>

#include "plan/lives.h"
#include "prove/join.h"

namespace whale::proof {

Place place_of(const Program& program, BufferId id, int32_t version) {
  const Buffer& b = program.buffers[id];
  const Bytes storage = bytes_of_storage(program, id, version);
  return {storage.space, storage.begin + b.at, b.bytes};
}

bool Memory::Range::whole(int64_t begin) const {
  return begin == origin && end - begin == value->region.size() * static_cast<int64_t>(size_of(value->dtype));
}

// [from, from + bytes) of a value; null: they begin or end within an element, or no box is there.
Held Memory::part(const Range& range, int64_t from, int64_t bytes) {
  const auto size = static_cast<int64_t>(size_of(range.value->dtype));
  if ((from - range.origin) % size || bytes % size) return nullptr;
  const auto region = range.value->region.run((from - range.origin) / size, bytes / size);
  if (!region) return nullptr;
  Value out = *range.value;
  out.region = *region, out.before = nullptr;
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
    if (begin < place.begin) ranges.emplace(begin, Range{place.begin, old.origin, old.value});
    if (old.end > end) ranges.emplace(end, old);
  }
  ranges[place.begin] = {end, place.begin, std::move(value)};
}

std::vector<Memory::Part> Memory::parts(const Place& place) const {
  const auto found = spaces_.find(place.space);
  if (found == spaces_.end()) return {};
  const Ranges& ranges = found->second;
  auto at = ranges.upper_bound(place.begin);
  if (at == ranges.begin()) return {};
  --at;
  const int64_t end = place.begin + place.bytes;
  std::vector<Part> out;
  for (int64_t from = place.begin; from < end; ++at) {
    if (at == ranges.end() || at->first > from || at->second.end <= from) return {};
    const int64_t to = std::min(end, at->second.end);
    const Range& range = at->second;
    const bool whole = range.whole(at->first);
    Held value = whole && from == at->first && to == range.end ? range.value : part(range, from, to - from);
    if (!value && !whole) return {};  // what is left of something
    if (!value) no_rule("bytes {} to {} of what holds {}", from, to, to_string(range.value->region));
    out.push_back({to - from, std::move(value)});
    from = to;
  }
  return out;
}

Held Memory::whole(const Place& place) const {
  const auto found = spaces_.find(place.space);
  if (found == spaces_.end()) return nullptr;
  const auto at = found->second.find(place.begin);
  if (at == found->second.end() || at->second.end != place.begin + place.bytes) return nullptr;
  return at->second.whole(place.begin) ? at->second.value : part(at->second, place.begin, place.bytes);
}

void Memory::replace(const Place& place, const std::function<Held(const Held&)>& now) {
  const auto found = spaces_.find(place.space);
  if (found == spaces_.end()) return;
  auto at = found->second.upper_bound(place.begin);
  if (at != found->second.begin()) --at;
  for (; at != found->second.end() && at->first < place.begin + place.bytes; ++at)
    if (at->second.end > place.begin)
      if (Held value = now(at->second.value)) at->second.value = std::move(value);
}

Held Memory::read(const Reference& ref, const Place& place, DType dtype) const {
  const std::vector<Part> all = parts(place);
  if (all.empty()) return nullptr;
  if (all.size() == 1) return all[0].value;
  const auto size = static_cast<int64_t>(size_of(dtype));
  std::vector<Piece> pieces;
  int64_t begin = 0;
  for (const Part& p : all) {
    pieces.push_back({p.value, {{begin, begin + p.bytes / size}}});
    begin += p.bytes / size;
  }
  return joined(ref, pieces, {place.bytes / size});
}

}  // namespace whale::proof
