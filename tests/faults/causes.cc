#include "causes.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "base/error.h"
#include "base/format.h"
#include "own_programs.h"
#include "races.h"
#include "run/handed_over.h"

namespace whale::test {
namespace {

// Sets of nodes, one for each node.
class Sets {
 public:
  explicit Sets(size_t nodes) : words_((nodes + 63) / 64), bits_(nodes * words_) {}
  void add(size_t to, size_t node) { bits_[to * words_ + node / 64] |= uint64_t{1} << (node % 64); }
  void merge(size_t to, const Sets& other, size_t from) {
    for (size_t w = 0; w < words_; ++w) bits_[to * words_ + w] |= other.bits_[from * words_ + w];
  }
  bool has(size_t in, size_t node) const { return (bits_[in * words_ + node / 64] >> (node % 64) & 1) != 0; }

 private:
  size_t words_;
  std::vector<uint64_t> bits_;
};

int64_t bytes_of_operands(const Program& p, const Instruction& i) {
  int64_t bytes = 0;
  for (const BufferIds* list : {&i.in, &i.out})
    for (const BufferId b : *list)
      if (b != kNone) bytes += p.buffers[b].bytes;
  return bytes;
}

// A slice of whole rows reads no others of its operand.
Bytes bytes_read(const Program& p, const Instruction& i, BufferId id, int64_t version) {
  Bytes all = bytes_of(p, id, version);
  const work::Kernel* kernel = i.kernel();
  if (kernel == nullptr || kernel->op != OpCode::k_local_slice) return all;
  const Ints& axis = attr_ints(kernel->attrs, "sub_axis");  // dimension, outer, inner
  const Dims& dims = p.buffers[id].dims;
  int64_t rows = axis[1];
  for (int64_t d = 0; d < axis[0]; ++d) rows *= dims[d];
  const int64_t extent = dims[axis[0]] / axis[1] / axis[2];
  if (rows != 1 || extent == 0) return all;
  const int64_t unit = (all.end - all.begin) / extent, begin = all.begin;
  all.begin = begin + attr_int(kernel->attrs, "begin") * unit;
  all.end = begin + attr_int(kernel->attrs, "end") * unit;
  return all;
}

int64_t elements_of(const Transfer& t) {
  int64_t n = 1;
  for (const Interval& i : t.source) n *= i.size();
  return n;
}

}  // namespace

// What is over when a node begins, when it first writes, and when it is over itself. A kernel waits for its operands;
// a collective, and a receive that does not clear, write when others have come.
class Order {
 public:
  Order(const Causes& causes, const Entry& entry)
      : c_(causes),
        entry_(entry),
        begun_(c_.nodes_.size()),
        written_(c_.nodes_.size()),
        ended_(c_.nodes_.size()),
        state_(c_.nodes_.size()),
        before_(c_.nodes_.size(), SIZE_MAX),
        lists_(c_.first_.size() * kQueues) {
    for (size_t j = 0; j < c_.nodes_.size(); ++j) {
      std::vector<size_t>& list = list_of(j);
      if (!list.empty()) before_[j] = list.back();
      list.push_back(j);
      if (c_.nodes_[j].does->kind() == InstructionKind::kVote) votes_.push_back(j);
    }
    run();
  }
  bool is_before(const Causes::Conflict& x) const { return (x.writes ? written_ : begun_).has(x.after, x.before); }

 private:
  enum State : char { kWaits, kBegun, kEnded };
  std::vector<size_t>& list_of(size_t j) {
    const Causes::Node& n = c_.nodes_[j];
    return lists_[static_cast<size_t>(n.device) * kQueues + static_cast<size_t>(n.does->queue)];
  }

  void run() {
    std::vector<size_t> at(lists_.size());
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t l = 0; l < lists_.size(); ++l)
        while (at[l] < lists_[l].size()) {
          const size_t j = lists_[l][at[l]];
          if (state_[j] == kWaits && begin(j)) moved = true;
          if (state_[j] != kBegun || !end(j)) break;
          ++at[l], moved = true;
        }
    }
    for (const char state : state_)
      if (state != kEnded) throw internal("instructions wait for each other for ever");
  }

  bool begin(size_t j) {
    const Causes::Node& n = c_.nodes_[j];
    const Program& p = entry_.programs[entry_.rows[n.device].program];
    const ScheduleRow& row = p.schedule[n.row];
    const auto& first = c_.first_[n.device];
    const auto r = static_cast<size_t>(n.row);
    std::vector<size_t> needs;
    if (before_[j] != SIZE_MAX) needs.push_back(before_[j]);
    const Instruction& does = p.segments[row.segment].instructions[n.index];
    for (const Wait& w : does.waits) needs.push_back(first[r] + static_cast<size_t>(w.index));
    if (row.waits != kNone)
      for (const RowWait& w : p.row_waits[row.waits])
        if (w.at == n.index) needs.push_back(first[r - 1] + static_cast<size_t>(w.on.index));
    for (size_t k = first[0]; r >= 2 && k < first[r - 1]; ++k) needs.push_back(k);
    if (does.kind() == InstructionKind::kCommit) needs.insert(needs.end(), votes_.begin(), votes_.end());
    if (std::ranges::any_of(needs, [&](size_t k) { return state_[k] != kEnded; })) return false;
    for (const size_t k : needs) begun_.add(j, k), begun_.merge(j, ended_, k);
    state_[j] = kBegun;
    return true;
  }

  bool end(size_t j) {
    const Causes::Node& n = c_.nodes_[j];
    const auto waits = [&](size_t k) { return state_[k] == kWaits; };
    if (std::ranges::any_of(n.meets, waits) || std::ranges::any_of(n.freed, waits) ||
        std::ranges::any_of(n.takes, [&](const auto& t) { return waits(t.first); }))
      return false;
    written_.merge(j, begun_, j);
    for (const size_t k : n.meets) written_.merge(j, begun_, k);
    if (!n.takes.empty() && !n.clears) take(written_, j, n.takes[0]);
    ended_.merge(j, written_, j);
    for (const size_t k : n.freed) ended_.merge(j, begun_, k);
    for (const auto& t : n.takes) take(ended_, j, t);
    state_[j] = kEnded;
    return true;
  }
  void take(Sets& to, size_t j, const std::pair<size_t, bool>& from) {
    to.merge(j, begun_, from.first);
    if (from.second) to.add(j, from.first);
  }

  const Causes& c_;
  const Entry& entry_;
  Sets begun_, written_, ended_;
  std::vector<char> state_;
  std::vector<size_t> before_;  // on its queue
  std::vector<std::vector<size_t>> lists_;
  std::vector<size_t> votes_;
};

Causes::Causes(const Plan& plan, const Entry& entry) : plan_(plan), entry_(entry) {
  give_own_programs(entry_);
  add_nodes();
  match_collectives();
  match_messages();
  find_conflicts();
}

std::string Causes::race_in(const Entry& entry) const {
  const Order order(*this, entry);
  for (const Conflict& x : conflicts_) {
    if (order.is_before(x)) continue;
    const Node &i = nodes_[x.before], &j = nodes_[x.after];
    return fmt::format("device {}, row {} ('{}'): {} ('{}'{}) and {} ('{}') may run at once and share bytes", j.device,
                       j.row, segment_of(j), i.index, i.does->name, i.row == j.row ? "" : ", of the row before",
                       j.index, j.does->name);
  }
  return "";
}

void Causes::add_nodes() {
  for (int32_t d = 0; d < static_cast<int32_t>(entry_.rows.size()); ++d) {
    const Program& p = program(d);
    std::vector<size_t>& first = first_.emplace_back();
    for (size_t r = 0; r < p.schedule.size(); ++r) {
      first.push_back(nodes_.size());
      const Segment& s = p.segments[p.schedule[r].segment];
      for (size_t k = 0; k < s.instructions.size(); ++k)
        nodes_.push_back({d, static_cast<int32_t>(r), static_cast<int32_t>(k), &s.instructions[k], {}, {}, {}});
    }
    first.push_back(nodes_.size());
  }
}

void Causes::match_collectives() {
  std::map<std::pair<int32_t, int32_t>, std::vector<size_t>> of;  // by group and device
  for (size_t j = 0; j < nodes_.size(); ++j)
    if (nodes_[j].does->group() != kNone) of[{nodes_[j].does->group(), nodes_[j].device}].push_back(j);
  for (size_t g = 0; g < plan_.groups.size(); ++g)
    for (const std::vector<int32_t>& part : plan_.groups[g].parts)
      for (size_t k = 0; k < of[{static_cast<int32_t>(g), part[0]}].size(); ++k) {
        std::vector<size_t> members;
        int64_t bytes = 0;
        for (const int32_t d : part) {
          members.push_back(of[{static_cast<int32_t>(g), d}].at(k));
          bytes += bytes_of_operands(program(d), *nodes_[members.back()].does);
        }
        // Adasum scales what it has before it meets others.
        if (bytes == 0 || nodes_[members[0]].does->op() == OpCode::k_adasum) continue;
        for (const size_t j : members)
          for (const size_t other : members)
            if (other != j) nodes_[j].meets.push_back(other);
      }
}

void Causes::match_messages() {
  std::map<std::tuple<int32_t, int32_t, bool>, std::vector<size_t>> of;  // by link, device, whether it sends
  for (size_t j = 0; j < nodes_.size(); ++j) {
    const Instruction& does = *nodes_[j].does;
    if (does.link() != kNone) of[{does.link(), nodes_[j].device, does.kind() == InstructionKind::kSend}].push_back(j);
  }
  for (size_t l = 0; l < entry_.links.size(); ++l) {
    const Link& link = entry_.links[l];
    const auto number = static_cast<int32_t>(l);
    std::vector<std::pair<int32_t, int32_t>> channels;  // in order of their first transfer
    std::map<int32_t, int64_t> covered;                 // elements, by receiver
    for (const Transfer& t : link.transfers) {
      if (elements_of(t) == 0) continue;
      covered[t.to] += elements_of(t);
      if (const std::pair c{t.from, t.to}; std::ranges::find(channels, c) == channels.end()) channels.push_back(c);
    }
    for (const auto& [from, to] : channels) {
      const auto of_sender = [from = from](const auto& c) { return c.first == from; };
      const bool is_last = std::ranges::find_if(channels.rbegin(), channels.rend(), of_sender)->second == to;
      const auto &sends = of[{number, from, true}], &receives = of[{number, to, false}];
      for (size_t k = 0; k < receives.size(); ++k) {
        nodes_[receives[k]].takes.emplace_back(sends.at(k), is_last);
        if (const auto freed = k + static_cast<size_t>(link.capacity); freed < sends.size())
          nodes_[sends[freed]].freed.push_back(receives[k]);
      }
    }
    for (const auto& [key, receives] : of)
      if (std::get<0>(key) == number && !std::get<2>(key))
        for (const size_t j : receives) {
          const Dims& dims = program(nodes_[j].device).buffers[nodes_[j].does->out.at(0)].dims;
          nodes_[j].clears = covered[nodes_[j].device] < element_count(dims);
        }
  }
}

void Causes::find_conflicts() {
  for (size_t d = 0; d < first_.size(); ++d) {
    const DeviceRow& row = entry_.rows[d];
    const Program& p = program(static_cast<int32_t>(d));
    const auto does_nothing = [&](const Node& n) {
      const auto* fetch = n.does->as<work::Fetch>();
      return fetch != nullptr && !hands_over(row, entry_.outputs[fetch->output]);
    };
    const auto bytes = [&](const Node& n, bool written) {
      const int64_t version = p.schedule[n.row].version;
      std::vector<Bytes> out;
      for (const BufferId b : written ? n.does->out : n.does->in)
        if (b != kNone) out.push_back(written ? bytes_of(p, b, version) : bytes_read(p, *n.does, b, version));
      return out;
    };
    const auto share = [](const std::vector<Bytes>& a, const std::vector<Bytes>& b) {
      return std::ranges::any_of(
          a, [&](const Bytes& x) { return std::ranges::any_of(b, [&](const Bytes& y) { return x.meets(y); }); });
    };
    for (size_t j = first_[d].front(); j < first_[d].back(); ++j) {
      const Node& y = nodes_[j];
      if (does_nothing(y)) continue;
      for (size_t i = first_[d][std::max(y.row - 1, 0)]; i < j; ++i) {
        const Node& x = nodes_[i];
        if (x.does->queue == y.does->queue || does_nothing(x)) continue;
        const std::vector<Bytes> written = bytes(x, true), by_later = bytes(y, true);
        if (share(written, bytes(y, false))) conflicts_.push_back({i, j, false});
        if (share(written, by_later) || share(bytes(x, false), by_later)) conflicts_.push_back({i, j, true});
      }
    }
  }
}

}  // namespace whale::test
