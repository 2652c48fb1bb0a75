// What each range of a device's memory holds. Ranges are bytes: what is written over is gone.
#pragma once

#include <functional>
#include <map>
#include <unordered_map>

#include "plan/plan.h"
#include "prove/reference.h"
#include "prove/value.h"

namespace whale::proof {

// A range of one space: the arena, the host's, a variable.
struct Place {
  int32_t space = 0;
  int64_t begin = 0, bytes = 0;
  friend bool operator==(const Place&, const Place&) = default;
};
inline bool meet(const Place& a, const Place& b) {
  return a.space == b.space && a.begin < b.begin + b.bytes && b.begin < a.begin + a.bytes;
}

class Memory {
 public:
  void write(const Place& place, Held value);
  // What lies there, put together from whole ranges and parts of them; null: nobody wrote it. Stops where parts do not
  // make one part of one tensor.
  Held read(const Reference& ref, const Place& place, DType dtype) const;
  // The same range by range, in order; empty: nobody wrote some of it.
  struct Part {
    int64_t bytes = 0;
    Held value;
  };
  std::vector<Part> parts(const Place& place) const;
  // What exactly these bytes hold, put there at once; null: none is.
  Held whole(const Place& place) const;
  // Replaces what lies there, range by range, by what `now` says of it; null: nothing.
  void replace(const Place& place, const std::function<Held(const Held&)>& now);

 private:
  // Of a value that lies from `origin` on, all of it or what is left.
  struct Range {
    int64_t end = 0, origin = 0;
    Held value;
    bool whole(int64_t begin) const;
  };
  using Ranges = std::map<int64_t, Range>;  // by begin
  static Held part(const Range& range, int64_t from, int64_t bytes);
  std::unordered_map<int32_t, Ranges> spaces_;
};

Place place_of(const Program& program, BufferId id, int32_t version);

}  // namespace whale::proof
