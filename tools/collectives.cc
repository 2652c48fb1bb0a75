// collectives [--sizes BYTES,...] [--ops NAME,...] [--seconds S] [--folder DIR] [--profile FILE]: times collectives
// between the ranks of a launcher, one CPU device each, over what processes have between them. Rank 0 prints a JSON
// line for each: median and quartiles of what the slowest rank took. `collectives --inproc N`: among N devices of this
// process.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "comm/transport.h"
#include "comm/wire.h"
#include "cost/profile_text.h"
#include "device/device.h"
#include "world/environment.h"
#include "world/process.h"

namespace whale {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  std::vector<int64_t> sizes = {4 << 10, 256 << 10, 4 << 20, 64 << 20};
  std::vector<std::string> ops = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "shift", "link", "triad"};
  double seconds = 0.5;  // of each measurement
  std::string folder;    // of back ends and couriers
  int inproc = 0;        // devices
  std::string profile;   // a file
};

// Of a device, as the tensors of a session are.
class DeviceMemory {
 public:
  DeviceMemory(Device& device, int64_t bytes)
      : device_(device), bytes_(static_cast<size_t>(bytes)), data_(device.allocate(bytes_)) {
    std::memset(data_, 0, bytes_);
  }
  ~DeviceMemory() { device_.release(data_, bytes_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  char* data() { return static_cast<char*>(data_); }
  size_t size() const { return bytes_; }

 private:
  Device& device_;
  const size_t bytes_;
  void* const data_;
};

// One member of a group of all: `bytes` are those of the whole tensor; of a shift or a link those that go each way;
// of a triad (STREAM's, no collective: how fast memory is) those of the three arrays of a member, so that it meets the
// caches that they meet.
struct Bench {
  DeviceMemory in, out, third;
  std::unique_ptr<Links> links;
  std::vector<std::unique_ptr<Collective>> bound;
  size_t triad = 0;  // elements

  Bench(const std::string& op, int64_t bytes, int rank, int size, Transport& transport, Links* shared, Device& device)
      : in(device, bytes), out(device, bytes), third(device, bytes) {
    const int64_t n = bytes / 4, begin = n * rank / size, end = n * (rank + 1) / size;
    const auto operand = [](DeviceMemory& memory, Dims dims) {
      return Operand{memory.data(), DType::kF32, std::move(dims), false, nullptr};
    };
    std::vector<Interval> cuts;
    for (int r = 0; r < size; ++r) cuts.push_back({n * r / size, n * (r + 1) / size});
    CollectiveSpec spec;
    const SubAxis all{0, 1, 1};
    if (op == "all_reduce") {
      spec.op = OpCode::k_all_reduce;
      spec.in = spec.out = {operand(in, {n})};
    } else if (op == "reduce_scatter") {
      spec.op = OpCode::k_reduce_scatter;
      spec.in = {operand(in, {n})}, spec.out = {operand(out, {end - begin})};
      spec.cuts = {{all, cuts}};
    } else if (op == "all_gather") {
      spec.op = OpCode::k_all_gather;
      spec.in = {operand(in, {end - begin})}, spec.out = {operand(out, {n})};
      spec.cuts = {{all, cuts}};
    } else if (op == "all_to_all") {  // rows that are cut become columns that are
      spec.op = OpCode::k_all_to_all;
      std::vector<Interval> columns;
      for (int r = 0; r < size; ++r) columns.push_back({r, r + 1});
      const int64_t rows = n / size;
      const int64_t mine = rows * (rank + 1) / size - rows * rank / size;
      cuts.clear();
      for (int r = 0; r < size; ++r) cuts.push_back({rows * r / size, rows * (r + 1) / size});
      spec.in = {operand(in, {size, mine})}, spec.out = {operand(out, {1, rows})};
      spec.cuts = {{SubAxis{1, 1, 1}, cuts}};
      spec.to = {all, columns};
    } else if (op == "shift") {  // each sends and receives
      spec.op = OpCode::k_shift;
      spec.in = {operand(in, {n})}, spec.out = {operand(out, {n})};
    } else if (op == "link") {  // each sends, and then receives: what was sent may be written again in between
      bound.push_back(shared->bind(0, rank, operand(in, {n}), true, device));
      bound.push_back(shared->bind(0, rank, operand(out, {n}), false, device));
      return;
    } else if (op == "triad") {
      triad = static_cast<size_t>(n / 3);
      return;
    } else {
      throw invalid("unknown collective {}", op);
    }
    bound.push_back(transport.bind(rank, spec, device));
  }
  void run() {
    for (auto& each : bound)
      if (!each->run(nullptr)) throw invalid("aborted");
    auto *x = reinterpret_cast<float*>(out.data()), *a = reinterpret_cast<float*>(in.data()),
         *b = reinterpret_cast<float*>(third.data());
    for (size_t i = 0; i < triad; ++i) x[i] = a[i] + 3 * b[i];
  }
};

struct Member {
  int rank, size;
  std::shared_ptr<Transport> transport;
  std::unique_ptr<Device> device;
};

Link ring_of(int size, int64_t bytes) {
  Link link;
  link.name = "ring";
  for (int r = 0; r < size; ++r) link.transfers.push_back({r, (r + 1) % size, {{0, bytes / 4}}, {{0, bytes / 4}}});
  link.capacity = 2;
  return link;
}

// All members take as many calls: rank 0 says how many by what a few took.
void measure(const Options& options, const Member& me,
             const std::function<std::shared_ptr<Links>(int64_t)>& open_links) {
  for (const std::string& op : options.ops)
    for (const int64_t bytes : options.sizes) {
      const auto links = op == "link" ? open_links(bytes) : nullptr;
      Bench bench(op, bytes, me.rank, me.size, *me.transport, links.get(), *me.device);
      Bench agree("all_reduce", 4 * me.size, me.rank, me.size, *me.transport, nullptr, *me.device);
      const auto most = [&](double mine) {  // the largest of all members': each has a place in a sum
        std::memset(agree.in.data(), 0, agree.in.size());
        auto* at = reinterpret_cast<float*>(agree.in.data());
        at[me.rank] = static_cast<float>(mine);
        agree.run();
        return static_cast<double>(*std::max_element(at, at + me.size));
      };
      for (int i = 0; i < 3; ++i) bench.run();
      auto begin = Clock::now();
      for (int i = 0; i < 3; ++i) bench.run();
      const double once = most(std::chrono::duration<double>(Clock::now() - begin).count() / 3);
      constexpr int kBlocks = 15;
      const int calls = std::max(1, static_cast<int>(options.seconds / kBlocks / std::max(once, 1e-7)));
      std::vector<double> seconds;
      for (int b = 0; b < kBlocks; ++b) {
        most(0);
        begin = Clock::now();
        for (int i = 0; i < calls; ++i) bench.run();
        seconds.push_back(most(std::chrono::duration<double>(Clock::now() - begin).count() / calls));
      }
      std::sort(seconds.begin(), seconds.end());
      if (me.rank == 0)
        std::printf("%s\n", nlohmann::json{{"op", op},
                                           {"bytes", bytes},
                                           {"ranks", me.size},
                                           {"microseconds", seconds[kBlocks / 2] * 1e6},
                                           {"quartiles", {seconds[kBlocks / 4] * 1e6, seconds[kBlocks * 3 / 4] * 1e6}},
                                           {"calls", calls * kBlocks}}
                                .dump()
                                .c_str());
      std::fflush(stdout);
    }
}

int run(const Options& options) {
  Backends backends(options.folder);
  Backend& cpu = backends.get(DeviceKind::kCpu);
  const auto device = [&] {
    auto opened = cpu.open({DeviceKind::kCpu, {0}, 0}, {.threads = 1, .pin = false});
    return opened;
  };
  const auto group_of = [](int size) {
    Group group{"replica", {{}}};
    for (int r = 0; r < size; ++r) group.parts[0].push_back(r);
    return group;
  };
  if (options.inproc > 0) {
    const int n = options.inproc;
    const std::shared_ptr<Transport> transport = make_inproc({group_of(n)});
    std::mutex mutex;
    std::vector<std::pair<int64_t, std::shared_ptr<Links>>> all;
    std::vector<std::thread> threads;
    for (int r = 0; r < n; ++r)
      threads.emplace_back([&, r] {
        size_t opened = 0;
        Member me{r, n, transport, device()};
        me.device->enter_thread(Queue::kCompute);
        measure(options, me, [&](int64_t bytes) {
          const std::lock_guard lock(mutex);
          if (opened == all.size()) all.emplace_back(bytes, transport->open_links({ring_of(n, bytes)}));
          return all[opened++].second;
        });
      });
    for (std::thread& thread : threads) thread.join();
    return 0;
  }
  const auto launch = launch_environment(backends.folder(), 30);
  if (!launch) throw invalid("start it with whale launch -n 2 -- collectives, or with --inproc 2");
  const auto worlds = join_processes(
      {launch->rank, launch->size, launch->address, launch->port, launch->token, 30, 0, backends.folder()});
  const World world = worlds->next();
  std::vector<int32_t> ranks;
  for (int r = 0; r < world.size(); ++r) ranks.push_back(r);
  Profile profile = kMachineOfCores;
  if (!options.profile.empty()) {
    std::ifstream file(options.profile);
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    profile = profile_of_text(text);
  }
  Member me{world.rank(), world.size(), make_reference({group_of(world.size())}, world.wire, ranks, profile), device()};
  me.device->enter_thread(Queue::kCompute);
  me.transport->reset();
  measure(options, me, [&](int64_t bytes) {
    return std::shared_ptr<Links>(me.transport->open_links({ring_of(world.size(), bytes)}));
  });
  return 0;
}

}  // namespace
}  // namespace whale

int main(int argc, char** argv) {
  whale::Options options;
  CLI::App app("Times collectives between the ranks of a launcher; --inproc: between devices of this process.");
  app.add_option("--sizes", options.sizes, "bytes of the whole tensor")->delimiter(',');
  app.add_option("--ops", options.ops)->delimiter(',')->check(CLI::IsMember(options.ops));
  app.add_option("--seconds", options.seconds, "of each measurement");
  app.add_option("--folder", options.folder, "of back ends and couriers");
  app.add_option("--profile", options.profile, "a file of figures, by which the form of an all-reduce is chosen");
  app.add_option("--inproc", options.inproc, "devices of this process");
  CLI11_PARSE(app, argc, argv);
  try {
    return whale::run(options);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "collectives: %s\n", e.what());
    return 1;
  }
}
