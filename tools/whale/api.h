// whale.h for C++ callers of this tool: handles that release themselves, statuses that throw.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "whale/whale.h"

namespace tool {

// A failed status: message and where, ready to print.
class Failure : public std::runtime_error {
 public:
  explicit Failure(const std::string& text, int code = WHALE_UNKNOWN) : std::runtime_error(text), code_(code) {}
  int code() const { return code_; }  // of the library's status

 private:
  int code_;
};

// Bytes of the UTF-8 character that begins there; 0: none does.
size_t character_at(std::string_view text, size_t at);
// What a user wrote, as messages show it: what is long loses its middle, what is no printable text is a question mark.
std::string shown(std::string_view text, size_t most = 160);

inline std::string to_string(whale_str text) { return std::string(text.data ? text.data : "", text.size); }
inline whale_str str(std::string_view text) { return {text.data(), text.size()}; }

inline void check(whale_status* status) {
  if (status == nullptr) return;
  std::string text = to_string(whale_status_message(status));
  const std::string op = to_string(whale_status_op(status)), scope = to_string(whale_status_scope(status));
  if (!op.empty() && text.find(op) == std::string::npos) text += " (op " + op + ")";
  if (!scope.empty() && text.find(scope) == std::string::npos) text += " (scope " + scope + ")";
  if (whale_status_device(status) >= 0) text += " (device " + std::to_string(whale_status_device(status)) + ")";
  const int code = whale_status_code(status);
  whale_status_release(status);
  throw Failure(text, code);
}

template <class T, void (*Release)(T*)>
struct Releaser {
  void operator()(T* handle) const { Release(handle); }
};
template <class T, void (*Release)(T*)>
using Owned = std::unique_ptr<T, Releaser<T, Release>>;

using Engine = Owned<whale_engine, whale_engine_release>;
using GraphHandle = Owned<whale_graph, whale_graph_release>;
using Cluster = Owned<whale_cluster, whale_cluster_release>;
using Plan = Owned<whale_plan, whale_plan_release>;
using Session = Owned<whale_session, whale_session_release>;
using World = Owned<whale_world, whale_world_release>;
using Tensor = Owned<whale_tensor, whale_tensor_release>;
using Event = Owned<whale_event, whale_event_release>;
using Cancel = Owned<whale_cancel, whale_cancel_release>;

// own<Plan>(whale_plan_create, engine, graph, ...): calls a function whose last parameter is a handle out-parameter.
template <class Handle, class Function, class... A>
Handle own(Function function, A... arguments) {
  typename Handle::pointer out = nullptr;
  check(function(arguments..., &out));
  return Handle(out);
}

// text(whale_plan_summary, plan.get()): calls a function whose last parameter is `whale_text *out`.
template <class Function, class... A>
std::string text(Function function, A... arguments) {
  whale_text out{};
  check(function(arguments..., &out));
  std::string result(out.data, out.size);
  whale_text_release(&out);
  return result;
}

// init_dir: folder that initial values of loaded models may be read from; empty: that of the file loaded.
inline Engine make_engine(std::string_view init_dir = {}) {
  whale_engine_options options = WHALE_ENGINE_OPTIONS_INIT;
  options.init_dir = str(init_dir);
  return own<Engine>(whale_engine_create, static_cast<const whale_engine_options*>(&options));
}

}  // namespace tool
