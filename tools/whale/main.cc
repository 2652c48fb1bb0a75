// whale: the command line, on the C ABI only.
#include <cstdio>

#include "api.h"
#include "commands.h"

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
    std::fprintf(stderr, "whale: %s\n", error.what());
    return 2;
  }
  return exit_code;
}
