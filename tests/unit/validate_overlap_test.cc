// Load that runs together: rates of progress, their bounds, and rows of a table.
#include <rapidcheck.h>

#include <algorithm>
#include <numeric>

#include "cost/interference.h"
#include "unit/caught.h"
#include "unit/validate_kit.h"
#include "validate/validate.h"

using namespace whale;

namespace {

const std::string kHeader = "gpu,world,intra,inter,compute_n,m,k,g2g_mb,h2d_mb,d2h_mb,latency_ms,std_ms\n";

constexpr PerLoad<bool> kComputeAndCopy{true, false, true, false};

}  // namespace

TEST_CASE("interference: two kinds, by hand") {
  const Interference i{
      .compute_by_copy = 1, .far_link_by_copy = 3, .to_device_by_to_host = 0.5, .to_host_by_to_device = 0};
  // Arithmetic at half its speed while the copy runs: 2 s of copy leave 3 of 4 s, which go on alone.
  CHECK(together_seconds({4, 0, 2, 0}, i, false) == doctest::Approx(5));
  // It ends first: 2 s of it take 4.
  CHECK(together_seconds({2, 0, 9, 0}, i, false) == doctest::Approx(9));
  // Traffic between devices shares the way of copies only where it goes through the host.
  CHECK(together_seconds({0, 4, 2, 0}, i, false) == doctest::Approx(4));
  CHECK(together_seconds({0, 4, 2, 0}, i, true) == doctest::Approx(2 + 3.5));
  CHECK(together_seconds({0, 0, 3, 6}, i, false) == doctest::Approx(6));
  CHECK(together_seconds({}, i, true) == 0);
  const PerLoad<double> rates = progress_rates(kComputeAndCopy, i, false);
  CHECK(rates[0] == doctest::Approx(0.5));
  CHECK(rates[1] == 0);
  CHECK(rates[2] == 1);
}

TEST_CASE("interference: together is never slower than one after another") {
  const Interference harsh{.compute_by_link = 1e6, .link_by_compute = 1e6};
  CHECK(together_seconds({3, 4, 0, 0}, harsh, false) == doctest::Approx(7));
}

TEST_CASE("interference: between the longest part and the sum, and monotone") {
  CHECK(rc::check("bounds", [] {
    const auto constant = [] { return *rc::gen::inRange(0, 1000) * 0.02; };
    const Interference i{constant(), constant(), constant(), constant(),
                         constant(), constant(), constant(), constant()};
    const bool far = *rc::gen::arbitrary<bool>();
    PerLoad<double> alone;
    for (double& seconds : alone) seconds = *rc::gen::inRange(0, 100) * 0.1;
    const double together = together_seconds(alone, i, far);
    const double sum = std::accumulate(alone.begin(), alone.end(), 0.);
    RC_ASSERT(together >= std::ranges::max(alone) * (1 - 1e-9));
    RC_ASSERT(together <= sum * (1 + 1e-9));
    PerLoad<double> half;
    for (int w = 0; w < kLoads; ++w) half[w] = alone[w] / 2;
    RC_ASSERT(std::abs(together_seconds(half, i, far) - together / 2) <= 1e-9 * (1 + together));  // no scale of its own
  }));
}

TEST_CASE("interference: of a GPU, or of one like it") {
  CHECK(interference_of("a100-sxm4-40gb").own);
  CHECK(interference_of("NVIDIA A100-SXM4-40GB").fitted_on == "a100-sxm4-40gb");
  CHECK_FALSE(interference_of("NVIDIA H100 80GB HBM3").own);
  CHECK(interference_of("NVIDIA H100 80GB HBM3").fitted_on == "a100-sxm4-40gb");
  CHECK(interference_of("l4").host_linked);
  CHECK_FALSE(interference_of("a100-sxm4-40gb").host_linked);
}

// Of Mist (Dazz993/Mist, Apache-2.0), A100-40, 16 devices on 2 nodes, one of a node in a group: parts that ran alone,
// and one row together.
TEST_CASE("validate overlap: parts alone from the file, rows together against the model") {
  const std::string g = "a100-sxm4-40gb,16,1,2,";
  const WrittenFile file(
      "overlap.csv", kHeader + g + "55792,4096,4096,0,0,0,6.93,0\n" + g + "223160,4096,4096,0,0,0,26.33,0\n" + g +
                         "0,4096,4096,24,0,0,10.72,0\n" + g + "0,4096,4096,128,0,0,49.45,0\n" + g +
                         "0,4096,4096,0,32,0,6.27,0\n" + g + "0,4096,4096,0,128,0,24.21,0\n" + g +
                         "0,4096,4096,0,0,48,8.04,0\n" + g + "0,4096,4096,0,0,192,31.60,0\n" + g +
                         "167376,4096,4096,24,48,64,23.47,0.1093\n" + g + "111584,4096,4096,40,48,64,30.14,0.2397\n");
  const Json out = validate(file.path(), {});
  CHECK(out["form"] == "overlap");
  CHECK(out["rows"] == 2);
  CHECK(out["rows_of_one_part"] == 8);
  CHECK(out["rows_of_one_part_error_percent"].get<double>() < 3);
  CHECK(out["mean_absolute_error_percent"].get<double>() < 10);
  CHECK(out["groups"]["a100-sxm4-40gb"]["longest_part_short_percent"].get<double>() > 10);
}

TEST_CASE("validate overlap: what cannot be told is said") {
  const auto message = [](const std::string& rows) {
    const WrittenFile file("overlap.csv", kHeader + rows);
    return message_of([&] { validate(file.path(), {}); }, {Code::kInvalidArgument});
  };
  CHECK(has(message("l4,8,2,1,0,4096,4096,1,1,0,5,0\n"), "no row in which two parts run together"));
  CHECK(has(message("l4,8,2,1,0,4096,4096,0,0,0,5,0\n"), "row 1: nothing ran"));
  CHECK(has(message("l4,8,2,1,0,4096,4096,1,0,0,0,0\n"), "latency_ms is 0"));
  CHECK(has(message("l4,8,2,1,0,4096,4096,-1,0,0,5,0\n"), "column 'g2g_mb' is '-1'"));
  // One of two rows has a part that never ran alone; copies count that ran among another number of devices.
  const std::string alone = "l4,8,2,1,0,1,1,0,8,0,2,0\nl4,4,2,1,0,1,1,0,0,8,2,0\n";
  const WrittenFile file("overlap.csv", kHeader + alone + "l4,8,2,1,0,1,1,0,8,8,3.5,0\nl4,8,2,1,0,1,1,8,8,0,3,0\n");
  const Json out = validate(file.path(), {});
  CHECK(out["rows"] == 1);
  CHECK(out["rows_without_parts_alone"] == 1);
  CHECK(out["rows_left_out"] == 1);
  CHECK(
      has(out["text"].get<std::string>(), "3 of 4 rows; 1 left out: 1 of a part that did not run alone in any row\n"));
}
