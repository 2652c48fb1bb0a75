// All instructions of all devices, one after the other in an order in which they could run. That every other order does
// the same is what the plan's verifier finds: whoever reads or writes the same bytes waits for each other.
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "prove/collective.h"
#include "prove/kernel.h"
#include "prove/memory.h"

namespace whale::proof {

// Where a device is.
struct At {
  int32_t device = -1;
  int32_t row = 0, instruction = 0;
};
struct Stopped {
  Stop stop;
  At at;  // device -1: behind the last instruction
  std::vector<Held> reads;
};

class Walk {
 public:
  Walk(const Plan& plan, const Entry& entry, Reference& reference);
  // All of it; what ends it, if anything does.
  std::optional<Stopped> run();
  const std::set<std::string>& exemptions() const { return kernels_.exemptions(); }
  int64_t walked() const { return walked_; }
  const Instruction& instruction(const At& at) const;
  const ScheduleRow& schedule_row(const At& at) const;
  const Segment& segment(const At& at) const;

 private:
  struct Device {
    const DeviceRow* row = nullptr;
    Program program;
    Memory memory;
    At at;
    bool waits = false;  // has arrived at a collective
  };
  struct Meeting {
    std::vector<int32_t> members;
    size_t arrived = 0;
  };
  struct Message {
    std::vector<Held> values;  // of each transfer of the channel
  };

  void begin(Device& d);
  bool step(Device& d);  // false: it waits for others
  bool collective(Device& d, const work::Collective& c);
  void meet(const Meeting& meeting, const work::Collective& c);
  bool are_rows(const std::vector<Held>& values) const;
  std::vector<Memory::Part> rows_of(Device& d, BufferId id);
  void write_rows(Device& d, BufferId id, const std::vector<Memory::Part>& rows);
  void check_in_place(const Device& d, const Instruction& i, const work::Kernel& k) const;
  void check_gathered(const Device& d, const Instruction& i, const work::Collective& c, size_t operand,
                      size_t member) const;
  bool gather_rows(const Meeting& meeting, const work::Collective& c, size_t operand);
  bool rows(Device& d, const Instruction& i, const work::Kernel& k);
  void kernel(Device& d, const Instruction& i, const work::Kernel& k);
  void feed(Device& d, const Instruction& i, const work::Feed& f);
  void fetch(Device& d, const Instruction& i, const work::Fetch& f);
  void send(Device& d, const Instruction& i, const work::Send& s);
  bool receive(Device& d, const Instruction& i, const work::Receive& r);
  void end(Device& d);
  void end();

  Held read(Device& d, BufferId id);
  void write(Device& d, BufferId id, Value value);
  Held initial(const Device& d, int32_t variable) const;  // null: the program has no such variable
  Interval samples(const Device& d, int32_t cut) const;
  const Buffer& buffer(const Device& d, BufferId id) const { return d.program.buffers[static_cast<size_t>(id)]; }
  const ScheduleRow& now(const Device& d) const { return d.program.schedule[static_cast<size_t>(d.at.row)]; }

  const Plan& plan_;
  const Entry& entry_;
  Reference& ref_;
  Kernels kernels_;
  std::vector<Device> devices_;
  std::vector<std::vector<int32_t>> part_of_;                       // [group][device]: number of its part
  std::map<std::pair<int32_t, int32_t>, Meeting> meetings_;         // by group and part
  std::map<std::array<int32_t, 3>, std::deque<Message>> channels_;  // by link, from, to
  std::vector<int64_t> fetched_;                                    // elements of each output
  std::vector<Held> reads_;                                         // of the instruction at hand
  At here_;
  int64_t walked_ = 0;
};

}  // namespace whale::proof
