// Graph -> bytes.
#include "schema/fields.h"
#include "schema/graph_file.h"

namespace whale {

using namespace schema;  // write, number, Off

std::vector<uint8_t> serialize(const Graph& graph) {
  Builder b(64 * 1024);
  std::vector<Off<fb::Tensor>> tensors;
  for (const Tensor& t : graph.tensors) {
    const auto name = write(b, t.name);
    tensors.push_back(fb::CreateTensor(b, name, number<fb::DType>(t.dtype), write(b, t.dims),
                                       number<fb::TensorKind>(t.kind), t.producer, t.output, t.batch_dim));
  }
  std::vector<Off<fb::Op>> ops;
  for (const Op& op : graph.ops) {
    const auto name = write(b, op.name), location = write(b, op.location);
    const auto inputs = write(b, op.inputs), outputs = write(b, op.outputs);
    const auto attrs = write(b, op.attrs);
    ops.push_back(fb::CreateOp(b, static_cast<uint16_t>(op.code), name, inputs, outputs, attrs, op.scope, op.key,
                               number<fb::Phase>(op.phase), number<fb::Region>(op.region), op.origin, location));
  }
  std::vector<Off<fb::Variable>> variables;
  for (const Variable& v : graph.variables) {
    const auto init = write(b, v.init);
    variables.push_back(fb::CreateVariable(b, v.tensor, number<fb::Role>(v.role), v.trainable, v.decay, init, v.owner,
                                           write(b, v.state_name), v.next, v.learning_rate,
                                           v.weight_decay.value_or(-1)));
  }
  const auto named = [&b](const std::vector<NamedTensor>& list) {
    std::vector<Off<fb::NamedTensor>> out;
    for (const NamedTensor& n : list) out.push_back(fb::CreateNamedTensor(b, write(b, n.name), n.tensor));
    return write(b, out);
  };
  const Training& t = graph.training;
  const auto optimizer = write(b, t.optimizer);
  const auto lr_schedule = write(b, t.lr_schedule);
  const auto training = fb::CreateTraining(b, t.loss, optimizer, lr_schedule, t.clip_norm, t.accumulation,
                                           number<fb::Precision>(t.precision));
  const auto name = write(b, graph.name), strategy = write(b, graph.default_strategy);
  const auto tensors_at = write(b, tensors);
  const auto ops_at = write(b, ops);
  const auto scopes = write(b, graph.scopes);
  const auto variables_at = write(b, variables);
  const auto inputs = write(b, graph.inputs);
  const auto outputs = named(graph.outputs), gradients = named(graph.gradients);
  fb::FinishGraphBuffer(b, fb::CreateGraph(b, kGraphFormatVersion, name, tensors_at, ops_at, scopes, variables_at,
                                           inputs, outputs, gradients, training, strategy));
  return bytes_of(b);
}

}  // namespace whale
