// What several devices do together: collectives and messages.
#include "prove/walk.h"

#include <algorithm>

#include "plan/placed.h"
#include "prove/lacking.h"

namespace whale::proof {

bool Walk::collective(Device& d, const work::Collective& c) {
  const int32_t part = part_of_[c.group][d.at.device];
  if (part < 0) refuse("group {} has no part with this device", plan_.groups[c.group].axis);
  Meeting& meeting = meetings_[{c.group, part}];
  if (meeting.members.empty()) {
    meeting.members = plan_.groups[c.group].parts[part];
    meeting.awaited = std::ranges::count_if(meeting.members, [&](int32_t m) { return symmetry_.walked(m); });
  }
  d.waits = true;
  if (++meeting.arrived < meeting.awaited) return false;
  meet(meeting, c);
  meeting.arrived = 0;
  for (const int32_t m : meeting.members) {
    if (!symmetry_.walked(m)) continue;
    Device& member = devices_[m];
    member.waits = false;
    ++member.at.instruction, ++walked_;
  }
  return true;
}

void Walk::meet(const Meeting& meeting, const work::Collective& c) {
  std::vector<const Instruction*> list;
  for (const int32_t m : meeting.members) {
    const Instruction& i = instruction(stand_in(m).at);
    const auto* theirs = i.as<work::Collective>();
    if (!theirs || theirs->op != c.op || theirs->group != c.group || theirs->combine != c.combine ||
        !(theirs->cuts == c.cuts) || !(theirs->to == c.to) || theirs->weights != c.weights ||
        i.in.size() != instruction(here_).in.size())
      refuse("device {} is at {} '{}', another collective than the others'", m, i.verb(), i.name);
    list.push_back(&i);
    check_apart(stand_in(m), i, c.op == OpCode::k_all_reduce || c.op == OpCode::k_adasum, c.op == OpCode::k_all_gather);
  }
  const size_t operands = list[0]->in.size();
  std::vector<std::vector<Held>> results(operands);
  std::vector<std::shared_ptr<const std::vector<Held>>> sums(operands);
  for (size_t k = 0; k < operands; ++k) {
    Exchange e{.work = &c, .operand = k, .in = {}, .in_dims = {}, .out_dims = {}};
    begin_reads();
    for (size_t m = 0; m < list.size(); ++m) check_gathered(meeting.members[m], c, k, m);
    if (gather_rows(meeting, c, k)) continue;
    for (size_t m = 0; m < list.size(); ++m) {
      Device& d = stand_in(meeting.members[m]);
      if (symmetry_.walked(meeting.members[m])) of_devices_[d.at.device] = read(d, list[m]->in[k]);
      e.in_dims.push_back(buffer(d, list[m]->in[k]).dims);
      e.out_dims.push_back(buffer(d, list[m]->out.at(k)).dims);
    }
    for (const int32_t m : meeting.members) e.in.push_back(of(m, [&](int32_t d) { return of_devices_[d]; }));
    const bool empty =
        std::all_of(e.out_dims.begin(), e.out_dims.end(), [](const Dims& d) { return !element_count(d); });
    if (empty) continue;
    const bool adds = (c.op == OpCode::k_all_reduce || c.op == OpCode::k_reduce_scatter) &&
                      c.combine != Combine::kMax && c.combine != Combine::kMin;
    for (size_t m = 1; m < e.in.size() && adds && tree_.asked(); ++m) {
      const auto row = [&](size_t i) { return devices_[meeting.members[i]].row; };
      // Those of the same samples have parts of a split, of whatever samples of theirs.
      if (row(m)->samples == row(m - 1)->samples) continue;
      const std::string fault = tree_.fault_of(e.in[m]->tensor, e.in[m - 1]->terms, e.in[m]->terms);
      if (!fault.empty())
        refuse("in exact mode it adds {} and {}: {}", describe(ref_, *e.in[m - 1]), describe(ref_, *e.in[m]), fault);
    }
    if (c.op == OpCode::k_adasum && !plan_.options.adasum) refuse("Adasum, which no option of the plan asks for");
    results[k] = exchanged(ref_, tree_, e);
    if (c.op == OpCode::k_adasum) check_weights(meeting, c, e.in);
    check_left_out(meeting, results[k]);
    if (!results[k].empty() && !results[k][0]->terms.whole())
      sums[k] = std::make_shared<const std::vector<Held>>(reads_);
  }
  for (size_t k = 0; k < operands; ++k) {
    sums_ = sums[k];
    for (size_t m = 0; m < results[k].size(); ++m)
      if (symmetry_.walked(meeting.members[m])) write(devices_[meeting.members[m]], list[m]->out[k], *results[k][m]);
  }
}

// Adasum takes each member's gradient for that of so many samples.
void Walk::check_weights(const Meeting& meeting, const work::Collective& c, const std::vector<Held>& gradients) {
  for (size_t m = 0; m < gradients.size(); ++m) {
    const auto samples = samples_in(entry_, ref_, *gradients[m]);
    if (samples && c.weights.at(m) != *samples)
      refuse("Adasum weighs the gradient of device {} as of {} samples, expected {}: {}", meeting.members[m],
             c.weights[m], *samples, describe(ref_, *gradients[m]));
  }
  kernels_.exempt("Adasum, which is no sum, combines the gradients of replicas");
}

// Devices that are not walked get what lies between those that stand for them, too.
void Walk::check_left_out(const Meeting& meeting, const std::vector<Held>& results) {
  if (static_cast<int64_t>(meeting.members.size()) == meeting.awaited) return;
  for (size_t m = 0; m < results.size(); ++m) of_devices_[meeting.members[m]] = results[m];
  for (size_t m = 0; m < results.size(); ++m) {
    const Held between = of(meeting.members[m], [&](int32_t d) { return of_devices_[d]; });
    if (between != results[m] && !alike(*between, *results[m])) throw Uneven{};
  }
}

// What is gathered in its own place lies where the member's interval does.
void Walk::check_gathered(int32_t device, const work::Collective& c, size_t operand, size_t member) {
  if (c.op != OpCode::k_all_gather) return;
  const Device& like = stand_in(device);
  const Instruction& i = instruction(like.at);
  const Buffer &part = buffer(like, i.in.at(operand)), &whole = buffer(like, i.out.at(operand));
  if (part.kind == BufferKind::kStep || part.bytes == 0 || whole.bytes == 0) return;
  const auto place = [&](BufferId id) {
    return of(device, [&](int32_t m) {
      const Device& d = devices_[m];
      return place_of(d.program, id, now(d).version);
    });
  };
  const Place from = place(i.in[operand]), to = place(i.out[operand]);
  if (!proof::meet(to, from) || to == from) return;
  const SubAxisCuts& cuts = c.cuts.at(operand);
  const bool rows = cuts.sub_axis.dim == 0 && cuts.sub_axis.outer == 1;
  const int64_t row = whole.bytes / whole.dims.at(0) * cuts.sub_axis.inner;
  if (!rows || from.begin != to.begin + cuts.cuts.at(member).begin * row)
    refuse("{} lies within {}, and not where its interval does", part.name, whole.name);
}

// An all_gather of rows, one member's behind the other's; false: it is none.
bool Walk::gather_rows(const Meeting& meeting, const work::Collective& c, size_t operand) {
  if (c.op != OpCode::k_all_gather) return false;
  const SubAxisCuts& cuts = c.cuts.at(operand);
  if (cuts.sub_axis.dim != 0 || cuts.sub_axis.outer != 1) return false;
  std::vector<Memory::Part> all;
  for (size_t m = 0; m < meeting.members.size(); ++m) {
    const Device& like = stand_in(meeting.members[m]);
    const Instruction& i = instruction(like.at);
    const Buffer &in = buffer(like, i.in.at(operand)), &out = buffer(like, i.out.at(operand));
    if (element_count(out.dims) == 0 || in.kind == BufferKind::kStep ||
        in.bytes != cuts.cuts.at(m).size() * cuts.sub_axis.inner * (out.bytes / out.dims[0]))
      return false;
    const std::vector<Memory::Part> parts = of(meeting.members[m], [&](int32_t d) {
      Device& walked = devices_[d];
      return walked.memory.parts(readable(walked, i.in[operand]));
    });
    if (in.bytes > 0 && parts.empty()) return false;
    all.insert(all.end(), parts.begin(), parts.end());
  }
  std::vector<Held> values;
  for (const Memory::Part& p : all) values.push_back(p.value);
  if (!are_rows(values)) return false;
  for (const int32_t m : meeting.members)
    if (symmetry_.walked(m)) {
      Device& d = devices_[m];
      write_rows(d, instruction(d.at).out[operand], all);
    }
  return true;
}

void Walk::send(Device& d, const Instruction& i, const work::Send& s) {
  const Held value = read(d, i.in.at(0));
  const Link& link = entry_.links[s.link];
  std::map<int32_t, Message> messages;
  for (const Transfer& t : link.transfers) {
    if (t.from != d.at.device) continue;
    Message& m = messages[t.to];
    const Dims& local = buffer(d, i.in[0]).dims;
    const auto region = t.source.size() == local.size() ? box_of(value->region, local, t.source) : std::nullopt;
    if (!region) no_rule("a message with a part of {}", describe(ref_, *value));
    Value part = *value;
    part.region = *region;
    m.values.push_back(std::make_shared<const Value>(std::move(part)));
  }
  for (auto& [to, message] : messages) channels_[{s.link, d.at.device, to}].push_back(std::move(message));
}

bool Walk::receive(Device& d, const Instruction& i, const work::Receive& r) {
  const Link& link = entry_.links[r.link];
  std::map<int32_t, size_t> taken;  // transfers of each sender
  for (const Transfer& t : link.transfers)
    if (t.to == d.at.device && channels_[{r.link, t.from, t.to}].empty()) return false;
  std::vector<Piece> pieces;
  for (const Transfer& t : link.transfers) {
    if (t.to != d.at.device) continue;
    const Message& m = channels_[{r.link, t.from, t.to}].front();
    const Held& value = m.values.at(taken[t.from]++);
    pieces.push_back({value, t.target});
    reads_.push_back(value);
  }
  for (const auto& [from, n] : taken) channels_[{r.link, from, d.at.device}].pop_front();
  const Dims& local = buffer(d, i.out.at(0)).dims;
  if (element_count(local) == 0) return true;
  int64_t elements = 0;
  for (const Piece& p : pieces) {
    if (p.at.size() != local.size()) refuse("a message of {} dimensions for {}", p.at.size(), to_string(local));
    elements += p.value->region.size();
  }
  if (elements < element_count(local)) {
    std::string from;
    for (const auto& [device, n] : taken) from += fmt::format("{}{}", from.empty() ? "" : ", ", device);
    refuse("by link '{}' come {} elements, from {}, for {}", link.name, elements,
           from.empty() ? "no device" : "device " + from, to_string(local));
  }
  const Held value = joined(ref_, pieces, local);
  write(d, i.out[0], *value);
  return true;
}

}  // namespace whale::proof
