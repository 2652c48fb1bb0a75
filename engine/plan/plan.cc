#include "plan/plan.h"

#include <algorithm>

namespace whale {

const Entry* Plan::find_entry(std::string_view name, int64_t batch) const {
  for (const Entry& entry : entries)
    if (entry.name == name && entry.batch == batch) return &entry;
  return nullptr;
}

int32_t Entry::loss() const {
  for (size_t o = 0; o < outputs.size(); ++o)
    if (outputs[o].name == "loss" && element_count(outputs[o].dims) == 1 && is_float(outputs[o].dtype))
      return static_cast<int32_t>(o);
  return kNone;
}

std::optional<OpCode> Instruction::op() const {
  if (const auto* k = as<work::Kernel>()) return k->op;
  if (const auto* c = as<work::Collective>()) return c->op;
  return std::nullopt;
}

int32_t Instruction::samples() const {
  if (const auto* k = as<work::Kernel>()) return k->samples;
  if (const auto* f = as<work::Feed>()) return f->samples;
  if (const auto* f = as<work::Fetch>()) return f->samples;
  return 0;
}

int32_t Instruction::group() const {
  const auto* c = as<work::Collective>();
  return c != nullptr ? c->group : kNone;
}

int32_t Instruction::link() const {
  if (const auto* s = as<work::Send>()) return s->link;
  if (const auto* r = as<work::Receive>()) return r->link;
  return kNone;
}

std::string_view Instruction::verb() const {
  if (const auto code = op()) return def(*code).name;
  if (const auto* c = as<work::Copy>())
    return def(c->to == Memory::kHost ? OpCode::k_to_host : OpCode::k_to_device).name;
  constexpr const char* kVerbs[] = {"feed", "fetch", "send", "receive", "copy", "vote", "commit"};
  return kVerbs[work.index() - static_cast<size_t>(InstructionKind::kFeed)];
}

bool Plan::has_variable(std::string_view name) const {
  return std::any_of(variables.begin(), variables.end(), [&](const PlanVariable& v) { return v.name == name; });
}

std::string Plan::scope_path(ScopeId id) const {
  Graph graph;
  graph.scopes = scopes;
  return graph.scope_path(id);
}

CostModel cost_of(const Plan& plan) { return {plan.devices, plan.memory_price, plan.profile, plan.precision}; }

}  // namespace whale
