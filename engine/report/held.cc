#include "report/held.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <tuple>

#include "base/text.h"
#include "plan/fullest.h"

namespace whale {
namespace {

// Of two names that differ in numbers alone: those that differ are stars.
std::string common_name(const std::string& a, const std::string& b) {
  const auto number = [](const std::string& text, size_t& at) {
    const size_t begin = at;
    while (at < text.size() && (text[at] == '*' || std::isdigit(static_cast<unsigned char>(text[at])) != 0)) ++at;
    return text.substr(begin, at - begin);
  };
  std::string out;
  for (size_t i = 0, k = 0; i < a.size() && k < b.size();) {
    const std::string one = number(a, i), other = number(b, k);
    if (!one.empty()) out += one == other ? one : "*";
    if (i < a.size()) out += a[i];
    ++i, ++k;
  }
  return out;
}

// The names of its scopes; without those that the op's own name has, where one is given.
std::string path_of(const Plan& plan, ScopeId id, const std::string& op) {
  std::string out;
  for (; id > 0; id = plan.scopes[id].parent) {
    const std::string& name = plan.scopes[id].name;
    if (!name.empty() && (op.empty() || op.find(name) == std::string::npos))
      out = out.empty() ? name : name + "/" + out;
  }
  return out;
}

class Holding {
 public:
  Holding(const Plan& plan, const Entry& entry, int32_t device)
      : plan_(plan),
        program_(entry.programs[entry.rows[device].program]),
        device_(device),
        fullest_(fullest_of(program_, Memory::kDevice)) {
    for (const Op& op : plan.source.ops)
      if (!op.location.empty()) locations_.emplace(op.name, op.location);
  }

  HeldTensors run() {
    find_makers();
    add_variables();
    add_arena();
    HeldTensors out{.list = {}, .when = now_ == nullptr ? "" : told(*now_)};
    for (auto& [key, held] : held_) out.list.push_back(std::move(held));
    std::ranges::stable_sort(out.list, std::greater<>(), &Held::bytes);
    return out;
  }

 private:
  struct Maker {
    BufferId buffer = kNone;
    const Instruction* instruction = nullptr;
  };

  std::string told(const Instruction& i) const {
    const std::string path = path_of(plan_, i.scope, "");
    return fmt::format("in the {} pass of {}", name_of(i.phase), path.empty() ? i.name : path);
  }

  // Of each storage what wrote it last before the moment; where that comes before it in another micro-batch alone, what
  // writes it first. And what runs at that moment.
  void find_makers() {
    makers_.resize(program_.buffers.size());
    int64_t at = 0;
    for (const Segment& segment : program_.segments) {
      for (const Instruction& i : segment.instructions) {
        if (at <= fullest_.when) now_ = &i;
        for (const BufferId b : i.out) {
          if (b == kNone) continue;
          Maker& maker = makers_[storage_of(program_, b)];
          if (maker.instruction == nullptr || at <= fullest_.when) maker = {b, &i};
        }
        ++at;
      }
      ++at;
    }
  }

  void add(Held held) {
    const auto [it, fresh] = held_.try_emplace({starred(held.name), held.kind, held.dtype, held.dims}, held);
    if (fresh) return;
    Held& all = it->second;
    all.name = common_name(all.name, held.name);
    all.made_by =
        starred(all.made_by) == starred(held.made_by) ? common_name(all.made_by, held.made_by) : std::string();
    all.bytes += held.bytes, all.versions = std::max(all.versions, held.versions), ++all.count;
    if (("," + all.state + ",").find("," + held.state + ",") == std::string::npos) all.state += "," + held.state;
  }

  void add_variables() {
    constexpr const char* kKinds[] = {"parameters", "state", "buffers"};  // by Role
    for (const PlanVariable& v : plan_.variables) {
      if (v.memory != Memory::kDevice) continue;
      const Dims dims = local_dims(plan_, v, device_);
      const int64_t bytes = element_count(dims) * size_of(v.dtype);
      if (bytes == 0) continue;
      const bool state = v.role == Role::kState;
      add({.name = state ? v.owner : v.name,
           .state = state ? v.state_name : "",
           .kind = kKinds[static_cast<size_t>(v.role)],
           .dtype = v.dtype,
           .dims = dims,
           .bytes = bytes,
           .made_by = ""});
    }
  }

  void add_arena() {
    constexpr const char* kKinds[] = {"activations", "gradients", "copies"};  // by Holds
    const std::vector<Holds> holds = contents_of(program_, plan_.groups);
    for (const BufferId id : fullest_.storages) {
      const auto b = static_cast<size_t>(id);
      const Buffer& storage = program_.buffers[b];
      const Maker& maker = makers_[b];
      const Buffer& tensor = maker.buffer == kNone ? storage : program_.buffers[maker.buffer];
      // A part of the storage (a bucket of gradients) does not stand for it.
      const bool part = tensor.bytes != storage.bytes;
      const Buffer& shown = part ? storage : tensor;
      add({.name = shown.name,
           .state = "",
           .kind = kKinds[static_cast<size_t>(holds[b])],
           .dtype = shown.dtype,
           .dims = shown.dims,
           .versions = storage.versions,
           .bytes = bytes_of_versions(storage),
           .made_by = maker.instruction == nullptr ? "" : made_by(*maker.instruction, shown.name)});
    }
  }

  std::string made_by(const Instruction& i, const std::string& tensor) const {
    std::string out(i.verb());
    if (i.name != tensor) out += " " + i.name;
    if (const std::string path = path_of(plan_, i.scope, i.name); !path.empty()) out += " in " + path;
    if (const auto it = locations_.find(i.name); it != locations_.end()) out += ", " + it->second;
    return out;
  }

  const Plan& plan_;
  const Program& program_;
  int32_t device_;
  Fullest fullest_;
  std::map<std::string, std::string> locations_;
  std::vector<Maker> makers_;  // by storage
  const Instruction* now_ = nullptr;
  std::map<std::tuple<std::string, std::string, DType, Dims>, Held> held_;
};

}  // namespace

HeldTensors held_tensors(const Plan& plan, const Entry& entry, int32_t device) {
  return Holding(plan, entry, device).run();
}

}  // namespace whale
