// Which samples and which part of a tensor a device works on.
#include <algorithm>

#include "fault.h"
#include "ops/fused.h"

namespace whale::test {
namespace {

bool change_cut(Plan& plan, Dice& dice, const std::function<bool(Entry&, DeviceRow&, SampleCut&, Dice&)>& change) {
  Entry& entry = train_of(plan);
  for (int tries = 0; tries < 8; ++tries) {
    DeviceRow& row = entry.rows[dice.below(std::ssize(entry.rows))];
    SampleCut& cut = row.samples[dice.below(std::ssize(row.samples))];
    if (change(entry, row, cut, dice)) return true;
  }
  return false;
}

bool shift(Interval& i, int64_t batch, Dice& dice) {
  if (i.size() == 0 || i.size() == batch) return false;
  const int64_t by = i.end == batch || (i.begin > 0 && dice.coin()) ? -1 : 1;
  if (i.begin + by < 0) return false;
  i.begin += by, i.end += by;
  return true;
}

bool shift_range(Entry& entry, DeviceRow&, SampleCut& cut, Dice& dice) {
  bool changed = false;
  if (cut.micro_batches.size() == 1) {
    changed = shift(cut.whole, entry.batch, dice);
    if (changed) cut.micro_batches[0] = cut.whole;
    return changed;
  }
  if (cut.micro_batches.empty()) return shift(cut.whole, entry.batch, dice);
  return shift(cut.micro_batches[dice.below(std::ssize(cut.micro_batches))], entry.batch, dice);
}

// The samples of another device, of as many.
bool samples_of_another(Entry& entry, DeviceRow& row, SampleCut& cut, Dice& dice) {
  const auto number = static_cast<size_t>(&cut - row.samples.data());
  const DeviceRow* other = choose(entry.rows, dice, [&](const DeviceRow& r) {
    return &r != &row && r.program == row.program && number < r.samples.size() && !(r.samples[number] == cut);
  });
  if (!other) return false;
  cut = other->samples[number];
  return true;
}

bool swap_micro_batches(Entry&, DeviceRow&, SampleCut& cut, Dice& dice) {
  if (cut.micro_batches.size() < 2) return false;
  const auto a = static_cast<size_t>(dice.below(std::ssize(cut.micro_batches) - 1));
  Interval &x = cut.micro_batches[a], &y = cut.micro_batches[a + 1];
  if (x.size() != y.size() || x == y) return false;
  std::swap(x, y);
  return true;
}

bool one_micro_batch_twice(Entry&, DeviceRow&, SampleCut& cut, Dice& dice) {
  if (cut.micro_batches.size() < 2) return false;
  const auto a = static_cast<size_t>(dice.below(std::ssize(cut.micro_batches) - 1));
  if (cut.micro_batches[a].size() != cut.micro_batches[a + 1].size() ||
      cut.micro_batches[a] == cut.micro_batches[a + 1])
    return false;
  cut.micro_batches[a] = cut.micro_batches[a + 1];
  return true;
}

// Two devices in each other's place in the mesh, their programs where they were.
bool other_coordinates(Plan& plan, Dice& dice) {
  Mesh* mesh = choose(plan.meshes, dice, [](const Mesh& m) { return m.devices.size() > 1; });
  if (!mesh) return false;
  const auto a = static_cast<size_t>(dice.below(std::ssize(mesh->devices) - 1));
  if (mesh->devices[a] < 0 || mesh->devices[a + 1] < 0) return false;
  std::swap(mesh->devices[a], mesh->devices[a + 1]);
  for (Entry& e : plan.entries)
    for (DeviceRow& row : e.rows)
      for (size_t k = 0; k < mesh->devices.size(); ++k)
        if (mesh->devices[k] == row.device) row.coordinates = mesh->coordinates(static_cast<int64_t>(k));
  return true;
}

bool other_share(Plan& plan, Dice& dice) {
  for (int tries = 0; tries < 8; ++tries) {
    Mesh& mesh = plan.meshes[dice.below(std::ssize(plan.meshes))];
    if (mesh.axes.empty()) continue;
    MeshAxis& axis = mesh.axes[dice.below(std::ssize(mesh.axes))];
    if (axis.size < 2 || axis.ragged()) continue;
    if (axis.shares.empty()) axis.shares.assign(static_cast<size_t>(axis.size), 1);
    axis.shares[dice.below(axis.size)] += 1 + static_cast<double>(dice.below(3));
    return true;
  }
  return false;
}

bool other_program(Plan& plan, Dice& dice) {
  Entry& entry = train_of(plan);
  if (entry.programs.size() < 2) return false;
  DeviceRow& row = entry.rows[dice.below(std::ssize(entry.rows))];
  row.program =
      static_cast<int32_t>((row.program + 1 + dice.below(std::ssize(entry.programs) - 1)) % std::ssize(entry.programs));
  return true;
}

// ---- boxes --------------------------------------------------------------------------------------------------------
// Kernels whose numbers follow from the box: many others are given one.
bool reads_box(const Spot& s) {
  const work::Kernel* k = s.at().kernel();
  if (k == nullptr) return false;
  switch (k->op) {
    case OpCode::k_dropout:
    case OpCode::k_iota:
    case OpCode::k_rotary:
    case OpCode::k_pad_to_batch: return true;
    case OpCode::k_attention:
    case OpCode::k_attention_grad: return attr_float(k->attrs, "dropout") > 0 || attr_bool(k->attrs, "causal");
    case OpCode::k_fused: {
      const FusedBody body = decode(k->attrs, static_cast<int>(s.at().in.size()));
      return std::any_of(body.steps.begin(), body.steps.end(),
                         [](const FusedStep& step) { return step.code == OpCode::k_dropout; });
    }
    default: return false;
  }
}
bool moves_origin(const Spot& s, Dice& dice) {
  Box& box = s.at().as<work::Kernel>()->box;
  if (box.origin.empty()) return false;
  const auto d = static_cast<size_t>(dice.below(std::ssize(box.origin)));
  box.origin[d] += dice.coin() || box.origin[d] == 0 ? 1 : -1;
  return true;
}
bool moves_cut(const Spot& s, Dice& dice) {
  std::vector<BoxCut>& cuts = s.at().as<work::Kernel>()->box.cuts;
  if (cuts.empty()) return false;
  BoxCut& cut = cuts[dice.below(std::ssize(cuts))];
  cut.begin += cut.begin > 0 ? -1 : 1;
  return true;
}
bool other_extent(const Spot& s, Dice& dice) {
  Dims& global = s.at().as<work::Kernel>()->box.global;
  if (global.size() < 2) return false;  // nothing is multiplied by the outermost
  ++global[dice.between(1, std::ssize(global) - 1)];
  return true;
}
bool no_batch(const Spot& s, Dice&) {
  if (!s.at().as<work::Kernel>()->box.batch.present()) return false;
  s.at().as<work::Kernel>()->box.batch = {};
  return true;
}

// Of a feed or fetch.
bool* whole_of(Instruction& i) {
  auto* feed = i.as<work::Feed>();
  auto* fetch = i.as<work::Fetch>();
  return feed ? &feed->whole_batch : fetch ? &fetch->whole_batch : nullptr;
}

bool other_samples(Plan& plan, Dice& dice) {
  const std::ptrdiff_t cuts = std::ssize(train_of(plan).rows[0].samples);
  return cuts > 1 && damage(
                         plan, dice, Reach::kAny,
                         [](const Spot& s) {
                           if (const bool* whole = whole_of(s.at())) return !*whole;
                           return reads_box(s) && s.at().kernel()->box.batch.present();
                         },
                         [&](const Spot& s, Dice& d) {
                           const auto other = static_cast<int32_t>((s.at().samples() + 1 + d.below(cuts - 1)) % cuts);
                           if (auto* k = s.at().as<work::Kernel>()) k->samples = other;
                           if (auto* feed = s.at().as<work::Feed>()) feed->samples = other;
                           if (auto* fetch = s.at().as<work::Fetch>()) fetch->samples = other;
                           return true;
                         });
}

bool whole_batch(const Spot& s, Dice&) {
  bool* whole = whole_of(s.at());
  if (whole != nullptr) *whole = !*whole;
  return whole != nullptr;
}

bool other_input(Plan& plan, Dice& dice) {
  const Entry& entry = train_of(plan);
  return damage(
      plan, dice, Reach::kAny, [](const Spot& s) { return s.at().kind() == InstructionKind::kFeed; },
      [&](const Spot& s, Dice& d) {
        int32_t& input = s.at().as<work::Feed>()->input;
        const PlanInput& now = entry.inputs[input];
        std::vector<int32_t> others;
        for (size_t k = 0; k < entry.inputs.size(); ++k)
          if (static_cast<int32_t>(k) != input && entry.inputs[k].dtype == now.dtype &&
              entry.inputs[k].dims == now.dims)
            others.push_back(static_cast<int32_t>(k));
        if (others.empty()) return false;
        input = others[d.below(std::ssize(others))];
        return true;
      });
}

bool other_output(Plan& plan, Dice& dice) {
  return damage(
      plan, dice, Reach::kAny, [](const Spot& s) { return s.at().kind() == InstructionKind::kFetch; },
      [&](const Spot& s, Dice& d) {
        std::vector<BufferId> others;
        for (size_t k = 0; k < s.index; ++k)
          for (const BufferId b : s.segment->instructions[k].out)
            if (b != kNone && b != s.at().in[0] && same_type(s.buffer(b), s.buffer(s.at().in[0]))) others.push_back(b);
        if (others.empty()) return false;
        s.at().in[0] = others[d.below(std::ssize(others))];
        return true;
      });
}

std::function<bool(Plan&, Dice&)> cut(bool (*change)(Entry&, DeviceRow&, SampleCut&, Dice&)) {
  return [change](Plan& plan, Dice& dice) { return change_cut(plan, dice, change); };
}
std::function<bool(Plan&, Dice&)> box(bool (*change)(const Spot&, Dice&)) {
  return [change](Plan& plan, Dice& dice) { return damage(plan, dice, Reach::kAny, reads_box, change); };
}

}  // namespace

std::vector<Fault> faults_of_samples() {
  const auto either = Catcher::kEither;
  return {
      {"a device's sample range", either, cut(shift_range)},
      {"the samples of another device", either, cut(samples_of_another)},
      {"two micro-batches' samples exchanged", either, cut(swap_micro_batches)},
      {"a micro-batch's samples twice", either, cut(one_micro_batch_twice)},
      {"two devices' coordinates exchanged", either, other_coordinates},
      {"a share", either, other_share},
      {"another class of device", either, other_program},
      {"a box's origin", either, box(moves_origin)},
      {"a cut of a box", either, box(moves_cut)},
      {"the global extents of a box", either, box(other_extent)},
      {"no samples in a box", either, box(no_batch)},
      {"another cut of the batch", either, other_samples},
      {"the range of a feed or fetch", either,
       [](Plan& p, Dice& d) {
         return damage(
             p, d, Reach::kAny, [](const Spot&) { return true; }, whole_batch);
       }},
      {"another input", either, other_input},
      {"another value fetched", either, other_output},
  };
}

}  // namespace whale::test
