#include "schedule/clock.h"

#include <algorithm>

#include "base/watch.h"

namespace whale {

size_t Clock::resource() {
  last_.push_back(kNobody);
  return last_.size() - 1;
}

size_t Clock::channel(int64_t capacity) {
  channels_.push_back({.capacity = capacity});
  return channels_.size() - 1;
}

size_t Clock::place(size_t members) {
  places_.push_back({.visits = std::vector<size_t>(members)});
  return places_.size() - 1;
}

void Clock::wait(Item item, Item before, bool begun) {
  Node& node = nodes_[static_cast<size_t>(item)];
  edges_.push_back({before, node.waits, begun});
  node.waits = static_cast<int32_t>(edges_.size()) - 1;
}

Clock::Item Clock::add(double seconds) {
  nodes_.push_back({.seconds = seconds});
  return static_cast<Item>(nodes_.size()) - 1;
}

Clock::Item Clock::on(size_t resource, Item item) {
  if (last_[resource] != kNobody) after(item, last_[resource]);
  last_[resource] = item;
  return item;
}

Clock::Item Clock::work(size_t resource, double seconds) { return on(resource, add(seconds)); }

Clock::Item Clock::send(size_t channel, size_t resource, double seconds) {
  return channels_[channel].sent.emplace_back(work(resource, seconds));
}

Clock::Item Clock::take(size_t channel, size_t resource, double seconds) {
  return channels_[channel].taken.emplace_back(work(resource, seconds));
}

Clock::Item Clock::meet(size_t place, size_t member, size_t resource, double seconds) {
  Place& p = places_[place];
  const size_t visit = p.visits[member]++;
  if (visit == p.items.size()) p.items.push_back(add(0)), p.there.push_back(0);
  const Item item = p.items[visit];
  ++p.there[visit];
  double& longest = nodes_[static_cast<size_t>(item)].seconds;
  longest = std::max(longest, seconds);
  return on(resource, item);
}

Clock::Item Clock::join(std::span<const size_t> resources) {
  const Item item = add(0);
  for (const size_t r : resources) on(r, item);
  return item;
}

void Clock::wait_for_message(Item item, const std::vector<Item>& messages, int64_t number) {
  after(item, number < std::ssize(messages) ? messages[static_cast<size_t>(number)] : kNever);
}

Clock::Stuck Clock::run() {
  for (const Channel& c : channels_) {
    for (int64_t m = c.capacity; m < std::ssize(c.sent); ++m)
      wait_for_message(c.sent[static_cast<size_t>(m)], c.taken, m - c.capacity);
    for (int64_t m = 0; m < std::ssize(c.taken); ++m) wait_for_message(c.taken[static_cast<size_t>(m)], c.sent, m);
  }
  for (const Place& p : places_)
    for (size_t k = 0; k < p.items.size(); ++k)
      if (p.there[k] < p.visits.size()) after(p.items[k], kNever);

  // Depth first, from whoever waits to whom it waits for: a circle closes on the way that led to it.
  enum State : char { kNew, kOnTheWay, kDone };
  std::vector<State> states(nodes_.size(), kNew);
  struct At {
    Item item;
    int32_t edge;  // the next one to look at
  };
  std::vector<At> way;
  const auto enter = [&](Item i) {
    states[static_cast<size_t>(i)] = kOnTheWay;
    way.push_back({i, nodes_[static_cast<size_t>(i)].waits});
  };
  Glance glance;
  for (Item root = 0; root < static_cast<Item>(nodes_.size()); ++root) {
    if (states[static_cast<size_t>(root)] == kNew) enter(root);
    while (!way.empty()) {
      glance();
      At& at = way.back();
      if (at.edge == kNobody) {
        states[static_cast<size_t>(at.item)] = kDone;
        way.pop_back();
        continue;
      }
      const Edge& edge = edges_[static_cast<size_t>(at.edge)];
      if (edge.before == kNever || states[static_cast<size_t>(edge.before)] == kOnTheWay) {
        auto first = way.begin();
        while (edge.before != kNever && first->item != edge.before) ++first;
        Stuck stuck{{}, edge.before != kNever};
        for (; first != way.end(); ++first) stuck.items.push_back(first->item);
        return stuck;
      }
      if (states[static_cast<size_t>(edge.before)] == kNew) {
        enter(edge.before);  // and come back to this edge
        continue;
      }
      double& begins = nodes_[static_cast<size_t>(at.item)].begin;
      begins = std::max(begins, edge.begun ? begin(edge.before) : end(edge.before));
      at.edge = edge.next;
    }
  }
  return {};
}

}  // namespace whale
