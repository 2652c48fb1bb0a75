#include "world/world.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <numeric>
#include <sstream>

#include "base/error.h"
#include "base/watch.h"

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
  std::string get(const std::string& key, int /*from*/, double timeout_seconds) override {
    std::unique_lock lock(mutex_);
    if (!watched_wait(came_, lock, timeout_seconds, [&] { return values_.contains(key); }))
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

std::string key_of(const World& world, int rank) { return fmt::format("session {}/{}", world.number, rank); }

constexpr std::string_view kNoSession = "no session: ";

class InprocWorlds final : public Worlds {
 public:
  // What all ranks share. Each rank takes its wire of a session; who is the first makes those of all.
  struct Shared {
    explicit Shared(int ranks) : size(ranks) {}
    const int size;
    const std::shared_ptr<Store> store = make_inproc_store();
    std::mutex mutex;
    std::map<uint64_t, std::vector<std::shared_ptr<Wire>>> wires;  // by session, that somebody has not taken yet
  };
  InprocWorlds(std::shared_ptr<Shared> shared, int rank) : shared_(std::move(shared)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return shared_->size; }
  World next() override {
    const std::lock_guard lock(shared_->mutex);
    auto& wires = shared_->wires[sessions_];
    if (wires.empty()) wires = make_inproc_wires(size());
    World world{shared_->store, std::move(wires[rank_]), {}, sessions_};
    if (std::none_of(wires.begin(), wires.end(), [](const auto& wire) { return bool(wire); }))
      shared_->wires.erase(sessions_);
    ++sessions_;
    return world;
  }

 private:
  const std::shared_ptr<Shared> shared_;
  const int rank_;
  uint64_t sessions_ = 0;
};

}  // namespace

void Whereabouts::add(uint64_t session, Ask ask) {
  const std::lock_guard lock(mutex_);
  sessions_[session] = std::move(ask);
}
void Whereabouts::remove(uint64_t session) {
  const std::lock_guard lock(mutex_);
  sessions_.erase(session);
}
std::string Whereabouts::text() const {
  const std::lock_guard lock(mutex_);
  std::string newest;
  for (auto at = sessions_.rbegin(); at != sessions_.rend(); ++at) {
    Place place = at->second();
    if (place.in_run) return std::move(place.text);
    if (newest.empty()) newest = std::move(place.text);
  }
  return newest;
}

std::shared_ptr<Store> make_inproc_store() { return std::make_shared<InprocStore>(); }

std::string text_of_rank(const World& world, int rank) {
  const auto r = static_cast<size_t>(rank);
  return r < world.hosts.size() ? fmt::format("rank {} (host '{}')", rank, world.hosts[r])
                                : fmt::format("rank {}", rank);
}

int who_left(const World& world, const std::vector<int32_t>& ranks) {
  for (const int32_t r : ranks)
    if (world.has_left && r != world.rank() && world.has_left(r)) return r;
  return -1;
}

std::vector<int32_t> all_ranks(const World& world) {
  std::vector<int32_t> all(static_cast<size_t>(world.size()));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

std::vector<int32_t> ranks_of_devices(int ranks, size_t devices) {
  std::vector<int32_t> of(devices);
  for (size_t d = 0; d < devices; ++d) of[d] = static_cast<int32_t>(d * static_cast<size_t>(ranks) / devices);
  for (int r = 0; r < ranks; ++r)
    if (std::find(of.begin(), of.end(), r) == of.end())
      throw invalid(
          "rank {} of {} has none of the plan's {} device{}: launch at most {} rank{} (whale launch -n {}), or plan "
          "for "
          "at least {} devices, one for each rank (such as --devices cpu:{})",
          r, ranks, devices, devices == 1 ? "" : "s", devices, devices == 1 ? "" : "s", devices, ranks, ranks)
          .at_rank(r);
  return of;
}

void agree(const World& world, const std::string& text, double timeout_seconds) {
  if (world.size() == 1) return;
  world.store->put(key_of(world, world.rank()), text);
  std::vector<std::string> texts;
  for (int r = 0; r < world.size(); ++r) {
    try {
      texts.push_back(world.store->get(key_of(world, r), r, timeout_seconds));
    } catch (const Error& e) {
      if (e.code() != Code::kDeadlineExceeded) throw;
      throw error(e.code(), "rank {} has not opened its session in {} seconds", r, timeout_seconds).at_rank(r);
    }
    if (texts.back().starts_with(kNoSession))
      throw error(Code::kFailedPrecondition, "rank {} opens no session: {}", r, texts.back().substr(kNoSession.size()))
          .at_rank(r);
  }
  // Of two ranks nobody knows which is wrong; of more, one that most others do not agree with.
  std::map<std::string_view, int> alike;
  for (const std::string& text : texts) ++alike[text];
  const auto right =
      std::max_element(texts.begin(), texts.end(), [&](const auto& a, const auto& b) { return alike[a] < alike[b]; });
  const auto wrong = std::find_if(texts.begin(), texts.end(), [&](const auto& text) { return text != *right; });
  if (wrong == texts.end()) return;
  const auto good = right - texts.begin(), bad = wrong - texts.begin();
  const std::vector<std::string> ours = lines(*right), theirs = lines(*wrong);
  for (size_t l = 0; l < std::max(ours.size(), theirs.size()); ++l) {
    const std::string a = l < ours.size() ? ours[l] : "nothing", b = l < theirs.size() ? theirs[l] : "nothing";
    if (a != b)
      throw error(
          Code::kFailedPrecondition,
          "the ranks do not run the same: rank {} has '{}', rank {} has '{}'. Give all ranks one plan, with the "
          "same options, and one version of libwhale",
          good, a, bad, b)
          .at_rank(static_cast<int>(bad));
  }
}

void refuse(const World& world, const Error& why) noexcept {
  try {
    world.store->put(key_of(world, world.rank()), std::string(kNoSession) + why.message());
  } catch (...) {  // no memory, or no store any more: the others wait in vain
  }
}

std::vector<std::shared_ptr<Worlds>> make_inproc_ranks(int ranks) {
  const auto shared = std::make_shared<InprocWorlds::Shared>(ranks);
  std::vector<std::shared_ptr<Worlds>> all;
  for (int r = 0; r < ranks; ++r) all.push_back(std::make_shared<InprocWorlds>(shared, r));
  return all;
}

std::vector<World> make_inproc_worlds(int ranks) {
  std::vector<World> worlds;
  for (const auto& mine : make_inproc_ranks(ranks)) worlds.push_back(mine->next());
  return worlds;
}

}  // namespace whale
