// Bytes -> Graph. Three fences: flatbuffers::Verifier (structure), the checks here (numbers, ids, sizes), then
// ir/verify and ops/ (meaning).
#include <cstring>

#include "ir/renamed_options.h"
#include "ops/op.h"
#include "schema/fields.h"
#include "schema/graph_file.h"

namespace whale {
namespace {

using schema::Fields;

Tensor read_tensor(Fields& f, const fb::Tensor* t, size_t ops) {
  Tensor out;
  f.spend(sizeof(Tensor));
  out.name = f.name(t->name(), "a tensor's name");
  out.dtype = f.number<DType>(t->dtype(), "a tensor's dtype");
  out.dims = f.dims(t->dims(), out.dtype, "a tensor");
  out.kind = f.number<TensorKind>(t->kind(), "a tensor's kind");
  out.producer = f.id_or_none(t->producer(), ops, "a tensor's producer");
  out.output = static_cast<int>(f.range(t->output(), 0, INT32_MAX, "a tensor's output"));
  out.batch_dim =
      static_cast<int>(f.range(t->batch_dim(), -1, static_cast<int64_t>(out.dims.size()) - 1, "a tensor's batch_dim"));
  return out;
}

Op read_op(Fields& f, const fb::Op* t, const Graph& graph, size_t ops) {
  Op out;
  f.spend(sizeof(Op));
  out.code = f.op_code(t->code());
  out.name = f.name(t->name(), "an op's name");
  out.inputs = f.vector(t->inputs());
  out.outputs = f.vector(t->outputs());
  for (const TensorId id : out.inputs) f.id_or_none(id, graph.tensors.size(), "an op's input");
  for (const TensorId id : out.outputs) f.id(id, graph.tensors.size(), "an op's output");
  out.attrs = f.attrs(t->attrs());
  if (def(out.code).index.input >= 0) out.attrs.try_emplace(kIndexLimit, int64_t{0});  // files from before it
  out.scope = f.id(t->scope(), graph.scopes.size(), "an op's scope");
  out.key = t->key();
  out.phase = f.number<Phase>(t->phase(), "an op's phase");
  out.region = f.number<Region>(t->region(), "an op's region");
  out.origin = f.id_or_none(t->origin(), ops, "an op's origin");
  out.location = f.name(t->location(), "an op's location");
  return out;
}

Variable read_variable(Fields& f, const fb::Variable* t, size_t tensors) {
  Variable out;
  f.spend(sizeof(Variable));
  out.tensor = f.id(t->tensor(), tensors, "a variable's tensor");
  out.role = f.number<Role>(t->role(), "a variable's role");
  out.trainable = t->trainable();
  out.decay = t->decay();
  out.init = f.initializer(t->init());
  out.owner = f.id_or_none(t->owner(), tensors, "a variable's owner");
  out.state_name = f.name(t->state_name(), "a variable's state name");
  out.next = f.id_or_none(t->next(), tensors, "a variable's next value");
  out.learning_rate = f.finite(t->learning_rate(), "a variable's factor of the learning rate");
  if (t->weight_decay() != -1) out.weight_decay = f.finite(t->weight_decay(), "a variable's weight decay");
  return out;
}

Training read_training(Fields& f, const fb::Training* t, size_t tensors) {
  Training out;
  if (t == nullptr) return out;
  out.loss = f.id_or_none(t->loss(), tensors, "the loss");
  out.optimizer = f.optimizer(t->optimizer());
  out.lr_schedule = f.lr_schedule(t->lr_schedule());
  out.clip_norm = f.finite(t->clip_norm(), "clip_norm");
  out.accumulation = f.range(t->accumulation(), 1, schema::kMaxCount, "accumulation");
  out.precision = f.number<Precision>(t->precision(), "the precision");
  return out;
}

std::vector<NamedTensor> read_named(Fields& f, const flatbuffers::Vector<flatbuffers::Offset<fb::NamedTensor>>* v,
                                    size_t tensors) {
  std::vector<NamedTensor> out;
  if (v == nullptr) return out;
  for (const fb::NamedTensor* t : *v) {
    f.spend(sizeof(NamedTensor));
    out.push_back({f.name(t->name(), "an output's name"), f.id(t->tensor(), tensors, "an output")});
  }
  return out;
}

bool has_identifier(const uint8_t* data, size_t size, const char* identifier) {
  return data != nullptr && size >= 8 && std::memcmp(data + 4, identifier, 4) == 0;
}

}  // namespace

bool is_graph_file(const uint8_t* data, size_t size) { return has_identifier(data, size, fb::GraphIdentifier()); }
bool is_plan_file(const uint8_t* data, size_t size) { return has_identifier(data, size, "WHP1"); }

Graph read_graph(const uint8_t* bytes, size_t size) {
  Fields f("graph", size);
  if (size == 0) throw f.bad("it is empty");
  if (!is_graph_file(bytes, size)) {
    throw f.bad(is_plan_file(bytes, size) ? "this is a plan" : "its first bytes are not those of a graph");
  }
  if (size >= schema::kMaxFileBytes) throw f.bad("it is larger than 2 GiB");
  std::vector<uint64_t> storage;
  const uint8_t* data = schema::aligned(bytes, size, storage);
  auto verifier = schema::verifier(data, size);
  if (!fb::VerifyGraphBuffer(verifier)) throw f.bad("it is damaged or cut short");
  const fb::Graph* t = fb::GetGraph(data);
  f.range(t->version(), 1, kGraphFormatVersion, "its format version (a newer one needs a newer libwhale)");

  Graph out;
  out.name = f.name(t->name(), "the graph's name");
  out.scopes = f.scopes(t->scopes());
  const size_t ops = t->ops() != nullptr ? t->ops()->size() : 0;
  if (t->tensors() != nullptr) {
    for (const fb::Tensor* tensor : *t->tensors()) out.tensors.push_back(read_tensor(f, tensor, ops));
  }
  if (t->ops() != nullptr) {
    for (const fb::Op* op : *t->ops()) out.ops.push_back(read_op(f, op, out, ops));
  }
  if (t->variables() != nullptr) {
    for (const fb::Variable* v : *t->variables()) out.variables.push_back(read_variable(f, v, out.tensors.size()));
  }
  out.inputs = f.vector(t->inputs());
  for (const TensorId id : out.inputs) f.id(id, out.tensors.size(), "an input");
  out.outputs = read_named(f, t->outputs(), out.tensors.size());
  out.gradients = read_named(f, t->gradients(), out.tensors.size());
  out.training = read_training(f, t->training(), out.tensors.size());
  out.default_strategy = f.name(t->default_strategy(), "the default strategy");
  if (t->version() < 2) out.default_strategy = with_renamed_options(out.default_strategy);
  verify(out);
  verify_ops(out);
  return out;
}

}  // namespace whale
