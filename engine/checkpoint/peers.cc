#include "checkpoint/peers.h"

#include <charconv>
#include <new>

#include "base/watch.h"

namespace whale {
namespace {

std::string failed(int rank, const Error& e) {
  return fmt::format("{} {}\n{}", static_cast<int>(e.code()), e.where().rank < 0 ? rank : e.where().rank,
                     e.where().rank < 0 ? fmt::format("rank {}: {}", rank, e.message()) : e.message());
}

}  // namespace

std::string told(int rank, const std::function<std::string()>& work) {
  try {
    return "0\n" + work();
  } catch (const Error& e) {
    return failed(rank, e);
  } catch (const Stopped& e) {
    return failed(rank, e.error());
  } catch (const std::bad_alloc&) {
    return failed(rank, error(Code::kResourceExhausted, "no memory to save or load a checkpoint"));
  } catch (const std::exception& e) {
    return failed(rank, internal("saving or loading a checkpoint failed: {}", e.what()));
  }
}

std::string heard(const std::string& told) {
  const size_t line = told.find('\n');
  if (line == std::string::npos) throw internal("a rank says nothing of a checkpoint");
  const char* const end = told.data() + line;
  int code = 0, rank = -1;
  const auto [next, failed] = std::from_chars(told.data(), end, code);
  if (failed != std::errc{}) throw internal("a rank says '{}' of a checkpoint", told.substr(0, line));
  if (code == 0) return told.substr(line + 1);
  if (next != end) std::from_chars(next + 1, end, rank);
  throw Error(static_cast<Code>(code), told.substr(line + 1)).at_rank(rank);
}

std::string lead(Peers& peers, const std::function<std::string()>& work) {
  return heard(peers.spread(peers.rank() == 0 ? told(0, work) : std::string()));
}

void agree(Peers& peers, const std::function<void()>& work) {
  const std::vector<std::string> all = peers.collect(told(peers.rank(), [&] {
    work();
    return std::string();
  }));
  lead(peers, [&] {
    for (const std::string& each : all) heard(each);
    return std::string();
  });
}

}  // namespace whale
