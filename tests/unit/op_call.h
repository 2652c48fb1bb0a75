// One op with its operands: what a kernel is given, and what it makes of it.
#pragma once

#include <string>
#include <vector>

#include "device/device.h"
#include "ops/op.h"

namespace whale::test {

// A tensor and its elements, each of which a double holds as it is.
struct Value {
  DType dtype{};  // DType{}: an operand that is not there
  Dims dims;
  std::vector<double> data;
  bool present() const { return dtype != DType{}; }
  TensorType type() const { return {present() ? dtype : DType::kF32, dims}; }
};

struct OpCall {
  OpCode code{};
  Attrs attrs;  // all of them
  std::vector<Value> in;
  uint64_t key = 0;
};

// "matmul(f64[4,3], f64[3,5], _; transpose_b=true)": attributes that are not their defaults.
std::string to_string(const OpCall& call);

// With results as the shape rule gives them.
OpView view_of(const OpCall& call);

// The same in f32, for devices without float64.
OpCall in_f32(OpCall call);

// Where the operands lie in those of the op that they are a part of.
struct Place {
  Box box;
  int64_t batch_begin = 0;
};

// One device that computes calls: results are filled with garbage before, those that an op always makes in place with
// what its operand holds.
class OpDevice {
 public:
  explicit OpDevice(DeviceKind kind = DeviceKind::kRef);
  ~OpDevice();
  // How far results of the same numbers may be apart, relative to the largest of what was added up, where they were
  // not added up in the same order; of floats that are not f64: in f32.
  double rounding(DType dtype) const;
  bool same_order() const { return kind_ == DeviceKind::kRef; }  // for an element of a part as for that of the whole
  bool has(OpCode code) const;                                   // a kernel, for some types at least
  bool has(const OpCall& call) const;
  std::vector<Value> run(const OpCall& call, const Place& place = {}) const;
  // Results of these types; of `in_place`, over operands.
  std::vector<Value> run(const OpCall& call, const Place& place, const std::vector<TensorType>& results,
                         const std::vector<Alias>& in_place = {}) const;

 private:
  DeviceKind kind_;
  Backend* backend_;
  std::unique_ptr<Device> device_;
};

// The reference device.
const OpDevice& ref_device();

}  // namespace whale::test
