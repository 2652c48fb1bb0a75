#include "compile/source_check.h"

#include <map>

#include "base/error.h"
#include "grad/passes.h"
#include "schema/graph_file.h"

namespace whale {
namespace {

class SourceCheck {
 public:
  SourceCheck(const Plan& plan, const Entry& entry, const Graph& whole) : plan_(plan), entry_(entry), whole_(whole) {}

  void run() const {
    inputs();
    outputs();
    index_checks();
    if (&entry_ == plan_.entries.data()) variables();
    Graph claimed = plan_.source;
    claimed.name = plan_.model;
    claimed.training.optimizer = plan_.optimizer;
    claimed.training.lr_schedule = plan_.lr_schedule;
    claimed.training.precision = plan_.precision;
    if (serialize(claimed) != serialize(plan_.source))
      fail("its name, optimizer, schedule or precision are not those of its model");
  }

 private:
  template <class... A>
  [[noreturn]] void fail(fmt::format_string<A...> format, A&&... args) const {
    throw error(Code::kDataLoss, "plan '{}', entry '{}': {}; the file is damaged: plan the model again", plan_.model,
                entry_.name, fmt::format(format, std::forward<A>(args)...));
  }

  void inputs() const {
    if (entry_.inputs.size() != whole_.inputs.size())
      fail("{} inputs, the model has {}", entry_.inputs.size(), whole_.inputs.size());
    const auto indices = indices_of_inputs(whole_);
    for (size_t i = 0; i < entry_.inputs.size(); ++i) {
      const PlanInput& input = entry_.inputs[i];
      const Tensor& t = whole_.tensor(whole_.inputs[i]);
      if (input.name != t.name || input.dtype != t.dtype || input.dims != t.dims || input.batch_dim != t.batch_dim)
        fail("input '{}' is {} {} with its samples along dimension {}, the model's is '{}', {} {} along {}", input.name,
             name_of(input.dtype), to_string(input.dims), input.batch_dim, t.name, name_of(t.dtype), to_string(t.dims),
             t.batch_dim);
      if (input.indices != indices[i])
        fail("input '{}' as an index may be {}, by the model it may be {}", input.name, ranges_text(input.indices),
             ranges_text(indices[i]));
    }
  }

  static std::string ranges_text(const std::vector<IndexRange>& ranges) {
    std::string text;
    for (const IndexRange& range : ranges) text += (text.empty() ? "" : " and ") + to_string(range);
    return text.empty() ? "anything" : text;
  }

  void outputs() const {
    std::map<std::string, TensorId> known;
    for (const NamedTensor& o : whole_.outputs) known.emplace(o.name, o.tensor);
    for (const NamedTensor& g : whole_.gradients) known.emplace("grad:" + g.name, g.tensor);
    if (whole_.training.loss != kNone) known["loss"] = whole_.training.loss;
    for (const PlanOutput& output : entry_.outputs) {
      const auto at = known.find(output.name);
      if (at == known.end()) fail("the model has no output '{}'", output.name);
      const Tensor& t = whole_.tensor(at->second);
      if (output.dtype != t.dtype || output.dims != t.dims)
        fail("output '{}' is {} {}, the model's is {} {}", output.name, name_of(output.dtype), to_string(output.dims),
             name_of(t.dtype), to_string(t.dims));
    }
  }

  // An op that checks its index does so in every program that has it, with its own limit.
  void index_checks() const {
    std::map<std::string_view, int64_t> limits;  // by the op's name; 0: its index was checked before
    for (const Op& op : whole_.ops)
      if (def(op.code).index.input >= 0) limits[op.name] = attr_int(op.attrs, kIndexLimit);
    for (const Program& program : entry_.programs) {
      std::map<std::string_view, bool> checked;
      for (const Segment& segment : program.segments)
        for (const Instruction& instruction : segment.instructions) {
          const auto at = limits.find(instruction.name);
          const work::Kernel* kernel = instruction.kernel();
          if (at == limits.end() || kernel == nullptr || def(kernel->op).index.input < 0) continue;
          const int64_t limit = attr_int(kernel->attrs, kIndexLimit);
          if (limit != 0 && limit != at->second)
            fail("op '{}' takes indices below {}, by the model below {}", instruction.name, limit, at->second);
          checked[instruction.name] |= limit == at->second;
        }
      for (const auto& [name, is] : checked)
        if (!is) fail("op '{}' does not check its index, of which the model says 0 to {}", name, limits.at(name) - 1);
    }
  }

  // Of the model's the length is known to be right (ir/verify.cc).
  static bool same_data(const Initializer& claimed, const Initializer& init) {
    if (init.kind != InitKind::kData) return claimed.data == nullptr;
    return claimed.data != nullptr && claimed.data_type == init.data_type && *claimed.data == *init.data;
  }

  void variables() const {
    if (plan_.variables.size() != whole_.variables.size())
      fail("{} variables, the model has {}", plan_.variables.size(), whole_.variables.size());
    for (size_t v = 0; v < plan_.variables.size(); ++v) {
      const PlanVariable& found = plan_.variables[v];
      const Variable& variable = whole_.variables[v];
      const Tensor& t = whole_.tensor(variable.tensor);
      if (found.name != t.name || found.dtype != t.dtype || found.dims != t.dims)
        fail("variable '{}' is {} {}, the model's is '{}', {} {}", found.name, name_of(found.dtype),
             to_string(found.dims), t.name, name_of(t.dtype), to_string(t.dims));
      // A file of initial values is named as found from where the plan lies.
      const Initializer &init = variable.init, &claimed = found.init;
      const std::string owner = variable.owner == kNone ? "" : whole_.tensor(variable.owner).name;
      if (found.role != variable.role || found.trainable != variable.trainable || found.owner != owner ||
          found.state_name != variable.state_name || claimed.kind != init.kind || claimed.a != init.a ||
          claimed.b != init.b || claimed.key != init.key || !same_data(claimed, init))
        fail("role, initializer or owner of variable '{}' are not those of the model's", found.name);
    }
  }

  const Plan& plan_;
  const Entry& entry_;
  const Graph& whole_;
};

}  // namespace

void check_source(const Plan& plan, const Entry& entry, const Graph& whole) { SourceCheck(plan, entry, whole).run(); }

}  // namespace whale
