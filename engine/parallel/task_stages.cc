#include <algorithm>
#include <map>
#include <numeric>

#include "base/error.h"
#include "parallel/stages.h"
#include "parallel/strategy.h"
#include "parallel/task_former.h"

namespace whale {

void TaskFormer::assign_stages() {
  find_stages();
  // Data goes forward only.
  for (size_t i = 0; i < g_.ops.size(); ++i)
    for (const TensorId id : g_.ops[i].inputs)
      if (id != kNone && g_.tensor(id).producer != kNone &&
          stage_[static_cast<size_t>(g_.tensor(id).producer)] > stage_[i])
        throw invalid("op '{}' in stage {} reads '{}', which a later stage ({}) makes; stages pass data forward only",
                      g_.ops[i].name, stage_[i], g_.tensor(id).name,
                      stage_[static_cast<size_t>(g_.tensor(id).producer)])
            .at_op(g_.ops[i].name)
            .at_scope(g_.scope_path(g_.ops[i].scope));
  std::map<std::pair<ScopeId, int32_t>, ScopeId> made;
  out_.stage_of_scope.assign(g_.scopes.size(), -1);
  for (size_t i = 0; i < g_.ops.size(); ++i) {
    Op& op = g_.ops[i];
    const size_t leaf = leaf_of_scope_.at(op.scope);
    if (leaves_[leaf].stage == SIZE_MAX) {
      const auto [at, fresh] = made.try_emplace({op.scope, stage_[i]}, static_cast<ScopeId>(g_.scopes.size()));
      if (fresh) {
        Scope scope;
        scope.kind = ScopeKind::kStage;
        scope.parent = op.scope;
        g_.scopes.push_back(std::move(scope));
        out_.stage_of_scope.push_back(stage_[i]);
        leaf_of_scope_[at->second] = leaf;
      }
      op.scope = at->second;
    }
    op.stage = stage_[i];
    out_.stage_of_scope[static_cast<size_t>(op.scope)] = stage_[i];
  }
}

void TaskFormer::find_stages() {
  std::map<ScopeId, int32_t> written;  // stage scopes in the order of their first op
  stage_.assign(g_.ops.size(), -1);
  for (size_t i = 0; i < g_.ops.size(); ++i) {
    const TaskLeaf& leaf = leaves_[leaf_of_scope_.at(g_.ops[i].scope)];
    if (leaf.stage != SIZE_MAX)
      stage_[i] = written.try_emplace(leaf.ids[leaf.stage], static_cast<int32_t>(written.size())).first->second;
  }
  const TaskLeaf& any = leaves_[*staged_];
  if (!written.empty()) {
    virtual_stages_ = static_cast<int64_t>(written.size());
    if (virtual_stages_ % pipeline_.chunks ||
        (pipeline_.count && pipeline_.count * pipeline_.chunks != virtual_stages_))
      refuse(any.nest, any.path,
             fmt::format("has {} stages written in it, expected {} stages of {} chunk(s) each", virtual_stages_,
                         pipeline_.count ? fmt::format("{}", pipeline_.count) : "a number of", pipeline_.chunks));
    pipeline_.count = virtual_stages_ / pipeline_.chunks;
    join(stage_);
    return;
  }
  if (!pipeline_.count) {
    bool complete = true;
    const int64_t others =
        product(any.nest, 0, any.outer(), complete) * product(any.nest, any.inner(), any.nest.size(), complete);
    pipeline_.count = std::max<int64_t>(1, devices_ / others);
  }
  if (pipeline_.count > (1 << 16)) refuse(any.nest, any.path, "wants too many stages");
  virtual_stages_ = pipeline_.count * pipeline_.chunks;
  std::vector<OpId> ops(g_.ops.size());
  std::iota(ops.begin(), ops.end(), 0);
  try {
    stage_ = cut_stages(g_, ops, virtual_stages_, {}, exact_);
  } catch (const Error& e) {
    throw invalid("scope '{}' ({}): {}", to_string(any.nest), any.path, e.message()).at_scope(any.path);
  }
}

void TaskFormer::join(std::vector<int32_t>& stage) {
  std::vector<char> given(stage.size());
  for (size_t i = 0; i < stage.size(); ++i) given[i] = stage[i] >= 0;
  for (size_t i = 0; i < stage.size(); ++i) {
    if (given[i]) continue;
    for (const TensorId id : g_.ops[i].inputs)
      if (id != kNone && g_.tensor(id).producer != kNone)
        stage[i] = std::max(stage[i], stage[static_cast<size_t>(g_.tensor(id).producer)]);
  }
  for (size_t i = stage.size(); i-- > 0;) {
    if (stage[i] >= 0) continue;
    int32_t first = static_cast<int32_t>(virtual_stages_) - 1;
    bool read = false;
    for (size_t k = i + 1; k < stage.size(); ++k)
      for (const TensorId id : g_.ops[k].inputs)
        if (id != kNone && g_.tensor(id).producer == static_cast<OpId>(i))
          first = std::min(first, stage[k]), read = true;
    stage[i] = read ? first : 0;
  }
}

}  // namespace whale
