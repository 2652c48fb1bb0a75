// Transposed convolution. Windows that tile the result (a kernel as large as its stride: doubling an image) are one
// matrix product for each plane of x, whose columns are then laid side by side; other windows are oneDNN's.
#include <cstring>

#include "base/error.h"
#include "device/cpu/bf16.h"
#include "device/cpu/conv.h"
#include "device/cpu/copies.h"
#include "device/cpu/function_kernel.h"
#include "device/cpu/parallel.h"

namespace whale::cpu {
namespace {

using dnnl::memory;

#define WHALE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
// to[rows, width] = from[rows, width] + bias[width], rows of `from` lying `stride` apart.
#define WHALE_ADD_BIAS(NAME, FROM, TO)                                                                               \
  WHALE_CLONES void NAME(const FROM* from, int64_t stride, const float* bias, int64_t rows, int64_t width, TO* to) { \
    for (int64_t r = 0; r < rows; ++r)                                                                               \
      _Pragma("omp simd") for (int64_t i = 0; i < width; ++i) to[r * width + i] =                                    \
          from_float<TO>(to_float(from[r * stride + i]) + bias[i]);                                                  \
  }
WHALE_ADD_BIAS(add_bias_f32, float, float)
WHALE_ADD_BIAS(add_bias_to_bf16, float, Bf16)
WHALE_ADD_BIAS(add_bias_bf16, Bf16, Bf16)

// `times` copies of the bias, as floats; zeros where there is none.
void repeat_bias(const Operand& bias, int64_t o, int64_t times, float* to) {
  for (int64_t i = 0; i < o * times; ++i) {
    if (!bias.present())
      to[i] = 0;
    else if (bias.dtype == DType::kF32)
      to[i] = static_cast<const float*>(bias.data)[i % o];
    else
      to[i] = to_float(static_cast<const Bf16*>(bias.data)[i % o]);
  }
}
Operand bias_of(const KernelSpec& spec) { return spec.in.size() > 2 ? spec.in[2] : Operand{}; }

bool tiles(const Geometry& g, const Dims& x, const Dims& w, const Dims& y) {
  bool same = g.groups == 1;
  for (size_t i = 0; i < g.spatial; ++i)
    same = same && g.strides[i] == w[i + 1] && g.dilates[i] == 0 && g.low[i] == 0 && y[i + 1] == x[i + 1] * w[i + 1];
  return same;
}

class TilingKernel final : public Kernel {
 public:
  TilingKernel(const KernelSpec& spec, CpuDevice& device)
      : device_(device), bias_(bias_of(spec)), x_(spec.in[0]), y_(spec.out[0]) {
    const Dims &x = x_.dims, &w = spec.in[1].dims;
    const size_t spatial = x.size() - 2;
    for (size_t i = 0; i < spatial; ++i) {
      extent_[3 - spatial + i] = x[i + 1];
      kernel_[3 - spatial + i] = w[i + 1];
    }
    planes_ = x[0] * extent_[0], o_ = w.back();
    columns_ = kernel_[0] * kernel_[1] * kernel_[2] * o_;
    const int64_t rows = extent_[1] * extent_[2], c = x.back();
    plane_bytes_ = rows * c * size_of(x_.dtype);
    const auto& engine = device.onednn().engine;
    const auto xd = plain_desc({rows, c}, x_.dtype), wd = plain_desc({c, columns_}, spec.in[1].dtype),
               td = plain_desc({rows, columns_}, DType::kF32);
    const dnnl::matmul::primitive_desc pd(dnnl::matmul::desc(xd, wd, td), user_scratchpad(), engine);
    matmul_ = dnnl::matmul(pd);
    memory_[0] = {xd, engine, x_.data}, memory_[1] = {wd, engine, spec.in[1].data}, memory_[2] = {td, engine, nullptr};
    memory_[3] = {pd.scratchpad_desc(), engine, nullptr};
    bias_at_ = td.get_size();
    scratchpad_at_ = bias_at_ + (static_cast<size_t>(kernel_[2] * o_) * sizeof(float) + 63) / 64 * 64;
  }
  size_t scratch_bytes() const override { return scratchpad_at_ + memory_[3].get_desc().get_size(); }
  void set_scratch(void* scratch) override {
    scratch_ = static_cast<char*>(scratch);
    memory_[2].set_data_handle(scratch);
    memory_[3].set_data_handle(scratch_ + scratchpad_at_);
  }
  void run() override {
    repeat_bias(bias_, o_, kernel_[2], bias());
    const dnnl_exec_arg_t arguments[] = {{DNNL_ARG_SRC, memory_[0].get()},
                                         {DNNL_ARG_WEIGHTS, memory_[1].get()},
                                         {DNNL_ARG_DST, memory_[2].get()},
                                         {DNNL_ARG_SCRATCHPAD, memory_[3].get()}};
    for (int64_t plane = 0; plane < planes_; ++plane) {
      memory_[0].set_data_handle(static_cast<char*>(x_.data) + plane * plane_bytes_);
      const dnnl_status_t status =
          dnnl_primitive_execute(matmul_.get(), device_.onednn().stream.get(), std::size(arguments), arguments);
      if (status != dnnl_success)
        throw internal("oneDNN failed to run a primitive: status {}", static_cast<int>(status));
      parallel_for(device_.threads(), kernel_[0] * extent_[1] * kernel_[1],
                   std::max<int64_t>(1, 8192 / (extent_[2] * kernel_[2] * o_)), [&](int64_t first, int64_t last) {
                     for (int64_t row = first; row < last; ++row) place(plane, row);
                   });
    }
  }

 private:
  float* bias() const { return reinterpret_cast<float*>(scratch_ + bias_at_); }
  // One row of the result: the same part of the columns of every product along x's last spatial dimension.
  void place(int64_t plane, int64_t row) const {
    const int64_t width = kernel_[2] * o_, per_depth = extent_[1] * kernel_[1];
    const int64_t kd = row / per_depth, h = row % per_depth / kernel_[1], kh = row % kernel_[1];
    const auto* from =
        reinterpret_cast<const float*>(scratch_) + h * extent_[2] * columns_ + (kd * kernel_[1] + kh) * width;
    const int64_t to = (plane * kernel_[0] * per_depth + row) * extent_[2] * width;
    if (y_.dtype == DType::kF32)
      add_bias_f32(from, columns_, bias(), extent_[2], width, static_cast<float*>(y_.data) + to);
    else
      add_bias_to_bf16(from, columns_, bias(), extent_[2], width, static_cast<Bf16*>(y_.data) + to);
  }

  CpuDevice& device_;
  Operand bias_, x_, y_;
  int64_t extent_[3] = {1, 1, 1}, kernel_[3] = {1, 1, 1};
  int64_t planes_ = 0, o_ = 0, columns_ = 0, plane_bytes_ = 0;
  dnnl::matmul matmul_;
  memory memory_[4];
  size_t bias_at_ = 0, scratchpad_at_ = 0;
  char* scratch_ = nullptr;
};

// Filters [c, kernel..., o / groups] as (g,) o, c, k...
Filter transposed_filter_of(const Dims& dims, int64_t groups) {
  Filter f = filter_of(dims, groups);
  const size_t at = groups > 1 ? 1 : 0;
  std::swap(f.dims[at], f.dims[at + 1]);
  std::swap(f.strides[at], f.strides[at + 1]);
  return f;
}

std::unique_ptr<Kernel> bias_in_place(CpuDevice& device, const Operand& bias, const Operand& y) {
  const int64_t o = y.dims.back(), rows = element_count(y.dims) / o;
  return make_kernel(static_cast<size_t>(o) * sizeof(float), [=, &device](char* scratch) {
    auto* wide = reinterpret_cast<float*>(scratch);
    repeat_bias(bias, o, 1, wide);
    parallel_for(device.threads(), rows, std::max<int64_t>(1, 8192 / o), [&](int64_t first, int64_t last) {
      if (y.dtype == DType::kF32) {
        float* at = static_cast<float*>(y.data) + first * o;
        add_bias_f32(at, o, wide, last - first, o, at);
      } else {
        Bf16* at = static_cast<Bf16*>(y.data) + first * o;
        add_bias_bf16(at, o, wide, last - first, o, at);
      }
    });
  });
}

// oneDNN's own bias is a slow loop in some of its deconvolutions, so it is added here.
std::unique_ptr<Kernel> bind_plain(const KernelSpec& spec, CpuDevice& device) {
  const Operand &x = spec.in[0], &w = spec.in[1], &y = spec.out[0];
  Geometry g = geometry_of(*spec.attrs, x.dims.size());
  if (element_count(y.dims) == 0) return nothing_to_do();
  auto sequence = std::make_unique<SequenceKernel>();
  if (element_count(w.dims) == 0) {
    sequence->add(zeros(y));
  } else if (tiles(g, x.dims, w.dims, y.dims)) {
    return std::make_unique<TilingKernel>(spec, device);
  } else {
    for (size_t i = 0; i < g.spatial; ++i)  // the output's padding is less of x's
      g.high[i] =
          (x.dims[i + 1] - 1) * g.strides[i] + (g.dilates[i] + 1) * (w.dims[i + 1] - 1) + 1 - g.low[i] - y.dims[i + 1];
    const Filter f = transposed_filter_of(w.dims, g.groups);
    const auto xd = image_desc(x.dims, x.dtype), yd = image_desc(y.dims, y.dtype), wd = any_filter(f, w.dtype);
    const dnnl::deconvolution_forward::desc desc(dnnl::prop_kind::forward_training,
                                                 dnnl::algorithm::deconvolution_direct, xd, wd, yd, g.strides,
                                                 g.dilates, g.low, g.high);
    const dnnl::deconvolution_forward::primitive_desc pd(desc, user_scratchpad(), device.onednn().engine);
    auto kernel = std::make_unique<DnnlKernel>(device.onednn());
    const auto packed = kernel->reordered(kernel->operand(plain_filter(f, w.dtype), w), pd.weights_desc());
    kernel->call(
        pd, dnnl::deconvolution_forward(pd),
        {{DNNL_ARG_SRC, kernel->operand(xd, x)}, {DNNL_ARG_WEIGHTS, packed}, {DNNL_ARG_DST, kernel->operand(yd, y)}});
    sequence->add(std::move(kernel));
  }
  if (bias_of(spec).present()) sequence->add(bias_in_place(device, spec.in[2], y));
  return sequence;
}

}  // namespace

std::unique_ptr<Kernel> bind_conv_transpose(const KernelSpec& spec, CpuDevice& device) {
  return bind_narrow(spec, device, bind_plain);
}

}  // namespace whale::cpu
