// All-gather and all-to-all: every member copies the pieces that it needs from its peers' memory.
#include "base/error.h"
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
      const DigitCuts& cut = spec.cuts[i];
      const Rows all = rows_of(whole, cut.digit);
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

// A tensor seen as [rows, first, middle, second, unit bytes] around two of its digits.
struct TwoDigits {
  int64_t rows = 1, middle = 1, unit = 1;
  bool from_first = true;  // the digit cut before lies outside of the other
};

// x has the digit `from` cut to `size` and the digit `to` whole, of `extent`.
TwoDigits two_digits(const Operand& x, const Digit& from, int64_t size, const Digit& to, int64_t extent) {
  const Rows a = rows_of(x, from), b = rows_of(x, to);
  const int64_t bytes = size_of(x.dtype);
  TwoDigits t;
  if (from.dim != to.dim) {
    t.from_first = from.dim < to.dim;
    const Digit &first = t.from_first ? from : to, &second = t.from_first ? to : from;
    t.rows = t.from_first ? a.rows : b.rows;
    t.unit = t.from_first ? b.unit : a.unit;
    t.middle = first.inner * second.outer;
    for (int d = first.dim + 1; d < second.dim; ++d) t.middle *= x.dims[static_cast<size_t>(d)];
    return t;
  }
  // Both in one dimension: x has outer * first * middle * second * inner elements there.
  t.from_first = from.inner >= extent * to.inner && from.inner % (extent * to.inner) == 0;
  if (t.from_first) {
    t.rows = a.rows;
    t.middle = from.inner / (extent * to.inner);
    t.unit = b.unit;
  } else {
    if (from.outer % (to.outer * extent) != 0)
      throw internal("an all-to-all between digits of dimension {} that lie across each other", from.dim);
    t.rows = a.rows / from.outer * to.outer;
    t.middle = from.outer / (to.outer * extent);
    t.unit = a.unit;
  }
  if (t.rows * size * t.middle * extent * t.unit != element_count(x.dims) * bytes)
    throw internal("an all-to-all's part {} does not have its digits", to_string(x.dims));
  return t;
}

class AllToAll final : public Member {
 public:
  AllToAll(GroupState& group, size_t rank, Device& device, const CollectiveSpec& spec)
      : Member(group, rank, device),
        to_(static_cast<char*>(spec.out.at(0).data)),
        cuts_(spec.cuts.at(0).cuts),
        to_cuts_(spec.to.cuts) {
    const Operand& x = spec.in.at(0);
    if (cuts_.empty() || to_cuts_.empty()) throw internal("an all-to-all without cuts");
    extent_ = cuts_.back().end;
    to_extent_ = to_cuts_.back().end;
    check_cuts(cuts_, size(), extent_);
    check_cuts(to_cuts_, size(), to_extent_);
    t_ = two_digits(x, spec.cuts[0].digit, cuts_[rank].size(), spec.to.digit, to_extent_);
    offer_.op = spec.op;
    offer_.dtype = x.dtype;
    offer_.elements = t_.rows * t_.middle * t_.unit / size_of(x.dtype) * extent_ * to_extent_;
    offer_.data = static_cast<const char*>(x.data);
    const int64_t units = t_.rows * t_.middle * t_.unit, bytes = size_of(x.dtype);
    if (element_count(x.dims) * bytes != units * cuts_[rank].size() * to_extent_ ||
        element_count(spec.out[0].dims) * bytes != units * extent_ * to_cuts_[rank].size())
      throw internal("an all-to-all from {} to {} has the cuts [{}, {}) and [{}, {}) of other numbers of elements",
                     to_string(x.dims), to_string(spec.out[0].dims), cuts_[rank].begin, cuts_[rank].end,
                     to_cuts_[rank].begin, to_cuts_[rank].end);
  }

  bool run(Lookout* lookout) override {
    next_call();
    if (!begin(lookout)) return false;
    for (size_t m = 0; m < size(); ++m) {
      const Interval &from = cuts_[m], &to = to_cuts_[rank_];
      if (from.size() == 0 || to.size() == 0) continue;
      const char* x = offer_of(m).data;
      if (t_.from_first)
        copy(x, {from.size(), to_extent_, 0, to.begin}, {extent_, to.size(), from.begin, 0}, from.size(), to.size());
      else
        copy(x, {to_extent_, from.size(), to.begin, 0}, {to.size(), extent_, 0, from.begin}, to.size(), from.size());
    }
    return end(lookout);
  }

 private:
  struct Side {
    int64_t first, second;  // extents
    int64_t first_begin, second_begin;
    int64_t at(int64_t row, int64_t f, int64_t middle, int64_t middles) const {
      return ((row * first + first_begin + f) * middles + middle) * second + second_begin;
    }
  };
  void copy(const char* x, const Side& in, const Side& out, int64_t firsts, int64_t seconds) {
    const size_t bytes = device_.has_values() ? static_cast<size_t>(seconds * t_.unit) : 0;
    for (int64_t row = 0; bytes != 0 && row < t_.rows; ++row)
      for (int64_t f = 0; f < firsts; ++f)
        for (int64_t k = 0; k < t_.middle; ++k)
          device_.copy_in(to_ + out.at(row, f, k, t_.middle) * t_.unit, x + in.at(row, f, k, t_.middle) * t_.unit,
                          bytes);
  }

  char* to_;
  std::vector<Interval> cuts_, to_cuts_;
  int64_t extent_ = 0, to_extent_ = 0;
  TwoDigits t_;
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
