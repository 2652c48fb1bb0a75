// The transport among the device threads of one process. Results do not depend on timing.
#include "base/error.h"
#include "comm/member.h"

namespace whale {
namespace {

using namespace inproc;  // NOLINT

class Inproc final : public Transport {
 public:
  explicit Inproc(const std::vector<Group>& groups) {
    for (const Group& group : groups) {
      groups_.emplace_back();
      for (const std::vector<int32_t>& part : group.parts) groups_.back().push_back(std::make_unique<GroupState>(part));
    }
  }

  std::unique_ptr<Collective> bind(int device, const CollectiveSpec& spec, Device& memory) override {
    const int32_t group = spec.group;
    if (group < 0 || static_cast<size_t>(group) >= groups_.size())
      throw internal("a collective names group {} of {}", group, groups_.size());
    for (const auto& part : groups_[group]) {
      const auto at = std::find(part->devices.begin(), part->devices.end(), device);
      if (at != part->devices.end()) return bind(*part, static_cast<size_t>(at - part->devices.begin()), spec, memory);
    }
    throw internal("device {} runs a collective of group {}, which it is not in", device, group);
  }

  std::unique_ptr<Links> open_links(const std::vector<Link>& links) override { return make_links(links); }

  void abort() override {
    for (auto& group : groups_)
      for (auto& part : group) part->meetings.abort();
  }
  void reset() override {
    for (auto& group : groups_)
      for (auto& part : group) part->reset();
  }

 private:
  static std::unique_ptr<Collective> bind(GroupState& part, size_t rank, const CollectiveSpec& spec, Device& memory) {
    switch (spec.op) {
      case OpCode::k_all_reduce: return bind_all_reduce(part, rank, memory, spec);
      case OpCode::k_reduce_scatter: return bind_reduce_scatter(part, rank, memory, spec);
      case OpCode::k_all_gather: return bind_all_gather(part, rank, memory, spec);
      case OpCode::k_adasum: return bind_adasum(part, rank, memory, spec);
      case OpCode::k_all_to_all: return bind_all_to_all(part, rank, memory, spec);
      case OpCode::k_shift: return bind_shift(part, rank, memory, spec);
      default: break;
    }
    throw unimplemented(
        "the in-process transport has no collective op {}; it has all_reduce, reduce_scatter, "
        "all_gather, all_to_all, shift and adasum",
        static_cast<int>(spec.op));
  }

  std::vector<std::vector<std::unique_ptr<GroupState>>> groups_;  // by group and part
};

}  // namespace

std::unique_ptr<Transport> make_inproc(const std::vector<Group>& groups) { return std::make_unique<Inproc>(groups); }

}  // namespace whale
