#include "base/json_input.h"

#include <algorithm>
#include <set>
#include <vector>

#include "base/error.h"
#include "base/text.h"

namespace whale {
namespace {

// What comes in, before anything is made of it: readers of JSON go as deep as the text does, and take the last of
// several values of a name.
class Looker : public nlohmann::json_sax<Json> {
 public:
  explicit Looker(std::string_view content) : content_(content) {}

  bool null() override { return value(); }
  bool boolean(bool) override { return value(); }
  bool number_integer(number_integer_t) override { return value(); }
  bool number_unsigned(number_unsigned_t) override { return value(); }
  bool number_float(number_float_t, const string_t&) override { return value(); }
  bool string(string_t&) override { return value(); }
  bool binary(binary_t&) override { return value(); }
  bool start_object(std::size_t) override { return open(); }
  bool start_array(std::size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    if (!open_.back().names.insert(name).second)
      throw invalid("{} is given twice in one object", brief(where() + pointer_part(name), 120));
    open_.back().name = name;
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& e) override {
    const std::string_view before = content_.substr(0, position > 0 ? std::min(position - 1, content_.size()) : 0);
    const auto line = 1 + std::ranges::count(before, '\n');
    const size_t start = before.rfind('\n');
    const size_t column = before.size() - (start == before.npos ? 0 : start + 1) + 1;
    throw invalid("line {}, column {}: {}", line, column, brief(reason(e.what())));
  }

 private:
  struct Open {
    std::string name;               // of an object: that is read
    size_t index = 0;               // of a list
    std::set<std::string> names{};  // of an object, so far
  };

  // "[...] parse error at line 1, column 3: syntax error while parsing value - invalid literal; last read: 'x'"
  static std::string_view reason(std::string_view said) {
    for (const std::string_view mark : {std::string_view(" - "), std::string_view("] ")})
      if (const size_t at = said.find(mark); at != said.npos) return said.substr(at + mark.size());
    return said;
  }
  bool value() {
    if (!open_.empty()) ++open_.back().index;
    return true;
  }
  bool open() {
    value();
    if (open_.size() >= kMostJsonLevels)
      throw invalid("lists and objects are more than {} deep in each other", kMostJsonLevels);
    open_.emplace_back();
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }
  // Of the object whose name is read.
  std::string where() const {
    std::string out;
    for (size_t k = 0; k + 1 < open_.size(); ++k)
      out += open_[k].names.empty() ? pointer_part(open_[k].index - 1) : pointer_part(open_[k].name);
    return out;
  }

  std::string_view content_;
  std::vector<Open> open_;
};

}  // namespace

Json parse_json(std::string_view content) {
  Looker looker(content);
  Json::sax_parse(content, &looker);
  return Json::parse(content);
}

std::string pointer_part(std::string_view name) {
  std::string out = "/";
  for (const char c : name) out += c == '~' ? std::string("~0") : c == '/' ? std::string("~1") : std::string{c};
  return out;
}

std::string pointer_part(size_t index) { return fmt::format("/{}", index); }

}  // namespace whale
