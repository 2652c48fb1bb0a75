#include "simulate/stack.h"

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>

#include "ops/op.h"
#include "plan/communication.h"

namespace whale {
namespace {

// Passes over the scores [samples, heads, queries, keys] of attention that is not fused: softmax with its mask and
// dropout, beside the products that make and read them.
constexpr double kScorePasses = 4.5, kScorePassesBack = 5.5;

class Worker {
 public:
  Worker(const Plan& plan, const Entry& entry) : e_{plan, entry}, parts_(peers_of(e_).parts) {
    for (const Group& group : plan.groups) sharing_.push_back(sharing_of(group));
    for (const Link& link : entry.links) leaving_.push_back(leaving_of(link));
  }

  StackWork of(const Instruction& i, int32_t device) const {
    StackWork w;
    switch (i.kind()) {
      case InstructionKind::kSend: {
        w.messages = 1;
        const auto at = leaving_[i.link()].find(device);
        const double sharing = at == leaving_[i.link()].end() ? 0 : at->second;
        (sharing > 0 ? w.network_bytes : w.inside_bytes) = bytes(device, i.in) * std::max(sharing, 1.0);
        break;
      }
      case InstructionKind::kCollective: of_collective(i, device, w); break;
      case InstructionKind::kKernel:
        w.issued = 1;
        of_kernel(i, device, w);
        break;
      default: break;
    }
    return w;
  }

 private:
  int node(int32_t device) const { return e_.plan.devices[device].node; }
  const Buffer& buffer(int32_t device, BufferId b) const { return e_.program(device).buffers[b]; }
  double bytes(int32_t device, const BufferIds& list) const {
    double sum = 0;
    for (const BufferId b : list)
      if (b != kNone) sum += static_cast<double>(buffer(device, b).bytes);
    return sum;
  }

  // Of each part: 0 inside a node; else how many parts go through the fullest of its nodes at once.
  std::vector<double> sharing_of(const Group& group) const {
    std::map<int, int> through;
    std::vector<std::set<int>> nodes;
    for (const auto& part : group.parts) {
      nodes.emplace_back();
      for (const int32_t d : part) nodes.back().insert(node(d));
      if (nodes.back().size() > 1)
        for (const int n : nodes.back()) ++through[n];
    }
    std::vector<double> out;
    for (const std::set<int>& list : nodes) {
      int most = 0;
      if (list.size() > 1)
        for (const int n : list) most = std::max(most, through[n]);
      out.push_back(most);
    }
    return out;
  }

  // Of devices that send to another node: how many of theirs do.
  std::map<int32_t, double> leaving_of(const Link& link) const {
    std::map<int, std::set<int32_t>> senders;
    for (const Transfer& t : link.transfers)
      if (node(t.from) != node(t.to)) senders[node(t.from)].insert(t.from);
    std::map<int32_t, double> out;
    for (const auto& [_, list] : senders)
      for (const int32_t d : list) out[d] = static_cast<double>(list.size());
    return out;
  }

  void of_collective(const Instruction& i, int32_t device, StackWork& w) const {
    const auto& collective = *i.as<work::Collective>();
    const auto g = static_cast<size_t>(collective.group);
    const auto part = static_cast<size_t>(parts_[g][device]);
    const auto n = static_cast<double>(e_.plan.groups[g].parts[part].size());
    if (n <= 1) return;
    const bool sum = collective.op == OpCode::k_all_reduce || collective.op == OpCode::k_adasum;
    const double whole = sum ? 2 * bytes(device, i.in) : std::max(bytes(device, i.in), bytes(device, i.out));
    const double passed = whole * (n - 1) / n;
    const double sharing = sharing_[g][part];
    (sharing > 0 ? w.network_bytes : w.inside_bytes) = passed * std::max(sharing, 1.0);
    w.collectives = 1;
    w.meetings = n - 1;
  }

  static void add_product(double flops, double edges, bool odd, StackWork& w) {
    (odd ? w.odd_flops : w.flops) += flops;
    (odd ? w.odd_edges : w.edges) += edges;
  }

  // Not fused: `products` of queries and keys for each head, all of them whole, and passes over the scores.
  void of_attention(const Buffer& out, double products, double passes, StackWork& w) const {
    const auto dim = [&](size_t d) { return static_cast<double>(out.dims[d]); };
    const double heads = dim(0) * dim(2), seq = dim(1), features = dim(3);
    const double scores = heads * seq * seq, flops = products * 2 * scores * features;
    add_product(flops, flops * (2 / seq + 1 / features), false, w);
    w.bytes += passes * scores * static_cast<double>(size_of(out.dtype));
  }

  void of_kernel(const Instruction& i, int32_t device, StackWork& w) const {
    const OpCode op = i.kernel()->op;
    if (const int products = def(op).score_products; products > 0) {
      const bool back = def(op).gradient == nullptr;
      const Buffer& result = buffer(device, back ? i.in[0] : i.out[0]);
      return of_attention(result, products, back ? kScorePassesBack : kScorePasses, w);
    }
    if (!has_flag(op, kMatrices)) {
      w.bytes = i.bytes;
      return;
    }
    // m x k by k x n: each of the three matrices has flops / 2 over the side that it lacks.
    double elements = 0;
    bool odd = false;
    for (const BufferId b : {i.in[0], i.in[1], i.out[0]}) {
      const Dims& dims = buffer(device, b).dims;
      double count = 1;
      for (const int64_t d : dims) count *= static_cast<double>(d);
      elements += count;
      odd |= dims.back() % 8 != 0;
    }
    add_product(i.flops, 2 * elements, odd, w);
  }

  const Entries e_;
  const PartNumbers parts_;
  std::vector<std::vector<double>> sharing_;        // [group][part]
  std::vector<std::map<int32_t, double>> leaving_;  // [link]
};

// Of each instruction, stretched where the host is slower than the device.
class Times {
 public:
  Times(const std::vector<Stack>& stacks, const Plan& plan, const Entry& entry)
      : stacks_(stacks), e_{plan, entry}, work_(work_of(plan, entry)) {
    for (const Stack& s : stacks) slowest_ = std::min(slowest_, s.network_bytes);
  }

  double of(const Instruction& i, int32_t device) {
    auto& known = seconds_[device];
    if (known.empty()) fill(known, device);
    return known.at(&i);
  }

 private:
  using Seconds = std::unordered_map<const Instruction*, double>;
  void fill(Seconds& known, int32_t device) const {
    const Stack& mine = stacks_.size() == 1 ? stacks_[0] : stacks_[device];
    Stack network = mine;  // messages go to other nodes, which may have a slower one
    network.network_bytes = slowest_;
    for (const Segment& segment : e_.program(device).segments)
      for (const StackRun& run : runs_of(e_.plan, segment)) {
        StackWork all;
        for (size_t k = run.begin; k < run.end; ++k) {
          const Instruction& i = segment.instructions[k];
          const StackWork w = work_(i, device);
          known[&i] = w.device_seconds(i.link() == kNone ? mine : network);
          if (i.link() == kNone) all += w;
        }
        const double computed = all.device_seconds(mine), issued = all.host_seconds(mine);
        if (!run.issued() || computed <= 0 || issued <= computed) continue;
        for (size_t k = run.begin; k < run.end; ++k)
          if (const Instruction& i = segment.instructions[k]; i.link() == kNone) known[&i] *= issued / computed;
      }
  }

  const std::vector<Stack> stacks_;
  double slowest_ = std::numeric_limits<double>::infinity();
  const Entries e_;
  const WorkOf work_;
  std::unordered_map<int32_t, Seconds> seconds_;
};

}  // namespace

double StackWork::device_seconds(const Stack& s) const {
  return (flops + s.product_edge * edges + s.odd_factor * (odd_flops + s.product_edge * odd_edges)) / s.product_flops +
         bytes / s.memory_bytes + collectives * s.collective_seconds + inside_bytes / s.inside_bytes +
         network_bytes / s.network_bytes + messages * s.message_seconds;
}

double StackWork::host_seconds(const Stack& s) const { return issued * s.issue_seconds + meetings * s.meeting_seconds; }

StackWork& StackWork::operator+=(const StackWork& other) {
  double add[11];
  size_t k = 0;
  each_work_of_stack(other, [&](const char*, double x) { add[k++] = x; });
  k = 0;
  each_work_of_stack(*this, [&](const char*, double& x) { x += add[k++]; });
  return *this;
}

std::vector<StackRun> runs_of(const Plan& plan, const Segment& segment) {
  const auto block_of = [&](ScopeId s) {
    ScopeId block = kNone;
    for (; s > 0 && static_cast<size_t>(s) < plan.scopes.size(); s = plan.scopes[s].parent)
      if (plan.scopes[s].kind == ScopeKind::kName) block = s;
    return block == kNone ? std::string_view() : std::string_view(plan.scopes[block].name);
  };
  // A step of one micro-batch is one segment.
  const bool whole = segment.name == "step";
  StepPart part = segment.name == "prologue"             ? StepPart::kPrologue
                  : segment.name == "epilogue"           ? StepPart::kEpilogue
                  : segment.name.starts_with("backward") ? StepPart::kBackward
                                                         : StepPart::kForward;
  std::vector<StackRun> out;
  std::string_view block;
  for (size_t k = 0; k < segment.instructions.size(); ++k) {
    const Instruction& i = segment.instructions[k];
    const bool sent = k > 0 && segment.instructions[k - 1].kind() == InstructionKind::kSend;
    if (whole && part == StepPart::kForward && i.phase == Phase::kBackward)
      part = StepPart::kBackward;
    else if (whole && part == StepPart::kBackward && (i.phase == Phase::kUpdate || sent))
      part = StepPart::kEpilogue;
    const std::string_view now = block_of(i.scope);
    if (out.empty() || now != block || out.back().part != part) out.push_back({part, k, k});
    block = now, out.back().end = k + 1;
  }
  return out;
}

WorkOf work_of(const Plan& plan, const Entry& entry) {
  return [worker = std::make_shared<Worker>(plan, entry)](const Instruction& i, int32_t device) {
    return worker->of(i, device);
  };
}

Duration seconds_by(const std::vector<Stack>& stacks, const Plan& plan, const Entry& entry) {
  return [times = std::make_shared<Times>(stacks, plan, entry)](const Instruction& i, int32_t device) {
    return times->of(i, device);
  };
}

}  // namespace whale
