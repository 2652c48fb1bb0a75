#include "run/sharing.h"

#include <algorithm>
#include <cstring>

namespace whale {
namespace {

constexpr uint64_t kTag = ~uint64_t{0} >> 1;  // that of no collective and of no link

// Of all tensors that are there, one behind the other.
template <class Run>
void each_run(const std::vector<ByteRuns>& parts, const std::vector<void*>& tensors, Run run) {
  size_t packed = 0;
  for (size_t t = 0; t < tensors.size(); ++t)
    for (const ByteRun& part : parts[t]) {
      if (tensors[t] == nullptr) break;
      run(static_cast<char*>(tensors[t]) + part.at, packed, part.bytes);
      packed += part.bytes;
    }
}

}  // namespace

void join(ByteRuns& bytes) {
  std::sort(bytes.begin(), bytes.end(), [](const ByteRun& a, const ByteRun& b) { return a.at < b.at; });
  ByteRuns out;
  for (const ByteRun& run : bytes) {
    if (run.bytes == 0) continue;
    if (out.empty() || out.back().at + out.back().bytes < run.at)
      out.push_back(run);
    else
      out.back().bytes = std::max(out.back().bytes, run.at + run.bytes - out.back().at);
  }
  bytes = std::move(out);
}

Sharing::Sharing(Wire& wire, std::vector<std::vector<ByteRuns>> parts) : wire_(wire), parts_(std::move(parts)) {
  const auto size = static_cast<size_t>(wire.size()), mine = static_cast<size_t>(wire.rank());
  const auto has_any = [&](size_t rank) {
    return std::any_of(parts_[rank].begin(), parts_[rank].end(), [](const ByteRuns& b) { return !b.empty(); });
  };
  senders_.resize(size), receivers_.resize(size);
  for (size_t r = 0; r < size; ++r) {
    if (r == mine) continue;
    if (has_any(mine)) senders_[r] = wire.open_sender(static_cast<int>(r), kTag, 1);
    if (has_any(r)) receivers_[r] = wire.open_receiver(static_cast<int>(r), kTag);
  }
}

size_t Sharing::bytes_of(size_t rank, const std::vector<void*>& tensors) const {
  size_t sum = 0;
  each_run(parts_[rank], tensors, [&](char*, size_t, size_t bytes) { sum += bytes; });
  return sum;
}

bool Sharing::run(const std::vector<void*>& tensors, Lookout* lookout) {
  const auto mine = static_cast<size_t>(wire_.rank());
  const size_t sent = bytes_of(mine, tensors);
  for (auto& sender : senders_) {
    if (!sender || sent == 0) continue;
    char* to = sender->begin(sent, lookout);
    if (to == nullptr) return false;
    each_run(parts_[mine], tensors, [&](char* from, size_t at, size_t n) { std::memcpy(to + at, from, n); });
    sender->end();
  }
  for (size_t r = 0; r < receivers_.size(); ++r) {
    const size_t bytes = receivers_[r] ? bytes_of(r, tensors) : 0;
    if (bytes == 0) continue;
    const char* from = receivers_[r]->begin(bytes, lookout);
    if (from == nullptr) return false;
    each_run(parts_[r], tensors, [&](char* to, size_t at, size_t n) { std::memcpy(to, from + at, n); });
    receivers_[r]->end();
  }
  return true;
}

}  // namespace whale
