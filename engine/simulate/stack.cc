#include "simulate/stack.h"

#include <algorithm>
#include <memory>
#include <unordered_map>

#include "ops/op.h"
#include "simulate/rates.h"

namespace whale {
namespace {

// Passes over the scores [samples, heads, queries, keys] of attention that is not fused: softmax with its mask and
// dropout, beside the products that make and read them.
constexpr double kScorePasses = 4.5, kScorePassesBack = 5.5;

class StackTimes {
 public:
  StackTimes(const Stack& stack, const Plan& plan, const Entry& entry)
      : s_(stack), e_{plan, entry}, rates_(cost_of(plan), plan, entry) {}

  double of(const Instruction& i, int32_t device) {
    auto& known = seconds_[device];
    if (known.empty()) fill(known, device);
    const auto at = known.find(&i);
    return at == known.end() ? 0 : at->second;
  }

 private:
  struct Work {
    double device = 0, host = 0;
  };

  // A row's instructions, stretched where the host is slower than the device.
  void fill(std::unordered_map<const Instruction*, double>& known, int32_t device) const {
    for (const Segment& segment : e_.program(device).segments) {
      Work all;
      for (const Instruction& i : segment.instructions) {
        const Work w = work_of(i, device);
        known[&i] = w.device;
        if (i.link() == kNone) all.device += w.device, all.host += w.host;
      }
      if (all.device <= 0 || all.host <= all.device) continue;
      for (const Instruction& i : segment.instructions)
        if (i.link() == kNone) known[&i] *= all.host / all.device;
    }
  }

  const Buffer& buffer(int32_t device, BufferId b) const {
    return e_.program(device).buffers[static_cast<size_t>(b)];
  }
  double bytes(int32_t device, const BufferIds& list) const {
    double sum = 0;
    for (const BufferId b : list)
      if (b != kNone) sum += static_cast<double>(buffer(device, b).bytes);
    return sum;
  }

  Work work_of(const Instruction& i, int32_t device) const {
    switch (i.kind()) {
      case InstructionKind::kSend:
        return {s_.message_seconds + link_seconds(bytes(device, i.in), 1, rates_.link(i.link(), device)), 0};
      case InstructionKind::kCollective: return of_collective(i, device);
      case InstructionKind::kKernel: return {of_kernel(i, device), s_.issue_seconds};
      default: return {};
    }
  }

  Work of_collective(const Instruction& i, int32_t device) const {
    const auto& collective = *i.as<work::Collective>();
    const int64_t n = rates_.members(collective.group, device);
    if (n <= 1) return {};
    const LinkRates link = rates_.group(collective.group, device).flow();
    const bool sum = collective.op == OpCode::k_all_reduce || collective.op == OpCode::k_adasum;
    const double moved = sum ? all_reduce_seconds(bytes(device, i.in), n, link)
                             : all_gather_seconds(std::max(bytes(device, i.in), bytes(device, i.out)), n, link);
    return {s_.inside_latency + moved, s_.issue_seconds + static_cast<double>(n - 1) * s_.meeting_seconds};
  }

  double product(double flops, double elements, bool aligned) const {
    return (flops + 2 * s_.product_edge * elements) / s_.product_flops * (aligned ? 1 : s_.unaligned);
  }

  double of_kernel(const Instruction& i, int32_t device) const {
    static const OpCode attention = code_of("attention"), attention_grad = code_of("attention_grad");
    static const OpCode product_op = code_of("matmul"), weight_grad = code_of("matmul_weight_grad");
    const OpCode op = i.kernel()->op;
    if (op == attention) return of_attention(buffer(device, i.out[0]), 2, kScorePasses);
    if (op == attention_grad) return of_attention(buffer(device, i.in[0]), 4, kScorePassesBack);
    if (op != product_op && op != weight_grad) return i.bytes / s_.memory_bytes;
    double elements = 0;
    bool aligned = true;
    for (const BufferId b : {i.in[0], i.in[1], i.out[0]}) {
      const Dims& dims = buffer(device, b).dims;
      double count = 1;
      for (const int64_t d : dims) count *= static_cast<double>(d);
      elements += count;
      aligned = aligned && dims.back() % 8 == 0;
    }
    return product(i.flops, elements, aligned);
  }

  // Not fused: `products` of queries by keys for each head, all of them whole, and passes over the scores.
  double of_attention(const Buffer& out, double products, double passes) const {
    const auto dim = [&](size_t d) { return static_cast<double>(out.dims[d]); };
    const double heads = dim(0) * dim(2), seq = dim(1), features = dim(3);
    const double scores = heads * seq * seq;
    return products * product(2 * scores * features, scores + 2 * heads * seq * features, true) +
           passes * scores * static_cast<double>(size_of(out.dtype)) / s_.memory_bytes;
  }

  const Stack s_;
  const Entries e_;
  const PlanRates rates_;
  std::unordered_map<int32_t, std::unordered_map<const Instruction*, double>> seconds_;
};

}  // namespace

Duration seconds_by(const Stack& stack, const Plan& plan, const Entry& entry) {
  return [times = std::make_shared<StackTimes>(stack, plan, entry)](const Instruction& i, int32_t device) {
    return times->of(i, device);
  };
}

}  // namespace whale
