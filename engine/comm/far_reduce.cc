#include "comm/far_reduce.h"

#include <algorithm>
#include <cstring>

namespace whale {
namespace {

// Of a long reduction: what has come is still in the cache when it is combined, and while one is combined the next are
// on their way. A multiple of every element's size.
constexpr size_t kChunk = 512 << 10;
constexpr uint32_t kChunksUnderWay = 8;

using Chunks = std::vector<Piece>;

class Reduce final : public Collective {
 public:
  Reduce(const Seat& seat, const FarReduce& what)
      : device_(seat.device),
        combine_(what.combine),
        dtype_(what.dtype),
        rank_(seat.rank),
        own_(chunks_of(seat.device, what.gives[seat.rank], kChunk)),
        target_(chunks_of(seat.device, what.target, kChunk)),
        others_(seat.size()) {
    const bool sums_here = bytes_of(what.target) > 0;
    size_t longest = 0;
    for (const Piece& chunk : target_) longest = std::max(longest, chunk.bytes);
    sum_.resize(longest), packed_.resize(longest);
    for (size_t k = 0; k < seat.size(); ++k) {
      const size_t m = seat.after(k);
      Other& other = others_[m];
      order_.push_back(m);
      chunks_ = std::max(chunks_, target_.size());
      if (m == seat.rank) continue;
      other.gives = chunks_of(device_, what.gives[m], kChunk);
      if (what.whole)
        for (Piece& chunk : other.gives) chunk = chunk.copied();
      chunks_ = std::max(chunks_, other.gives.size());
      const bool paced = sums_here && other.gives.size() == 1 && target_.size() == 1;
      if (!other.gives.empty()) other.gives_to = seat.to(m, paced ? 0 : kChunksUnderWay);
      if (sums_here) other.brings = seat.from(m);
      if (what.results.empty()) continue;
      other.results = chunks_of(device_, what.results[m], kChunk);
      chunks_ = std::max(chunks_, other.results.size());
      if (sums_here) other.sums_to = seat.to(m, kChunksUnderWay, Seat::kResults);
      if (!other.results.empty()) other.sums_from = seat.from(m, Seat::kResults);
    }
    order_.erase(order_.begin());
  }

  bool run(Lookout* lookout) override {
    for (size_t c = 0; c < chunks_; ++c) {
      for (const size_t m : order_)
        if (c < others_[m].gives.size() && !send(*others_[m].gives_to, device_, others_[m].gives[c], lookout))
          return false;
      if (c < target_.size()) {
        if (!add_up(c, lookout)) return false;
        for (const size_t m : order_)
          if (others_[m].sums_to && !send(*others_[m].sums_to, device_, target_[c], lookout)) return false;
      }
      if (c > 0 && !take_results(c - 1, lookout)) return false;
    }
    if (chunks_ > 0 && !take_results(chunks_ - 1, lookout)) return false;
    for (const size_t m : order_)
      for (auto* sender : {&others_[m].gives_to, &others_[m].sums_to})
        if (*sender && !(*sender)->settle(lookout)) return false;
    return true;
  }

 private:
  struct Other {
    Chunks gives, results;
    std::unique_ptr<Wire::Sender> gives_to = {}, sums_to = {};
    std::unique_ptr<Wire::Receiver> brings = {}, sums_from = {};
  };

  bool take_results(size_t c, Lookout* lookout) {
    for (const size_t m : order_)
      if (c < others_[m].results.size() && !receive(*others_[m].sums_from, device_, others_[m].results[c], lookout))
        return false;
    return true;
  }

  // A member's bytes are held until they have been combined.
  bool add_up(size_t c, Lookout* lookout) {
    const Piece& target = target_[c];
    const size_t elements = target.bytes / static_cast<size_t>(size_of(dtype_));
    const char* sum = nullptr;
    for (size_t m = 0; m < others_.size(); ++m) {
      const char* x = m == rank_ ? mine(c) : others_[m].brings->begin(target.bytes, lookout);
      if (x == nullptr) return false;
      if (m > 0) {
        char* to = m + 1 == others_.size() && target.flat != nullptr ? target.flat : sum_.data();
        if (device_.has_values()) device_.combine(combine_, dtype_, to, sum, x, elements);
        sum = to;
        if (m == 1 && rank_ != 0) others_[0].brings->end();
        if (m != rank_) others_[m].brings->end();
      } else {
        sum = x;
      }
    }
    if (sum != target.flat) unpack(device_, sum, target.runs);
    return true;
  }
  const char* mine(size_t c) {
    if (own_[c].flat != nullptr) return own_[c].flat;
    pack(device_, own_[c].runs, packed_.data());
    return packed_.data();
  }

  Device& device_;
  Combine combine_;
  DType dtype_;
  size_t rank_;
  Chunks own_, target_;
  std::vector<Other> others_;  // by member
  std::vector<size_t> order_;  // of the others
  size_t chunks_ = 0;
  std::vector<char> sum_, packed_;
};

}  // namespace

std::unique_ptr<Collective> bind_far_reduce(const Seat& seat, FarReduce what) {
  return std::make_unique<Reduce>(seat, what);
}

}  // namespace whale
