// The clock: when work begins and ends, given who does it, what it waits for and how long it takes. Schedules and plans
// are walked by handing it their items; it knows nothing of either.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace whale {

class Clock {
 public:
  using Item = int32_t;

  // Who works, one item after another. Returns its number, counted from 0; so do the next two.
  size_t resource();
  // Holds so many messages (at least 1) that nobody has taken.
  size_t channel(int64_t capacity);
  // Where so many members meet, again and again.
  size_t place(size_t members);

  // Work of this resource, behind all that it was given before.
  Item work(size_t resource, double seconds);
  // The next message of the channel: begins when there is free capacity, and is there when it has ended.
  Item send(size_t channel, size_t resource, double seconds);
  // Takes the next message: begins when that is there, and has freed its place when it has ended.
  Item take(size_t channel, size_t resource, double seconds);
  // The next visit of this member (by number), on one of its resources. The k-th visits of all members are one item: it
  // begins when all are there and takes the longest of their times.
  Item meet(size_t place, size_t member, size_t resource, double seconds);
  // All of these resources go on together.
  Item join(std::span<const size_t> resources);

  // `item` begins when `before` has ended; when it has begun.
  void after(Item item, Item before) { wait(item, before, false); }
  void after_begin(Item item, Item before) { wait(item, before, true); }

  // Items of a machine that run beside each other slow each other down. Of a second of each kind, what is done in one
  // second, by the kinds that run (a bit each); above 0 of those that do.
  static constexpr int kKinds = 5;
  using Rates = std::array<std::array<double, kKinds>, 1 << kKinds>;
  // `rates` outlive the clock.
  size_t machine(const Rates& rates);
  // The item takes of the machine what this kind does; one of several machines goes on as on the slowest.
  void runs_on(Item item, size_t machine, int kind);

  // Each item waits for the next one; the last one for the first (circle), or for a message, free capacity or a member
  // that never comes. Empty: everything ends.
  struct Stuck {
    std::vector<Item> items;
    bool circle = false;
  };
  // Once, when everything has been handed over: finds all times, as far as nobody is stuck.
  Stuck run();

  double begin(Item i) const { return nodes_[i].begin; }
  double end(Item i) const { return begin(i) + nodes_[i].seconds; }

 private:
  static constexpr Item kNobody = -1, kNever = -2;
  struct Node {
    double seconds = 0, begin = 0;
    int32_t waits = kNobody;  // the first in the list of its edges
  };
  struct Edge {
    Item before;
    int32_t next;
    bool begun;  // it is enough that `before` has begun
  };
  struct Channel {
    int64_t capacity = 1;
    std::vector<Item> sent = {}, taken = {};
  };
  struct Place {
    std::vector<size_t> visits;  // of each member
    std::vector<Item> items = {};
    std::vector<size_t> there = {};  // members who have come, per item
  };

  struct Machine {
    const Rates* rates;
    unsigned kinds = 0;  // of all its items
    std::vector<Item> running = {};
    bool changed = false;
  };
  struct Use {
    int32_t machine;
    int32_t kind;
    int32_t next;
  };

  void wait(Item item, Item before, bool begun);
  void run_beside();
  void wait_for_message(Item item, const std::vector<Item>& messages, int64_t number);
  Item add(double seconds);
  Item on(size_t resource, Item item);

  std::vector<Node> nodes_;
  std::vector<Edge> edges_;
  std::vector<Item> last_;  // per resource
  std::vector<Channel> channels_;
  std::vector<Place> places_;
  std::vector<Machine> machines_;
  std::vector<Use> uses_;
  std::vector<int32_t> first_use_;  // per item, as far as there are any; kNobody: none
};

}  // namespace whale
