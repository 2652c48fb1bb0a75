#include "validate/csv.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/error.h"
#include "base/file.h"

namespace whale {
namespace {

std::vector<std::string> cells_of(std::string_view line) {
  std::vector<std::string> cells(1);
  bool quoted = false;
  for (const char c : line) {
    if (c == '"')
      quoted = !quoted;
    else if (c == ',' && !quoted)
      cells.emplace_back();
    else
      cells.back() += c;
  }
  return cells;
}

}  // namespace

bool Csv::has(std::string_view column) const { return std::ranges::find(columns, column) != columns.end(); }

const std::string& Csv::text(size_t row, std::string_view column) const {
  const auto at = std::ranges::find(columns, column);
  if (at == columns.end()) throw invalid("{} has no column '{}'; it has {}", path, column, fmt::join(columns, ", "));
  return rows[row][at - columns.begin()];
}

double Csv::number(size_t row, std::string_view column) const {
  const std::string& cell = text(row, column);
  double value = 0;
  const auto [end, error] = std::from_chars(cell.data(), cell.data() + cell.size(), value);
  if (error != std::errc{} || end != cell.data() + cell.size() || !std::isfinite(value) || value < 0)
    throw invalid("{}, row {}: column '{}' is '{}', expected a number from 0", path, row + 1, column, cell);
  return value;
}

int64_t Csv::whole(size_t row, std::string_view column) const {
  const double value = number(row, column);
  if (value != std::floor(value) || value > 9e15)
    throw invalid("{}, row {}: column '{}' is {}, expected a whole number", path, row + 1, column, value);
  return static_cast<int64_t>(value);
}

Csv parse_csv(std::string_view content, std::string path) {
  Csv out{.path = std::move(path), .columns = {}, .rows = {}};
  for (size_t at = 0; at < content.size();) {
    const size_t end = std::min(content.find('\n', at), content.size());
    std::string_view line = content.substr(at, end - at);
    at = end + 1;
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty()) continue;
    std::vector<std::string> cells = cells_of(line);
    if (out.columns.empty()) {
      out.columns = std::move(cells);
      continue;
    }
    if (cells.size() != out.columns.size())
      throw invalid("{}, row {} has {} cells, expected {}: {}", out.path, out.rows.size() + 1, cells.size(),
                    out.columns.size(), fmt::join(out.columns, ", "));
    out.rows.push_back(std::move(cells));
  }
  if (out.rows.empty())
    throw invalid("{} has no rows, expected a header and rows of numbers, joined by commas", out.path);
  return out;
}

std::string read_measured(const std::string& path) {
  constexpr uint64_t kMost = 256 << 20;
  return InputFile(path).text(kMost, "it is no file of measurements");
}

Csv read_csv(const std::string& path) { return parse_csv(read_measured(path), path); }

}  // namespace whale
