// For tests of checkpoints of several ranks: the small one of checkpoint_kit.h, cut, and ranks that are processes.
#pragma once

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <csignal>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <thread>

#include "checkpoint/shards.h"
#include "checkpoint_kit.h"

namespace whale::kit {

// Sockets between rank 0 and each other rank: the end of a process is the end of its sockets.
class SocketPeers final : public Peers {
 public:
  SocketPeers(int rank, std::vector<int> sockets) : rank_(rank), sockets_(std::move(sockets)) {}
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(sockets_.size()); }
  double patience() const override { return 0.3; }
  std::vector<std::string> collect(const std::string& mine) override {
    std::vector<std::string> all;
    if (rank_ != 0) send(0, mine);
    for (int r = 0; rank_ == 0 && r < size(); ++r) all.push_back(r == 0 ? mine : receive(r));
    return all;
  }
  std::string spread(const std::string& text) override {
    if (rank_ != 0) return receive(0);
    std::optional<Error> lost;  // the others are told nevertheless
    for (int r = 1; r < size(); ++r) try {
        send(r, text);
      } catch (const Error& e) {
        lost = e;
      }
    if (lost) throw Error(*lost);
    return text;
  }

 private:
  void send(int rank, const std::string& text) {
    const uint64_t bytes = text.size();
    const std::string all = std::string(reinterpret_cast<const char*>(&bytes), sizeof bytes) + text;
    for (size_t at = 0; at < all.size();) {
      const ssize_t n = ::send(socket(rank), all.data() + at, all.size() - at, MSG_NOSIGNAL);
      if (n <= 0) lost(rank);
      at += static_cast<size_t>(n);
    }
  }
  std::string receive(int rank) {
    uint64_t bytes = 0;
    fill(rank, &bytes, sizeof bytes);
    std::string text(bytes, '\0');
    fill(rank, text.data(), bytes);
    return text;
  }
  void fill(int rank, void* to, size_t bytes) {
    for (size_t at = 0; at < bytes;) {
      const ssize_t n = ::recv(socket(rank), static_cast<char*>(to) + at, bytes - at, 0);
      if (n <= 0) lost(rank);
      at += static_cast<size_t>(n);
    }
  }
  [[noreturn]] void lost(int rank) { throw error(Code::kUnavailable, "rank {} is lost", rank).at_rank(rank); }
  int socket(int rank) const { return sockets_[rank_ == 0 ? rank : 0]; }
  int rank_;
  std::vector<int> sockets_;  // of rank 0: to each; of the others: [0]
};

// This rank's share of what checkpoint_kit's write() writes; `reads` is called before each read of a value.
inline void write_share(const std::string& directory, int64_t value, Peers& peers, const FaultProbe& probe = {},
                        const std::function<void()>& reads = {}) {
  const auto rank = static_cast<size_t>(peers.rank());
  Shards shards(peers.size(), 100);
  std::vector<int32_t> all;
  for (int r = 0; r < peers.size(); ++r) all.push_back(r);
  const auto v = static_cast<float>(value);
  const auto share = [&](const std::vector<std::pair<std::string, Dims>>& tensors) {
    CheckpointPart out;
    std::vector<std::pair<size_t, VariablePart>> pieces;
    for (size_t t = 0; t < tensors.size(); ++t) {
      const auto& [name, dims] = tensors[t];
      const Part whole = part_of(dims, std::vector<SubAxisCut>{});
      const std::vector<Part> mine = shards.next(dims, 4, {{whole, all}})[rank];
      for (const Part& part : mine) {
        const std::string text = part == whole ? name : name + "[" + to_text(part) + "]";
        out.tensors.push_back({text, DType::kF32, part.extents(), 0, 0});
        if (!(part == whole)) out.parts[text] = {name, dims, part};
        pieces.emplace_back(t, VariablePart(part, dims, 4));
      }
    }
    out.source = [pieces, v, reads](size_t index, uint64_t offset, void* to, size_t bytes) {
      if (reads) reads();
      const auto& [tensor, part] = pieces[index];
      part.each_local(offset, offset + bytes, [&](uint64_t logical, uint64_t local, uint64_t n) {
        auto* floats = static_cast<float*>(to) + (local - offset) / 4;
        for (size_t i = 0; i < n / 4; ++i)
          floats[i] = v + static_cast<float>(tensor) + static_cast<float>(logical / 4 + i) / 1024;
      });
    };
    return out;
  };
  const CheckpointPart model = share({{"w", {300, 5}}, {"b", {5}}, {"none", {0, 4}}});
  write_checkpoint(directory, {"model", 7, value, 1, 0.5, {}, 0}, model, share({{"w/m", {300, 5}}}), probe, &peers);
}

// body(peers) in a process for each rank; how each ended: "" well, "killed", or what it threw. None lives for more than
// half a minute.
inline std::vector<std::string> in_processes(int ranks, const std::function<void(Peers&)>& body,
                                             const std::function<void(const std::vector<pid_t>&)>& beside = {}) {
  constexpr size_t kText = 4096;
  char* const told = static_cast<char*>(
      ::mmap(nullptr, kText * static_cast<size_t>(ranks), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  std::vector<std::array<int, 2>> pairs(static_cast<size_t>(ranks), {-1, -1});
  for (size_t r = 1; r < pairs.size(); ++r) REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, pairs[r].data()) == 0);
  std::vector<pid_t> children;
  for (int r = 0; r < ranks; ++r) {
    const pid_t child = ::fork();
    if (child != 0) {
      children.push_back(child);
      continue;
    }
    ::alarm(30);
    std::vector<int> mine(static_cast<size_t>(ranks), -1);
    for (size_t other = 1; other < pairs.size(); ++other) {
      if (r == 0) mine[other] = pairs[other][0];
      if (r == static_cast<int>(other)) mine[0] = pairs[other][1];
      if (r != 0) ::close(pairs[other][0]);
      if (r != static_cast<int>(other)) ::close(pairs[other][1]);
    }
    SocketPeers peers(r, mine);
    try {
      body(peers);
    } catch (const Error& e) {
      std::strncpy(told + kText * static_cast<size_t>(r), e.message().c_str(), kText - 1);
    } catch (const std::exception& e) {
      std::strncpy(told + kText * static_cast<size_t>(r), e.what(), kText - 1);
    }
    ::_exit(0);
  }
  for (const auto& pair : pairs)
    for (const int end : pair)
      if (end >= 0) ::close(end);
  if (beside) beside(children);
  std::vector<std::string> ends;
  for (size_t r = 0; r < children.size(); ++r) {
    int status = 0;
    ::waitpid(children[r], &status, 0);
    const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    ends.push_back(killed                ? "killed"
                   : WIFSIGNALED(status) ? fmt::format("signal {}", WTERMSIG(status))
                                         : std::string(told + kText * r));
  }
  ::munmap(told, kText * static_cast<size_t>(ranks));
  return ends;
}

}  // namespace whale::kit
