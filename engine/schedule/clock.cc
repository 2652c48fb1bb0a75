#include "schedule/clock.h"

#include <algorithm>
#include <queue>

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
  Node& node = nodes_[item];
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
  double& longest = nodes_[item].seconds;
  longest = std::max(longest, seconds);
  return on(resource, item);
}

size_t Clock::machine(const Rates& rates) {
  machines_.push_back({.rates = &rates});
  return machines_.size() - 1;
}

void Clock::runs_on(Item item, size_t machine, int kind) {
  machines_[machine].kinds |= 1u << kind;
  if (first_use_.size() < nodes_.size()) first_use_.resize(nodes_.size(), kNobody);
  int32_t& first = first_use_[item];
  uses_.push_back({static_cast<int32_t>(machine), kind, first});
  first = static_cast<int32_t>(uses_.size()) - 1;
}

Clock::Item Clock::join(std::span<const size_t> resources) {
  const Item item = add(0);
  for (const size_t r : resources) on(r, item);
  return item;
}

void Clock::wait_for_message(Item item, const std::vector<Item>& messages, int64_t number) {
  after(item, number < std::ssize(messages) ? messages[number] : kNever);
}

Clock::Stuck Clock::run() {
  for (const Channel& c : channels_) {
    for (int64_t m = c.capacity; m < std::ssize(c.sent); ++m) wait_for_message(c.sent[m], c.taken, m - c.capacity);
    for (int64_t m = 0; m < std::ssize(c.taken); ++m) wait_for_message(c.taken[m], c.sent, m);
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
    states[i] = kOnTheWay;
    way.push_back({i, nodes_[i].waits});
  };
  Glance glance;
  for (Item root = 0; root < static_cast<Item>(nodes_.size()); ++root) {
    if (states[root] == kNew) enter(root);
    while (!way.empty()) {
      glance();
      At& at = way.back();
      if (at.edge == kNobody) {
        states[at.item] = kDone;
        way.pop_back();
        continue;
      }
      const Edge& edge = edges_[at.edge];
      if (edge.before == kNever || states[edge.before] == kOnTheWay) {
        auto first = way.begin();
        while (edge.before != kNever && first->item != edge.before) ++first;
        Stuck stuck{{}, edge.before != kNever};
        for (; first != way.end(); ++first) stuck.items.push_back(first->item);
        return stuck;
      }
      if (states[edge.before] == kNew) {
        enter(edge.before);  // and come back to this edge
        continue;
      }
      double& begins = nodes_[at.item].begin;
      begins = std::max(begins, edge.begun ? begin(edge.before) : end(edge.before));
      at.edge = edge.next;
    }
  }
  const auto slows = [](const Machine& m) {
    for (unsigned running = 1; running <= m.kinds; ++running)
      for (int kind = 0; kind < kKinds; ++kind)
        if ((running & ~m.kinds) == 0 && (running >> kind & 1) != 0 && (*m.rates)[running][kind] != 1) return true;
    return false;
  };
  if (std::ranges::any_of(machines_, slows)) run_beside();
  return {};
}

// From begin to begin and end to end, in the order of time. Nobody waits for ever: run() has seen that.
void Clock::run_beside() {
  const size_t n = nodes_.size();
  first_use_.resize(n, kNobody);
  // Who waits for each item.
  std::vector<int32_t> awaited(n), from(n + 1);
  for (const Node& node : nodes_)
    for (int32_t e = node.waits; e != kNobody; e = edges_[e].next) ++from[static_cast<size_t>(edges_[e].before) + 1];
  for (size_t i = 0; i < n; ++i) from[i + 1] += from[i];
  struct Waiter {
    Item item;
    bool begun;
  };
  std::vector<Waiter> waiters(static_cast<size_t>(from[n]));
  std::vector<int32_t> next(from.begin(), from.end() - 1);
  for (size_t i = 0; i < n; ++i)
    for (int32_t e = nodes_[i].waits; e != kNobody; e = edges_[e].next) {
      const Edge& edge = edges_[e];
      waiters[next[edge.before]++] = {static_cast<Item>(i), edge.begun};
      ++awaited[i];
    }

  struct Progress {
    double left = 0, since = 0, rate = 0;  // seconds of work; when that was so; of work in a second
    int32_t version = 0;                   // of its end, as it is expected
  };
  std::vector<Progress> progress(n);
  struct End {
    double time;
    Item item;
    int32_t version;
    bool operator>(const End& other) const { return time > other.time; }
  };
  std::priority_queue<End, std::vector<End>, std::greater<>> ends;
  std::vector<Item> ready, over;
  std::vector<size_t> changed;  // machines
  const auto each_use = [&](Item i, const auto& visit) {
    for (int32_t u = first_use_[i]; u != kNobody; u = uses_[u].next) visit(uses_[u]);
  };
  const auto change = [&](size_t machine) {
    if (!std::exchange(machines_[machine].changed, true)) changed.push_back(machine);
  };
  const auto tell = [&](Item i, bool begun) {
    for (int32_t w = from[i]; w < from[static_cast<size_t>(i) + 1]; ++w) {
      const Waiter& waiter = waiters[w];
      if (waiter.begun == begun && --awaited[waiter.item] == 0) ready.push_back(waiter.item);
    }
  };
  const auto running_on = [&](const Machine& m, int32_t machine) {
    unsigned kinds = 0;
    for (const Item i : m.running)
      each_use(i, [&](const Use& use) {
        if (use.machine == machine) kinds |= 1u << use.kind;
      });
    return kinds;
  };
  std::vector<unsigned> kinds(machines_.size());
  Glance glance;
  double now = 0;
  for (size_t i = 0; i < n; ++i)
    if (awaited[i] == 0) ready.push_back(static_cast<Item>(i));
  for (;;) {
    glance();
    while (!ready.empty() || !over.empty()) {
      if (!over.empty()) {
        const Item i = over.back();
        over.pop_back();
        nodes_[i].seconds = now - nodes_[i].begin;
        tell(i, false);
        continue;
      }
      const Item i = ready.back();
      ready.pop_back();
      Node& node = nodes_[i];
      node.begin = now;
      tell(i, true);
      if (node.seconds <= 0) {
        over.push_back(i);
        continue;
      }
      Progress& mine = progress[i];
      mine = {.left = node.seconds, .since = now};
      if (first_use_[i] == kNobody) {
        mine.rate = 1;
        ends.push({now + node.seconds, i, mine.version});
      }
      each_use(i, [&](const Use& use) {
        machines_[use.machine].running.push_back(i);
        change(static_cast<size_t>(use.machine));
      });
    }
    for (const size_t m : changed) kinds[m] = running_on(machines_[m], static_cast<int32_t>(m));
    for (const size_t m : changed) {
      machines_[m].changed = false;
      for (const Item i : machines_[m].running) {
        double rate = 1;
        each_use(i, [&](const Use& use) {
          const auto on = static_cast<size_t>(use.machine);
          rate = std::min(rate, (*machines_[on].rates)[kinds[on]][use.kind]);
        });
        Progress& mine = progress[i];
        if (rate == mine.rate) continue;
        mine.left -= (now - mine.since) * mine.rate;
        mine.since = now, mine.rate = rate;
        ends.push({now + std::max(0.0, mine.left) / rate, i, ++mine.version});
      }
    }
    changed.clear();
    while (!ends.empty() && ends.top().version != progress[ends.top().item].version) ends.pop();
    if (ends.empty()) return;
    now = ends.top().time;
    const Item ended = ends.top().item;
    ends.pop();
    each_use(ended, [&](const Use& use) {
      Machine& m = machines_[use.machine];
      std::erase(m.running, ended);
      change(static_cast<size_t>(use.machine));
    });
    over.push_back(ended);
  }
}

}  // namespace whale
