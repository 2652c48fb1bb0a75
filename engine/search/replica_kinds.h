// Of one way to cut a model: what a replica may be made of, without the ways that another one is better than.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "search/pipeline_price.h"
#include "search/share_out.h"

namespace whale {

// A replica's step takes fill + micro-batches x peak, of which it does `micro_batches_by`.
struct ReplicaKind {
  ShareRow use{};
  int64_t micro_batch = 1;
  double fill = 0;  // seconds of all stages once, and the update, less one peak
  double peak = 0;  // seconds of its slowest stage
  std::vector<StagePlace> stages;
  int64_t micro_batches_by(double deadline) const;
};

// Tables of one problem that every cut asks.
class KindTables {
 public:
  explicit KindTables(const ClusterProblem& problem);
  struct Place {
    int type = 0, split_at = 0;
    ShareRow use{};
  };
  // Rows: of each type, devices in groups of at least 1, 2, 4, ...; where nodes are multiples of the largest group one
  // row says it all. The last row counts replicas.
  const ShareRow& have() const { return have_; }
  size_t rows() const { return rows_; }
  std::span<const Place> places() const { return places_; }
  std::span<const int64_t> micro_batches() const { return micro_batches_; }
  const ClusterProblem& problem() const { return *problem_; }

  // Appends kinds for these cuts that are worth more than the devices they use, when one of each row is worth `price`
  // (in samples by the deadline): of each size of micro-batch and each bound of the slowest stage (in steps of that
  // ratio), the best one. Stage i, on devices of type t, is split over at least splits[least[i * types + t]] devices;
  // where that is past the end, stage i is on no devices of type t. Gives the largest ratio of samples to what the
  // devices are worth.
  double kinds(std::span<const int> cuts, std::span<const int> least, double deadline, std::span<const double> price,
               double step, std::vector<ReplicaKind>& out) const;
  // Appends all of them, if there are no more than `most`; whether it did.
  bool all_kinds(std::span<const int> cuts, std::span<const int> least, double deadline, size_t most,
                 std::vector<ReplicaKind>& out) const;
  // Samples a second that no replica of these cuts exceeds.
  double fastest(std::span<const int> cuts, std::span<const int> least) const;
  // Seconds of a stage, without its sends; infinity where it is not known.
  double stage_seconds(size_t micro_batch_at, size_t place, int begin, int end) const {
    const std::vector<double>& sums = sums_[micro_batch_at * places_.size() + place];
    return sums.empty() ? kNever : sums[end] - sums[begin];
  }
  bool fits(size_t micro_batch_at, size_t place, int begin, int end, int after) const;

  static constexpr double kNever = 1e300;

 private:
  double send(size_t micro_batch_at, int layer, size_t from, size_t to) const {
    return sends_[(micro_batch_at * static_cast<size_t>(problem_->layers) + static_cast<size_t>(layer)) *
                      places_.size() * places_.size() +
                  from * places_.size() + to];
  }
  const ClusterProblem* problem_;
  ShareRow have_{};
  size_t rows_ = 0;
  std::vector<Place> places_;
  std::vector<int64_t> micro_batches_;
  std::vector<std::vector<double>> sums_;                      // [micro-batch, place][layers before]
  std::vector<const LayerTimes*> times_;                       // [micro-batch, place]
  std::vector<double> sends_;                                  // [micro-batch, layer, from, to]
  std::vector<std::vector<double>> parameters_, activations_;  // [split][layers before]
};

}  // namespace whale
