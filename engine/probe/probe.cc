#include "probe/probe.h"

#include <chrono>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "base/no_signals.h"
#include "probe/measure.h"
#include "probe/timing.h"
#include "run/team.h"

namespace whale {
namespace {

constexpr double kPatience = 120;  // seconds: of all of it, beside what it is asked to take

// What ends it before its time: a cancel, a lost rank, one that does nothing.
class Overseer final : public Lookout {
 public:
  Overseer(Transport& transport, Wire* wire, const std::atomic<bool>* cancel, double seconds)
      : transport_(transport), wire_(wire), cancel_(cancel), seconds_(seconds) {}
  void look() override {
    const std::lock_guard lock(mutex_);
    Notice notice;
    if (cancel_ != nullptr && cancel_->load(std::memory_order_relaxed))
      end_locked(whale::error(Code::kCancelled, "probing was cancelled"));
    else if (seconds_since(begin_) > seconds_)
      end_locked(
          whale::error(Code::kDeadlineExceeded, "a device or a rank has not taken part for {:.3g} seconds", seconds_));
    else
      while (wire_ != nullptr && wire_->hear(notice))
        if (notice.kind == Notice::kGone || notice.kind == Notice::kStopped || notice.kind == Notice::kClosed)
          end_locked(whale::error(notice.code, "rank {}: {}", notice.rank, notice.message).at_rank(notice.rank));
  }
  void end(Error why) {
    const std::lock_guard lock(mutex_);
    end_locked(std::move(why));
  }
  const std::optional<Error>& error() const { return error_; }

 private:
  void end_locked(Error why) {
    if (error_) return;
    if (wire_ != nullptr && why.where().rank < 0) wire_->tell(notice_of(Notice::kStopped, why));
    error_ = std::move(why);
    transport_.abort();
  }

  Transport& transport_;
  Wire* const wire_;
  const std::atomic<bool>* const cancel_;
  const double seconds_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
  std::optional<Error> error_;
};

// Of a message: what the small one takes, and the rest by the byte.
LinkRates rates_of(double small, double large, double share = 1, double rounds = 1) {
  const double bytes = share * static_cast<double>(Meetings::kLarge - Meetings::kSmall);
  return {bytes / std::max(large - small, 1e-9), small / rounds};
}

void check_kinds(const std::vector<DeviceSpec>& devices) {
  for (const DeviceSpec& spec : devices)
    if (spec.kind != DeviceKind::kCpu && spec.kind != DeviceKind::kRef && spec.kind != DeviceKind::kCuda)
      throw unimplemented("{} devices are not probed: they compute nothing, or are there for tests; probe cpu devices",
                          traits(spec.kind).name);
}

Json numbers(const ProbedDevice& d) {
  const auto list = [](const std::vector<ProbedDevice::Product>& products) {
    Json out = Json::array();
    for (const auto& p : products) out.push_back({p.size, p.flops_per_second});
    return out;
  };
  return {list(d.f32), list(d.bf16), d.bytes_per_second, d.host.bytes_per_second, d.host.latency_seconds};
}
void read(const Json& from, ProbedDevice& d) {
  const auto list = [](const Json& rows, std::vector<ProbedDevice::Product>& to) {
    for (const Json& row : rows) to.push_back({row.at(0), row.at(1)});
  };
  list(from.at(0), d.f32), list(from.at(1), d.bf16);
  d.bytes_per_second = from.at(2);
  d.host = {from.at(3), from.at(4)};
}

}  // namespace

Probed probe(Backends& backends, const std::vector<DeviceSpec>& devices, const ProbeOptions& options) {
  check_kinds(devices);
  const World* world = options.world && options.world->size() > 1 ? &*options.world : nullptr;
  std::vector<int32_t> ranks(devices.size());
  if (world != nullptr) ranks = ranks_of_devices(world->size(), devices.size());
  const int32_t me = world == nullptr ? 0 : world->rank();
  std::vector<size_t> here;
  std::vector<DeviceSpec> specs;
  for (size_t d = 0; d < devices.size(); ++d)
    if (ranks[d] == me) here.push_back(d), specs.push_back(devices[d]);
  const auto leases = options.leases ? options.leases : std::make_shared<CoreLeases>();
  const auto lease = CoreLeases::lease(leases, specs, 0, world == nullptr);
  const std::vector<Group> groups = groups_of_pairs(static_cast<int>(devices.size()));
  const std::unique_ptr<Transport> transport =
      world == nullptr ? make_inproc(groups) : make_reference(groups, world->wire, ranks);
  transport->reset();
  const double whole = options.seconds * 2 * static_cast<double>(groups.size() + 12);
  Overseer overseer(*transport, world == nullptr ? nullptr : world->wire.get(), options.cancel, whole + kPatience);

  std::vector<std::unique_ptr<Device>> opened;
  for (const DeviceSpec& spec : lease->specs())
    opened.push_back(backends.get(spec.kind).open(spec, {.pin = world == nullptr}));
  std::vector<ProbedDevice> measured(here.size());
  std::vector<Meetings> meetings(here.size());
  std::vector<std::unique_ptr<Prober>> probers(here.size());  // made on their threads
  const auto measure = [&](size_t k) {
    Device& device = *opened[k];
    device.enter_thread(Queue::kCompute);
    probers[k] = std::make_unique<Prober>(static_cast<int>(here[k]), groups, *transport, device, &overseer);
    Prober& prober = *probers[k];
    const auto all_begin = [&] { overseer.look(), (void)prober.most(0); };
    measure_device(device, !traits(specs[k].kind).overlaps && specs[k].cores.size() <= 1, options.seconds, all_begin,
                   measured[k]);
    meetings[k] = prober.measure(options.seconds);
    all_begin();  // nobody leaves before the others are through
  };
  {
    const NoSignals quiet;
    std::vector<std::thread> threads;
    for (size_t k = 0; k < here.size(); ++k)
      threads.emplace_back([&, k] {
        try {
          measure(k);
        } catch (const ProbeAborted&) {  // the overseer knows why
        } catch (const std::exception& e) {
          overseer.end(as_error(e, "probe a device"));
        }
      });
    for (std::thread& thread : threads) thread.join();
  }
  if (overseer.error()) throw Error(*overseer.error());

  Json mine = Json::array();
  for (size_t k = 0; k < here.size(); ++k)
    mine.push_back({numbers(measured[k]), meetings[k].small_gather, meetings[k].large_gather, meetings[k].small,
                    meetings[k].large});
  Json all = mine;
  if (world != nullptr) {
    const auto key = [&](int rank) { return fmt::format("probe {} {}", world->number, rank); };
    world->store->put(key(me), text_of(mine));
    all = Json::array();
    for (int r = 0; r < world->size(); ++r) {
      const Json theirs = Json::parse(world->store->get(key(r), r, kPatience));
      all.insert(all.end(), theirs.begin(), theirs.end());
    }
  }
  Probed out;
  for (size_t d = 0; d < devices.size(); ++d) {
    out.devices.push_back({.rank = ranks[d], .kind = devices[d].kind, .spec = devices[d]});
    read(all.at(d).at(0), out.devices.back());
  }
  const auto n = static_cast<double>(devices.size());
  if (devices.size() > 1) out.gather = rates_of(all.at(0).at(1), all.at(0).at(2), (n - 1) / n, n - 1);
  for (size_t a = 0; a < devices.size(); ++a)
    for (size_t b = a + 1; b < devices.size(); ++b) {
      const auto slower = [&](size_t what) {
        return std::max(all.at(a).at(what).at(b).get<double>(), all.at(b).at(what).at(a).get<double>());
      };
      out.links.push_back({static_cast<int>(a), static_cast<int>(b), rates_of(slower(3), slower(4))});
    }
  return out;
}

}  // namespace whale
