// Models of images and volumes, and of very many classes: the rows are in models.cc.
#pragma once

#include "models.h"

namespace tool {

ModelOptions cosmoflow_sizes();
Value cosmoflow(Builder& b, const ModelOptions& o);

ModelOptions unet3d_sizes();
Value unet3d(Builder& b, const ModelOptions& o);

ModelOptions classifier_sizes();
Value classifier(Builder& b, const ModelOptions& o);

}  // namespace tool
