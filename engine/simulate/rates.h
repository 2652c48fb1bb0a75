// How fast instructions of a plan are where devices and links are of several kinds.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "cost/cost.h"
#include "plan/communication.h"

namespace whale {

class PlanRates {
 public:
  PlanRates(const CostModel& cost, const Plan& plan, const Entry& entry);

  DeviceRates device(int32_t device, bool half) const { return of(rates_[half ? 1 : 0], device); }
  LinkRates host(int32_t device) const { return of(host_, device); }
  const LinkRates& vote() const { return vote_; }  // between the devices that are farthest from each other
  // Of each member of its part of the group: the slowest link of a ring through the members as they are listed, where
  // parts that pass through the network of a node at once share it.
  LinkRates group(int32_t group, int32_t device) const;
  int64_t members(int32_t group, int32_t device) const;
  // Of the messages of this device on the link: what the devices of a node send at once shares its network.
  LinkRates link(int32_t link, int32_t device) const;

  // Numbers, equal where devices and what connects them are alike.
  std::vector<int32_t> kinds() const;

 private:
  template <class T>
  static const T& of(const std::vector<T>& list, int32_t index) {
    return list[index];
  }
  std::map<int32_t, LinkRates> rates_of_link(const Link& link) const;

  const CostModel cost_;
  const Plan& plan_;
  const Entry& entry_;
  bool uniform_ = true;  // all is as the cost model has it
  PartNumbers parts_;
  std::vector<DeviceRates> rates_[2];  // f32, half
  std::vector<LinkRates> host_;
  LinkRates vote_;
  std::vector<std::vector<LinkRates>> groups_;               // [group][part]
  mutable std::vector<std::map<int32_t, LinkRates>> links_;  // [link]: by sender; made when asked for
};

}  // namespace whale
