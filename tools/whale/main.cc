// whale: the command line, on the C ABI only.
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <utility>

#include "api.h"
#include "commands.h"
#include "usage.h"

namespace tool {

CLI::Validator whole(int64_t low, int64_t high) {
  return {[=](std::string& given) {
            int64_t value = 0;
            const auto [end, error] = std::from_chars(given.data(), given.data() + given.size(), value);
            if (!given.empty() && error == std::errc{} && end == given.data() + given.size() && low <= value &&
                value <= high)
              return std::string();
            return "'" + shown(given) + "', expected a whole number from " + std::to_string(low) + " to " +
                   std::to_string(high);
          },
          ""};
}

CLI::Validator seed_number() {
  return {[](std::string& given) {
            uint64_t value = 0;
            const auto [end, error] = std::from_chars(given.data(), given.data() + given.size(), value);
            if (!given.empty() && error == std::errc{} && end == given.data() + given.size()) return std::string();
            return "'" + shown(given) + "', expected a whole number from 0 to 2^64 - 1";
          },
          ""};
}

namespace {
CLI::Validator number_that(bool (*fits)(double), const char* wanted) {
  return {[=](std::string& given) {
            double value = 0;
            const auto [end, error] = std::from_chars(given.data(), given.data() + given.size(), value);
            if (!given.empty() && error == std::errc{} && end == given.data() + given.size() && fits(value) &&
                std::isfinite(value))
              return std::string();
            return "'" + shown(given) + "', expected " + wanted;
          },
          ""};
}
}  // namespace

CLI::Validator not_negative() {
  return number_that([](double value) { return value >= 0; }, "a number from 0");
}
CLI::Validator above_zero() {
  return number_that([](double value) { return value > 0; }, "a number above 0");
}
CLI::Validator loss_scale() {
  return number_that([](double value) { return 0x1p-14 <= value && value <= 0x1p24; }, "a number from 2^-14 to 2^24");
}

namespace {

// Words of the library's errors, and those of the command line. Other fields of whale.h's options are options by their
// own name.
constexpr std::pair<std::string_view, std::string_view> kWords[] = {
    {"make the engine with option init_dir", "give --init-dir"},
    {"engine option init_dir", "--init-dir"},
    {"argument `options.stage_recompute`", "--recompute"},
    {"argument `options.timeout_seconds`", "--plan-timeout"},
    {"argument `options.learning_rate`", "--lr"},
    {"argument `options.clip_norm`", "--clip"},
    {"argument `options.warmup_steps`", "--warmup"},
    {"training: total_steps", "--total-steps"},
    {"Give a longer one, fewer devices", "Give a longer --plan-timeout, fewer devices"},
    {"batch_norm's attribute groups", "batch_norm's attribute groups (`whale model resnet`: --norm-groups)"}};

std::string in_words_of_the_command_line(std::string message) {
  for (const auto& [field, option] : kWords)
    if (const size_t at = message.find(field); at != std::string::npos) message.replace(at, field.size(), option);
  constexpr std::string_view kField = "argument `options.";
  const size_t at = message.find(kField), end = at == std::string::npos ? at : message.find('`', at + kField.size());
  if (end == std::string::npos) return message;
  std::string name = message.substr(at + kField.size(), end - at - kField.size());
  std::replace(name.begin(), name.end(), '_', '-');
  return message.replace(at, end + 1 - at, "--" + name);
}

// `--save ""` and `--save=` are unset variables of a script: not what is meant by leaving the option out.
void check_no_empty(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    const bool assigned = text.starts_with("--") && text.find('=') == text.size() - 1;
    if (!text.empty() && !assigned) continue;
    const std::string before = assigned ? text : argv[i - 1];
    throw Failure(
        (before.starts_with("-") ? "'" + shown(before) + "' is followed by nothing" : "an argument is empty") +
        ", such as an unset variable of a script gives; give it a value, or leave it out");
  }
}

void check_command(const CLI::App& app, int argc, char** argv) {
  const std::string first = argc > 1 ? argv[1] : "";
  std::string names;
  for (const CLI::App* command : app.get_subcommands(nullptr)) {
    if (first == command->get_name()) return;
    names += (names.empty() ? "" : ", ") + command->get_name();
  }
  if (!first.starts_with("-"))
    throw Failure((first.empty() ? "give a command" : "no command '" + shown(first) + "'") + "; there are " + names +
                  ". `whale --help` shows how they are used");
}

// Arguments up to the program that `whale launch` starts.
int without_program(int argc, char** argv) {
  if (argc < 2 || std::string_view(argv[1]) != "launch") return argc;
  return static_cast<int>(std::find(argv, argv + argc, std::string_view("--")) - argv);
}

// A file that is opened takes the lowest free number: where a standard stream was closed, what is printed would go into
// it. Writing to what stands there now fails, as to a closed stream.
void hold_standard_streams() {
  int number = 0;
  do number = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  while (number >= 0 && number <= 2);
  if (number > 2) ::close(number);
}

// Whether all that was printed has arrived. A pipe that nobody reads any more is not complained about.
bool printed_all() {
  pollfd reader{STDOUT_FILENO, 0, 0};
  const bool read = ::poll(&reader, 1, 0) <= 0 || (reader.revents & (POLLERR | POLLHUP)) == 0;
  errno = 0;
  const bool before = std::ferror(stdout) != 0;
  if (std::fclose(stdout) == 0 && !before) return true;
  if (read)
    std::fprintf(stderr, "whale: cannot write to the standard output%s%s: what was printed is incomplete\n",
                 errno != 0 ? ": " : "", errno != 0 ? std::strerror(errno) : "");
  return false;
}

int run(int all, char** argv) {
  const int argc = without_program(all, argv);
  const std::vector<std::string> program(argv + std::min(argc + 1, all), argv + all);
  CLI::App app{
      "whale: distributed training of a local model\n\n"
      "  whale model gpt -o gpt.whale                    write a model file\n"
      "  whale inspect gpt.whale                         what is in it\n"
      "  whale plan gpt.whale --devices cpu:4            what each device would do\n"
      "  whale run gpt.whale --devices cpu:4 --data t.txt --steps 100\n"
      "  whale verify gpt.whale --devices cpu:4          does the plan change the result? Runs it\n"
      "  whale prove gpt.whale --devices null:1024       the same, without devices or a run\n"
      "  whale launch -n 4 -- PROGRAM ARGUMENTS          a program as several processes\n"};
  int exit_code = 0;
  app.set_version_flag("--version", whale_version());
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  app.failure_message([argc, argv](const CLI::App* failed, const CLI::Error& error) {
    return "whale: " + wrong_usage(*failed, error, argc, argv) + "\n";
  });
  add_model(app);
  add_inspect(app);
  add_plan(app, exit_code);
  add_run(app, exit_code);
  add_verify(app, exit_code);
  add_prove(app, exit_code);
  add_bench(app);
  add_devices(app);
  add_profile(app);
  add_validate(app);
  add_predict(app);
  add_simulate(app);
  add_launch(app, program, exit_code);
  refuse_values_of_flags(app);
  try {
    check_no_empty(argc, argv);
    check_command(app, argc, argv);
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "whale: %s\n", shown(in_words_of_the_command_line(error.what()), 4500).c_str());
    return 2;
  }
  return exit_code;
}

}  // namespace
}  // namespace tool

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file-size limit is an error of the write, with the path
  tool::hold_standard_streams();
  const int exit_code = tool::run(argc, argv);
  return tool::printed_all() || exit_code != 0 ? exit_code : 1;
}
