#include <algorithm>
#include <map>
#include <numeric>
#include <type_traits>

#include "base/error.h"
#include "base/watch.h"
#include "task/stages.h"
#include "task/strategy.h"
#include "task/task_former.h"

namespace whale {

void TaskFormer::find_siblings() {
  std::vector<const TaskLeaf*> leaves;  // of each
  for (const Op& op : g_.ops) {
    const TaskLeaf& leaf = leaves_[leaf_of_scope_.at(op.scope)];
    if (leaf.pipeline == SIZE_MAX ||
        std::find(siblings_.begin(), siblings_.end(), leaf.ids[leaf.pipeline]) != siblings_.end())
      continue;
    siblings_.push_back(leaf.ids[leaf.pipeline]);
    leaves.push_back(&leaf);
  }
  if (siblings_.size() < 2) return;
  for (const TaskLeaf* leaf : leaves) {
    const Scope& own = leaf->nest[leaf->pipeline];
    const auto agree = [&](const char* what, auto Scope::*member) {
      const std::remove_cvref_t<decltype(own.*member)> open{};
      if (pipeline_.*member == open) pipeline_.*member = own.*member;
      if (own.*member != open && own.*member != pipeline_.*member)
        refuse(leaf->nest, leaf->path,
               fmt::format("and '{}' ({}) are pipelines on the same devices with different {}; give both the same",
                           to_string(leaves[0]->nest), leaves[0]->path, what));
    };
    agree("stages", &Scope::count);
    agree("micro_batches", &Scope::micro_batches);
    agree("chunks", &Scope::chunks);
    agree("schedules", &Scope::schedule);
  }
  if (!pipeline_.schedule.empty() && pipeline_.schedule != "1f1b" && pipeline_.schedule != "interleaved")
    refuse(leaves[0]->nest, leaves[0]->path,
           fmt::format("has the schedule '{}', but {} pipelines side by side run interleaved; leave the schedule out, "
                       "or write one pipeline around them",
                       pipeline_.schedule, siblings_.size()));
  if (!pipeline_.chunks) pipeline_.chunks = pipeline_.schedule == "interleaved" ? 2 : 1;
  pipeline_.chunks *= std::ssize(siblings_);
  pipeline_.schedule = "interleaved";
}

void TaskFormer::find_stages_of_siblings() {
  const auto n = siblings_.size();
  const int64_t chunks = pipeline_.chunks / std::ssize(siblings_);
  std::vector<std::vector<OpId>> ops(n);
  std::vector<std::map<ScopeId, int32_t>> written(n);
  std::vector<const TaskLeaf*> leaves(n);
  for (size_t i = 0; i < g_.ops.size(); ++i) {
    const TaskLeaf& leaf = leaves_[leaf_of_scope_.at(g_.ops[i].scope)];
    if (leaf.pipeline == SIZE_MAX) continue;
    const auto k =
        static_cast<size_t>(std::find(siblings_.begin(), siblings_.end(), leaf.ids[leaf.pipeline]) - siblings_.begin());
    ops[k].push_back(static_cast<OpId>(i));
    leaves[k] = &leaf;
    if (leaf.stage != SIZE_MAX) written[k].try_emplace(leaf.ids[leaf.stage], static_cast<int32_t>(written[k].size()));
  }
  for (size_t k = 0; k < n; ++k) {
    const int64_t there = std::ssize(written[k]);
    if (there == 0) continue;
    if (there % chunks || (pipeline_.count && there != pipeline_.count * chunks))
      refuse(leaves[k]->nest, leaves[k]->path,
             fmt::format("has {} stages written in it, expected {} stages of {} chunk(s) each, as the pipeline beside "
                         "it has",
                         there, pipeline_.count ? fmt::format("{}", pipeline_.count) : "a number of", chunks));
    pipeline_.count = there / chunks;
  }
  if (!pipeline_.count) pipeline_.count = stages_left(*leaves[0]);
  const int64_t own = pipeline_.count * chunks;
  virtual_stages_ = own * std::ssize(siblings_);
  for (size_t k = 0; k < n; ++k) {
    std::vector<int32_t> cut(ops[k].size(), -1);
    if (written[k].empty()) cut = cut_ops(ops[k], own, *leaves[k]);
    for (size_t i = 0; i < cut.size(); ++i) {
      const TaskLeaf& leaf = leaves_[leaf_of_scope_.at(g_.ops[static_cast<size_t>(ops[k][i])].scope)];
      const int32_t stage = leaf.stage != SIZE_MAX ? written[k].at(leaf.ids[leaf.stage]) : cut[i];
      if (stage >= 0)
        stage_[static_cast<size_t>(ops[k][i])] = static_cast<int32_t>(own * static_cast<int64_t>(k)) + stage;
    }
  }
  join(stage_);
}

int64_t TaskFormer::stages_left(const TaskLeaf& leaf) const {
  bool complete = true;
  const int64_t others =
      product(leaf.nest, 0, leaf.outer(), complete) * product(leaf.nest, leaf.inner(), leaf.nest.size(), complete);
  return std::max<int64_t>(1, devices_ / others);
}

std::vector<int32_t> TaskFormer::cut_ops(const std::vector<OpId>& ops, int64_t stages, const TaskLeaf& leaf) const {
  if (stages > (1 << 16)) refuse(leaf.nest, leaf.path, "wants too many stages");
  try {
    return cut_stages(g_, ops, stages, out_.cost, {}, exact_);
  } catch (const Error& e) {
    throw invalid("scope '{}' ({}): {}", to_string(leaf.nest), leaf.path, e.message()).at_scope(leaf.path);
  }
}

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
  out_.written.resize(g_.scopes.size());
  std::iota(out_.written.begin(), out_.written.end(), 0);
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
        out_.written.push_back(op.scope);
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
  if (siblings_.size() > 1) return find_stages_of_siblings();
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
  if (!pipeline_.count) pipeline_.count = stages_left(any);
  virtual_stages_ = pipeline_.count * pipeline_.chunks;
  std::vector<OpId> ops(g_.ops.size());
  std::iota(ops.begin(), ops.end(), 0);
  stage_ = cut_ops(ops, virtual_stages_, any);
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
    Watch::look();
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
