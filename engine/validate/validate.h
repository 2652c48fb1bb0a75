// The cost model and the planner against what others measured (docs/validation.md): rows of a file, and what
// libwhale says of each.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace whale {

struct ValidateOptions {
  std::string form;      // of kForms; empty: by the file's columns
  std::string profiles;  // a folder that the form reads besides; empty: the file's
};

// JSON: `form`, `rows` (how many), `rows_left_out` (and where some are, `left_out`, with why), and what the form
// measures, such as `mean_absolute_error_percent`, `spearman`, `regret`; `groups`: the same of each; `text`: the same
// as a table for a terminal. Throws invalid for a file of no known form, and for cells that mean nothing, with file,
// row and column.
Json validate(const std::string& path, const ValidateOptions& options);

// A form: how its files are told from others, and what is said of them.
struct ValidateForm {
  const char* name;
  bool (*is)(const std::string& path);
  Json (*validate)(const std::string& path, const ValidateOptions& options);
};
const std::vector<ValidateForm>& validate_forms();

// Whether a file is a CSV with these columns.
bool has_columns(const std::string& path, const std::vector<std::string_view>& columns);

}  // namespace whale
