// All-reduce and reduce-scatter. Every element is combined in the order of the members, whoever does it: a
// reduce-scatter with an all-gather behind it gives the bits of an all-reduce.
#include "base/error.h"
#include "comm/member.h"

namespace whale::inproc {
namespace {

constexpr int64_t kAlignment = 64;

class AllReduce final : public Member {
 public:
  AllReduce(GroupState& group, size_t rank, Device& device, const CollectiveSpec& spec) : Member(group, rank, device) {
    offer_.op = spec.op;
    offer_.combine = spec.combine;
    offer_.dtype = spec.in.empty() ? DType::kF32 : spec.in[0].dtype;
    offer_.operands = spec.in.size();
    offer_.stretches = &stretches_;
    for (const Operand& x : spec.in) {
      if (x.dtype != offer_.dtype)
        throw internal("a bucket of an all-reduce holds {} and {}; one type is allowed", name_of(offer_.dtype),
                       name_of(x.dtype));
      const int64_t n = element_count(x.dims);
      stretches_.push_back({static_cast<char*>(x.data), offer_.elements, offer_.elements + n});
      offer_.elements += n;
    }
    element_bytes_ = size_of(offer_.dtype);
  }

  bool run(Lookout* lookout) override {
    if (size() == 1 || offer_.elements == 0) return true;
    return offer_.elements * element_bytes_ <= kSmallBytes ? run_small(lookout) : run_large(lookout);
  }

 private:
  // Everybody copies its bucket to its slot, meets, and reduces all slots into its own buffers: one meeting, not two.
  bool run_small(Lookout* lookout) {
    next_call();
    const uint32_t half = half_;
    MemberSlot& mine = group_.slots[rank_];
    for (const Stretch& p : stretches_)
      device_.copy_out(mine.small[half] + p.begin * element_bytes_, p.data,
                       static_cast<size_t>((p.end - p.begin) * element_bytes_));
    if (!begin(lookout)) return false;
    for (const Stretch& p : stretches_) {
      const size_t n = static_cast<size_t>(p.end - p.begin);
      const int64_t at = p.begin * element_bytes_;
      const char* first = group_.slots[0].small[half] + at;
      for (size_t m = 1; m < size(); ++m)
        device_.combine(offer_.combine, offer_.dtype, p.data, m == 1 ? first : p.data, group_.slots[m].small[half] + at,
                        n);
    }
    return true;
  }

  // Member r reduces slice r of the bucket from everybody and writes the result to everybody: each byte is read once
  // and written once (a reduce-scatter and an all-gather in one pass over shared memory).
  bool run_large(Lookout* lookout) {
    next_call();
    if (!begin(lookout)) return false;
    const int64_t unit = kAlignment / element_bytes_;
    const int64_t units = (offer_.elements + unit - 1) / unit, members = static_cast<int64_t>(size()),
                  r = static_cast<int64_t>(rank_);
    const int64_t begin = std::min(offer_.elements, units * r / members * unit);
    const int64_t end = std::min(offer_.elements, units * (r + 1) / members * unit);
    for (size_t i = 0; i < stretches_.size(); ++i)
      reduce(i, std::max(begin, stretches_[i].begin), std::min(end, stretches_[i].end));
    return Member::end(lookout);
  }

  void reduce(size_t stretch, int64_t begin, int64_t end) {
    const int64_t step = kChunkBytes / element_bytes_;
    if (!device_.has_values()) return;
    for (int64_t at = begin; at < end; at += step) {
      const int64_t offset = (at - stretches_[stretch].begin) * element_bytes_;
      const size_t n = static_cast<size_t>(std::min(step, end - at));
      // The running sum is kept in member 0's buffer, whose values come first in the order.
      char* sum = peer(0, stretch) + offset;
      for (size_t m = 1; m < size(); ++m)
        device_.combine(offer_.combine, offer_.dtype, sum, sum, peer(m, stretch) + offset, n);
      for (size_t m = 1; m < size(); ++m)
        device_.copy_in(peer(m, stretch) + offset, sum, n * static_cast<size_t>(element_bytes_));
    }
  }
  char* peer(size_t member, size_t stretch) const { return (*offer_of(member).stretches)[stretch].data; }

  std::vector<Stretch> stretches_;
  int64_t element_bytes_ = 4;
};

class ReduceScatter final : public Member {
 public:
  ReduceScatter(GroupState& group, size_t rank, Device& device, const CollectiveSpec& spec)
      : Member(group, rank, device) {
    if (spec.in.empty() || spec.in.size() != spec.out.size() || spec.in.size() != spec.cuts.size())
      throw internal("a reduce-scatter of {} operands has {} results and {} cuts", spec.in.size(), spec.out.size(),
                     spec.cuts.size());
    offer_.op = spec.op;
    offer_.combine = spec.combine;
    offer_.dtype = spec.in[0].dtype;
    offer_.operands = spec.in.size();
    offer_.stretches = &stretches_;
    element_bytes_ = size_of(offer_.dtype);
    for (size_t i = 0; i < spec.in.size(); ++i) {
      const Operand& whole = spec.in[i];
      if (whole.dtype != offer_.dtype || spec.out[i].dtype != offer_.dtype)
        throw internal("a bucket of a reduce-scatter holds {}, {} and {}; one type is allowed", name_of(offer_.dtype),
                       name_of(whole.dtype), name_of(spec.out[i].dtype));
      const int64_t n = element_count(whole.dims);
      stretches_.push_back({static_cast<char*>(whole.data), offer_.elements, offer_.elements + n});
      offer_.elements += n;
      if (n == 0) continue;
      const SubAxisCuts& cut = spec.cuts[i];
      const Rows all = rows_of(whole, cut.sub_axis);
      check_cuts(cut.cuts, size(), all.extent);
      const Piece piece{i, static_cast<char*>(spec.out[i].data), all, cut.cuts[rank]};
      if (element_count(spec.out[i].dims) * element_bytes_ != piece.all.rows * piece.cut.size() * piece.all.unit)
        throw internal("a reduce-scatter's result has {} elements, its cut [{}, {}) another number",
                       element_count(spec.out[i].dims), piece.cut.begin, piece.cut.end);
      pieces_.push_back(piece);
    }
  }

  bool run(Lookout* lookout) override {
    next_call();
    if (!begin(lookout)) return false;
    for (const Piece& p : pieces_) {
      const int64_t bytes = device_.has_values() ? p.cut.size() * p.all.unit : 0;
      for (int64_t row = 0; bytes > 0 && row < p.all.rows; ++row)
        for (int64_t at = 0; at < bytes; at += kChunkBytes)
          reduce(p.operand, (row * p.all.extent + p.cut.begin) * p.all.unit + at, p.to + row * bytes + at,
                 std::min(kChunkBytes, bytes - at));
    }
    return end(lookout);
  }

 private:
  struct Piece {  // of what is not empty
    size_t operand;
    char* to;
    Rows all;
    Interval cut;
  };
  const char* peer(size_t member, size_t i) const { return (*offer_of(member).stretches)[i].data; }
  void reduce(size_t i, int64_t from, char* to, int64_t bytes) {
    if (size() == 1) return device_.copy_in(to, stretches_[i].data + from, static_cast<size_t>(bytes));
    const size_t n = static_cast<size_t>(bytes / element_bytes_);
    for (size_t m = 1; m < size(); ++m)
      device_.combine(offer_.combine, offer_.dtype, to, m == 1 ? peer(0, i) + from : to, peer(m, i) + from, n);
  }

  std::vector<Stretch> stretches_;
  std::vector<Piece> pieces_;
  int64_t element_bytes_ = 4;
};

}  // namespace

std::unique_ptr<Collective> bind_all_reduce(GroupState& group, size_t rank, Device& device,
                                            const CollectiveSpec& spec) {
  return std::make_unique<AllReduce>(group, rank, device, spec);
}
std::unique_ptr<Collective> bind_reduce_scatter(GroupState& group, size_t rank, Device& device,
                                                const CollectiveSpec& spec) {
  return std::make_unique<ReduceScatter>(group, rank, device, spec);
}

}  // namespace whale::inproc
