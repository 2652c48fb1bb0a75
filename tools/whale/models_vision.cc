#include "models_vision.h"

#include <cmath>

namespace tool {
namespace {

// `volume`: batch, three spatial dimensions and channels. The kernel is a cube; the volume keeps its size.
Value conv3d(Builder& b, const std::string& name, Value x, int64_t features, int64_t kernel) {
  const auto scope = b.scope(name);
  const int64_t channels = b.dims(x).back(), pad = kernel / 2;
  const Init init = Init::uniform(1 / std::sqrt(static_cast<double>(channels * kernel * kernel * kernel)));
  const Value weight = b.parameter("weight", {features, kernel, kernel, kernel, channels}, init);
  return b.op("conv", {x, weight, b.parameter("bias", {features}, Init::zeros())}, {{"padding", Dims(6, pad)}});
}

// Doubles the spatial dimensions.
Value up(Builder& b, const std::string& name, Value x, int64_t features) {
  const auto scope = b.scope(name);
  const int64_t channels = b.dims(x).back();
  const Value weight = b.parameter("weight", {channels, 2, 2, 2, features},
                                   Init::uniform(1 / std::sqrt(static_cast<double>(8 * features))));
  return b.op("conv_transpose", {x, weight, b.parameter("bias", {features}, Init::zeros())}, {{"strides", Dims(3, 2)}});
}

Value halve(Builder& b, Value x) { return b.ops("max_pool", {x}, {{"window", Dims(3, 2)}})[0]; }

Value leaky_relu(Builder& b, Value x, double slope) {
  return b.op("where", {b.op("greater", {x, b.constant(0)}), x, b.mul(x, b.constant(slope))});
}

// Instance normalization (Ulyanov et al., 2016): over each sample's space, channel by channel. The gradient by the mean
// inside the variance is zero, and not computed.
Value instance_norm(Builder& b, const std::string& name, Value x) {
  const auto scope = b.scope(name);
  const int64_t features = b.dims(x).back();
  const AttrList space{{"axes", Dims{1, 2, 3}}, {"keep_dims", true}};
  const Value mean = b.op("reduce_mean", {x}, space);
  const Value variance = b.op("reduce_mean", {b.op("squared_difference", {x, b.op("stop_gradient", {mean})})}, space);
  const Value scale =
      b.mul(b.op("rsqrt", {b.add(variance, b.constant(1e-5))}), b.parameter("weight", {features}, Init::ones()));
  const Value shift = b.op("sub", {b.parameter("bias", {features}, Init::zeros()), b.mul(mean, scale)});
  return b.add(b.mul(x, scale), shift);
}

Value double_conv(Builder& b, const std::string& name, Value x, int64_t features) {
  const auto scope = b.scope(name);
  x = b.op("relu", {instance_norm(b, "norm1", conv3d(b, "conv1", x, features, 3))});
  return b.op("relu", {instance_norm(b, "norm2", conv3d(b, "conv2", x, features, 3))});
}

ModelOptions volume_sizes(int64_t layers, int64_t classes, int64_t batch) {
  ModelOptions o;
  o.layers = layers, o.dim = 16, o.image = 64, o.classes = classes, o.batch = batch;
  o.optimizer = "momentum", o.learning_rate = 1e-3, o.weight_decay = 0;
  return o;
}

}  // namespace

ModelOptions cosmoflow_sizes() {
  ModelOptions o = volume_sizes(5, 4, 2);
  o.hidden = 128;
  return o;
}

// Cosmological parameters from the distribution of dark matter, as CosmoFlow (Mathuriya et al., 2018): convolutions
// that halve the volume, then three dense layers.
Value cosmoflow(Builder& b, const ModelOptions& o) {
  const Value volumes = b.input("volumes", WHALE_F32, {o.batch, o.image, o.image, o.image, 4});
  const Value targets = b.input("targets", WHALE_F32, {o.batch, o.classes});
  Value x = volumes;
  for (int64_t i = 0; i < o.layers; ++i)
    x = halve(b, leaky_relu(b, conv3d(b, "conv" + std::to_string(i), x, o.dim << i, 3), 0.3));
  const Dims shape = b.dims(x);
  x = b.reshape(x, {-1, shape[1] * shape[2] * shape[3] * shape[4]});
  x = leaky_relu(b, b.linear("dense1", x, o.hidden), 0.3);
  x = leaky_relu(b, b.linear("dense2", x, o.hidden / 2), 0.3);
  x = b.linear("head", x, o.classes);
  check(whale_graph_output(b.graph(), WHALE_STR("parameters"), x));
  return b.op("reduce_mean", {b.op("squared_difference", {x, targets})});
}

ModelOptions unet3d_sizes() { return volume_sizes(3, 3, 1); }

// Segmentation of volumes, as 3D U-Net (Cicek et al., 2016): a class for each voxel.
Value unet3d(Builder& b, const ModelOptions& o) {
  const Value volumes = b.input("volumes", WHALE_F32, {o.batch, o.image, o.image, o.image, 1});
  const Value labels = b.input("labels", WHALE_I32, {o.batch, o.image, o.image, o.image});
  std::vector<Value> skips;
  Value x = volumes;
  for (int64_t i = 0; i < o.layers; ++i) {
    x = double_conv(b, "down" + std::to_string(i), i == 0 ? x : halve(b, x), o.dim << i);
    skips.push_back(x);
  }
  for (int64_t i = o.layers - 2; i >= 0; --i) {
    const auto scope = b.scope("up" + std::to_string(i));
    x = b.op("concat", {skips[i], up(b, "up", x, o.dim << i)}, {{"axis", int64_t{4}}});
    x = double_conv(b, "double", x, o.dim << i);
  }
  const Value logits = conv3d(b, "head", x, o.classes, 1);
  check(whale_graph_output(b.graph(), WHALE_STR("logits"), logits));
  return b.cross_entropy(logits, labels);
}

ModelOptions classifier_sizes() {
  ModelOptions o;
  o.layers = 1, o.dim = 512, o.classes = 100000, o.batch = 64, o.dropout = 0;
  o.optimizer = "sgd", o.learning_rate = 0.1, o.weight_decay = 0;
  return o;
}

// Very many classes, the example of Whale (Jia et al., 2022, section 2.2): a small backbone that every device can hold,
// and a classifier that is larger than all the rest. Each is a scope, so that each can be given a strategy of its own.
Value classifier(Builder& b, const ModelOptions& o) {
  const Value features = b.input("features", WHALE_F32, {o.batch, o.dim}),
              labels = b.input("labels", WHALE_I32, {o.batch});
  Value x = features;
  {
    const auto backbone = b.scope("backbone");
    for (int64_t i = 0; i < o.layers; ++i) x = b.op("relu", {b.linear("layer" + std::to_string(i), x, o.dim)});
  }
  const auto classifier = b.scope("classifier");
  const Value logits = b.linear("head", x, o.classes);
  check(whale_graph_output(b.graph(), WHALE_STR("logits"), logits));
  return b.cross_entropy(logits, labels);
}

}  // namespace tool
