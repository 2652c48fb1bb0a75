// A plan, one device, and one device whose numbers are moved in their last bits, step by step on the same data: what
// rounding alone does is measured, and the plan is judged by it (semantics.md section 10).
#pragma once

#include <functional>
#include <map>
#include <set>

#include "decisions.h"
#include "loss_terms.h"
#include "variables.h"

namespace tool {

// How one precision is compared. A tensor passes when its difference, plan to one device, is at most
//   factor * envelope + floor;
// envelope: the largest difference of the moved runs to one device so far; of state and gradients also that of a run in
// more bits, where there is one, since terms of a sum are rounded where moved weights leave them alone. A tensor of a
// few elements is known less well from a few runs than a norm of many: factor_of. floor: roundings of the stored tensor
// and, for state, of the largest values of its kind (what is summed to a small one may have been large). With `flips` a
// few elements may have moved the other way: an update that is the gradient's sign, more or less, turns where a
// gradient is smaller than its rounding, which is too rare for three runs to show; then all parameters together are one
// more tensor.
struct Setting {
  std::string name;      // "float64", ...
  std::string coarse;    // what the model itself computes in, where that is fewer bits: it rounds like that
  double amplitude = 0;  // of the moves, relative
  double epsilon = 0;    // half a unit in the last place of stored variables
  double roundoff = 0;   // of the arithmetic
  double summed = 0;     // roundings of the largest values of a kind that state may be off by
  double factor = 0;
  bool flips = false;
  bool divides = false;              // the optimizer, a gradient by its own size
  bool turns = false;                // and a few elements of parameters may have turned
  int runs = 3;                      // moved ones
  std::set<std::string> alike = {};  // parameters that move as the largest does (Shake)
  double terms = 0;                  // of the model's largest sum, where roundings of all of them may be allowed for
};

// A normal n-vector is longer than c times the longest of r others with a chance of about c^(-n r): one in ten
// thousand.
double factor_of(const Setting& setting, size_t elements, int64_t runs);
// Of a loss that is as large as one.
double floor_of_loss(const Setting& setting);
// What a plan fails with that did not update its variables, or too often.
std::string unlike_updates(int64_t number, int64_t plan, int64_t one);
// Of a stored tensor after so many steps, relative.
double rounding_of(const Setting& setting, int64_t steps);
// Of a tensor of state of size * size elements, beside values of its kind that are as large as `largest` per element.
double summed_floor(const Setting& setting, double largest, double size);
// Of a parameter of size * size elements that moved by so much each: of those that turned.
double turned_floor(const Setting& setting, double size, double movement);

// One tensor where it is furthest from its bound. Differences are Euclidean norms.
struct Figure {
  std::string name;
  int64_t step = 0;  // after so many steps; 0: as initialized
  int64_t copy = 0;
  std::vector<int32_t> devices;  // of that copy
  double difference = 0, envelope = 0, floor = 0, bound = 0, norm = 0;
  double ratio() const;    // of the difference to its bound; more than 1: not rounding
  bool has_power() const;  // a value of zero, where it is none, would not pass
  // Whether it counts among the worst. Where rounding makes anything of a tensor, what it does is a matter of factors
  // and no longer of terms: the bound is there the square of itself, in units of the tensor.
  bool tells() const;
};
// Takes the figure that is further from its bound.
void worsen(Figure& worst, const Figure& figure);

// How far into the steps something is compared: where a value of zero would pass, the bound has no power.
struct Reach {
  int64_t to = 0, lost = 0;  // the last step whose bound had power; the first after it whose bound had none; 0: none
  void judged(int64_t step, bool power);
};

struct Compared {                   // of one class: parameters, state, buffers
  int64_t tensors = 0, copies = 0;  // that were read; copies: of all tensors together
  Figure worst;                     // of those whose bound has power, and of those beyond any
  std::map<std::string, Reach> reach;
  void judge(const Figure& figure);
  std::vector<std::string> lost() const;  // tensors that the last steps say nothing of
};

enum class Verdict { kEqual, kNotEqual, kNotCompared };

struct Report {
  Setting setting;
  std::string devices, against;
  int32_t ranks = 1;  // that ran the plan
  Figure loss;        // of a step, relative to the largest loss
  Figure evaluation;  // the loss of a step's batch after that step, as whale_session_eval gives it
  Reach losses_reach, evaluation_reach;
  int64_t known_losses = 0;  // steps whose loss is compared
  int64_t evaluations = 0;   // made
  bool moved = false;        // an update moved a parameter
  bool idle = false;         // none did, though there were gradients
  Compared gradients;        // that are summed as an option asks for
  Compared parameters, state, buffers;
  Compared outputs, evaluated;  // of training steps, and of the evaluation
  int64_t steps_of_outputs = 0;
  std::vector<std::string> outputs_left_out;  // rounding may turn them
  bool bits_alone = false;                    // the plan's file has no form in float64
  int64_t left_out = 0;                       // smaller last batches, of which no replica's samples are known
  int64_t unlike_copies = 0;                  // that differ from the first copy in a bit
  std::string unlike;                         // the first of them
  std::vector<std::string> by_rounding;       // parameters that rounding alone moves by a tenth of their movement
  std::vector<std::string> unmoved;           // trained parameters that no step of one device gave a gradient
  double clip_norm = 0, gradient_norm = 0;    // of all gradients; the largest of one device, where that is known
  int64_t steps = 0, compared = 0;            // compared: without a flipped decision
  int64_t flipped_at = 0;                     // the first step with one; 0: none
  int64_t set_aside = 0;                      // steps of gradients in 16 bits in which a unit turned
  int64_t overflowed_at = 0;    // the step of float16 that one side applied and the other not, the last; 0: none
  int64_t overflowed = 0;       // steps in float16 that nobody applied: no update is compared
  int64_t updated = 0;          // steps that were compared with their updates
  int64_t ended_at = 0;         // the step in which something was not finite, which ends the comparison; 0: none
  std::string ended_by;         // what it was
  int64_t alone_otherwise = 0;  // steps in which replicas' samples by themselves decide otherwise than among the others
  int64_t flipped_runs = 0;     // steps of moved runs with one: brought back, and not part of an envelope
  Decided decided;
  double margin_bound = 0;          // of the decision with the largest margin
  bool margins = true;              // all of those that differ lie within their bounds
  std::string subject;              // empty: the whole step
  std::string reason;               // why nothing is compared
  std::vector<std::string> unseen;  // scores of decisions that the plan file does not hand out
  std::string to_fetch;             // what a plan file is to hand out, so that they are seen
  std::string failure;              // what the plan's run ended with
  Figure lone;                      // in 16 bits: what was too far from lone_seed, and from no other seed
  uint64_t lone_seed = 0, seed = 0;
  Compared& of(const Variable& variable);
  void found_unlike(const Variable& variable, size_t copy, int64_t step);
  bool unclipped() const { return gradient_norm < clip_norm; }  // what clips was not looked at
  double parameter_error() const;  // largest relative difference: of the worst parameter, to its norm
  Figure worst() const;            // of everything, the furthest from its bound
  Verdict verdict() const;
};

struct Sides {
  std::set<std::string> trained;  // parameters
  std::function<Plan()> plan, single;
  std::function<Plan()> wide;        // one device in other bits than the others; none: it is not compared with
  std::function<Plan()> update;      // the optimizer alone (updates.h), where sums of gradients are compared
  std::vector<std::string> outputs;  // of the plan, that are compared: all of these hand them out
  LossTerms terms;                   // `single` hands its scalars out
  double wide_scale = 1;     // of what `wide` shows: below 1 where it is in fewer bits, whose rounding is larger
  bool wide_decides = true;  // it counts for losses and decisions too
  std::vector<std::string> gradients;  // parameters of which `single` hands out grad:NAME
  double clip_norm = 0;
};

using Tick = std::function<void(int64_t step)>;

Report compare(whale_engine* engine, const Sides& sides, const std::vector<Batch>& batches,
               const SessionArguments& arguments, const std::vector<Decision>& decisions, const Setting& setting,
               const Tick& tick);

}  // namespace tool
