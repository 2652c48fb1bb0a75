// The ranks that save or load together. Rank 0 leads: it hears what each has to say, and tells all what holds.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/error.h"

namespace whale {

// All ranks make the same calls in the same order. A call throws where a rank is lost or does not answer in time, on
// every rank sooner or later; after that there are no more calls.
class Peers {
 public:
  virtual ~Peers() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::vector<std::string> collect(const std::string& mine) = 0;  // of all, by rank, on rank 0; else nothing
  virtual std::string spread(const std::string& rank_0s) = 0;             // on every rank
  // Seconds until a rank sees in a directory what another has made there: network file systems keep names for a minute.
  virtual double patience() const { return 90; }
};

// What `work` returns, or the Error that it throws, as a text that names this rank; and back.
std::string told(int rank, const std::function<std::string()>& work);
std::string heard(const std::string& told);

// What `work` returns on rank 0, on every rank; or what it throws.
std::string lead(Peers& peers, const std::function<std::string()>& work);
// Work of every rank, which has failed on all when it has failed on one: all throw the Error of the first that has.
void agree(Peers& peers, const std::function<void()>& work);

}  // namespace whale
