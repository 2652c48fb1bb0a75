// Random kernels and collectives on what the prover holds, and on numbers beside it: each value that it calls whole is
// compared with the tensor that it names; in exact mode those of one order with each other, bit by bit.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "op_call.h"
#include "property.h"
#include "prove/collective.h"
#include "prove/kernel.h"

namespace whale::test {

class Mill {
 public:
  Mill(Dice& dice, const Plan& plan, bool exact);
  void turn();

  int64_t compared = 0, of_one_order = 0;
  std::string wrong = {};  // the first value that is not what it is called

 private:
  struct Held {
    proof::Value value;
    Value numbers;    // in f64
    std::string how;  // it was made
  };
  using Some = std::vector<const Held*>;

  void make_truth();
  template <class Fits>
  const Held* any(Fits fits);
  const Held* beside(const Held& a);  // of its dims, mostly of the same tensor
  Attrs odd(Attrs attrs);             // mostly as they are

  void op_of_program();
  void slice();
  void run(OpCode code, const Attrs& attrs, const std::string& name, const Some& in, uint64_t key = 0,
           const Place& place = {});
  void combine();  // all-reduce, reduce-scatter
  void gather();   // all-gather, all-to-all
  void exchange(const work::Collective& work, const Some& in, const Value& whole, const std::vector<Dims>& out);
  SubAxis sub_axis_of(const Dims& dims);

  void keep(const proof::Value& value, const Value& numbers, const std::string& how);
  void compare(const proof::Value& value, const Value& numbers, const std::string& how);

  Dice& dice_;
  bool exact_;
  proof::Reference ref_;
  proof::Tree tree_;
  proof::Kernels kernels_;
  std::map<TensorId, Value> truth_;
  std::vector<Held> held_;
  std::map<std::tuple<TensorId, uint64_t, size_t>, double> bits_;  // by tensor, order and element
};

}  // namespace whale::test
