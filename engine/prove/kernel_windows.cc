// What kernels read and make through windows.
#include <algorithm>

#include "prove/match.h"

namespace whale::proof {
namespace {

// Does one of them lie in the other?
bool nested(Interval a, Interval b) {
  if (a.size() == 0 || b.size() == 0) return false;
  return (a.begin <= b.begin && b.end <= a.end) || (b.begin <= a.begin && a.end <= b.end);
}

}  // namespace

// The part of what is read through a window that `held` of the source makes, as the kernel's attributes say: `said`,
// where another operand has one. What it takes for padding must be beyond the source's ends.
Interval Kernels::made_through(const KernelCall& call, const Op& op, const Factor& factor, Interval held,
                               const std::optional<Digit>& said) const {
  const WindowRead& w = factor.window;
  const auto entry = [&](const char* name, size_t at) {
    const auto found = call.attrs.find(name);
    const auto* list = found == call.attrs.end() ? nullptr : std::get_if<Ints>(&found->second);
    return list != nullptr && at < list->size() ? (*list)[at] : 0;
  };
  const int64_t low = entry("padding", 2 * factor.window_dim), high = entry("padding", 2 * factor.window_dim + 1);
  int64_t size = said ? said->set.size() : w.result == 1 ? 1 : 0;
  for (size_t o = 0; o < call.out.size() && size == 0; ++o)
    if (factor.outputs.at(o).present()) size = call.out[o].local.at(static_cast<size_t>(factor.outputs[o].dim));
  // Element k of the result reads from k * stride - low of the operand on; transposed, the other way round.
  const int64_t first = w.transposed ? low - w.low + held.begin * w.stride : held.begin + w.low - low;
  if (!w.transposed && first % w.stride) refuse("padding {} of {} lies between two of its results", low, factor.name);
  const int64_t begin = w.transposed ? first : first / w.stride;
  const Interval made{begin, begin + size};
  if (size <= 0 || begin < 0 || made.end > w.result)
    refuse("with padding {}, [{}:{}] of {} would give [{}:{}] of {}", low, held.begin, held.end, factor.name,
           made.begin, made.end, w.result);
  if (said && !said->any && !(said->set == Set(made)))
    refuse("with padding {}, [{}:{}] of {} gives [{}:{}], and another operand has {}", low, held.begin, held.end,
           factor.name, made.begin, made.end, to_string(said->set));
  const auto rounded_up = [](int64_t a, int64_t b) { return a > 0 ? (a + b - 1) / b : -(-a / b); };
  Interval needed{made.begin * w.stride - w.low, (made.end - 1) * w.stride - w.low + w.reach};
  if (w.transposed)
    needed = {rounded_up(made.begin + w.low - w.reach + 1, w.stride), (made.end - 1 + w.low) / w.stride + 1};
  needed = {std::max<int64_t>(needed.begin, 0), std::min(needed.end, w.source)};
  if (needed.size() > 0 && (needed.begin < held.begin || needed.end > held.end))
    refuse("[{}:{}] of {} needs [{}:{}] of what it reads, and [{}:{}] is there", made.begin, made.end, factor.name,
           needed.begin, needed.end, held.begin, held.end);
  // As many as the kernel makes of these.
  const bool gradient = call.attrs.contains("spatial");
  const int64_t more = entry("output_padding", factor.window_dim);
  const bool fits = !w.transposed ? (held.size() + low + high - w.reach) / w.stride + 1 == size
                    : gradient    ? entry("spatial", factor.window_dim) == size &&
                                     (size + low + high - w.reach) / w.stride + 1 == held.size()
                               : (held.size() - 1) * w.stride + w.reach + more - low - high == size;
  if (!fits)
    refuse("padding {} and {} do not make {} of {} out of {} ({})", low, high, size, factor.name, held.size(), op.name);
  return made;
}

void Kernels::Match::take_windows() {
  for (size_t f = 0; f < list.size(); ++f)
    for (size_t i = 0; i < call.in.size() && list[f].window.source == 1; ++i)  // which has no digit of its own
      if (list[f].reads_through(i) && call.in[i].value)
        read[f] = Interval{0, call.in[i].local.at(static_cast<size_t>(list[f].inputs[i].dim))};
  for (size_t f = 0; f < list.size(); ++f) {
    if (anywhere[f] == 0) continue;
    if (read[f] && read[f]->size() != anywhere[f])
      refuse("operands have [{}:{}] of {}, and {} of it", read[f]->begin, read[f]->end, list[f].name, anywhere[f]);
    if (!read[f]) read[f] = window_of(f);
  }
  for (size_t f = 0; f < list.size(); ++f) {
    if (!read[f]) continue;
    const Interval made = kernels.made_through(call, op, list[f], *read[f], of[f]);
    of[f] = Digit{list[f].extent, Set(made)};
    kernels.windows_[{call.device, list[f].window_dim, list[f].window.source, list[f].window.result}] = {*read[f],
                                                                                                         made};
  }
}

// Of what is the same all along: the one place where the kernel's padding and other operands fit. Where several do, all
// of them are right: the one nearest to what the device had when it last read through that window, or to what it made
// of its opposite (not to what it read there, which has a halo).
Interval Kernels::Match::window_of(size_t f) const {
  const WindowRead& w = list[f].window;
  const auto seen = [&](int64_t from, int64_t to) {
    const auto at = kernels.windows_.find({call.device, list[f].window_dim, from, to});
    return at == kernels.windows_.end() ? Windows{} : at->second;
  };
  const Interval before = seen(w.source, w.result).read, opposite = seen(w.result, w.source).made;
  const Interval own = seen(w.result, w.source).read;
  const auto is_part = [&](Interval made) {
    const auto at = kernels.parts_.find({call.device, w.result, made.size()});
    return at != kernels.parts_.end() && at->second == made;
  };
  std::vector<Interval> best;
  int64_t fits = 0;
  // The same, more or less of it, what it makes of what is read there, a part that the device has of others too.
  std::tuple<bool, bool, int64_t, bool, int64_t> most{};
  for (int64_t begin = 0; begin + anywhere[f] <= w.source; ++begin) {
    const Interval held{begin, begin + anywhere[f]};
    Interval made;
    try {
      made = kernels.made_through(call, op, list[f], held, of[f]);
    } catch (const Stop&) {
      continue;
    }
    ++fits;
    const int64_t common = std::min(made.end, own.end) - std::max(made.begin, own.begin);
    const std::tuple score{held == before || held == opposite, nested(held, before) || nested(held, opposite),
                           std::max<int64_t>(common, 0), is_part(made),
                           -std::abs(made.begin * w.source - opposite.begin * w.result)};  // in parts of both extents
    if (!best.empty() && score < most) continue;
    if (score > most) best.clear();
    most = score;
    best.push_back(held);
  }
  if (best.empty()) refuse("no {} of {} give what it makes with its padding", anywhere[f], list[f].name);
  if (best.size() > 1) no_rule("{} reads any {} of {} through a window", op.name, anywhere[f], list[f].name);
  kernels.guessed_ |= fits > 1;
  return best[0];
}

}  // namespace whale::proof
