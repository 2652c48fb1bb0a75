// Rows of a CSV file with a header, as others write their measurements.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace whale {

struct Csv {
  std::string path;  // for messages
  std::vector<std::string> columns;
  std::vector<std::vector<std::string>> rows;

  bool has(std::string_view column) const;
  // By name; throws where the file has none of it, or a cell is no finite number from 0, with the line.
  const std::string& text(size_t row, std::string_view column) const;
  double number(size_t row, std::string_view column) const;
  int64_t whole(size_t row, std::string_view column) const;
};

// Throws for what is no CSV with a header and at least one row. A # before the header belongs to its first column
// ("# GPUs").
Csv parse_csv(std::string_view content, std::string path);
Csv read_csv(const std::string& path);
std::string read_measured(const std::string& path);  // a file of measurements, as text

}  // namespace whale
