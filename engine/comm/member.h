// What the in-process collectives share: the members of a group meet, and read each other's buffers.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "comm/transport.h"
#include "comm/wire.h"

namespace whale::inproc {

inline constexpr int64_t kSmallBytes = 16 << 10;  // up to here every member of an all-reduce reduces everything
inline constexpr int64_t kChunkBytes = 32 << 10;  // of a large reduction: stays in the first-level cache

struct Stretch {  // of a bucket, flat
  char* data;
  int64_t begin, end;  // elements of the bucket
};

// What a member shows its peers. What must be equal comes first.
struct Offer {
  OpCode op{};
  Combine combine{};
  DType dtype{};
  int64_t elements = 0;  // of the whole tensor or bucket
  size_t operands = 1;
  int64_t part = 0;                                 // shift: elements that this member has
  const std::vector<Stretch>* stretches = nullptr;  // of a bucket
  const char* data = nullptr;                       // of one tensor
};

struct alignas(64) MemberSlot {
  // Both alternate from call to call: a member that is one call ahead writes the other ones.
  const Offer* offer[2] = {nullptr, nullptr};
  alignas(64) char small[2][kSmallBytes];
};

// One part of a group.
struct GroupState {
  std::vector<int32_t> devices;
  std::unique_ptr<MemberSlot[]> slots;
  std::atomic<uint32_t> arrived{0};
  Counter meetings;                        // how many times all members have met in this run
  std::unique_ptr<uint32_t[]> met, calls;  // per member, 16 apart: its own thread's view

  explicit GroupState(std::vector<int32_t> members);
  bool meet(size_t member, Lookout* lookout);
  void reset();
};

class Member : public Collective {
 public:
  Member(GroupState& group, size_t rank, Device& device) : group_(group), rank_(rank), device_(device) {}

 protected:
  size_t size() const { return group_.devices.size(); }
  const Offer& offer_of(size_t member) const { return *group_.slots[member].offer[half_]; }
  void next_call() { half_ = group_.calls[rank_ * 16]++ & 1; }
  bool begin(Lookout* lookout);  // shows the offer, meets everybody, and looks at what they brought
  bool end(Lookout* lookout) { return group_.meet(rank_, lookout); }

  GroupState& group_;
  size_t rank_;
  Device& device_;
  Offer offer_;
  uint32_t half_ = 0;

 private:
  void check_peers() const;
};

// A tensor seen as [rows, extent, unit bytes] around a sub-axis.
struct Rows {
  int64_t rows = 1, extent = 0, unit = 0;
};
Rows rows_of(const Operand& tensor, const SubAxis& sub_axis);
// The intervals lie one behind the other from 0 to the extent, one a member.
void check_cuts(const std::vector<Interval>& cuts, size_t members, int64_t extent);

std::unique_ptr<Collective> bind_all_reduce(GroupState& group, size_t rank, Device& device, const CollectiveSpec& spec);
std::unique_ptr<Collective> bind_reduce_scatter(GroupState& group, size_t rank, Device& device,
                                                const CollectiveSpec& spec);
std::unique_ptr<Collective> bind_all_gather(GroupState& group, size_t rank, Device& device, const CollectiveSpec& spec);
std::unique_ptr<Collective> bind_all_to_all(GroupState& group, size_t rank, Device& device, const CollectiveSpec& spec);
std::unique_ptr<Collective> bind_shift(GroupState& group, size_t rank, Device& device, const CollectiveSpec& spec);
std::unique_ptr<Collective> bind_adasum(GroupState& group, size_t rank, Device& device, const CollectiveSpec& spec);

}  // namespace whale::inproc

namespace whale {

// What of the links leaves this rank: by default nothing.
struct Abroad {
  Wire* wire = nullptr;
  const std::vector<int32_t>* ranks = nullptr;  // of the devices
  bool everything = false;
  bool crosses(int32_t from, int32_t to) const {
    return wire != nullptr && (everything || (*ranks)[from] != (*ranks)[to]);
  }
};
std::unique_ptr<Links> make_links(const std::vector<Link>& links, const Abroad& abroad = {});

}  // namespace whale
