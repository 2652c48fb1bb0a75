// All-gather and all-to-all: every member copies the pieces that it needs from its peers' memory.
#include "base/error.h"
#include "comm/all_to_all_shape.h"
#include "comm/member.h"

namespace whale::inproc {
namespace {

class AllGather final : public Member {
 public:
  AllGather(GroupState& group, size_t rank, Device& device, const CollectiveSpec& spec) : Member(group, rank, device) {
    if (spec.in.empty() || spec.in.size() != spec.out.size() || spec.in.size() != spec.cuts.size())
      throw internal("an all-gather of {} operands has {} results and {} cuts", spec.in.size(), spec.out.size(),
                     spec.cuts.size());
    offer_.op = spec.op;
    offer_.dtype = spec.out[0].dtype;
    offer_.operands = spec.in.size();
    offer_.stretches = &stretches_;
    for (size_t i = 0; i < spec.in.size(); ++i) {
      const Operand& whole = spec.out[i];
      if (whole.dtype != offer_.dtype || spec.in[i].dtype != offer_.dtype)
        throw internal("a bucket of an all-gather holds {}, {} and {}; one type is allowed", name_of(offer_.dtype),
                       name_of(whole.dtype), name_of(spec.in[i].dtype));
      const int64_t n = element_count(whole.dims);
      stretches_.push_back({static_cast<char*>(spec.in[i].data), offer_.elements, offer_.elements + n});
      offer_.elements += n;
      if (n == 0) continue;
      const SubAxisCuts& cut = spec.cuts[i];
      const Rows all = rows_of(whole, cut.sub_axis);
      check_cuts(cut.cuts, size(), all.extent);
      if (element_count(spec.in[i].dims) * size_of(whole.dtype) != all.rows * cut.cuts[rank].size() * all.unit)
        throw internal("an all-gather's part has {} elements, its cut [{}, {}) another number",
                       element_count(spec.in[i].dims), cut.cuts[rank].begin, cut.cuts[rank].end);
      pieces_.push_back({i, static_cast<char*>(whole.data), cut.cuts, all});
    }
  }

  bool run(Lookout* lookout) override {
    next_call();
    if (!begin(lookout)) return false;
    for (const Piece& p : pieces_)
      for (size_t m = 0; m < size(); ++m) gather(p, m, (*offer_of(m).stretches)[p.operand].data);
    return end(lookout);
  }

 private:
  struct Piece {  // of what is not empty
    size_t operand;
    char* to;
    std::vector<Interval> cuts;
    Rows all;
  };
  void gather(const Piece& p, size_t member, const char* from) {
    const int64_t bytes = device_.has_values() ? p.cuts[member].size() * p.all.unit : 0;
    for (int64_t row = 0; bytes > 0 && row < p.all.rows; ++row) {
      char* to = p.to + (row * p.all.extent + p.cuts[member].begin) * p.all.unit;
      if (to != from + row * bytes)  // a part may be made where it belongs
        device_.copy_in(to, from + row * bytes, static_cast<size_t>(bytes));
    }
  }

  std::vector<Stretch> stretches_;
  std::vector<Piece> pieces_;
};

class AllToAll final : public Member {
 public:
  AllToAll(GroupState& group, size_t rank, Device& device, const CollectiveSpec& spec)
      : Member(group, rank, device), shape_(spec, size(), rank) {
    const Operand& x = spec.in.at(0);
    offer_.op = spec.op;
    offer_.dtype = x.dtype;
    offer_.elements = shape_.elements(x.dtype);
    offer_.data = static_cast<const char*>(x.data);
    for (size_t m = 0; m < size(); ++m)
      pieces_.push_back(
          {shape_.source(nullptr, m, rank), shape_.target(static_cast<char*>(spec.out[0].data), m, rank)});
  }

  bool run(Lookout* lookout) override {
    next_call();
    if (!begin(lookout)) return false;
    for (size_t m = 0; m < size() && device_.has_values(); ++m)
      for (size_t row = 0; row < pieces_[m].to.size(); ++row) {
        const Strided &from = pieces_[m].from[row], &to = pieces_[m].to[row];
        const char* x = offer_of(m).data + from.begin;
        for (size_t i = 0; i < to.count; ++i)
          device_.copy_in(to.data + to.begin + i * to.stride, x + i * from.stride, to.run);
      }
    return end(lookout);
  }

 private:
  struct Piece {  // what a member has for this one
    std::vector<Strided> from, to;
  };
  AllToAllShape shape_;
  std::vector<Piece> pieces_;
};

class Shift final : public Member {
 public:
  Shift(GroupState& group, size_t rank, Device& device, const CollectiveSpec& spec)
      : Member(group, rank, device),
        to_(static_cast<char*>(spec.out.at(0).data)),
        elements_(element_count(spec.out[0].dims)),
        element_bytes_(size_of(spec.out[0].dtype)) {
    offer_.op = spec.op;
    offer_.dtype = spec.in.at(0).dtype;
    offer_.part = element_count(spec.in[0].dims);
    offer_.data = static_cast<const char*>(spec.in[0].data);
  }

  bool run(Lookout* lookout) override {
    next_call();
    if (!begin(lookout)) return false;
    const Offer& before = offer_of((rank_ + size() - 1) % size());
    if (before.part != elements_)
      throw internal("a shift brings {} elements, the result has {}", before.part, elements_);
    device_.copy_in(to_, before.data, static_cast<size_t>(elements_ * element_bytes_));
    return end(lookout);
  }

 private:
  char* to_;
  int64_t elements_, element_bytes_;
};

}  // namespace

std::unique_ptr<Collective> bind_shift(GroupState& group, size_t rank, Device& device, const CollectiveSpec& spec) {
  return std::make_unique<Shift>(group, rank, device, spec);
}
std::unique_ptr<Collective> bind_all_gather(GroupState& group, size_t rank, Device& device,
                                            const CollectiveSpec& spec) {
  return std::make_unique<AllGather>(group, rank, device, spec);
}
std::unique_ptr<Collective> bind_all_to_all(GroupState& group, size_t rank, Device& device,
                                            const CollectiveSpec& spec) {
  return std::make_unique<AllToAll>(group, rank, device, spec);
}

}  // namespace whale::inproc
