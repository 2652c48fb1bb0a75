// Collectives among the device threads of one process. Results do not depend on timing: every element is combined in
// the order of the members, whoever does it.
#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "comm/transport.h"

namespace whale {
namespace {

constexpr int64_t kSmallBytes = 16 << 10;  // up to here every member reduces everything: one meeting instead of two
constexpr int64_t kChunkBytes = 32 << 10;  // of a large reduction: stays in the first-level cache between its passes
constexpr size_t kAlignment = 64;

struct Part {  // of a bucket, flat
  char* data;
  int64_t begin, end;  // elements of the bucket
};

// What a member shows its peers.
struct Offer {
  OpCode op{};
  Combine combine{};
  DType dtype{};
  int64_t elements = 0;
  const std::vector<Part>* parts = nullptr;  // all_reduce
  const char* data = nullptr;                // all_gather
};

bool same_call(const Offer& a, const Offer& b) {
  return a.op == b.op && a.combine == b.combine && a.dtype == b.dtype && a.elements == b.elements &&
         (a.parts == nullptr || a.parts->size() == b.parts->size());
}

struct alignas(64) Slot {
  // Both alternate from call to call: a member that is one call ahead writes the other ones.
  const Offer* offer[2] = {nullptr, nullptr};
  alignas(64) char small[2][kSmallBytes];
};

struct GroupState {
  std::vector<int32_t> devices;
  std::unique_ptr<Slot[]> slots;
  std::atomic<uint32_t> arrived{0};
  Counter meetings;                        // how many times all members have met in this run
  std::unique_ptr<uint32_t[]> met, calls;  // per member, 16 apart: its own thread's view

  explicit GroupState(std::vector<int32_t> members)
      : devices(std::move(members)),
        slots(new Slot[devices.size()]),
        met(new uint32_t[devices.size() * 16]()),
        calls(new uint32_t[devices.size() * 16]()) {}

  bool meet(size_t member, Lookout* lookout) {
    const uint32_t target = ++met[member * 16];
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == devices.size()) {
      arrived.store(0, std::memory_order_relaxed);
      meetings.advance(1);
      return meetings.wait(target);
    }
    return meetings.wait(target, lookout);
  }

  void reset() {
    arrived.store(0, std::memory_order_relaxed);
    meetings.reset();
    std::fill_n(met.get(), devices.size() * 16, 0u);
    std::fill_n(calls.get(), devices.size() * 16, 0u);
  }
};

class Member : public Collective {
 public:
  Member(GroupState& group, size_t rank, Device& device) : group_(group), rank_(rank), device_(device) {}

 protected:
  size_t size() const { return group_.devices.size(); }
  const Offer& offer_of(size_t member) const { return *group_.slots[member].offer[half_]; }
  // Shows the offer, meets everybody, and looks at what they brought.
  bool begin(Lookout* lookout) {
    group_.slots[rank_].offer[half_] = &offer_;
    if (!group_.meet(rank_, lookout)) return false;
    check_peers();
    return true;
  }
  void next_call() { half_ = group_.calls[rank_ * 16]++ & 1; }
  void check_peers() const {
    for (size_t m = 0; m < size(); ++m)
      if (!same_call(offer_of(m), offer_))
        throw internal(
            "collective differs between members of a group: device {} runs op {} of {} elements of {}, device {} op {} "
            "of {} elements of {}",
            group_.devices[rank_], static_cast<int>(offer_.op), offer_.elements, name_of(offer_.dtype),
            group_.devices[m], static_cast<int>(offer_of(m).op), offer_of(m).elements, name_of(offer_of(m).dtype));
  }
  GroupState& group_;
  size_t rank_;
  Device& device_;
  Offer offer_;
  uint32_t half_ = 0;
};

// ---- all-reduce of a bucket -------------------------------------------------------------------------------------
class AllReduce final : public Member {
 public:
  AllReduce(GroupState& group, size_t rank, Device& device, const CollectiveSpec& spec) : Member(group, rank, device) {
    offer_ = {spec.op, spec.combine, spec.in.empty() ? DType::kF32 : spec.in[0].dtype, 0, &parts_, nullptr};
    for (const Operand& x : spec.in) {
      if (x.dtype != offer_.dtype)
        throw internal("a bucket of an all-reduce holds {} and {}; one type is allowed", name_of(offer_.dtype),
                       name_of(x.dtype));
      const int64_t n = element_count(x.dims);
      parts_.push_back({static_cast<char*>(x.data), offer_.elements, offer_.elements + n});
      offer_.elements += n;
    }
    element_bytes_ = size_of(offer_.dtype);
  }

  bool run(Lookout* lookout) override {
    if (size() == 1 || offer_.elements == 0) return true;
    return offer_.elements * element_bytes_ <= kSmallBytes ? run_small(lookout) : run_large(lookout);
  }

 private:
  // Everybody copies its bucket to its slot, meets, and reduces all slots into its own buffers.
  bool run_small(Lookout* lookout) {
    next_call();
    const uint32_t half = half_;
    Slot& mine = group_.slots[rank_];
    for (const Part& p : parts_)
      device_.copy_out(mine.small[half] + p.begin * element_bytes_, p.data,
                       static_cast<size_t>((p.end - p.begin) * element_bytes_));
    if (!begin(lookout)) return false;
    for (const Part& p : parts_) {
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
    const int64_t unit = static_cast<int64_t>(kAlignment) / element_bytes_;
    const int64_t units = (offer_.elements + unit - 1) / unit, members = static_cast<int64_t>(size()),
                  r = static_cast<int64_t>(rank_);
    const int64_t begin = std::min(offer_.elements, units * r / members * unit);
    const int64_t end = std::min(offer_.elements, units * (r + 1) / members * unit);
    for (size_t i = 0; i < parts_.size(); ++i)
      reduce(i, std::max(begin, parts_[i].begin), std::min(end, parts_[i].end));
    return group_.meet(rank_, lookout);
  }

  void reduce(size_t part, int64_t begin, int64_t end) {
    const int64_t step = kChunkBytes / element_bytes_;
    for (int64_t at = begin; at < end; at += step) {
      const int64_t offset = (at - parts_[part].begin) * element_bytes_;
      const size_t n = static_cast<size_t>(std::min(step, end - at));
      // The running sum is kept in member 0's buffer, whose values come first in the order.
      char* sum = peer_part(0, part) + offset;
      for (size_t m = 1; m < size(); ++m)
        device_.combine(offer_.combine, offer_.dtype, sum, sum, peer_part(m, part) + offset, n);
      for (size_t m = 1; m < size(); ++m)
        device_.copy_in(peer_part(m, part) + offset, sum, n * static_cast<size_t>(element_bytes_));
    }
  }
  char* peer_part(size_t member, size_t part) const { return (*offer_of(member).parts)[part].data; }

  std::vector<Part> parts_;
  int64_t element_bytes_ = 4;
};

// ---- all-gather -------------------------------------------------------------------------------------------------
class AllGather final : public Member {
 public:
  AllGather(GroupState& group, size_t rank, Device& device, const CollectiveSpec& spec)
      : Member(group, rank, device), to_(static_cast<char*>(spec.out.at(0).data)), cuts_(spec.cuts) {
    const Operand& whole = spec.out[0];
    offer_ = {spec.op,     spec.combine,
              whole.dtype, element_count(whole.dims),
              nullptr,     static_cast<const char*>(spec.in.at(0).data)};
    if (!spec.digit.present() || spec.digit.dim >= static_cast<int>(whole.dims.size()))
      throw internal("an all-gather names digit {} of a tensor of {} dimensions", spec.digit.dim, whole.dims.size());
    if (cuts_.size() != size()) throw internal("an all-gather over {} members has {} cuts", size(), cuts_.size());
    rows_ = spec.digit.outer;
    for (int d = 0; d < spec.digit.dim; ++d) rows_ *= whole.dims[static_cast<size_t>(d)];
    unit_bytes_ = spec.digit.inner * size_of(whole.dtype);
    for (size_t d = static_cast<size_t>(spec.digit.dim) + 1; d < whole.dims.size(); ++d) unit_bytes_ *= whole.dims[d];
    extent_ = whole.dims[static_cast<size_t>(spec.digit.dim)] / (spec.digit.outer * spec.digit.inner);
    for (const Interval& cut : cuts_)
      if (cut.begin < 0 || cut.end < cut.begin || cut.end > extent_)
        throw internal("an all-gather has the cut [{}, {}) of an extent of {}", cut.begin, cut.end, extent_);
    if (element_count(spec.in[0].dims) * size_of(whole.dtype) != rows_ * cuts_[rank].size() * unit_bytes_)
      throw internal("an all-gather's part has {} elements, its cut [{}, {}) another number",
                     element_count(spec.in[0].dims), cuts_[rank].begin, cuts_[rank].end);
  }

  bool run(Lookout* lookout) override {
    next_call();
    if (!begin(lookout)) return false;
    for (size_t m = 0; m < size(); ++m) {
      const char* from = offer_of(m).data;
      const int64_t bytes = cuts_[m].size() * unit_bytes_;
      for (int64_t row = 0; bytes > 0 && row < rows_; ++row)
        device_.copy_in(to_ + (row * extent_ + cuts_[m].begin) * unit_bytes_, from + row * bytes,
                        static_cast<size_t>(bytes));
    }
    return group_.meet(rank_, lookout);
  }

 private:
  char* to_;
  std::vector<Interval> cuts_;
  int64_t rows_ = 1, extent_ = 0, unit_bytes_ = 0;
};

class Inproc final : public Transport {
 public:
  explicit Inproc(const std::vector<Group>& groups) {
    for (const Group& group : groups) groups_.push_back(std::make_unique<GroupState>(group.devices));
  }

  std::unique_ptr<Collective> bind(int group, int device, const CollectiveSpec& spec, Device& memory) override {
    if (group < 0 || static_cast<size_t>(group) >= groups_.size())
      throw internal("a collective names group {} of {}", group, groups_.size());
    GroupState& state = *groups_[static_cast<size_t>(group)];
    const auto at = std::find(state.devices.begin(), state.devices.end(), device);
    if (at == state.devices.end())
      throw internal("device {} runs a collective of group {}, which it is not in", device, group);
    const size_t rank = static_cast<size_t>(at - state.devices.begin());
    if (spec.op == OpCode::k_all_reduce) return std::make_unique<AllReduce>(state, rank, memory, spec);
    if (spec.op == OpCode::k_all_gather) return std::make_unique<AllGather>(state, rank, memory, spec);
    throw unimplemented("the in-process transport has no collective op {}; it has all_reduce and all_gather",
                        static_cast<int>(spec.op));
  }

  void abort() override {
    for (auto& group : groups_) group->meetings.abort();
  }
  void reset() override {
    for (auto& group : groups_) group->reset();
  }

 private:
  std::vector<std::unique_ptr<GroupState>> groups_;
};

}  // namespace

std::unique_ptr<Transport> make_inproc(const std::vector<Group>& groups) { return std::make_unique<Inproc>(groups); }

}  // namespace whale
