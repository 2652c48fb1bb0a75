// The reference: a collective as messages between its members, over a wire that takes flat bytes only. A member packs
// for each other one what that one needs of it, and puts down or combines, in the order of the members, what comes:
// the bits are those of the transport among threads, which is tested against this.
#include <algorithm>
#include <map>
#include <mutex>
#include <optional>

#include "base/error.h"
#include "comm/adasum_tree.h"
#include "comm/all_to_all_shape.h"
#include "comm/chain.h"
#include "comm/far_reduce.h"
#include "comm/member.h"
#include "comm/messages.h"
#include "comm/process_gather.h"

namespace whale {
namespace {

using namespace inproc;  // NOLINT

// all_gather, all_to_all, shift.
class Exchange final : public Collective {
 public:
  Exchange(const Seat& seat, const Pieces& sends, const Pieces& receives) : messages_(seat, sends, receives) {}
  bool run(Lookout* lookout) override { return messages_.run(lookout); }

 private:
  Messages messages_;
};

class Gone final : public Collective {  // nothing to do
  bool run(Lookout*) override { return true; }
};

// Rows [rows, extent, unit] of a tensor, of which a cut takes an interval of the extent.
Strided rows_at(const Operand& tensor, const Rows& all, const Interval& cut) {
  return {static_cast<char*>(tensor.data), static_cast<size_t>(cut.begin * all.unit),
          static_cast<size_t>(cut.size() * all.unit), static_cast<size_t>(all.extent * all.unit),
          static_cast<size_t>(all.rows)};
}
Strided dense(const Operand& tensor) {
  return {static_cast<char*>(tensor.data), 0, static_cast<size_t>(element_count(tensor.dims) * size_of(tensor.dtype)),
          0, 1};
}

DType one_type(const CollectiveSpec& spec) {
  for (const auto* list : {&spec.in, &spec.out})
    for (const Operand& x : *list)
      if (x.dtype != spec.in[0].dtype)
        throw internal("a bucket of a collective holds {} and {}; one type is allowed", name_of(spec.in[0].dtype),
                       name_of(x.dtype));
  return spec.in[0].dtype;
}

// A small bucket goes whole from each to each. Of a large one every member combines a slice, which then goes to all:
// 2 / members of the bytes. An element is combined in the same order both ways.
std::unique_ptr<Collective> all_reduce(const Seat& seat, const CollectiveSpec& spec, bool whole) {
  std::vector<Strided> bucket;
  for (const Operand& x : spec.in) bucket.push_back(dense(x));
  const DType dtype = one_type(spec);
  const size_t n = seat.size(), bytes = bytes_of(bucket), element = static_cast<size_t>(size_of(dtype));
  FarReduce what{spec.combine, dtype, Pieces(n, bucket), bucket, true};
  if (whole) return bind_far_reduce(seat, std::move(what));
  for (size_t m = 0; m < n; ++m)
    what.gives[m] = slice(bucket, bytes / element * m / n * element, bytes / element * (m + 1) / n * element);
  what.target = what.gives[seat.rank];
  what.results = what.gives;
  what.whole = false;
  return bind_far_reduce(seat, std::move(what));
}

void check_operands(const CollectiveSpec& spec, const char* what) {
  if (spec.in.empty() || spec.in.size() != spec.out.size() || spec.in.size() != spec.cuts.size())
    throw internal("{} of {} operands has {} results and {} cuts", what, spec.in.size(), spec.out.size(),
                   spec.cuts.size());
}
void check_part(const Operand& part, const Rows& all, const Interval& cut, const char* what) {
  if (element_count(part.dims) * size_of(part.dtype) != all.rows * cut.size() * all.unit)
    throw internal("the part of {} has {} elements, its cut [{}, {}) another number", what, element_count(part.dims),
                   cut.begin, cut.end);
}

// A bucket of whole tensors, of which each member has, or gets, its cuts: what lies where, by member.
struct ByCuts {
  Pieces whole, part;
  ByCuts(const Seat& seat, const CollectiveSpec& spec, const char* what) : whole(seat.size()), part(seat.size()) {
    const bool reduces = spec.op == OpCode::k_reduce_scatter;
    check_operands(spec, what);
    for (size_t i = 0; i < spec.in.size(); ++i) {
      const Operand &large = reduces ? spec.in[i] : spec.out[i], &small = reduces ? spec.out[i] : spec.in[i];
      if (element_count(large.dims) == 0) continue;
      const Rows all = rows_of(large, spec.cuts[i].sub_axis);
      check_cuts(spec.cuts[i].cuts, seat.size(), all.extent);
      check_part(small, all, spec.cuts[i].cuts[seat.rank], what);
      for (size_t m = 0; m < seat.size(); ++m) {
        whole[m].push_back(rows_at(large, all, spec.cuts[i].cuts[m]));
        part[m].push_back(dense(small));
      }
    }
  }
};

std::unique_ptr<Collective> reduce_scatter(const Seat& seat, const CollectiveSpec& spec) {
  ByCuts bucket(seat, spec, "a reduce-scatter");
  return bind_far_reduce(seat,
                         {spec.combine, one_type(spec), std::move(bucket.whole), std::move(bucket.part[seat.rank])});
}

std::unique_ptr<Collective> all_to_all(const Seat& seat, const CollectiveSpec& spec) {
  const AllToAllShape shape(spec, seat.size(), seat.rank);
  Pieces sends(seat.size()), receives(seat.size());
  for (size_t m = 0; m < seat.size(); ++m) {
    sends[m] = shape.source(static_cast<char*>(spec.in[0].data), seat.rank, m);
    receives[m] = shape.target(static_cast<char*>(spec.out[0].data), m, seat.rank);
  }
  return std::make_unique<Exchange>(seat, sends, receives);
}

std::unique_ptr<Collective> shift(const Seat& seat, const CollectiveSpec& spec) {
  const size_t n = seat.size();
  Pieces sends(n), receives(n);
  sends[(seat.rank + 1) % n] = {dense(spec.in.at(0))};
  receives[(seat.rank + n - 1) % n] = {dense(spec.out.at(0))};
  return std::make_unique<Exchange>(seat, sends, receives);
}

// What all members have, one after the other, for the Adasums of a device in a group, which run one after the other.
class Gradients {
 public:
  void will_hold(size_t bytes) {
    const std::lock_guard lock(mutex_);
    largest_ = std::max(largest_, bytes);
  }
  std::shared_ptr<char[]> place() {  // for what was announced so far
    const std::lock_guard lock(mutex_);
    if (bytes_ < largest_) place_ = std::make_shared_for_overwrite<char[]>(largest_), bytes_ = largest_;
    return place_;
  }

 private:
  std::mutex mutex_;
  size_t largest_ = 0, bytes_ = 0;
  std::shared_ptr<char[]> place_;
};

// Everybody has everything, and does the same.
class Adasum final : public Collective {
 public:
  Adasum(const Seat& seat, const CollectiveSpec& spec, std::shared_ptr<Gradients> gradients)
      : seat_(seat),
        tree_(spec, seat.size(), seat.rank, seat.device),
        data_(static_cast<char*>(spec.in[0].data)),
        gradients_(std::move(gradients)) {
    if (!is_idle()) gradients_->will_hold(seat_.size() * tree_.bytes());
  }
  bool run(Lookout* lookout) override {
    if (is_idle()) return true;
    if (!messages_) open();
    tree_.scale(data_);
    if (!messages_->run(lookout)) return false;
    tree_.each_step([&](size_t distance, size_t stride, size_t count) {
      for (size_t k = 0; k < count; ++k) {
        char *a = of(k * stride), *b = of(k * stride + distance);
        AdasumTree::Products sum;
        for (size_t m = 0; m < seat_.size(); ++m) sum.add(tree_.products(a, b, tree_.slice(m), tree_.slice(m + 1)));
        tree_.join(a, b, sum, 0, tree_.elements());
      }
      return true;
    });
    seat_.device.copy_in(data_, of(0), tree_.bytes());
    return true;
  }

 private:
  bool is_idle() const { return seat_.size() == 1 || tree_.elements() == 0; }
  char* of(size_t member) const { return place_.get() + member * tree_.bytes(); }
  void open() {  // at the first run: all are bound
    place_ = gradients_->place();
    Pieces places;
    for (size_t m = 0; m < seat_.size(); ++m) places.push_back({{of(m), 0, tree_.bytes(), 0, 1}});
    messages_.emplace(seat_, Pieces(seat_.size(), {{data_, 0, tree_.bytes(), 0, 1}}), places);
  }

  const Seat seat_;
  AdasumTree tree_;
  char* data_;
  const std::shared_ptr<Gradients> gradients_;
  std::shared_ptr<char[]> place_;
  std::optional<Messages> messages_;
};

class Reference final : public Transport {
 public:
  Reference(const std::vector<Group>& groups, std::shared_ptr<Wire> wire, std::vector<int32_t> ranks,
            const Profile& profile, bool everything)
      : groups_(groups), wire_(std::move(wire)), ranks_(std::move(ranks)), profile_(profile), everything_(everything) {
    // Groups inside this rank have the memory of their members in common.
    near_ = make_inproc(groups_);
  }

  std::unique_ptr<Collective> bind(int device, const CollectiveSpec& spec, Device& memory) override {
    const std::vector<int32_t>& part = part_of(device, spec.group);
    if (!everything_ && std::all_of(part.begin(), part.end(), [&](int32_t d) { return is_here(d); }))
      return near_->bind(device, spec, memory);
    const auto at = static_cast<size_t>(std::find(part.begin(), part.end(), device) - part.begin());
    const Seat seat{part, at, spec.group, memory, *wire_, ranks_};
    switch (spec.op) {
      case OpCode::k_all_reduce: return bind_all_reduce(seat, spec);
      case OpCode::k_reduce_scatter: return reduce_scatter(seat, spec);
      case OpCode::k_all_gather: return bind_all_gather(seat, spec);
      case OpCode::k_all_to_all: return all_to_all(seat, spec);
      case OpCode::k_shift: return shift(seat, spec);
      case OpCode::k_adasum: return std::make_unique<Adasum>(seat, spec, gradients_of(device, spec.group));
      default: break;
    }
    throw unimplemented("the transport between ranks has no collective op {}", static_cast<int>(spec.op));
  }

  std::unique_ptr<Links> open_links(const std::vector<Link>& links) override {
    return make_links(links, {wire_.get(), &ranks_, everything_});
  }
  void abort() override {
    near_->abort();
    {
      const std::lock_guard lock(mutex_);
      for (auto& [first, members] : here_) members->meetings.abort();
    }
    wire_->abort();
  }
  void reset() override {
    near_->reset();
    for (auto& [first, members] : here_) members->reset();
    wire_->begin_run();
  }

 private:
  std::unique_ptr<Collective> bind_all_reduce(const Seat& seat, const CollectiveSpec& spec) {
    if (spec.in.empty() || seat.size() == 1) return std::make_unique<Gone>();
    const RanksOfGroup ranks(seat, wire_->rank());
    double bytes = 0;
    for (const Operand& x : spec.in) bytes += static_cast<double>(element_count(x.dims) * size_of(x.dtype));
    one_type(spec);
    GroupWork work{bytes, static_cast<int64_t>(seat.size())};
    if (!ranks.runs.empty()) work = ranks.work(bytes);
    const AllReduceForm form = choose_all_reduce(work, profile_);
    if (bytes == 0 || form != AllReduceForm::kChain) return all_reduce(seat, spec, form == AllReduceForm::kWhole);
    return bind_chain(members_here(ranks, seat), ranks, seat, spec);
  }
  std::unique_ptr<Collective> bind_all_gather(const Seat& seat, const CollectiveSpec& spec) {
    const ByCuts bucket(seat, spec, "an all-gather");
    one_type(spec);
    double bytes = 0;
    for (const Operand& x : spec.out) bytes += static_cast<double>(element_count(x.dims) * size_of(x.dtype));
    const RanksOfGroup ranks(seat, wire_->rank());
    if (bytes == 0 || ranks.runs.empty() || choose_gather(ranks.work(bytes), profile_) == GatherForm::kEach)
      return std::make_unique<Exchange>(seat, bucket.part, bucket.whole);
    return bind_process_gather(members_here(ranks, seat), ranks, seat, spec, bucket.part, bucket.whole);
  }
  GroupState& members_here(const RanksOfGroup& ranks, const Seat& seat) {
    const RanksOfGroup::Run& run = ranks.runs[ranks.here];
    const auto first = seat.devices.begin() + static_cast<ptrdiff_t>(run.begin);
    const std::lock_guard lock(mutex_);
    auto& members = here_[{seat.group, *first}];
    if (!members)
      members = std::make_unique<GroupState>(std::vector<int32_t>(first, first + static_cast<ptrdiff_t>(run.count)));
    return *members;
  }
  std::shared_ptr<Gradients> gradients_of(int device, int32_t group) {
    const std::lock_guard lock(mutex_);
    auto& all = gradients_[{device, group}];
    if (!all) all = std::make_shared<Gradients>();
    return all;
  }
  bool is_here(int32_t device) const { return ranks_[device] == wire_->rank(); }
  const std::vector<int32_t>& part_of(int device, int32_t group) const {
    if (group < 0 || static_cast<size_t>(group) >= groups_.size())
      throw internal("a collective names group {} of {}", group, groups_.size());
    for (const std::vector<int32_t>& part : groups_[group].parts)
      if (std::find(part.begin(), part.end(), device) != part.end()) return part;
    throw internal("device {} runs a collective of group {}, which it is not in", device, group);
  }

  const std::vector<Group> groups_;
  std::shared_ptr<Wire> wire_;
  const std::vector<int32_t> ranks_;
  const Profile profile_;
  bool everything_;
  std::unique_ptr<Transport> near_;
  std::mutex mutex_;
  // The members of a group that are here, where others are not: by the group and the first of them.
  std::map<std::pair<int32_t, int32_t>, std::unique_ptr<GroupState>> here_;
  std::map<std::pair<int, int32_t>, std::shared_ptr<Gradients>> gradients_;  // by device and group
};

}  // namespace

std::unique_ptr<Transport> make_reference(const std::vector<Group>& groups, std::shared_ptr<Wire> wire,
                                          std::vector<int32_t> ranks, const Profile& profile, bool everything) {
  return std::make_unique<Reference>(groups, std::move(wire), std::move(ranks), profile, everything);
}

}  // namespace whale
