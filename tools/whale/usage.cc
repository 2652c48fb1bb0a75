#include "usage.h"

#include <vector>

#include "api.h"
#include "renamed_options.h"

namespace tool {
namespace {

bool is_flag(const CLI::Option& option) { return option.get_expected_max() == 0; }

std::string in_quotes(const std::string& text) { return "'" + shown(text, 200) + "'"; }

std::string help_of(const CLI::App& command) {
  return "`whale " + command.get_name() + " --help` shows how they are used";
}

std::string option_names(const CLI::App& command) {
  std::string names;
  for (const CLI::Option* option : command.get_options())
    if (!option->get_positional() && !option->get_group().empty() && option != command.get_help_ptr())
      names += (names.empty() ? "" : ", ") + option->get_name();
  return names;
}

const CLI::Option* positional(const CLI::App& command) {
  for (const CLI::Option* option : command.get_options())
    if (option->get_positional()) return option;
  return nullptr;
}

// "--flag=3" as it stands on the command line, whatever of it CLI11 complains about.
std::string flag_with_a_value(const CLI::App& command, int argc, char** argv) {
  for (int i = 2; i < argc; ++i) {
    const std::string given = argv[i];
    const CLI::Option* option = command.get_option_no_throw(given.substr(0, given.find('=')));
    if (given.find('=') != given.npos && option != nullptr && is_flag(*option))
      return in_quotes(given) + ": " + option->get_name() + " takes no value; leave out what is behind it";
  }
  return "";
}

std::string not_known(const CLI::App& command, const std::vector<std::string>& rest) {
  for (const std::string& given : rest) {
    if (given.size() < 2 || given[0] != '-') continue;
    const std::string name = given.substr(0, given.find('='));
    const std::string none = "`whale " + command.get_name() + "` has no option " + in_quotes(name);
    for (const RenamedOption& option : kRenamedOptions)
      if (option.command == command.get_name() && option.before == name)
        return none + "; it is called " + std::string(option.now) + " now";
    return none + "; there are " + option_names(command) + ". " + help_of(command);
  }
  return "";
}

std::string too_many(const CLI::App& command, const std::string& given) {
  if (command.get_name() == "launch")
    return in_quotes(given) + ": put the program behind --: whale launch -n 4 -- PROGRAM ARGUMENTS";
  const CLI::Option* only = positional(command);
  return in_quotes(given) + " is one argument too many: `whale " + command.get_name() + "` takes " +
         (only == nullptr ? "options alone; " : "one " + only->get_name() + " besides options; ") + help_of(command);
}

std::string missing(const CLI::App& command) {
  for (const CLI::Option* option : command.get_options())
    if (option->get_required() && option->count() == 0)
      return "`whale " + command.get_name() + "` needs " + option->get_name() + ": " + option->get_description() +
             ". `whale " + command.get_name() + " --help` shows how it is used";
  return "";
}

// An option without its value, or with several.
std::string mismatch(const CLI::App& command, const std::string& said) {
  const CLI::Option* option = command.get_option_no_throw(said.substr(0, said.find(':')));
  if (option == nullptr) return "";
  const std::string name = option->get_name();
  return option->count() > 1 ? name + " is given " + std::to_string(option->count()) + " times; give it once"
                             : name + " is followed by nothing; give it its value: " + option->get_description();
}

}  // namespace

void refuse_values_of_flags(CLI::App& app) {
  for (CLI::App* command : app.get_subcommands(nullptr))
    for (CLI::Option* option : command->get_options())
      if (is_flag(*option)) option->disable_flag_override();
}

std::string wrong_usage(const CLI::App& app, const CLI::Error& error, int argc, char** argv) {
  const std::string said = error.what();
  const CLI::App* command = app.get_subcommands().empty() ? nullptr : app.get_subcommands().front();
  if (command == nullptr) return shown(said, 1000);
  const std::vector<std::string> rest = app.remaining(true);
  std::string found = not_known(*command, rest);
  if (found.empty()) found = flag_with_a_value(*command, argc, argv);
  if (found.empty() && dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr && !rest.empty())
    found = too_many(*command, rest.front());
  if (found.empty() && dynamic_cast<const CLI::RequiredError*>(&error) != nullptr) found = missing(*command);
  if (found.empty() && dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr) found = mismatch(*command, said);
  return found.empty() ? shown(said, 1000) : found;
}

}  // namespace tool
