// cpu_bench [--threads N] [--milliseconds T] ['CASE'...]: times one op of the CPU back end. A case is written
//   op(type[dims], ...; attribute=value, ...) -> type[dims], ...
// with "_" for an absent operand. Values are random in [-1, 1); integers are 0. Without a case it runs the list below.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "base/bf16.h"
#include "base/error.h"
#include "base/philox.h"
#include "device/device.h"
#include "ops/op.h"

extern "C" const whale::BackendEntry whale_backend;

namespace whale {
namespace {

const char* const kCases[] = {
    "matmul(f32[2048,256], f32[256,1024]) -> f32[2048,1024]",
    "matmul(f32[2048,256], f32[256,768], f32[768]) -> f32[2048,768]",
    "matmul(f32[2048,1024], f32[256,1024]; transpose_b=true) -> f32[2048,256]",
    "matmul_weight_grad(f32[2048,256], f32[2048,1024]; bias=true) -> f32[256,1024], f32[1024]",
    "matmul_weight_grad(f32[2048,1024], f32[2048,256]; bias=true) -> f32[1024,256], f32[256]",
    "matmul(f32[256,784], f32[784,512], f32[512]; activation=relu) -> f32[256,512]",
    "matmul_weight_grad(f32[256,784], f32[256,512]; bias=true) -> f32[784,512], f32[512]",
    "matmul(f32[1024,768], f32[50257,768]; transpose_b=true) -> f32[1024,50257]",
    "matmul(bf16[2048,256], bf16[256,1024]) -> bf16[2048,1024]",
    "matmul(bf16[2048,1024], bf16[256,1024]; transpose_b=true) -> bf16[2048,256]",
    "matmul_weight_grad(bf16[2048,256], bf16[2048,1024]; bias=true) -> f32[256,1024], f32[1024]",
    "conv(f32[64,32,32,16], f32[16,3,3,16]; padding=[1,1,1,1]) -> f32[64,32,32,16]",
    "conv_grad_input(f32[64,32,32,16], f32[16,3,3,16]; padding=[1,1,1,1], spatial=[32,32]) -> f32[64,32,32,16]",
    "conv_grad_weight(f32[64,32,32,16], f32[64,32,32,16]; padding=[1,1,1,1], kernel=[3,3]) -> f32[16,3,3,16]",
    "batch_stats(f32[64,32,32,16]) -> f64[2,16]",
    "batch_norm_apply(f32[64,32,32,16], f64[2,16], f32[16], f32[16]; count=65536, relu=true) -> f32[64,32,32,16]",
    "batch_norm_grad_stats(f32[64,32,32,16], f32[64,32,32,16], f64[2,16], f32[64,32,32,16]; count=65536, relu=true) -> "
    "f64[2,16]",
    "batch_norm_grad(f32[64,32,32,16], f32[64,32,32,16], f64[2,16], f32[16], f64[2,16], f32[64,32,32,16]; count=65536, "
    "relu=true)"
    " -> f32[64,32,32,16]",
    "max_pool(f32[16,32,32,64]; window=[3,3], strides=[2,2], padding=[1,1,1,1]) -> f32[16,16,16,64], i32[16,16,16,64]",
};

// ---- the notation ------------------------------------------------------------------------------------------------
std::string trim(std::string s) {
  const auto blank = [](char c) { return c == ' ' || c == '\n'; };
  while (!s.empty() && blank(s.back())) s.pop_back();
  size_t i = 0;
  while (i < s.size() && blank(s[i])) ++i;
  return s.substr(i);
}

std::vector<std::string> split(const std::string& text) {  // at commas outside brackets
  std::vector<std::string> parts;
  std::string part;
  int depth = 0;
  for (const char c : text) {
    depth += c == '[' ? 1 : c == ']' ? -1 : 0;
    if (c == ',' && depth == 0) {
      parts.push_back(trim(part));
      part.clear();
    } else {
      part += c;
    }
  }
  if (!trim(part).empty()) parts.push_back(trim(part));
  return parts;
}

std::vector<int64_t> numbers(const std::string& list) {  // "[1,2]"
  std::vector<int64_t> values;
  for (const std::string& n : split(list.substr(1, list.size() - 2))) values.push_back(std::stoll(n));
  return values;
}

Attr value_of(const std::string& text) {
  if (text == "true" || text == "false") return text == "true";
  if (text.front() == '[') return numbers(text);
  if (text.find_first_not_of("-0123456789") == std::string::npos) return static_cast<int64_t>(std::stoll(text));
  if (text.find_first_not_of("-+.e0123456789") == std::string::npos) return std::stod(text);
  return text;
}

Operand operand_of(const std::string& text) {
  Operand operand;
  if (text == "_") return operand;
  const size_t bracket = text.find('[');
  operand.dtype = parse_dtype(text.substr(0, bracket));
  operand.dims = numbers(text.substr(bracket));
  return operand;
}

struct Case {
  KernelSpec spec;
  Attrs attrs;
};

void parse(const std::string& text, Case& c) {
  const size_t open = text.find('('), arrow = text.find(") ->");
  if (open == std::string::npos || arrow == std::string::npos)
    throw invalid("case '{}': want op(operands; attributes) -> results", text);
  c.spec.op = code_of(trim(text.substr(0, open)));
  const std::string inside = text.substr(open + 1, arrow - open - 1);
  const size_t semicolon = inside.find(';');
  for (const std::string& operand : split(inside.substr(0, semicolon))) c.spec.in.push_back(operand_of(operand));
  if (semicolon != std::string::npos)
    for (const std::string& attr : split(inside.substr(semicolon + 1)))
      c.attrs[trim(attr.substr(0, attr.find('=')))] = value_of(trim(attr.substr(attr.find('=') + 1)));
  for (const std::string& operand : split(text.substr(arrow + 4))) c.spec.out.push_back(operand_of(operand));
  c.attrs = complete_attrs(def(c.spec.op), c.attrs);
  c.spec.attrs = &c.attrs;
}

// ---- running -----------------------------------------------------------------------------------------------------
void fill(const Operand& operand, uint64_t key) {
  const RandomStream random(1, key, 0);
  const int64_t n = element_count(operand.dims);
  for (int64_t i = 0; i < n; ++i) {
    const float x = static_cast<float>(random.word(static_cast<uint64_t>(i % 65536))) * 4.656612873e-10f - 1.0f;
    if (operand.dtype == DType::kF32) static_cast<float*>(operand.data)[i] = x;
    if (operand.dtype == DType::kF64) static_cast<double*>(operand.data)[i] = (x + 1.0) * 70000;  // sums over a batch
    if (operand.dtype == DType::kBF16) static_cast<uint16_t*>(operand.data)[i] = float_to_bf16(x);
  }
}

double flops_of(const KernelSpec& spec) {
  const auto count = [](const Operand& o) { return static_cast<double>(element_count(o.dims)); };
  const auto last = [](const Operand& o) { return static_cast<double>(o.dims.back()); };
  switch (spec.op) {
    case OpCode::k_matmul: return 2 * count(spec.in[0]) * last(spec.out[0]);
    case OpCode::k_matmul_weight_grad: return 2 * count(spec.in[0]) * last(spec.in[1]);
    case OpCode::k_conv: return 2 * count(spec.out[0]) * count(spec.in[1]) / last(spec.out[0]);
    case OpCode::k_conv_grad_input: return 2 * count(spec.in[0]) * count(spec.in[1]) / last(spec.in[0]);
    case OpCode::k_conv_grad_weight: return 2 * count(spec.in[1]) * count(spec.out[0]) / last(spec.in[1]);
    default: return 0;
  }
}

void time_case(Device& device, const std::string& text, double seconds) {
  Case c;
  parse(text, c);
  StepParameters step;
  RowContext row;
  c.spec.step = &step, c.spec.row = &row;
  double bytes = 0;
  uint64_t key = 0;
  for (auto* list : {&c.spec.in, &c.spec.out})
    for (Operand& operand : *list) {
      if (!operand.present()) continue;
      const size_t size = static_cast<size_t>(element_count(operand.dims) * size_of(operand.dtype));
      operand.data = device.allocate(size);
      fill(operand, ++key);
      bytes += static_cast<double>(size);
    }
  c.spec.name = "bench";
  c.spec.box.origin = Dims(c.spec.out[0].dims.size(), 0);
  c.spec.box.global = c.spec.out[0].dims;
  const auto kernel = device.bind(c.spec);
  const size_t scratch_bytes = kernel->scratch_bytes();
  void* scratch = device.allocate(scratch_bytes);
  kernel->set_scratch(scratch);
  const auto now = [] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  };
  kernel->run();
  double once = now();
  kernel->run();
  once = now() - once;
  const int inner = std::clamp(static_cast<int>(0.002 / std::max(once, 1e-7)), 1, 1000);
  std::vector<double> times;
  for (const double end = now() + seconds; now() < end || times.size() < 5;) {
    const double begin = now();
    for (int i = 0; i < inner; ++i) kernel->run();
    times.push_back((now() - begin) / inner);
  }
  std::sort(times.begin(), times.end());
  const double median = times[times.size() / 2], best = times.front(), flops = flops_of(c.spec);
  fmt::print("{:9.1f} us (best {:9.1f}) {:7.1f} GB/s {:7.1f} GFLOP/s  scratch {:9}  {}\n", median * 1e6, best * 1e6,
             bytes / median * 1e-9, flops / median * 1e-9, scratch_bytes, text);
  std::fflush(stdout);
  device.release(scratch, scratch_bytes);
  for (auto* list : {&c.spec.in, &c.spec.out})
    for (Operand& operand : *list)
      if (operand.present())
        device.release(operand.data, static_cast<size_t>(element_count(operand.dims) * size_of(operand.dtype)));
}

int run(int argc, char** argv) {
  DeviceSpec spec;
  double seconds = 0.2;
  std::vector<std::string> cases;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--threads") == 0 && i + 1 < argc) {
      for (int core = 0, n = std::stoi(argv[++i]); core < n; ++core) spec.cores.push_back(core);
    } else if (std::strcmp(argv[i], "--milliseconds") == 0 && i + 1 < argc) {
      seconds = std::stod(argv[++i]) / 1000;
    } else {
      cases.emplace_back(argv[i]);
    }
  }
  if (cases.empty()) cases.assign(std::begin(kCases), std::end(kCases));
  const std::unique_ptr<Backend> backend(whale_backend.create());
  const auto device = backend->open(spec);
  device->enter_thread(Queue::kCompute);
  fmt::print("{}\n", backend->describe());
  int failed = 0;
  for (const std::string& text : cases) try {
      time_case(*device, text, seconds);
    } catch (const Error& e) {
      fmt::print("failed: {}: {}\n", text, e.message());
      ++failed;
    }
  return failed != 0;
}

}  // namespace
}  // namespace whale

int main(int argc, char** argv) { return whale::run(argc, argv); }
