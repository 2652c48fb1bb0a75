// All instructions of all devices, one after the other in an order in which they could run. That every other order does
// the same is what `races` and `meetings` find.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/progress.h"
#include "prove/between.h"
#include "prove/collective.h"
#include "prove/kernel.h"
#include "prove/memory.h"
#include "prove/stopped.h"
#include "prove/symmetry.h"

namespace whale::proof {

class Walk {
 public:
  // What stands for others is walked, and they are not.
  Walk(const Plan& plan, const Entry& entry, Reference& reference, const Symmetry& symmetry);
  // All of it; what ends it, if anything does. Throws Uneven where others cannot be stood for.
  std::optional<Stopped> run(Progress* progress = nullptr);
  int64_t to_walk() const;  // instructions
  const std::set<std::string>& exemptions() const { return kernels_.exemptions(); }
  int64_t walked() const { return walked_; }
  const Tree& tree() const { return tree_; }
  const Instruction& instruction(const At& at) const;
  const ScheduleRow& schedule_row(const At& at) const;
  const Segment& segment(const At& at) const;
  int64_t runs(const At& at) const;  // rows of its segment

 private:
  struct Device {
    const DeviceRow* row = nullptr;
    Program program;
    Memory memory;
    At at;
    bool waits = false;  // has arrived at a collective
    bool committed = false;
  };
  struct Meeting {
    std::vector<int32_t> members;  // walked or not
    int64_t awaited = 0;           // that are walked
    int64_t arrived = 0;
  };
  struct Message {
    std::vector<Held> values;  // of each transfer of the channel
  };

  // Of a device that is walked, as it is, of another what lies between those that stand for it.
  template <class Of>
  auto of(int32_t device, const Of& at) -> decltype(at(device)) {
    if (symmetry_.walked(device)) return at(device);
    const Symmetry::Line l = symmetry_.line(device);
    return between(of(l.first, at), of(l.second, at), of(l.last, at), l.steps, l.span);
  }
  // It, or a device that stands for it and is at the same instruction.
  Device& stand_in(int32_t device);

  void begin(Device& d);
  bool is_left_out(const ScheduleRow& row) const;
  void next_row(Device& d);
  bool step(Device& d);  // false: it waits for others
  bool collective(Device& d, const work::Collective& c);
  void meet(const Meeting& meeting, const work::Collective& c);
  void check_weights(const Meeting& meeting, const work::Collective& c, const std::vector<Held>& gradients);
  void check_left_out(const Meeting& meeting, const std::vector<Held>& results);
  bool are_rows(const std::vector<Held>& values) const;
  std::vector<Memory::Part> rows_of(Device& d, BufferId id);
  void write_rows(Device& d, BufferId id, const std::vector<Memory::Part>& rows);
  void check_in_place(const Device& d, const Instruction& i, const work::Kernel& k) const;
  void check_gathered(int32_t device, const work::Collective& c, size_t operand, size_t member);
  void check_apart(const Device& d, const Instruction& i, bool in_place, bool gathers) const;
  // Results lie apart from each other, and from the first `operands` operands but where a result may lie on one.
  void check_writes(const Device& d, const Instruction& i, size_t operands,
                    const std::function<bool(size_t result, size_t operand)>& may_meet) const;
  bool gather_rows(const Meeting& meeting, const work::Collective& c, size_t operand);
  bool may_be_own_concat(const Instruction& i) const;
  bool rows(Device& d, const Instruction& i, const work::Kernel& k);
  void kernel(Device& d, const Instruction& i, const work::Kernel& k);
  void feed(Device& d, const Instruction& i, const work::Feed& f);
  void fetch(Device& d, const Instruction& i, const work::Fetch& f);
  void send(Device& d, const Instruction& i, const work::Send& s);
  bool receive(Device& d, const Instruction& i, const work::Receive& r);
  void end(Device& d);
  void end();

  Place readable(Device& d, BufferId id);
  void bring_up(Device& d, const Place& place);
  Held brought_up(const Device& d, const Held& value) const;
  Held read(Device& d, BufferId id);
  void write(Device& d, BufferId id, Value value);
  static void check_decided(const Device& d, const Buffer& b);
  void put(Device& d, const Place& place, Value value);
  std::shared_ptr<const std::vector<Held>> sums_read();
  void begin_reads() { reads_.clear(), sums_ = nullptr; }
  std::vector<Held> lying();                              // at the operands of the instruction at hand
  Held initial(const Device& d, int32_t variable) const;  // null: the program has no such variable
  Interval samples(const Device& d, int32_t cut) const;
  const Buffer& buffer(const Device& d, BufferId id) const { return d.program.buffers[id]; }
  Place place(const Device& d, BufferId id) const { return place_of(d.program, id, now(d).version); }
  bool is_there(const Device& d, BufferId id) const {
    return id != kNone && buffer(d, id).kind != BufferKind::kStep && buffer(d, id).bytes > 0;
  }
  const ScheduleRow& now(const Device& d) const { return d.program.schedule[d.at.row]; }

  const Plan& plan_;
  const Entry& entry_;
  Reference& ref_;
  const Symmetry& symmetry_;
  const bool gaps_;  // micro-batches are left out
  Tree tree_;
  Kernels kernels_;
  std::vector<Device> devices_;
  std::vector<std::vector<int32_t>> part_of_;                       // [group][device]: number of its part
  std::vector<Held> of_devices_;                                    // of the collective at hand
  std::map<std::pair<int32_t, int32_t>, Meeting> meetings_;         // by group and part
  std::map<std::array<int32_t, 3>, std::deque<Message>> channels_;  // by link, from, to
  std::vector<Held> reads_;                                         // of the instruction at hand
  std::shared_ptr<const std::vector<Held>> sums_;                   // those of `reads_` that lack terms, once asked for
  At here_;
  int64_t walked_ = 0;
  bool voted_ = false;
};

}  // namespace whale::proof
