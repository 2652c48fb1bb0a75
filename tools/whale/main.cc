// whale: the command line, on the C ABI only.
#include <charconv>
#include <cmath>
#include <cstdio>

#include "api.h"
#include "commands.h"

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

CLI::Validator not_negative() {
  return {[](std::string& given) {
            double value = 0;
            const auto [end, error] = std::from_chars(given.data(), given.data() + given.size(), value);
            if (!given.empty() && error == std::errc{} && end == given.data() + given.size() && value >= 0 &&
                std::isfinite(value))
              return std::string();
            return "'" + shown(given) + "', expected a number from 0";
          },
          ""};
}

}  // namespace tool

int main(int argc, char** argv) {
  CLI::App app{
      "whale: distributed training of a local model\n\n"
      "  whale model gpt -o gpt.whale                    write a model file\n"
      "  whale inspect gpt.whale                         what is in it\n"
      "  whale plan gpt.whale --devices cpu:4            what each device would do\n"
      "  whale run gpt.whale --devices cpu:4 --data t.txt --steps 100\n"
      "  whale verify gpt.whale --devices cpu:4          does the plan change the result?\n"};
  app.set_version_flag("--version", whale_version());
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  app.failure_message([](const CLI::App*, const CLI::Error& error) {
    return "whale: " + tool::shown(error.what(), 1000) + "\nrun with --help for more information\n";
  });
  int exit_code = 0;
  tool::add_model(app);
  tool::add_inspect(app);
  tool::add_plan(app);
  tool::add_run(app, exit_code);
  tool::add_verify(app, exit_code);
  tool::add_bench(app);
  tool::add_devices(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "whale: %s\n", tool::shown(error.what(), 4500).c_str());
    return 2;
  }
  return exit_code;
}
