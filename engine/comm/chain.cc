#include "comm/chain.h"

#include <algorithm>

#include "base/error.h"

namespace whale {
namespace {

using namespace inproc;  // NOLINT

constexpr int64_t kChunk = 256 << 10;  // bytes: stays in the cache while it is combined
constexpr uint32_t kUnderWay = 4;      // chunks

class Chain final : public Member {
 public:
  Chain(GroupState& here, const RanksOfGroup& ranks, const Seat& seat, const CollectiveSpec& spec)
      : Member(here, seat.rank - ranks.runs[ranks.here].begin, seat.device),
        first_(ranks.here == 0),
        lag_(2 * (ranks.runs.size() - 1 - ranks.here) + 1) {
    offer_.op = spec.op;
    offer_.combine = spec.combine;
    offer_.dtype = spec.in[0].dtype;
    offer_.operands = spec.in.size();
    offer_.stretches = &stretches_;
    for (const Operand& x : spec.in) {
      const int64_t n = element_count(x.dims);
      stretches_.push_back({static_cast<char*>(x.data), offer_.elements, offer_.elements + n});
      offer_.elements += n;
    }
    const auto lanes = static_cast<int64_t>(ranks.lanes()), lane = static_cast<int64_t>(rank_);
    if (lane >= lanes) return;
    cut(offer_.elements * lane / lanes, offer_.elements * (lane + 1) / lanes);
    sum_.resize(static_cast<size_t>(kChunk));
    if (!first_) {
      const size_t before = ranks.runs[ranks.here - 1].begin + rank_;
      sums_in_ = seat.from(before), results_out_ = seat.to(before, kUnderWay, Seat::kResults);
    }
    if (ranks.here + 1 < ranks.runs.size()) {
      const size_t behind = ranks.runs[ranks.here + 1].begin + rank_;
      sums_out_ = seat.to(behind, kUnderWay), results_in_ = seat.from(behind, Seat::kResults);
    }
  }

  bool run(Lookout* lookout) override {
    next_call();
    if (!begin(lookout)) return false;
    for (size_t c = 0; c < chunks_.size() + lag_; ++c) {
      if (c < chunks_.size() && !pass_on(chunks_[c], lookout)) return false;
      if (c >= lag_ && results_in_ && !bring_back(chunks_[c - lag_], lookout)) return false;
    }
    return end(lookout);
  }

 private:
  struct Part {  // of a chunk, in one tensor
    size_t stretch;
    size_t offset, at, elements;  // bytes of the tensor, of the chunk
  };
  struct Chunk {
    std::vector<Part> parts;
    size_t bytes = 0;
  };

  size_t bytes_of(const Part& p) const { return p.elements * static_cast<size_t>(size_of(offer_.dtype)); }
  char* there(size_t member, const Part& p) const { return (*offer_of(member).stretches)[p.stretch].data + p.offset; }

  void cut(int64_t begin, int64_t end) {
    const int64_t element = size_of(offer_.dtype), step = kChunk / element;
    for (int64_t from = begin; from < end; from += step) {
      const int64_t to = std::min(end, from + step);
      Chunk chunk{{}, static_cast<size_t>((to - from) * element)};
      for (size_t i = 0; i < stretches_.size(); ++i) {
        const int64_t a = std::max(from, stretches_[i].begin), b = std::min(to, stretches_[i].end);
        if (a < b)
          chunk.parts.push_back({i, static_cast<size_t>((a - stretches_[i].begin) * element),
                                 static_cast<size_t>((a - from) * element), static_cast<size_t>(b - a)});
      }
      chunks_.push_back(std::move(chunk));
    }
  }

  // The sum of the members before, and of those here, goes to the next rank; from the last one back.
  bool pass_on(const Chunk& chunk, Lookout* lookout) {
    const char* before = nullptr;
    if (sums_in_ && (before = sums_in_->begin(chunk.bytes, lookout)) == nullptr) return false;
    char* sum = sum_.data();
    if (sums_out_ && (sum = sums_out_->begin(chunk.bytes, lookout)) == nullptr) return false;
    if (device_.has_values())
      for (const Part& p : chunk.parts) add_up(p, before == nullptr ? nullptr : before + p.at, sum + p.at);
    if (sums_in_) sums_in_->end();
    if (sums_out_) {
      sums_out_->end();
      return true;
    }
    return put_down(chunk, sum, lookout);
  }
  void add_up(const Part& p, const char* sum, char* to) {
    for (size_t m = 0; m < size(); ++m) {
      const char* x = there(m, p);
      if (sum != nullptr) device_.combine(offer_.combine, offer_.dtype, to, sum, x, p.elements);
      sum = sum == nullptr ? x : to;
    }
    if (sum != to) device_.copy_out(to, sum, bytes_of(p));
  }

  bool bring_back(const Chunk& chunk, Lookout* lookout) {
    const char* result = results_in_->begin(chunk.bytes, lookout);
    if (result == nullptr || !put_down(chunk, result, lookout)) return false;
    results_in_->end();
    return true;
  }
  bool put_down(const Chunk& chunk, const char* result, Lookout* lookout) {
    if (results_out_) {
      char* to = results_out_->begin(chunk.bytes, lookout);
      if (to == nullptr) return false;
      if (device_.has_values()) std::copy_n(result, chunk.bytes, to);
      results_out_->end();
    }
    if (device_.has_values())
      for (const Part& p : chunk.parts)
        for (size_t m = 0; m < size(); ++m) device_.copy_in(there(m, p), result + p.at, bytes_of(p));
    return true;
  }

  const bool first_;
  const size_t lag_;  // chunks between a sum that is passed on and its result
  std::vector<Stretch> stretches_;
  std::vector<Chunk> chunks_;  // of this member's lane
  std::vector<char> sum_;      // on the last rank
  std::unique_ptr<Wire::Receiver> sums_in_, results_in_;
  std::unique_ptr<Wire::Sender> sums_out_, results_out_;
};

}  // namespace

RanksOfGroup::RanksOfGroup(const Seat& seat, int rank) {
  std::vector<int32_t> seen;
  for (size_t m = 0; m < seat.size(); ++m) {
    const int32_t of = seat.ranks[seat.devices[m]];
    if (seen.empty() || seen.back() != of) {
      if (std::find(seen.begin(), seen.end(), of) != seen.end()) {
        runs.clear();
        return;
      }
      if (of == rank) here = seen.size();
      seen.push_back(of);
      runs.push_back({m, 0});
    }
    ++runs.back().count;
  }
}

size_t RanksOfGroup::lanes() const {
  return std::min_element(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.count < b.count; })
      ->count;
}
size_t RanksOfGroup::widest() const {
  return std::max_element(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.count < b.count; })
      ->count;
}

GroupWork RanksOfGroup::work(double bytes) const {
  GroupWork out{bytes, 0, static_cast<int64_t>(runs.size()), static_cast<int64_t>(widest()), 0};
  for (const Run& run : runs) out.members += static_cast<int64_t>(run.count);
  out.chunk = std::min(bytes / static_cast<double>(lanes()), static_cast<double>(kChunk));
  return out;
}

std::unique_ptr<Collective> bind_chain(GroupState& here, const RanksOfGroup& ranks, const Seat& seat,
                                       const CollectiveSpec& spec) {
  return std::make_unique<Chain>(here, ranks, seat, spec);
}

}  // namespace whale
