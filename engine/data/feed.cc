#include "data/feed.h"

#include <algorithm>

#include "base/error.h"
#include "data/indices.h"

namespace whale {
namespace {

template <class Port>
std::string names_of(const std::vector<Port>& ports) {
  std::string text;
  for (const Port& port : ports) text += (text.empty() ? "" : ", ") + port.name;
  return text.empty() ? "none" : text;
}

template <class Port>
size_t index_of(const std::vector<Port>& ports, const std::string& name, const char* what) {
  const auto at = std::find_if(ports.begin(), ports.end(), [&](const Port& port) { return port.name == name; });
  if (at == ports.end()) throw invalid("there is no {} '{}'; the plan has: {}", what, name, names_of(ports));
  return static_cast<size_t>(at - ports.begin());
}

void check_type(const char* what, const std::string& name, DType dtype, const Dims& dims, const HostTensor& found) {
  if (found.dtype != dtype)
    throw invalid("{} '{}' is {}, expected {} {}", what, name, name_of(found.dtype), name_of(dtype), to_string(dims));
  if (found.dims != dims)
    throw invalid("{} '{}' has shape {}, expected {} of {}", what, name, to_string(found.dims), to_string(dims),
                  name_of(dtype));
  if (found.data == nullptr && element_count(dims) != 0)
    throw invalid("{} '{}' has no data (null pointer)", what, name);
}

char nothing;  // what an empty tensor has for memory; never read or written

// check(port, tensor): its type.
template <class Port, class Pointer, class Check>
void bind(const char* what, const std::vector<Port>& ports, const std::vector<NamedHost>& given,
          std::vector<Pointer>& to, Check check) {
  to.assign(ports.size(), nullptr);
  for (const NamedHost& host : given) {
    const size_t port = index_of(ports, host.name, what);
    check(port, host.tensor);
    if (to[port] != nullptr) throw invalid("{} '{}' is given twice", what, host.name);
    // An empty tensor may come without memory, but it was given.
    to[port] = host.tensor.data != nullptr ? host.tensor.data : &nothing;
  }
}

template <class Port, class Pointer>
void bind(const char* what, const std::vector<Port>& ports, const std::vector<NamedHost>& given,
          std::vector<Pointer>& to) {
  bind(what, ports, given, to, [&](size_t port, const HostTensor& found) {
    check_type(what, ports[port].name, ports[port].dtype, ports[port].dims, found);
  });
}

}  // namespace

SampleRuns sample_runs(DType dtype, const Dims& dims, int batch_dim, int64_t batch, SampleRange range) {
  SampleRuns piece;
  if (batch_dim < 0) {
    piece.run = piece.stride = static_cast<size_t>(element_count(dims) * size_of(dtype));
    piece.rows = 1;
    return piece;
  }
  const size_t at = static_cast<size_t>(batch_dim);
  if (at >= dims.size() || batch <= 0 || dims[at] % batch != 0 || range.begin < 0 || range.end < range.begin ||
      range.end > batch)
    throw internal("samples [{}, {}) of {} along dimension {} of {}", range.begin, range.end, batch, batch_dim,
                   to_string(dims));
  int64_t rows = 1, sample = dims[at] / batch * size_of(dtype);
  for (size_t d = 0; d < at; ++d) rows *= dims[d];
  for (size_t d = at + 1; d < dims.size(); ++d) sample *= dims[d];
  piece.begin = static_cast<size_t>(range.begin * sample);
  piece.run = static_cast<size_t>(range.size() * sample);
  piece.stride = static_cast<size_t>(batch * sample);
  piece.rows = static_cast<size_t>(rows);
  return piece;
}

int64_t batch_of(const std::vector<PlanInput>& ports, const std::vector<NamedHost>& inputs, int64_t otherwise) {
  int64_t batch = -1;
  const std::string* first = nullptr;
  for (const NamedHost& host : inputs) {
    const PlanInput& port = ports[index_of(ports, host.name, "input")];
    if (port.batch_dim < 0) continue;
    const size_t at = static_cast<size_t>(port.batch_dim);
    if (host.tensor.dims.size() != port.dims.size())
      throw invalid("input '{}' has shape {}, expected {} of {}", host.name, to_string(host.tensor.dims),
                    to_string(port.dims), name_of(port.dtype));
    const int64_t found = host.tensor.dims[at];
    if (first == nullptr) {
      batch = found;
      first = &host.name;
    } else if (found != batch) {
      throw invalid("input '{}' has {} samples, input '{}' has {}; every input of a step has the same number",
                    host.name, found, *first, batch);
    }
  }
  if (first == nullptr) return otherwise;
  if (batch < 1) throw invalid("input '{}' has {} samples; a step needs at least one", *first, batch);
  return batch;
}

void bind_inputs(const std::vector<PlanInput>& ports, const std::vector<NamedHost>& inputs, bool allow_missing,
                 std::vector<const void*>& to) {
  bind("input", ports, inputs, to);
  for (size_t i = 0; i < ports.size() && !allow_missing; ++i)
    if (to[i] == nullptr)
      throw invalid("input '{}' is missing: expected {} {}", ports[i].name, name_of(ports[i].dtype),
                    to_string(ports[i].dims));
}

void bind_slices(const std::vector<PlanInput>& ports, const std::vector<InputSlices>& slices, int rank,
                 const std::vector<NamedHost>& inputs, bool allow_missing, std::vector<const void*>& to) {
  bind("input", ports, inputs, to, [&](size_t i, const HostTensor& found) {
    if (found.dtype != ports[i].dtype || found.dims != slices[i].dims())
      throw invalid("the slices of rank {} of input '{}' are {} {}, expected {} {}: {}", rank, ports[i].name,
                    name_of(found.dtype), to_string(found.dims), name_of(ports[i].dtype), to_string(slices[i].dims()),
                    slices[i].text());
    check_type("input", ports[i].name, ports[i].dtype, slices[i].dims(), found);
  });
  for (size_t i = 0; i < ports.size(); ++i) {
    if (to[i] != nullptr) continue;
    if (slices[i].empty())
      to[i] = &nothing;
    else if (!allow_missing)
      throw invalid("the slices of rank {} of input '{}' are missing: expected {} {}, {}", rank, ports[i].name,
                    name_of(ports[i].dtype), to_string(slices[i].dims()), slices[i].text());
  }
}

void check_indices(const std::vector<PlanInput>& ports, const std::vector<const void*>& inputs,
                   const std::vector<bool>& read, const std::vector<InputSlices>& slices) {
  for (size_t i = 0; i < ports.size(); ++i)
    for (const IndexRange& range : ports[i].indices) {
      if (inputs[i] == nullptr || !(read.empty() || read[i]) || (!slices.empty() && slices[i].empty())) continue;
      const Dims& dims = slices.empty() ? ports[i].dims : slices[i].dims();
      const auto bad = first_outside(ports[i].dtype, inputs[i], element_count(dims), range);
      if (bad)
        throw invalid("input '{}' has the value {} at {}{}; it is an index and may be {}. This batch was not run",
                      ports[i].name, bad->value, position_text(dims, bad->position),
                      slices.empty() ? "" : " of this rank's slices", to_string(range));
    }
}

void bind_outputs(const std::vector<PlanOutput>& ports, const std::vector<NamedHost>& outputs, std::vector<void*>& to) {
  bind("output", ports, outputs, to);
}

}  // namespace whale
