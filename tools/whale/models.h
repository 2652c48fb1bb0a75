// The models of `whale model`: one row a model or preset in a table (models.cc), one short function a family.
#pragma once

#include <string>
#include <vector>

#include "builder.h"

namespace tool {

// Sizes of a model; -1: the row's default. Not every family uses every field.
struct ModelOptions {
  int64_t layers = -1, dim = -1, heads = -1, seq = -1, vocab = -1, batch = -1, hidden = -1, classes = -1, image = -1;
  int64_t experts = -1, top_k = -1, moe_every = -1, decoder = -1;
  int64_t kv_heads = -1, head_dim = -1, dense_layers = -1;
  int64_t norm_groups = 1;  // of batch norm
  double dropout = -1, capacity = -1;
  bool tied = false;
  std::string
      optimizer;  // "sgd", "split_sgd", "momentum", "adam", "adamw", "lamb", "adagrad", "adafactor"; empty: the row's
  double learning_rate = -1, weight_decay = -1, clip = 0;
  int64_t accumulation = 1;
  int sparse_updates = -1;  // 1: updates of the rows of tables that a step looked up; 0: of whole tables
  std::string precision = "f32", parameters = "f32";
  std::string lr_schedule = "constant";
  int64_t warmup = 0, total_steps = 0;
  std::string strategy;
};

// A size that a family reads. when: of which options, all if there is no such function; wants: these, in words.
struct Read {
  const char* option;
  bool (*when)(const ModelOptions& options) = nullptr;
  const char* wants = "";
};

struct ModelFamily {
  Value (*build)(Builder& builder, const ModelOptions& options);  // returns the loss
  std::vector<Read> reads;                                        // besides the options of every model
};

struct ModelRow {
  const char* name;
  const char* doc;
  ModelOptions defaults;
  const ModelFamily& family;
};

const std::vector<ModelRow>& model_rows();
const ModelRow& find_model(const std::string& name);  // throws Failure with the names there are
ModelOptions merge(const ModelOptions& given, const ModelOptions& defaults);

// Throws for the first of `sizes`, options by name, that the model would not read.
void check_reads(const ModelRow& row, const ModelOptions& given, const std::vector<std::string>& sizes);

// Builds a sealed graph, with loss and optimizer.
GraphHandle build_model(whale_engine* engine, const ModelRow& row, const ModelOptions& options);

}  // namespace tool
