#include "world/world.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <sstream>

#include "base/error.h"

namespace whale {
namespace {

class InprocStore final : public Store {
 public:
  void put(const std::string& key, std::string value) override {
    {
      const std::lock_guard lock(mutex_);
      values_[key] = std::move(value);
    }
    came_.notify_all();
  }
  std::string get(const std::string& key, double timeout_seconds) override {
    std::unique_lock lock(mutex_);
    if (!came_.wait_for(lock, std::chrono::duration<double>(timeout_seconds), [&] { return values_.contains(key); }))
      throw error(Code::kDeadlineExceeded, "no rank has put '{}' in {} seconds", key, timeout_seconds);
    return values_[key];
  }

 private:
  std::mutex mutex_;
  std::condition_variable came_;
  std::map<std::string, std::string> values_;
};

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> out;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) out.push_back(line);
  return out;
}

std::string key_of(const std::string& name, int rank) { return fmt::format("{}/{}", name, rank); }

}  // namespace

std::shared_ptr<Store> make_inproc_store() { return std::make_shared<InprocStore>(); }

std::vector<int32_t> ranks_of_devices(const World& world, size_t devices) {
  const auto size = static_cast<size_t>(world.size());
  if (world.rank() < 0 || world.rank() >= world.size())
    throw invalid("rank {} of a world of {}", world.rank(), world.size());
  std::vector<int32_t> ranks = world.ranks;
  if (ranks.empty())
    for (size_t d = 0; d < devices; ++d) ranks.push_back(static_cast<int32_t>(d * size / std::max<size_t>(devices, 1)));
  if (ranks.size() != devices)
    throw invalid("the world says the ranks of {} devices, the plan has {}", ranks.size(), devices);
  for (int r = 0; r < world.size(); ++r)
    if (std::find(ranks.begin(), ranks.end(), r) == ranks.end())
      throw invalid("rank {} of {} has none of the plan's {} devices; plan for at least a device a rank", r, size,
                    devices)
          .at_rank(r);
  for (const int32_t r : ranks)
    if (r < 0 || r >= world.size()) throw invalid("a device of the plan is of rank {}, the world has {}", r, size);
  return ranks;
}

void agree(const World& world, const std::string& name, const std::string& text, double timeout_seconds) {
  if (world.size() == 1) return;
  world.store->put(key_of(name, world.rank()), text);
  const std::vector<std::string> first = lines(world.store->get(key_of(name, 0), timeout_seconds));
  for (int r = 1; r < world.size(); ++r) {
    std::string theirs;
    try {
      theirs = world.store->get(key_of(name, r), timeout_seconds);
    } catch (Error& e) {
      throw Error(e.at_rank(r));
    }
    const std::vector<std::string> other = lines(theirs);
    for (size_t l = 0; l < std::max(first.size(), other.size()); ++l) {
      const std::string a = l < first.size() ? first[l] : "nothing", b = l < other.size() ? other[l] : "nothing";
      if (a == b) continue;
      throw error(Code::kFailedPrecondition,
                  "the ranks do not run the same: rank 0 has '{}', rank {} has '{}'. Give all ranks one plan, with the "
                  "same options, and one version of libwhale",
                  a, r, b)
          .at_rank(r);
    }
  }
}

std::vector<World> make_inproc_worlds(int ranks) {
  const auto store = make_inproc_store();
  std::vector<World> worlds;
  for (auto& wire : make_inproc_wires(ranks)) worlds.push_back({store, std::move(wire), {}});
  return worlds;
}

}  // namespace whale
