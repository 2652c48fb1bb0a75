#include "validate/validate.h"

#include <algorithm>

#include "base/error.h"
#include "validate/amp.h"
#include "validate/csv.h"
#include "validate/gpu_forms.h"
#include "validate/megatron.h"
#include "validate/planners.h"
#include "validate/sailor.h"

namespace whale {

bool has_columns(const std::string& path, const std::vector<std::string_view>& columns) {
  if (!path.ends_with(".csv")) return false;
  const Csv csv = read_csv(path);
  return std::ranges::all_of(columns, [&](std::string_view c) { return csv.has(c); });
}

const std::vector<ValidateForm>& validate_forms() {
  static const std::vector<ValidateForm> forms{
      {"ops", is_ops, validate_ops},
      {"overlap", is_overlap, validate_overlap},
      {"models", is_models, validate_models},
      {"planners", is_planners, validate_planners},
      {"partition", is_partition, validate_partition},
      {"megatron", is_megatron, validate_megatron},
      {"amp", is_amp, validate_amp},
      {"amp_work", [](const std::string&) { return false; }, work_of_amp},
      {"sailor", is_sailor, validate_sailor},
      {"megatron_work", [](const std::string&) { return false; }, work_of_megatron},
  };
  return forms;
}

Json validate(const std::string& path, const ValidateOptions& options) {
  std::string names;
  for (const ValidateForm& form : validate_forms()) {
    if (options.form.empty() ? form.is(path) : options.form == form.name) {
      Json out{{"form", form.name}};
      out.update(form.validate(path, options));
      out.emplace("rows_left_out", 0);
      return out;
    }
    names += (names.empty() ? "" : ", ") + std::string(form.name);
  }
  if (options.form.empty())
    throw invalid("{} has the columns of no form that is known ({}); give its form", path, names);
  throw invalid("no form '{}'; there are {}", options.form, names);
}

}  // namespace whale
