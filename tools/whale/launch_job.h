// The ranks of `whale launch`: started, heard, and brought to an end together.
#pragma once

#include <string>
#include <vector>

namespace tool {

struct RankSpec {
  std::string host;
  bool remote = false;                   // words are ssh's, input what it reads; its output begins at kStarted
  std::vector<std::string> words;        // program and arguments
  std::vector<std::string> environment;  // NAME=VALUE
  std::string input;
};

enum class Shown { kPrefixed, kAll, kFirst };

struct JobOptions {
  Shown shown = Shown::kPrefixed;
  std::string output_dir;  // empty: no files
  double grace_seconds = 5;
  double connect_seconds = 30;
};

// Runs them, by rank, to their end, and says on stderr what went wrong. The exit code: 0 where all ended with 0 and all
// their output has arrived, else that of the first that failed (128 and the number of a signal). Throws Failure where
// one cannot be started. When it returns or throws none of them runs any more.
int run_job(const std::vector<RankSpec>& ranks, const JobOptions& options);

}  // namespace tool
