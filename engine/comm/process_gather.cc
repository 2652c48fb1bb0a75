#include "comm/process_gather.h"

#include "base/error.h"

namespace whale {
namespace {

using namespace inproc;  // NOLINT
using Run = RanksOfGroup::Run;

// Of the members of `to`, the one that gets what number `from` of another rank has.
size_t receiver_in(const Run& to, size_t from) { return to.begin + from % to.count; }

class ProcessGather final : public Member {
 public:
  ProcessGather(GroupState& here, const RanksOfGroup& ranks, const Seat& seat, const CollectiveSpec& spec,
                const Pieces& part, const Pieces& whole)
      : Member(here, seat.rank - ranks.runs[ranks.here].begin, seat.device),
        far_(seat, sends(ranks, seat, part), receives(ranks, seat, whole)) {
    offer_.op = spec.op;
    offer_.dtype = spec.out[0].dtype;
    offer_.operands = spec.out.size();
    offer_.stretches = &results_;
    std::vector<size_t> operands;  // that have elements
    for (size_t i = 0; i < spec.out.size(); ++i) {
      const int64_t n = element_count(spec.out[i].dims);
      results_.push_back({static_cast<char*>(spec.out[i].data), offer_.elements, offer_.elements + n});
      offer_.elements += n;
      if (n > 0) operands.push_back(i);
    }
    const Run& mine = ranks.runs[ranks.here];
    for (size_t r = 0; r < ranks.runs.size(); ++r)
      for (size_t k = 0; k < ranks.runs[r].count; ++k) {
        const size_t m = ranks.runs[r].begin + k;
        const size_t at = r == ranks.here ? m : receiver_in(mine, k);
        if (at == seat.rank) continue;
        for (size_t i = 0; i < whole[m].size(); ++i)
          if (whole[m][i].bytes() > 0) copies_.push_back({at - mine.begin, operands[i], whole[m][i]});
      }
  }

  bool run(Lookout* lookout) override {
    next_call();
    if (!far_.run(lookout) || !begin(lookout)) return false;
    if (device_.has_values())
      for (const Copy& c : copies_) {
        const char* from = (*offer_of(c.member).stretches)[c.operand].data + c.at.begin;
        char* to = c.at.data + c.at.begin;
        for (size_t i = 0; i < c.at.count; ++i) device_.copy_in(to + i * c.at.stride, from + i * c.at.stride, c.at.run);
      }
    return end(lookout);
  }

 private:
  struct Copy {
    size_t member, operand;  // of this rank
    Strided at;              // of all results alike
  };

  static Pieces sends(const RanksOfGroup& ranks, const Seat& seat, const Pieces& part) {
    Pieces out(seat.size());
    out[seat.rank] = part[seat.rank];
    const size_t mine = seat.rank - ranks.runs[ranks.here].begin;
    for (size_t r = 0; r < ranks.runs.size(); ++r)
      if (const size_t to = receiver_in(ranks.runs[r], mine); r != ranks.here) out[to] = part[to];
    return out;
  }
  static Pieces receives(const RanksOfGroup& ranks, const Seat& seat, const Pieces& whole) {
    Pieces out(seat.size());
    out[seat.rank] = whole[seat.rank];
    for (size_t r = 0; r < ranks.runs.size(); ++r)
      for (size_t k = 0; r != ranks.here && k < ranks.runs[r].count; ++k)
        if (const size_t m = ranks.runs[r].begin + k; receiver_in(ranks.runs[ranks.here], k) == seat.rank)
          out[m] = whole[m];
    return out;
  }

  Messages far_;
  std::vector<Stretch> results_;
  std::vector<Copy> copies_;
};

}  // namespace

std::unique_ptr<Collective> bind_process_gather(GroupState& here, const RanksOfGroup& ranks, const Seat& seat,
                                                const CollectiveSpec& spec, const Pieces& part, const Pieces& whole) {
  return std::make_unique<ProcessGather>(here, ranks, seat, spec, part, whole);
}

}  // namespace whale
