#include "device/cpu/attention.h"

#include <cmath>
#include <cstring>

#include "device/cpu/operands.h"
#include "device/cpu/parallel.h"
#include "device/cpu/tile.h"

namespace whale::cpu {
namespace {

HeadsView heads_view(const Operand& x, int64_t first_head, int64_t width) {
  const int64_t token = x.dims[2] * x.dims[3];
  return {static_cast<char*>(x.data) + first_head * width * size_of(x.dtype), x.dims[1] * token, token, width, x.dtype};
}

// q, k and v, of their own or packed side by side in one tensor.
void place(const Operand& q, const Operand& k, const Operand& v, const AttentionArgs& a, HeadsView& to_q,
           HeadsView& to_k, HeadsView& to_v) {
  const bool packed = !k.present();
  to_q = heads_view(q, 0, a.d);
  to_k = packed ? heads_view(q, a.heads, a.d) : heads_view(k, 0, a.d);
  to_v = packed ? heads_view(q, a.heads + a.kv_heads, a.d) : heads_view(v, 0, a.dv_width);
}

// `first` is the position of q in the spec.
AttentionArgs make_args(const KernelSpec& spec, size_t first, const Operand& bias) {
  AttentionArgs a;
  const Operand& q = spec.in[first];
  const bool packed = !has(spec.in, first + 1);
  const Operand k = packed ? Operand{} : spec.in[first + 1], v = packed ? Operand{} : spec.in[first + 2];
  a.batches = q.dims[0], a.tq = q.dims[1], a.d = q.dims[3];
  if (packed) {
    a.kv_heads = attr_int(*spec.attrs, "kv_heads");
    if (a.kv_heads == 0) a.kv_heads = q.dims[2] / 3;
    a.heads = q.dims[2] - 2 * a.kv_heads, a.tk = a.tq, a.dv_width = a.d;
  } else {
    a.heads = q.dims[2], a.kv_heads = k.dims[2], a.tk = k.dims[1], a.dv_width = v.dims[3];
  }
  place(q, k, v, a, a.q, a.k, a.v);
  a.all_keys = attr_int(*spec.attrs, "keys");
  if (a.all_keys == 0) a.all_keys = a.tk;
  a.key_begin = attr_int(*spec.attrs, "key_begin");
  a.box = GlobalIndex(spec.box, spec.out[0].dims);
  const bool packed_result = packed && spec.out[0].dims[2] != a.heads;  // the box is of dq, with the k and v heads
  a.all_heads = packed_result ? a.box.global(2) * a.heads / spec.out[0].dims[2] : a.box.global(2);
  a.all_queries = a.box.global(1);
  a.causal = attr_bool(*spec.attrs, "causal");
  if (a.causal && a.tq > 1 && a.box.coordinate(1, a.tq - 1, 0) - a.box.coordinate(1, 0, 0) != a.tq - 1)
    throw unimplemented(
        "causal attention whose {} queries on this device are not neighbours (they are cut in several places of {}) on "
        "cpu devices; cut another dimension, or keep what is cut out of the dimension of queries",
        a.tq, a.all_queries);
  const double scale = attr_float(*spec.attrs, "scale");
  a.scale = static_cast<float>(scale != 0 ? scale : 1 / std::sqrt(static_cast<double>(a.d)));
  a.rate = attr_float(*spec.attrs, "dropout");
  if (bias.present()) {
    a.bias = static_cast<const char*>(bias.data);
    a.bias_dtype = bias.dtype;
    const int64_t head = a.tq * a.all_keys;
    a.bias_head = bias.dims[1] == 1 ? 0 : head;
    a.bias_batch = bias.dims[0] == 1 ? 0 : bias.dims[1] * head;
  }
  return a;
}

// What changes each time it runs.
void refresh(AttentionArgs& a, const StepParameters* step, const RowContext* row, uint64_t key) {
  if (row != nullptr) a.batch_begin = row->batch_begin;
  a.shift = a.box.coordinate(1, 0, a.batch_begin) + a.all_keys - a.all_queries - a.key_begin;
  if (step != nullptr && a.rate > 0) a.stream = RandomStream(step->seed, key, static_cast<uint64_t>(step->iteration));
}
uint64_t key_of(const KernelSpec& spec) {
  return spec.key != 0 ? spec.key : static_cast<uint64_t>(attr_int(*spec.attrs, "key"));
}

Operand operand(const std::vector<Operand>& list, size_t i) { return has(list, i) ? list[i] : Operand{}; }

std::unique_ptr<Kernel> bind_attention(const KernelSpec& spec, CpuDevice& device) {
  AttentionArgs args = make_args(spec, 0, operand(spec.in, 3));
  args.out = heads_view(spec.out[0], 0, args.dv_width);
  args.lse = has(spec.out, 1) ? static_cast<float*>(spec.out[1].data) : nullptr;
  const int threads = device.threads();
  const auto floats = static_cast<int64_t>(attention_scratch(args));
  const auto bytes = static_cast<size_t>(threads) * static_cast<size_t>(floats) * 4;
  return make_kernel(bytes, [=, step = spec.step, row = spec.row, key = key_of(spec)](char* scratch) {
    AttentionArgs a = args;
    refresh(a, step, row, key);
    const int64_t blocks = a.query_blocks(), tasks = a.batches * a.heads * blocks;
    parallel_tasks(threads, tasks, [&](int64_t task, int thread) {
      const int64_t block = blocks - 1 - task % blocks, head = task / blocks;  // causal: the long ones first
      run_attention(a, head / a.heads, head % a.heads, block, reinterpret_cast<float*>(scratch) + thread * floats);
    });
  });
}

std::unique_ptr<Kernel> bind_attention_grad(const KernelSpec& spec, CpuDevice& device) {
  const Operand bias = operand(spec.in, 6);
  AttentionArgs args = make_args(spec, 1, bias);
  const bool packed = !has(spec.in, 2);
  args.dout = heads_view(spec.in[0], 0, args.dv_width);
  args.out = heads_view(spec.in[4], 0, args.dv_width);
  args.lse = static_cast<float*>(spec.in[5].data);
  Results results(spec);
  const Operand dq = results.take(), dk = results.take(!packed), dv = results.take(!packed);
  const Operand dbias = results.take(attr_bool(*spec.attrs, "bias_grad") && bias.present());
  place(dq, dk, dv, args, args.dq, args.dk, args.dv);
  // Heads that share a bias add to it in order, on one thread.
  const bool shared = dbias.present() && (args.bias_batch == 0 || args.bias_head == 0 || args.heads != args.kv_heads);
  const int threads = shared ? 1 : device.threads();
  const auto floats = static_cast<int64_t>(attention_grad_scratch(args));
  const auto bytes = static_cast<size_t>(threads) * static_cast<size_t>(floats) * 4;
  const bool direct = dbias.dtype == DType::kF32;
  const int64_t biases = dbias.present() ? count(dbias) : 0;
  const size_t total = bytes + (direct ? 0 : static_cast<size_t>(biases * 4));
  return make_kernel(total, [=, step = spec.step, row = spec.row, key = key_of(spec)](char* scratch) {
    AttentionArgs a = args;
    refresh(a, step, row, key);
    if (dbias.present()) {
      a.dbias = direct ? static_cast<float*>(dbias.data) : reinterpret_cast<float*>(scratch + bytes);
      std::memset(a.dbias, 0, static_cast<size_t>(biases) * 4);
    }
    parallel_tasks(threads, a.batches * a.kv_heads, [&](int64_t task, int thread) {
      run_attention_grad(a, task / a.kv_heads, task % a.kv_heads, reinterpret_cast<float*>(scratch) + thread * floats);
    });
    if (dbias.present() && !direct) store_tile(dbias.dtype, a.dbias, dbias.data, 0, biases);
  });
}

// Rows of out, with their weights from lse.
std::unique_ptr<Kernel> bind_attention_merge(const KernelSpec& spec, CpuDevice& device) {
  const Dims& dims = spec.in[0].dims;
  const int64_t times = dims[1], heads = dims[2], width = dims[3];
  const auto floats = [&](const Operand& x) { return static_cast<float*>(x.data); };
  const float *x = floats(spec.in[0]), *x_lse = floats(spec.in[1]), *y = floats(spec.in[2]),
              *y_lse = floats(spec.in[3]);
  const Operand to = spec.out[0];
  float* const lse = has(spec.out, 1) ? floats(spec.out[1]) : nullptr;
  const int threads = device.threads();
  const size_t bytes = static_cast<size_t>(threads) * static_cast<size_t>(width) * 4;
  return make_kernel(bytes, [=](char* scratch) {
    parallel_tasks(threads, dims[0] * heads, [&](int64_t task, int thread) {
      float* const sums = reinterpret_cast<float*>(scratch) + thread * width;
      for (int64_t t = 0; t < times; ++t) {
        const int64_t row = task * times + t, at = ((task / heads * times + t) * heads + task % heads) * width;
        const float a = x_lse[row], b = y_lse[row], top = std::fmax(a, b);
        const bool any = top != -HUGE_VALF;  // else no key at all: zeros
        const float wa = any ? std::exp(a - top) : 0, wb = any ? std::exp(b - top) : 0, sum = wa + wb;
        const float pa = any ? wa / sum : 0, pb = any ? wb / sum : 0;
        for (int64_t c = 0; c < width; ++c) sums[c] = pa * x[at + c] + pb * y[at + c];
        store_tile(to.dtype, sums, to.data, at, width);
        if (lse) lse[row] = any ? top + std::log(sum) : top;
      }
    });
  });
}

constexpr KernelEntry kTable[] = {
    {OpCode::k_attention, bind_attention, nullptr},
    {OpCode::k_attention_grad, bind_attention_grad, nullptr},
    {OpCode::k_attention_merge, bind_attention_merge, nullptr},
};

}  // namespace

std::span<const KernelEntry> attention_kernels() { return kTable; }

}  // namespace whale::cpu
