// What moves between devices piece by piece.
#include <algorithm>

#include "fault.h"

namespace whale::test {
namespace {

bool change_link(Plan& plan, Dice& dice, const std::function<bool(Entry&, Link&, Dice&)>& change) {
  Entry& entry = train_of(plan);
  for (int tries = 0; tries < 8; ++tries) {
    Link* link = choose(entry.links, dice, [](const Link& l) { return !l.transfers.empty(); });
    if (!link) return false;
    if (change(entry, *link, dice)) return true;
  }
  return false;
}

Transfer& any(Link& link, Dice& dice) { return link.transfers[dice.below(std::ssize(link.transfers))]; }

// One element further, or shorter at both ends.
bool move_box(std::vector<Interval>& box, Dice& dice) {
  if (box.empty()) return false;
  Interval& i = box[dice.below(std::ssize(box))];
  const int64_t by = dice.coin() || i.begin == 0 ? 1 : -1;
  i.begin += by, i.end += by;
  return true;
}

bool shorten(Entry&, Link& link, Dice& dice) {
  Transfer& t = any(link, dice);
  if (t.source.empty()) return false;
  const auto d = static_cast<size_t>(dice.below(std::ssize(t.source)));
  --t.source[d].end, --t.target[d].end;
  return t.source[d].size() >= 0;
}

bool drop(Entry&, Link& link, Dice& dice) {
  link.transfers.erase(link.transfers.begin() + dice.below(std::ssize(link.transfers)));
  return true;
}

bool other_source(Entry& entry, Link& link, Dice& dice) {
  Transfer& t = any(link, dice);
  for (int tries = 0; tries < 8; ++tries) {
    const auto from = static_cast<int32_t>(dice.below(std::ssize(entry.rows)));
    if (from == t.from || entry.rows[from].mesh != entry.rows[t.from].mesh) continue;
    t.from = from;
    return true;
  }
  return false;
}

bool swap_targets(Entry&, Link& link, Dice& dice) {
  Transfer &a = any(link, dice), &b = any(link, dice);
  const auto sizes = [](const Transfer& t) {
    std::vector<int64_t> out;
    for (const Interval& i : t.source) out.push_back(i.size());
    return out;
  };
  if (&a == &b || sizes(a) != sizes(b) || (a.to == b.to && a.target == b.target)) return false;
  if (a.from == b.from && a.source == b.source) return false;  // the same to both
  std::swap(a.to, b.to), std::swap(a.target, b.target);
  return true;
}

bool less_capacity(Entry&, Link& link, Dice&) { return --link.capacity >= 0; }

bool other_value(const Spot& s, Dice& dice) {
  if (s.at().kind() != InstructionKind::kSend) return false;
  std::vector<BufferId> made;
  for (size_t k = 0; k < s.index; ++k)
    for (const BufferId b : s.segment->instructions[k].out)
      if (b != kNone && b != s.at().in[0] && same_type(s.buffer(b), s.buffer(s.at().in[0])) &&
          s.segment->instructions[k].queue == s.at().queue)
        made.push_back(b);
  if (made.empty()) return false;
  s.at().in[0] = made[dice.below(std::ssize(made))];
  return true;
}

bool other_link(const Spot& s, Dice& dice) {
  if (s.at().link() == kNone) return false;
  std::vector<Work> others;
  for (const Instruction& i : s.segment->instructions)
    if (i.kind() == s.at().kind() && i.link() != s.at().link()) others.push_back(i.work);
  if (others.empty()) return false;
  s.at().work = others[dice.below(std::ssize(others))];
  return true;
}

std::function<bool(Plan&, Dice&)> link(bool (*change)(Entry&, Link&, Dice&)) {
  return [change](Plan& plan, Dice& dice) { return change_link(plan, dice, change); };
}

}  // namespace

std::vector<Fault> faults_of_links() {
  const auto either = Catcher::kEither, verifier = Catcher::kVerifier;
  const auto all = [](const Spot&) { return true; };
  return {
      {"a transfer's source box", either, link([](Entry&, Link& l, Dice& d) { return move_box(any(l, d).source, d); })},
      {"a transfer's target box", either, link([](Entry&, Link& l, Dice& d) { return move_box(any(l, d).target, d); })},
      {"a transfer cut short", either, link(shorten)},
      {"a transfer dropped", either, link(drop)},
      {"a link's source", either, link(other_source)},
      {"two transfers exchanged", either, link(swap_targets)},
      {"a link's capacity", verifier, link(less_capacity)},
      {"another value sent", either, [=](Plan& p, Dice& d) { return damage(p, d, Reach::kAny, all, other_value); }},
      {"another link", verifier, [=](Plan& p, Dice& d) { return damage(p, d, Reach::kOne, all, other_link); }},
  };
}

}  // namespace whale::test
