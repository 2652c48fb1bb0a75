// Op times by data sheets and five constants: against a few measured rows, closed forms, and what must hold of any.
#include <rapidcheck.h>
#include <cmath>

#include "cluster/device_types.h"
#include "cost/curve.h"
#include "unit/caught.h"
#include "unit/validate_kit.h"
#include "validate/validate.h"

using namespace whale;

namespace {

const std::string kHeader = "set,op,gpu,torch,B,M,N,K,H,ms\n";

// Of NeuSight (sitar-lab/NeuSight, MIT): op times in milliseconds, float32.
struct MeasuredProduct {
  const char* gpu;
  double batch, m, inner, n, milliseconds;
};
constexpr MeasuredProduct kProducts[] = {
    {"NVIDIA A100 80GB PCIe", 1, 32768, 1600, 1600, 9.41866},
    {"NVIDIA A100 80GB PCIe", 1, 1024, 4096, 4096, 2.16457},
    {"NVIDIA A100 80GB PCIe", 768, 512, 512, 64, 2.95663},
    {"NVIDIA H100 80GB HBM3", 1, 32768, 1280, 5120, 8.24994},
    {"NVIDIA H100 80GB HBM3", 1, 8192, 5120, 1280, 2.5886},
    {"Tesla V100-PCIE-32GB", 1, 1024, 1280, 1280, 0.294342},
    {"Tesla P4", 1, 65536, 3072, 768, 82.828},
};

DeviceCurve ideal(int64_t processors = 100) {
  GpuSheet sheet;
  sheet.name = "ideal", sheet.flops_per_second = 1e12, sheet.flops_per_second16 = 4e12;
  sheet.bytes_per_second = 1e12, sheet.processors = processors, sheet.cache_bytes = 1 << 20;
  return {sheet, {.compute_share = 1, .memory_share = 1, .start_seconds = 1e-6, .tile_loss = 0, .strain = 0}, "", ""};
}

double size() { return static_cast<double>(*rc::gen::inRange(1, 5000)); }

const DeviceCurve& some_curve() {
  static const std::vector<DeviceCurve> curves = [] {
    std::vector<DeviceCurve> out;
    for (const DeviceType& type : device_types())
      if (type.is_gpu()) out.push_back(curve_of(type.sheet));
    return out;
  }();
  return curves[*rc::gen::inRange<int>(0, static_cast<int>(curves.size()))];
}

}  // namespace

TEST_CASE("curves: products that were measured are within 20 %, 11 % in the mean") {
  double sum = 0;
  for (const MeasuredProduct& p : kProducts) {
    CAPTURE(std::string(p.gpu));
    CAPTURE(p.m);
    const double seconds = product_seconds({p.batch, p.m, p.n, p.inner}, curve_of(p.gpu));
    const double error = std::abs(seconds * 1e3 / p.milliseconds - 1);
    CHECK(error < 0.20);
    sum += error;
  }
  CHECK(sum / std::size(kProducts) < 0.11);
}

TEST_CASE("curves: tiles are whole and come in waves over the processors") {
  const DeviceCurve curve = ideal(100);
  const auto seconds = [&](double m, double n) { return product_seconds({1, m, n, 1 << 20}, curve) - 1e-6; };
  const double wave = 2. * 128 * 128 * ((1 << 20) + 8) / 1e10;
  // Ten by ten tiles are one wave; one column more is a wave of its own (no split of the sums is cheaper).
  CHECK(seconds(1280, 1280) == doctest::Approx(wave).epsilon(1e-3));
  CHECK(seconds(1281, 1280) > 1.05 * seconds(1280, 1280));
  CHECK(seconds(1281, 1280) == doctest::Approx(seconds(1344, 1280)));
  // A single tile is cut into smaller ones and along the sums: 32 of 100 processors work.
  CHECK(seconds(128, 128) == doctest::Approx(wave / 32).epsilon(1e-2));
}

TEST_CASE("curves: long rows strain, and boards that heat slow down in long runs only") {
  DeviceCurve curve = ideal(1);
  curve.constants.strain = 0.5;
  const auto of_flops = [&](double k) { return product_seconds({1, 1024, 1024, k}, curve) / k; };
  CHECK(of_flops(8192) == doctest::Approx(of_flops(4096)).epsilon(0.01));
  CHECK(of_flops(1 << 20) > 1.45 * of_flops(8192));
  curve.sheet.heats = true;
  CHECK(of_flops(1 << 20) ==
        doctest::Approx(1.5 * product_seconds({1, 1024, 1024, 1 << 20}, ideal(1)) / (1 << 20)).epsilon(0.01));
  CHECK(product_seconds({1, 64, 64, 64}, curve) ==
        doctest::Approx(product_seconds({1, 64, 64, 64}, ideal(1))).epsilon(0.01));
}

TEST_CASE("curves: 16 bits are computed at their own peak") {
  const Product wide{1, 4096, 4096, 4096, 4}, narrow{1, 4096, 4096, 4096, 2};
  CHECK(product_seconds(wide, ideal()) > 3.5 * product_seconds(narrow, ideal()));
}

TEST_CASE("curves: rows of layer norm and softmax that do not fit the cache are read again") {
  const DeviceCurve curve = ideal();
  const auto norm = [&](double columns) { return layer_norm_seconds(1e5, columns, 4, curve) * 1e12 / (4e5 * columns); };
  CHECK(norm(16) == doctest::Approx(2).epsilon(0.2));
  CHECK(norm(1 << 16) == doctest::Approx(3).epsilon(0.01));
  CHECK(softmax_seconds(1e5, 1 << 16, 4, curve) == doctest::Approx(4. * 4e5 * (1 << 16) / 1e12).epsilon(0.01));
  CHECK(pass_seconds(1e9, curve) == doctest::Approx(1e-3 + 1e-6));
}

TEST_CASE("curves: more work is never faster, none beats the sheet") {
  CHECK(rc::check("products", [] {
    const DeviceCurve& curve = some_curve();
    Product p{size(), size(), size(), size(), *rc::gen::element(2., 4.)}, more = p;
    **rc::gen::element(&more.batch, &more.m, &more.n, &more.k) += size();
    RC_ASSERT(product_seconds(more, curve) >= product_seconds(p, curve));
    const double peak = p.bytes_an_element == 2 ? curve.sheet.flops_per_second16 : curve.sheet.flops_per_second;
    RC_ASSERT(product_seconds(p, curve) >= p.flops() / peak);
    RC_ASSERT(product_seconds(p, curve) >= p.bytes() / curve.sheet.bytes_per_second);
  }));
  CHECK(rc::check("passes", [] {
    const DeviceCurve& curve = some_curve();
    const double rows = size(), columns = size();
    for (const auto seconds : {softmax_seconds, layer_norm_seconds}) {
      RC_ASSERT(seconds(rows + 1, columns, 4, curve) >= seconds(rows, columns, 4, curve));
      RC_ASSERT(seconds(rows, columns + 1, 4, curve) >= seconds(rows, columns, 4, curve));
      RC_ASSERT(seconds(rows, columns, 4, curve) > 8 * rows * columns / curve.sheet.bytes_per_second);
    }
  }));
}

TEST_CASE("curves: what knows FLOPs and bytes only agrees for large operands") {
  for (const DeviceType& type : device_types()) {
    if (!type.is_gpu()) continue;
    const GpuSheet& sheet = type.sheet;
    CAPTURE(sheet.name);
    const DeviceCurve curve = curve_of(sheet);
    const Product p{1, 128 * 256, 128 * 256, 8192};
    CHECK(op_seconds({p.flops(), p.bytes()}, 4, curve) == doctest::Approx(product_seconds(p, curve)).epsilon(0.02));
  }
}

TEST_CASE("curves: a GPU that was not measured takes the nearest architecture's constants, and says so") {
  CHECK(curve_of("nvidia_a100_80gb_pcie").note.empty());
  const DeviceCurve h200 = curve_of("NVIDIA H200");
  CHECK(h200.fitted_on == "NVIDIA H100 80GB HBM3");
  CHECK(has(h200.note, "NVIDIA H200: not measured; its peaks"));
  CHECK(h200.sheet.bytes_per_second == 4800e9);
  CHECK(h200.constants.compute_share == curve_of("NVIDIA H100 80GB HBM3").constants.compute_share);
  GpuSheet unknown = h200.sheet;
  unknown.name = "new", unknown.architecture = "", unknown.heats = true;
  CHECK(curve_of(unknown).constants.strain == 0);
  CHECK(has(message_of([] { curve_of("abacus"); }, {Code::kInvalidArgument}), "no data sheet of the GPU 'abacus'"));
}

TEST_CASE("validate ops: errors by op and by GPU") {
  const DeviceCurve curve = curve_of("Tesla T4");
  const double product = 1e3 * product_seconds({2, 64, 48, 32}, curve),
               norm = 1e3 * layer_norm_seconds(100, 512, 4, curve);
  const WrittenFile file("ops.csv", kHeader + fmt::format("test,bmm,Tesla T4,p,2,64,32,48,,{}\n", product) +
                                        fmt::format("test,ln,Tesla T4,p,100,,,,512,{}\n", norm / 1.25));
  const Json out = validate(file.path(), {});
  CHECK(out["form"] == "ops");
  CHECK(out["rows"] == 2);
  CHECK(out["mean_absolute_error_percent"].get<double>() == doctest::Approx(12.5));
  CHECK(out["groups"]["bmm"]["mean_absolute_error_percent"].get<double>() == doctest::Approx(0).epsilon(1e-6));
  CHECK(out["groups"]["ln"]["mean_absolute_error_percent"].get<double>() == doctest::Approx(25));
  CHECK(out["groups"]["Tesla T4"]["rows"] == 2);
  CHECK(has(out["text"].get<std::string>(), "12.50 %"));
}

TEST_CASE("validate ops: a GPU of a data sheet in a folder") {
  const WrittenFolder folder;
  folder.write("abacus.json", R"({"Device":"Abacus 9","Mem_Bw":100,"Num_Sm":10,"SingleFLOPs":1000,"L2Cache":1})");
  const std::string path = folder.write("ops.csv", kHeader + "test,linear,Abacus 9,p,1,4096,4096,4096,,1000\n");
  CHECK(has(message_of([&] { validate(path, {}); }, {Code::kInvalidArgument}), "no data sheet of the GPU 'Abacus 9'"));
  const Json out = validate(path, {.form = "ops", .profiles = folder.path()});
  CHECK(out["rows"] == 1);
  CHECK(has(out["text"].get<std::string>(), "Abacus 9: not measured; its peaks, constants of"));
  // 137 GFLOP at most at a TFLOP/s.
  CHECK(out["groups"]["linear"]["mean_error_percent"].get<double>() > 13.7 - 100);
  folder.write("abacus.json", R"({"Device":"Abacus 9","Mem_Bw":-1,"Num_Sm":10,"SingleFLOPs":1000,"L2Cache":1})");
  CHECK(has(message_of([&] { validate(path, {.form = "", .profiles = folder.path()}); }, {Code::kInvalidArgument}),
            "Mem_Bw is -1, expected a number above 0"));
  CHECK(has(message_of([&] { validate(path, {.form = "", .profiles = folder.path() + "/none"}); }),
            "cannot read the folder"));
}

TEST_CASE("validate ops: cells that mean nothing are named") {
  const auto message = [](const std::string& rows) {
    const WrittenFile file("ops.csv", kHeader + rows);
    return message_of([&] { validate(file.path(), {}); }, {Code::kInvalidArgument});
  };
  CHECK(has(message("test,conv,Tesla T4,p,1,2,3,4,,1\n"), "row 1: op is 'conv'"));
  CHECK(has(message("test,bmm,Tesla T4,p,0,2,3,4,,1\n"), "column 'B' is 0"));
  CHECK(has(message("test,bmm,Tesla T4,p,1,2,3,4,,0\n"), "ms is 0"));
  CHECK(has(message("test,bmm,Tesla T4,p,1,2,nan,4,,1\n"), "column 'N' is 'nan'"));
}
