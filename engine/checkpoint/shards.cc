#include "checkpoint/shards.h"

#include <algorithm>
#include <charconv>

#include "base/error.h"

namespace whale {
namespace {

using Intervals = std::vector<Interval>;

bool overlap(const Intervals& a, const Intervals& b) {
  for (const Interval& i : a)
    for (const Interval& k : b)
      if (std::max(i.begin, k.begin) < std::min(i.end, k.end)) return true;
  return false;
}

// The intervals with an end wherever an interval of `others` ends or begins.
Intervals cut_at(const Intervals& list, const std::vector<const Intervals*>& others) {
  std::vector<int64_t> ends;
  for (const Intervals* other : others)
    for (const Interval& i : *other) ends.insert(ends.end(), {i.begin, i.end});
  std::sort(ends.begin(), ends.end());
  Intervals out;
  for (Interval rest : list) {
    for (const int64_t end : ends) {
      if (end <= rest.begin || end >= rest.end) continue;
      out.push_back({rest.begin, end});
      rest.begin = end;
    }
    out.push_back(rest);
  }
  return out;
}

// What of `part` is in none of `others`: itself where they do not overlap, else boxes.
std::vector<Part> without(const Part& part, const std::vector<Part>& others) {
  std::vector<const Part*> near;
  for (const Part& other : others)
    if (whale::overlap(part, other)) near.push_back(&other);
  if (near.empty()) return {part};
  std::vector<Part> boxes = {{}};
  for (size_t d = 0; d < part.dims.size(); ++d) {
    std::vector<const Intervals*> lists;
    for (const Part* other : near) lists.push_back(&other->dims[d]);
    std::vector<Part> next;
    for (const Part& box : boxes)
      for (const Interval& i : cut_at(part.dims[d], lists)) {
        next.push_back(box);
        next.back().dims.push_back({i});
      }
    boxes = std::move(next);
  }
  std::erase_if(boxes, [&](const Part& box) {
    return std::ranges::any_of(near, [&](const Part* other) { return whale::overlap(box, *other); });
  });
  return boxes;
}

// Elements [begin, end) of those that are in the intervals.
Intervals slice(const Intervals& list, int64_t begin, int64_t end) {
  Intervals out;
  int64_t at = 0;
  for (const Interval& i : list) {
    const int64_t from = std::max(begin, at), to = std::min(end, at + i.size());
    if (from < to) out.push_back({i.begin + (from - at), i.begin + (to - at)});
    at += i.size();
  }
  return out;
}

}  // namespace

bool overlap(const Part& a, const Part& b) {
  for (size_t d = 0; d < a.dims.size(); ++d)
    if (!overlap(a.dims[d], b.dims[d])) return false;
  return true;
}

std::vector<std::vector<Part>> Shards::next(const Dims& dims, int64_t element_bytes, const std::vector<HeldBy>& held) {
  std::vector<std::vector<Part>> out(written_.size());
  const auto give = [&](int32_t rank, Part part) {
    written_[rank] += static_cast<uint64_t>(element_count(part.extents()) * element_bytes);
    out[rank].push_back(std::move(part));
  };
  if (element_count(dims) == 0) {
    give(0, part_of(dims, std::vector<SubAxisCut>{}));
    return out;
  }
  std::vector<Part> done;
  for (const HeldBy& h : held) {
    if (h.part.empty()) continue;
    for (const Part& part : without(h.part, done)) {
      const Dims extents = part.extents();
      const auto ranks = static_cast<int64_t>(h.ranks.size());
      const bool cut = ranks > 1 && !extents.empty() && extents[0] >= ranks &&
                       static_cast<uint64_t>(element_count(extents) * element_bytes) >= cut_from_;
      if (!cut) {
        give(*std::ranges::min_element(h.ranks, {}, [&](int32_t rank) { return written_[rank]; }), part);
        continue;
      }
      for (int64_t k = 0; k < ranks; ++k) {
        Part mine = part;
        mine.dims[0] = slice(part.dims[0], extents[0] * k / ranks, extents[0] * (k + 1) / ranks);
        give(h.ranks[k], std::move(mine));
      }
    }
    done.push_back(h.part);
  }
  return out;
}

std::string to_text(const Part& part) {
  std::string text;
  for (size_t d = 0; d < part.dims.size(); ++d) {
    text += d == 0 ? "" : ",";
    for (size_t i = 0; i < part.dims[d].size(); ++i)
      text += fmt::format("{}{}:{}", i == 0 ? "" : "+", part.dims[d][i].begin, part.dims[d][i].end);
  }
  return text;
}

Part part_of_text(const std::string& text, const Dims& dims) {
  const char *at = text.data(), *const end = at + text.size();
  const auto bad = [&] { return invalid("'{}' is no part of a tensor of dimensions {}", text, to_string(dims)); };
  const auto number = [&] {
    int64_t n = 0;
    const auto [next, failed] = std::from_chars(at, end, n);
    if (failed != std::errc{} || next == at) throw bad();
    at = next;
    return n;
  };
  const auto expect = [&](char c) {
    if (at == end || *at != c) throw bad();
    ++at;
  };
  Part part;
  for (size_t d = 0; d < dims.size(); ++d) {
    if (d > 0) expect(',');
    Intervals& list = part.dims.emplace_back();
    while (at != end && *at != ',') {
      if (!list.empty()) expect('+');
      const int64_t begin = number();
      expect(':');
      list.push_back({begin, number()});
      if (begin < (list.size() > 1 ? list[list.size() - 2].end : 0) || list.back().size() <= 0 ||
          list.back().end > dims[d])
        throw bad();
    }
  }
  if (at != end) throw bad();
  return part;
}

}  // namespace whale
