#include "task/factor_names.h"

#include <algorithm>

namespace whale {
namespace {

struct Word {
  const char *word, *name;
  const char* needs = "";  // in some op of the model
};
constexpr Word kWords[] = {
    {"columns", "n"},       {"rows", "k"},          {"vocabulary", "rows"},
    {"vocabulary", "v"},    {"experts", "experts"}, {"experts", "b", "experts"},
    {"channels", "o"},      {"sequence", "t"},      {"sequence", "tq"},
    {"table_rows", "rows"}, {"classes", "v"},       {"classes", "n"},
    {"spatial", "depth"},   {"spatial", "height"},  {"spatial", "width"},
};

const Word* find(const std::string& name, const std::string& wanted) {
  const auto at = std::find_if(std::begin(kWords), std::end(kWords),
                               [&](const Word& w) { return wanted == w.word && name == w.name; });
  return at == std::end(kWords) ? nullptr : at;
}

}  // namespace

bool is_named(const std::string& name, const std::string& wanted) { return name == wanted || find(name, wanted); }

std::string needed_by(const std::string& name, const std::string& wanted) {
  const Word* word = name == wanted ? nullptr : find(name, wanted);
  return word ? word->needs : "";
}

std::vector<std::string> words_of(const std::set<std::string>& names) {
  std::vector<std::string> out;
  for (const Word& w : kWords)
    if (names.contains(w.name) && (!*w.needs || names.contains(w.needs)) &&
        std::find(out.begin(), out.end(), w.word) == out.end())
      out.push_back(w.word);
  for (const std::string& name : names)
    if (std::find(out.begin(), out.end(), name) == out.end()) out.push_back(name);
  return out;
}

bool asks_for(const TaskGraphs& tasks, const Op& op, size_t axis, const Factor& factor) {
  const std::string& wanted = tasks.task(op).factors[axis - 1];
  return !wanted.empty() && is_named(factor.name, wanted);
}

}  // namespace whale
