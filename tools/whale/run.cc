// run: a model on devices, on data; bench: the same with a stopwatch.
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <filesystem>

#include <nlohmann/json.hpp>

#include "commands.h"
#include "file.h"
#include "runner.h"

namespace tool {
namespace {

// step, loss, items/s, time left; on a terminal one line that moves, elsewhere a line every tenth of the way.
class Progress {
 public:
  Progress(int64_t steps, const char* unit) : steps_(steps), unit_(unit), terminal_(isatty(2)), start_(seconds_now()) {}
  void show(int64_t step, double loss, double items_per_second) {
    const double now = seconds_now();
    const bool last = step == steps_;
    if (!last && (terminal_ ? now - shown_ < 0.1 : step % std::max<int64_t>(1, steps_ / 10) != 0)) return;
    shown_ = now;
    const double left = (now - start_) / static_cast<double>(step) * static_cast<double>(steps_ - step);
    const int width = 24, filled = static_cast<int>(static_cast<double>(width) * static_cast<double>(step) /
                                                    static_cast<double>(steps_));
    std::string bar(static_cast<size_t>(filled), '#');
    bar.resize(static_cast<size_t>(width), '.');
    std::fprintf(stderr, "%s[%s] step %ld/%ld  loss %.4f  %.0f %s/s  %s left%s", terminal_ ? "\r" : "", bar.c_str(),
                 static_cast<long>(step), static_cast<long>(steps_), loss, items_per_second, unit_,
                 duration(left).c_str(), !terminal_ || last ? "\n" : "   ");
    std::fflush(stderr);
  }
  // Ends a line that moves.
  void leave() const {
    if (terminal_ && shown_ > 0) std::fputc('\n', stderr);
  }

 private:
  int64_t steps_;
  const char* unit_;
  bool terminal_;
  double start_, shown_ = 0;
};

// From here on the first signal that asks the run to end is kept for it; a second one ends the process at once.
class Interruption {
 public:
  // pipe: also that of a pipe that nobody reads any more.
  explicit Interruption(bool pipe) {
    for (const int number : kNumbers) {
      struct sigaction now {};
      if ((number == SIGPIPE && !pipe) || sigaction(number, nullptr, &now) != 0 || now.sa_handler == SIG_IGN) continue;
      now = {};
      now.sa_handler = keep;
      now.sa_flags = SA_RESTART;
      sigemptyset(&now.sa_mask);
      sigaction(number, &now, nullptr);
    }
  }
  static int number() { return kept_; }  // 0: none

 private:
  static constexpr int kNumbers[] = {SIGINT, SIGTERM, SIGHUP, SIGPIPE};
  static void keep(int number) {
    if (kept_ == 0) {
      kept_ = number;
    } else if (number != SIGPIPE) {
      std::signal(number, SIG_DFL);
      std::raise(number);
    }
  }
  static inline volatile std::sig_atomic_t kept_ = 0;
};

// What a save would refuse once the steps are done: for its directory, and for the plan's devices.
void check_directory(const std::string& save) {
  try {
    check(whale_checkpoint_check_target(str(save)));
  } catch (const Failure& failure) {
    throw Failure(std::string("--save: ") + failure.what());
  }
}
void check_savable(const whale_plan* plan) {
  const auto json = nlohmann::json::parse(text(whale_plan_json, plan));
  for (const auto& device : json.at("devices"))
    if (device.at("name").get<std::string>().starts_with("null"))
      throw Failure(
          "--save: the plan runs on null devices, which compute nothing and hold no values to save; leave --save "
          "out, or run on devices that compute, such as --devices cpu:1");
}

// A step was refused after `steps` others: saves what those have made, unless this one has changed it.
std::string keep_what_was_made(const Runner& runner, int64_t steps, bool unchanged, const std::string& save) {
  const std::string made = "the state after " + std::to_string(steps) + (steps == 1 ? " step" : " steps");
  if (save.empty()) return made + " was not saved (--save DIRECTORY does)";
  if (!unchanged) return "the step was applied, so nothing was saved to " + shown(save) + " after it";
  try {
    runner.save(save);
  } catch (const Failure& failure) {
    return made + " could not be saved: " + failure.what();
  }
  return "saved " + made + " to " + shown(save);
}

// r.html is r.rank0.html.
std::string file_of_rank(const std::string& path, int32_t rank) {
  const std::filesystem::path of(path);
  return (of.parent_path() / (of.stem().string() + ".rank" + std::to_string(rank) + of.extension().string())).string();
}

// Of the ranks of this process, in their order.
std::vector<std::string> trace_files(const std::string& path, const SessionArguments& session) {
  if (path.empty()) return {};
  if (ranks_of(session) == 1) return {path};
  const int32_t first = session.world == nullptr ? 0 : whale_world_rank(session.world);
  std::vector<std::string> files;
  for (int32_t r = first; r < first + session.ranks; ++r) files.push_back(file_of_rank(path, r));
  return files;
}

// Of all ranks of this process together.
std::string report_file(const std::string& path, const SessionArguments& session) {
  if (path.empty() || session.world == nullptr || ranks_of(session) == 1) return path;
  return file_of_rank(path, whale_world_rank(session.world));
}

}  // namespace

// Devices of types that are planned for. (Who writes `null` knows.)
static bool computes_nothing(const whale_plan* plan) {
  whale_device first = WHALE_DEVICE_INIT;
  check(whale_plan_device(plan, 0, &first));
  if (first.kind != WHALE_DEVICE_NULL) return false;
  const auto json = nlohmann::json::parse(text(whale_plan_json, plan));
  for (const auto& device : json.at("devices"))
    if (device.contains("type") && device.at("kind") == "null") return true;
  return false;
}
static void say_what_is_not_here(const whale_plan* plan) {
  if (computes_nothing(plan))
    std::fprintf(stderr,
                 "whale: the devices of this plan are planned for and not here: nothing is computed, losses are 0; how "
                 "long a step would take there says whale simulate\n");
}

void add_run(CLI::App& app, int& exit_code) {
  auto* command = app.add_subcommand("run", "train");
  struct State {
    std::string path, data, save, load, trace, report;
    PlanArguments arguments;
    int64_t steps = 100;
    SessionArguments session;
    bool json = false, quiet = false;
    double lr = -1;
  };
  auto state = std::make_shared<State>();
  command->add_option("FILE", state->path, "a .whale or a .plan file")->required();
  command->add_option("--data", state->data,
                      "text for token models; .npz or .safetensors of arrays named like the inputs (others are left "
                      "alone), .npy of the "
                      "only input; none: synthetic");
  command->add_option("--steps", state->steps, "training steps")->check(whole(1, INT64_MAX));
  auto* seed = command
                   ->add_option("--seed", state->session.seed,
                                "of parameters, dropout and the order of the data; with --load of the data alone "
                                "(default there: the checkpoint's)")
                   ->check(seed_number());
  command->add_option("--save", state->save, "write a checkpoint to this directory at the end");
  command->add_option("--load", state->load, "go on from this checkpoint, in the data too");
  command->add_option("--lr", state->lr, "learning rate, instead of the model's schedule")->check(not_negative());
  command->add_option("--trace", state->trace,
                      "write a timeline of the last step (open at ui.perfetto.dev); of several ranks a file each: "
                      "t.json is t.rank0.json");
  command->add_option("--report", state->report,
                      "write a page for a browser: the plan, and the timeline of the last step beside the predicted "
                      "one; of several processes each writes that of its own devices: r.html is r.rank0.html");
  command->add_flag("--json", state->json, "an object a step: step, loss, seconds, items_per_second");
  command->add_flag("--quiet", state->quiet, "no progress bar");
  command->add_flag("--ignore-nan", state->session.ignore_nan, "go on when the loss is not finite");
  command->add_flag("--no-pin", state->session.no_pin, "CPU devices run on whatever cores the system gives them");
  add_plan_options(*command, state->arguments);
  const auto* devices = command->get_option("--devices");
  add_precision_options(*command, state->session);
  add_ranks_option(*command, state->session);
  command->callback([state, seed, devices, &exit_code] {
    if (!state->save.empty()) check_directory(state->save);
    const Engine engine = make_engine(state->arguments.init_dir);
    const World world = join_processes(engine.get(), state->arguments, devices->count() > 0, state->session);
    const std::vector<std::string> traces = trace_files(state->trace, state->session);
    for (const std::string& trace : traces) check_target(trace, "--trace", {state->path, state->data});
    const std::string report = report_file(state->report, state->session);
    if (!report.empty()) check_target(report, "--report", {state->path, state->data});
    const bool first = is_first(state->session);
    if (!first) state->json = false, state->quiet = true;
    Plan plan = open_plan(engine.get(), state->path, state->arguments);
    if (first) say_what_is_not_here(static_cast<const whale_plan*>(plan.get()));
    if (!state->save.empty()) check_savable(plan.get());
    const std::vector<InputSpec> inputs = inputs_of(plan.get(), "train");
    const auto data = open_data(state->data, inputs);
    if (!state->json && !state->quiet)
      std::fprintf(stderr, "%s\n", text(whale_plan_summary, static_cast<const whale_plan*>(plan.get())).c_str());
    Runner runner(engine.get(), std::move(plan), state->session);
    uint64_t data_seed = state->session.seed;
    if (!state->load.empty()) {
      runner.load(state->load);
      const auto loaded = nlohmann::json::parse(text(whale_session_report_json, runner.session())).at("loaded");
      if (seed->count() == 0) data_seed = loaded.at("seed").get<uint64_t>();
      if (const auto& left_out = loaded.at("left_out"); !left_out.empty() && first)
        std::fprintf(
            stderr,
            "whale: '%s' holds optimizer state%s (%zu tensors, such as '%s') and this model's optimizer keeps none: "
            "it was left out, and what this run saves is without it\n",
            state->load.c_str(),
            loaded.at("optimizer").is_null() ? "" : (" of " + loaded.at("optimizer").get<std::string>()).c_str(),
            left_out.size(), left_out[0].get<std::string>().c_str());
      if (!loaded.at("checksums").get<bool>() && first)
        std::fprintf(stderr,
                     "whale: '%s' was saved by an older libwhale and has no checksums: a changed byte in it would not "
                     "have been noticed\n",
                     state->load.c_str());
    }
    if (state->lr >= 0)
      runner.each([&](whale_session* session) { check(whale_session_set_learning_rate(session, state->lr)); });
    Progress progress(state->steps, item_name(inputs));
    double loss = 0;
    const Interruption interruption(!state->save.empty());
    int64_t i = 1, skipped = 0;  // steps that updated nothing
    for (; i <= state->steps && interruption.number() == 0; ++i) {
      const int64_t last = whale_session_iteration(runner.session()), updates = whale_session_updates(runner.session());
      const Batch batch = data->batch(data_seed, last);
      if (i == state->steps && (!traces.empty() || !report.empty()))
        runner.each([](whale_session* session) { check(whale_session_trace(session, 1)); });
      const double start = seconds_now();
      try {
        loss = runner.step(batch);
      } catch (const Failure& refused) {
        const std::string place = data->place_of(last);
        const std::string what = refused.what() + (place.empty() ? "" : "\nwhale: " + place);
        if (i == 1) throw Failure(what);
        progress.leave();
        const bool unchanged = whale_session_updates(runner.session()) == updates;
        throw Failure(what + "\nwhale: " + keep_what_was_made(runner, last, unchanged, state->save));
      }
      skipped += whale_session_updates(runner.session()) == updates;
      const double seconds = seconds_now() - start;
      double items = static_cast<double>(items_of(inputs));
      for (const Array& array : batch)
        if (array.name == inputs[0].name)
          items *= static_cast<double>(array.dims[0]) / static_cast<double>(std::max<int64_t>(1, inputs[0].dims[0]));
      if (state->json) {
        std::printf("%s\n", nlohmann::json{{"step", whale_session_iteration(runner.session())},
                                           {"loss", loss},
                                           {"seconds", seconds},
                                           {"items_per_second", items / seconds}}
                                .dump()
                                .c_str());
        std::fflush(stdout);
      } else if (!state->quiet) {
        progress.show(i, loss, items / seconds);
      }
    }
    const bool whole = i > state->steps;
    try {
      if (!state->save.empty()) runner.save(state->save);
    } catch (const Failure&) {
      // A process that has not heard of the interruption yet began a step instead, which ended with this; now it saves
      // too.
      if (interruption.number() == 0 || state->session.world == nullptr) throw;
      runner.save(state->save);
    }
    if (skipped > 0 && first)
      std::fprintf(stderr,
                   "whale: %ld of %ld steps overflowed in float16 and updated nothing: the loss scale begins large and "
                   "is halved by each (--loss-scale)\n",
                   static_cast<long>(skipped), static_cast<long>(i - 1));
    if (whole) {
      std::vector<std::string> timelines;  // of the ranks of this process
      if (!traces.empty() || !report.empty())
        runner.each([&](whale_session* session) { timelines.push_back(text(whale_session_timeline_json, session)); });
      for (size_t r = 0; r < traces.size(); ++r) write_file(traces[r], timelines[r]);
      if (!report.empty()) write_file(report, report_of(runner.plan(), timelines));
    }
    if (!whole) {
      progress.leave();
      if (first)
        std::fprintf(
            stderr, "whale: interrupted after step %ld, %s%s\n",
            static_cast<long>(whale_session_iteration(runner.session())),
            state->save.empty() ? "nothing was saved (--save DIRECTORY does)" : ("saved " + state->save).c_str(),
            state->trace.empty() && state->report.empty() ? "" : "; no timeline was written");
    } else {
      if (!state->save.empty() && first) std::fprintf(stderr, "saved %s\n", state->save.c_str());
      if (state->quiet && !state->json && first) std::printf("%.6f\n", loss);
    }
    exit_code = interruption.number() == 0 ? 0 : 128 + interruption.number();
  });
}

void add_bench(CLI::App& app) {
  auto* command = app.add_subcommand("bench", "time training steps; one line of JSON");
  struct State {
    std::string path, data, name;
    PlanArguments arguments;
    SessionArguments session;
    int64_t steps = 20, warmup = 3, inner = 1;
    bool report = false, overhead = false;
  };
  auto state = std::make_shared<State>();
  command->add_option("FILE", state->path, "a .whale or a .plan file")->required();
  command->add_option("--data", state->data, "as for run; none: synthetic");
  command->add_flag("--overhead", state->overhead, "also the share of a step outside of ops, collectives and copies");
  command->add_option("--steps", state->steps, "timed steps")->check(whole(1, INT64_MAX));
  command->add_option("--warmup", state->warmup, "steps before")->check(whole(1, INT64_MAX));
  command->add_option("--inner", state->inner, "steps of one timed window")->check(whole(1, INT64_MAX));
  command->add_option("--name", state->name, "of the workload, for the line");
  command->add_flag("--report", state->report, "also where the time and memory went");
  add_plan_options(*command, state->arguments);
  const auto* given_devices = command->get_option("--devices");
  add_precision_options(*command, state->session);
  command->callback([state, given_devices] {
    const Engine engine = make_engine(state->arguments.init_dir);
    const World world = join_processes(engine.get(), state->arguments, given_devices->count() > 0, state->session);
    const double begin = seconds_now();
    Plan plan = open_plan(engine.get(), state->path, state->arguments);
    const double planned = seconds_now();
    if (is_first(state->session)) say_what_is_not_here(static_cast<const whale_plan*>(plan.get()));
    std::string devices = state->arguments.devices;
    if (kind_of(state->path) == FileKind::kPlan) {
      devices.clear();
      const auto plan_json = nlohmann::json::parse(text(whale_plan_json, static_cast<const whale_plan*>(plan.get())));
      for (const auto& device : plan_json.at("devices"))
        devices += (devices.empty() ? "" : ",") + device.at("name").get<std::string>();
    }
    const std::vector<InputSpec> inputs = inputs_of(plan.get(), "train");
    const auto data = open_data(state->data, inputs);
    std::vector<Batch> pool;
    for (int i = 0; i < 8; ++i) pool.push_back(data->batch(0, i));
    SessionArguments session = state->session;
    session.ignore_nan = true;
    Runner runner(engine.get(), std::move(plan), session);
    size_t k = 0;
    const double opened = seconds_now();
    const double first_loss = runner.step(pool[k++ % pool.size()]);
    const double first = seconds_now();
    double loss = first_loss;
    for (int64_t i = 1; i < state->warmup; ++i) loss = runner.step(pool[k++ % pool.size()]);
    std::vector<double> windows;
    for (int64_t i = 0; i < std::max<int64_t>(1, state->steps / state->inner); ++i) {
      const double start = seconds_now();
      for (int64_t j = 0; j < state->inner; ++j) loss = runner.step(pool[k++ % pool.size()]);
      windows.push_back((seconds_now() - start) / static_cast<double>(state->inner));
    }
    std::sort(windows.begin(), windows.end());
    const double median = windows.size() % 2 ? windows[windows.size() / 2]
                                             : (windows[windows.size() / 2 - 1] + windows[windows.size() / 2]) / 2;
    nlohmann::json line{{"workload", state->name.empty() ? state->path : state->name},
                        {"framework", "libwhale"},
                        {"devices", devices},
                        {"ms_per_step", median * 1e3},
                        {"ms_min", windows.front() * 1e3},
                        {"ms_max", windows.back() * 1e3},
                        {"items_per_second", static_cast<double>(items_of(inputs)) / median},
                        {"items", items_of(inputs)},
                        {"peak_rss_mb", peak_rss_mb()},
                        {"first_loss", first_loss},
                        {"last_loss", loss},
                        {"steps", state->steps},
                        {"plan_ms", (planned - begin) * 1e3},
                        {"open_ms", (opened - planned) * 1e3},
                        {"first_step_ms", (first - opened) * 1e3}};
    if (state->overhead) {
      // What threads do outside of ops, collectives and copies, in the step's time; the median of some traced steps.
      check(whale_session_trace(runner.session(), 1));
      std::vector<double> shares;
      for (int i = 0; i < 11; ++i) {
        const double start = seconds_now();
        runner.step(pool[k++ % pool.size()]);
        const double seconds = seconds_now() - start;
        const auto report = nlohmann::json::parse(text(whale_session_report_json, runner.session()));
        double outside = 0;
        for (const auto& device : report["devices"])
          outside += device["seconds"]["cpu"].get<double>() - device["seconds"]["cpu_inside"].get<double>();
        shares.push_back(outside / seconds);
      }
      std::sort(shares.begin(), shares.end());
      line["overhead"] = shares[shares.size() / 2];
    }
    if (state->report) line["report"] = nlohmann::json::parse(text(whale_session_report_json, runner.session()));
    if (!is_first(session)) return;
    std::printf("%s\n", line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  });
}

}  // namespace tool
