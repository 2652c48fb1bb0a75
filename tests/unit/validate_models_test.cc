// Steps of whole models from their ops: against measured steps, and what must hold.
#include "cost/curve.h"
#include "unit/caught.h"
#include "unit/validate_kit.h"
#include "validate/validate.h"

using namespace whale;

namespace {

const std::string kHeader = "gpu,model,mode,seq,batch,strategy,num_layer,fw_ms,bwall_ms,e2e_ms\n";

double error_of(const std::string& row) {
  const WrittenFile file("models.csv", kHeader + row);
  return validate(file.path(), {})["groups"].begin().value()["mean_error_percent"].get<double>();
}

}  // namespace

// Of NeuSight (sitar-lab/NeuSight, MIT).
TEST_CASE("validate models: training steps that were measured are within 10 %") {
  for (const char* row : {
           "NVIDIA_H100_80GB_HBM3,opt_13,train,2048,2,,24,344.2,671.7,1015.9246\n",
           "NVIDIA_H100_80GB_HBM3,gpt2_large,train,1024,4,,36,226.3,412.5,638.8087\n",
           "NVIDIA_H100_80GB_HBM3,gpt3_27,train,2048,1,,32,348.1,650.6,998.7345\n",
           "Tesla_V100-PCIE-32GB,bert_large,train,512,2,,24,83.0,151.3,234.2580\n",
           "NVIDIA_A100-PCIE-40GB,gpt3_27,inf,2048,8,,32,7267.0,0,7267.0361\n",
       }) {
    CAPTURE(row);
    CHECK(std::abs(error_of(row)) < 10);
  }
}

TEST_CASE("validate models: training is longer than inference, a larger batch than a smaller one") {
  const auto seconds = [](const char* mode, int batch) {
    return 100 + error_of(fmt::format("Tesla T4,bert_large,{},512,{},,24,1,1,1000\n", mode, batch));
  };
  CHECK(seconds("train", 8) > 2.5 * seconds("inf", 8));
  CHECK(seconds("inf", 16) > 1.8 * seconds("inf", 8));
}

TEST_CASE("validate models: rows that are not modelled are left out and counted") {
  const WrittenFile file("models.csv", kHeader +
                                           "Tesla T4,bert_large,inf,512,8,,24,1,0,700\n"
                                           "Tesla T4,bert_large,inf,512,8,fusion,24,1,0,700\n"
                                           "Tesla T4,switchxl4,inf,512,8,,24,1,0,700\n"
                                           "AMD_Instinct_MI210,opt_13,inf,2048,2,,24,1,0,637.7\n");
  const Json out = validate(file.path(), {});
  CHECK(out["form"] == "models");
  CHECK(out["rows"] == 2);
  const std::string text = out["text"];
  CHECK(has(text, "2 of 4 rows; 2 left out: 1 of strategy fusion, 1 of model switchxl4\n"));
  CHECK(out["rows_left_out"] == 2);
  CHECK(out["left_out"]["of strategy fusion"] == 1);
  CHECK(out["left_out"]["of model switchxl4"] == 1);
  CHECK(has(text, "AMD Instinct MI210: not measured"));
  CHECK(out["groups"]["inference, GPUs without constants"]["rows"] == 1);
}

TEST_CASE("validate models: cells that mean nothing are named") {
  const auto message = [](const std::string& rows) {
    const WrittenFile file("models.csv", kHeader + rows);
    return message_of([&] { validate(file.path(), {}); }, {Code::kInvalidArgument});
  };
  CHECK(has(message("Tesla T4,bert_large,dream,512,8,,24,1,0,700\n"), "mode is 'dream'"));
  CHECK(has(message("Tesla T4,bert_large,inf,0,8,,24,1,0,700\n"), "column 'seq' is 0"));
  CHECK(has(message("Tesla T4,bert_large,inf,512,8,,24,1,0,0\n"), "e2e_ms is 0"));
  CHECK(has(message("Tesla T4,moe,inf,512,8,,24,1,0,5\n"),
            "no row of one GPU and a model that is known: 0 of 1 rows; 1 left out: 1 of model moe"));
}
