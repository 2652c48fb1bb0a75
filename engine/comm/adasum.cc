// Adasum among threads: each member owns a slice of all gradients. It adds up the products of its slice, the members
// meet, and all know the sums; then it combines its slice.
#include <cstring>

#include "base/error.h"
#include "comm/adasum_tree.h"
#include "comm/member.h"

namespace whale::inproc {
namespace {

using Products = AdasumTree::Products;

class Adasum final : public Member {
 public:
  Adasum(GroupState& group, size_t rank, Device& device, const CollectiveSpec& spec)
      : Member(group, rank, device),
        tree_(spec, group.devices.size(), rank, device),
        data_(static_cast<char*>(spec.in.at(0).data)),
        peers_(group.devices.size()) {
    offer_.op = spec.op;
    offer_.dtype = tree_.dtype();
    offer_.elements = tree_.elements();
    offer_.data = data_;
    if (size() > kMostMembers) throw unimplemented("Adasum over {} devices; at most {}", size(), kMostMembers);
  }

  bool run(Lookout* lookout) override {
    if (size() == 1 || offer_.elements == 0) return true;
    next_call();
    tree_.scale(data_);
    if (!Member::begin(lookout)) return false;
    for (size_t m = 0; m < size(); ++m) peers_[m] = const_cast<char*>(offer_of(m).data);
    if (!tree_.each_step([&](size_t distance, size_t stride, size_t count) {
          return combine_pairs(distance, stride, count, lookout);
        }))
      return false;
    for (size_t m = 1; m < size(); ++m) tree_.copy(peers_[m], peers_[0], tree_.slice(rank_), tree_.slice(rank_ + 1));
    return end(lookout);
  }

 private:
  // A pair's products are kept in the slots of the members.
  static constexpr size_t kMostMembers = static_cast<size_t>(kSmallBytes) / sizeof(Products);

  // All pairs at once, each member its slice.
  bool combine_pairs(size_t distance, size_t stride, size_t count, Lookout* lookout) {
    const int64_t begin = tree_.slice(rank_), end = tree_.slice(rank_ + 1);
    next_call();
    for (size_t k = 0; k < count; ++k) {
      const Products p = tree_.products(peers_[k * stride], peers_[k * stride + distance], begin, end);
      std::memcpy(group_.slots[rank_].small[half_] + k * sizeof p, &p, sizeof p);
    }
    if (!Member::begin(lookout)) return false;
    for (size_t k = 0; k < count; ++k) {
      Products sum;
      for (size_t m = 0; m < size(); ++m) {
        Products p;
        std::memcpy(&p, group_.slots[m].small[half_] + k * sizeof p, sizeof p);
        sum.add(p);
      }
      tree_.join(peers_[k * stride], peers_[k * stride + distance], sum, begin, end);
    }
    return true;
  }

  AdasumTree tree_;
  char* data_;
  std::vector<char*> peers_;  // data of the members
};

}  // namespace

std::unique_ptr<Collective> bind_adasum(GroupState& group, size_t rank, Device& device, const CollectiveSpec& spec) {
  return std::make_unique<Adasum>(group, rank, device, spec);
}

}  // namespace whale::inproc
