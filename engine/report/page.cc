#include "report/page.h"

#include "report/page_text.h"

namespace whale {
namespace {

// Data inside of a script element: no text can end it, nor begin a comment.
std::string embedded(const Json& data) {
  std::string out;
  for (const char c : data.dump(-1, ' ', true, Json::error_handler_t::replace)) {
    if (c == '<' || c == '>' || c == '&')
      out += fmt::format("\\u{:04x}", static_cast<int>(c));
    else
      out += c;
  }
  return out;
}

}  // namespace

std::string page_html(const Json& data) {
  return std::string(kPageBeforeData) + embedded(data) + std::string(kPageAfterData);
}

}  // namespace whale
