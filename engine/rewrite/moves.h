// Copies between a device's memory and its host's, collected over a graph in its final order and then put in.
#pragma once

#include <map>
#include <tuple>
#include <vector>

#include "shard/sharded_graph.h"

namespace whale {

// An op that reads a storage, and the tensor as which it does (the storage's own or a view of it).
struct Use {
  size_t op = 0;
  TensorId id = kNone;
};

class Moves {
 public:
  explicit Moves(ShardedGraph& graph);

  // Ops of one segment run one after the other on a device; a phase of a segment has copies of its own.
  using Segment = std::tuple<int, int32_t, int, Phase>;
  Segment segment_of(size_t op, TensorId read = kNone) const;
  // In order; through views, which do not count. Storage root of every tensor: see view_root.
  const std::vector<Use>& uses_of(TensorId root) const { return uses_[root]; }
  // Ops (no views) of the op's mesh in [from, to).
  size_t ops_between(size_t from, size_t to) const;

  // to_host in front of op `before`, with the place in the program of op `like`. `places`: results of earlier ones, to
  // be written over.
  TensorIds store(const TensorIds& values, size_t before, size_t like, const TensorIds& places = {});
  // The uses read copies of `host` instead of `root`; none is made before op `after`.
  void fetch(TensorId host, TensorId root, const std::vector<Use>& uses, size_t after);
  // A copy at the very start, for whoever wants it whole: in the form of this view of it.
  TensorId fetch_first(TensorId host, TensorId view);
  void apply();

 private:
  struct Request {
    TensorId host, root;
    std::vector<Use> uses;
    size_t after;
  };
  struct Copy {  // requests with one first reader
    std::vector<Request> requests;
    size_t reader = 0, after = 0, position = 0;
    double seconds = 0;
  };
  struct Inserted {
    int rank;  // of those before one op: copies out, copies in, views
    Op op;
  };
  void place(std::vector<Copy*>& copies, const std::vector<size_t>& ops) const;
  void insert(const Copy& copy);
  TensorId seen_through(TensorId id, TensorId root, TensorId copy, const Op& reader, size_t position,
                        std::map<TensorId, TensorId>& known);

  ShardedGraph& lg_;
  Graph& g_;
  std::vector<std::vector<Use>> uses_;
  std::vector<char> later_;  // per op: weight_ops
  std::vector<double> seconds_;
  bool timed_, pipelined_;
  std::vector<Request> requests_;
  std::vector<std::vector<Inserted>> before_;  // per op, and at the end
};

}  // namespace whale
