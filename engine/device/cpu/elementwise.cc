// One elementwise op, or a fused chain of them: a body run in tiles that stay in the first-level cache. Numbers are
// float inside (rounded to bf16 or f16 after each step that says so, so that fusing changes no number) or int64 for
// integer steps.
#include <array>
#include <cstring>
#include <numeric>

#include "device/cpu/copies.h"
#include "device/cpu/operands.h"
#include "device/cpu/parallel.h"
#include "device/cpu/tile.h"
#include "device/global_index.h"
#include "ops/fused.h"

namespace whale::cpu {
namespace {

constexpr int64_t kTileBytes = 48 << 10;  // of all slots of a tile
constexpr int kMaxRank = 12;

bool integer(DType dtype) { return is_integer(dtype); }

// An operand of the body: where tile data comes from.
struct Input {
  // kDirect: float in memory, read in place. kPeriodic: strided, with the same `period` elements again and again for
  // `span` elements of the result (a value for each channel): a tile of it is kept from tile to tile.
  enum Kind { kDirect, kSame, kScalar, kStrided, kPeriodic } kind = kSame;
  const char* data = nullptr;
  DType dtype{};
  bool as_integer = false;
  int rank = 0;  // kStrided: collapsed dimensions, innermost last
  std::array<int64_t, kMaxRank> extent{}, stride{};
  int64_t period = 0, span = 0;
};

struct Step {
  enum Kind { kFloat, kInteger, kCompare, kWhereInteger, kToFloat, kToInteger, kDropout } kind = kFloat;
  TileFunction tile = nullptr;
  IntTileFunction int_tile = nullptr;
  CompareFunction compare = nullptr;
  DType dtype{};
  int a = 0, b = -1, c = -1;
  char* direct = nullptr;  // writes to memory instead of its slot
  double rate = 0;
  uint64_t key = 0;
};

struct Result {
  int slot = 0;
  char* data = nullptr;
  DType dtype{};
  bool as_integer = false;
};

struct Program {
  std::vector<Input> inputs;
  std::vector<Step> steps;
  std::vector<Result> results;  // what is left to store after the steps
  int64_t elements = 0, tile = 0, slot_bytes = 0;
  int64_t row = 1;  // last dimension of the output
  GlobalIndex global{Box{}, Dims{}};
  const StepParameters* parameters = nullptr;
  const RowContext* samples = nullptr;
};

Input make_input(const Operand& x, const Dims& out, bool as_integer) {
  Input in;
  in.data = static_cast<const char*>(x.data);
  in.dtype = x.dtype;
  in.as_integer = as_integer;
  if (x.dims == out || count(x) == element_count(out)) {
    in.kind = x.dtype == DType::kF32 && !as_integer ? Input::kDirect : Input::kSame;
    return in;
  }
  if (count(x) == 1) {
    in.kind = Input::kScalar;
    return in;
  }
  in.kind = Input::kStrided;
  if (out.size() > kMaxRank) throw unimplemented("broadcasting over {} dimensions, at most {}", out.size(), kMaxRank);
  const Dims strides = row_major_strides(x.dims);
  const size_t lead = out.size() - x.dims.size();
  for (size_t d = 0; d < out.size(); ++d) {
    if (out[d] == 1) continue;
    const int64_t stride = d >= lead && x.dims[d - lead] != 1 ? strides[d - lead] : 0;
    auto& last = in.stride[std::max(in.rank - 1, 0)];
    auto& last_extent = in.extent[std::max(in.rank - 1, 0)];
    if (in.rank > 0 && last == stride * out[d]) {  // also 0 == 0
      last_extent *= out[d];
      last = stride;
    } else {
      in.extent[in.rank] = out[d];
      in.stride[in.rank++] = stride;
    }
  }
  return in;
}

// Makes strided operands periodic where a tile can hold whole periods; returns the size of the tile.
int64_t find_periods(std::vector<Input>& inputs, int64_t tile) {
  int64_t step = 64;
  for (Input& in : inputs) {
    const auto inner = static_cast<size_t>(in.rank - 1);
    if (in.kind != Input::kStrided || in.rank < 2 || in.stride[inner] != 1 || in.stride[inner - 1] != 0) continue;
    const int64_t period = in.extent[inner], both = std::lcm(step, period);
    if (both > tile) continue;
    step = both;
    in.kind = Input::kPeriodic;
    in.period = period, in.span = period * in.extent[inner - 1];
  }
  return tile / step * step;
}

template <class T>
void load_strided(const Input& in, int64_t begin, T* to, int64_t n) {
  std::array<int64_t, kMaxRank> at{};
  int64_t offset = 0, rest = begin;
  for (int d = in.rank - 1; d >= 0; --d) {
    const auto i = static_cast<size_t>(d);
    at[i] = rest % in.extent[i];
    rest /= in.extent[i];
    offset += at[i] * in.stride[i];
  }
  const auto inner = static_cast<size_t>(in.rank - 1);
  for (int64_t done = 0; done < n;) {
    const int64_t run = std::min(n - done, in.extent[inner] - at[inner]);
    if (in.stride[inner] == 1) {
      load_tile(in.dtype, in.data, offset, to + done, run);
    } else {  // 0: no other stride survives broadcasting a dense tensor along its last dimension
      T value;
      load_tile(in.dtype, in.data, offset, &value, 1);
      std::fill_n(to + done, run, value);
    }
    done += run;
    offset += run * in.stride[inner];
    at[inner] += run;
    for (auto d = inner; d > 0 && at[d] == in.extent[d]; --d) {
      offset += in.stride[d - 1] - at[d] * in.stride[d];
      at[d] = 0;
      ++at[d - 1];
    }
  }
}

template <class T>
void load_input(const Input& in, int64_t begin, T* to, int64_t n) {
  if (in.kind == Input::kStrided || in.kind == Input::kPeriodic)
    load_strided(in, begin, to, n);
  else
    load_tile(in.dtype, in.data, begin, to, n);
}

// Words of local elements begin .. begin + n - 1, in runs that are contiguous in the logical tensor.
void global_words(const Program& p, const RandomStream& stream, int64_t begin, uint32_t* words, int64_t n) {
  const int64_t batch = p.samples->batch_begin;
  if (p.global.contiguous())
    return random_words(stream, static_cast<uint64_t>(begin + p.global.offset(batch)), words, n);
  for (int64_t done = 0; done < n;) {
    const int64_t at = begin + done;
    int64_t run = std::min(n - done, p.row - at % p.row);
    const int64_t first = p.global(at, batch);
    if (p.global(at + run - 1, batch) != first + run - 1) run = 1;
    random_words(stream, static_cast<uint64_t>(first), words + done, run);
    done += run;
  }
}

void run_dropout(const Program& p, const Step& step, const float* x, float* y, int64_t begin, int64_t n) {
  const RandomStream stream(p.parameters->seed, step.key, static_cast<uint64_t>(p.parameters->iteration));
  const uint32_t threshold = drop_threshold(step.rate);
  const auto scale = static_cast<float>(1 / (1 - step.rate));
  uint32_t words[256];
  for (int64_t i = 0; i < n; i += 256) {
    const int64_t m = std::min<int64_t>(256, n - i);
    global_words(p, stream, begin + i, words, m);
    keep_tile(x + i, words, threshold, scale, y + i, m);
  }
}

// Whether the slot of a periodic operand already holds elements at .. at + n - 1; if not, it will.
bool keeps(const Input& in, int64_t at, int64_t n, int64_t& kept) {
  const int64_t first = at / in.span, last = (at + n - 1) / in.span;
  if (first == last && first == kept) return true;
  kept = first == last ? first : -1;
  return false;
}

// Elements [begin, end) of the output.
void run_range(const Program& p, int64_t begin, int64_t end) {
  alignas(64) char memory[kTileBytes];
  const auto slot = [&](int i) { return memory + i * p.slot_bytes; };
  const char* place[256];
  int64_t kept[256];  // periodic operands: the span that the slot holds
  std::fill_n(kept, p.inputs.size(), -1);
  const auto inputs = static_cast<int>(p.inputs.size());
  for (int i = 0; i < inputs; ++i) {
    const Input& in = p.inputs[i];
    place[i] = slot(i);
    if (in.kind != Input::kScalar) continue;
    const auto fill = [&](auto* to) {
      load_tile(in.dtype, in.data, 0, to, 1);
      std::fill_n(to + 1, p.tile - 1, *to);
    };
    if (in.as_integer)
      fill(reinterpret_cast<int64_t*>(slot(i)));
    else
      fill(reinterpret_cast<float*>(slot(i)));
  }
  for (int64_t at = begin; at < end; at += p.tile) {
    const int64_t n = std::min(p.tile, end - at);
    for (int i = 0; i < inputs; ++i) {
      const Input& in = p.inputs[i];
      if (in.kind == Input::kDirect)
        place[i] = in.data + at * 4;
      else if (in.kind == Input::kScalar || (in.kind == Input::kPeriodic && keeps(in, at, n, kept[i])))
        continue;
      else if (in.as_integer)
        load_input(in, at, reinterpret_cast<int64_t*>(slot(i)), n);
      else
        load_input(in, at, reinterpret_cast<float*>(slot(i)), n);
    }
    for (size_t s = 0; s < p.steps.size(); ++s) {
      const Step& step = p.steps[s];
      const int to = inputs + static_cast<int>(s);
      char* out = step.direct ? step.direct + at * 4 : slot(to);
      place[to] = out;
      const auto f = [&](int i) { return i < 0 ? nullptr : reinterpret_cast<const float*>(place[i]); };
      const auto k = [&](int i) { return i < 0 ? nullptr : reinterpret_cast<const int64_t*>(place[i]); };
      auto* y = reinterpret_cast<float*>(out);
      auto* z = reinterpret_cast<int64_t*>(out);
      switch (step.kind) {
        case Step::kFloat: step.tile(f(step.a), f(step.b), f(step.c), y, n); break;
        case Step::kInteger: step.int_tile(k(step.a), k(step.b), z, n); break;
        case Step::kCompare: step.compare(k(step.a), k(step.b), y, n); break;
        case Step::kToFloat: load_tile(DType::kI64, k(step.a), 0, y, n); break;
        case Step::kToInteger: store_tile(step.dtype, f(step.a), z, 0, n); break;
        case Step::kDropout: run_dropout(p, step, f(step.a), y, at, n); break;
        case Step::kWhereInteger:
          for (int64_t i = 0; i < n; ++i) z[i] = f(step.a)[i] != 0 ? k(step.b)[i] : k(step.c)[i];
          break;
      }
      if (step.dtype == DType::kBF16) {
        round_tile_bf16(y, y, n);
      } else if (step.dtype == DType::kF16) {
        round_f16(y, n);
      } else if (step.dtype == DType::kBool) {
        if (step.kind == Step::kToFloat || step.tile)
          for (int64_t i = 0; i < n; ++i) y[i] = y[i] != 0 ? 1.0f : 0.0f;
      } else if (integer(step.dtype) && step.dtype != DType::kI64) {
        if (step.kind != Step::kToInteger) store_tile(step.dtype, z, z, 0, n);  // wraps to its width
        // widen in place, from the end
        const auto width = size_of(step.dtype);
        for (int64_t i = n - 1; i >= 0; --i) load_tile(step.dtype, reinterpret_cast<char*>(z) + i * width, 0, z + i, 1);
      }
    }
    for (const Result& r : p.results) {
      if (r.as_integer)
        store_tile(r.dtype, reinterpret_cast<const int64_t*>(place[r.slot]), r.data, at, n);
      else
        store_tile(r.dtype, reinterpret_cast<const float*>(place[r.slot]), r.data, at, n);
    }
  }
}

bool overlap(const Operand& a, const void* data, int64_t bytes) {
  const auto* x = static_cast<const char*>(a.data);
  const auto* y = static_cast<const char*>(data);
  return x < y + bytes && y < x + count(a) * size_of(a.dtype);
}

Step make_step(const FusedStep& what, const std::vector<bool>& is_int) {
  Step step;
  step.dtype = what.dtype;
  const auto operand = [&](size_t i) { return i < what.operands.size() ? what.operands[i] : -1; };
  step.a = operand(0), step.b = operand(1), step.c = operand(2);
  const auto is = [&](int i) { return i >= 0 && is_int[i]; };
  const bool to_int = integer(what.dtype);
  if (what.code == OpCode::k_dropout) {
    step.kind = Step::kDropout, step.rate = what.value, step.key = what.key;
  } else if (what.code == OpCode::k_where && to_int) {
    step.kind = Step::kWhereInteger;
  } else if (what.code == OpCode::k_cast && is(step.a) != to_int) {
    step.kind = to_int ? Step::kToInteger : Step::kToFloat;
  } else if (is(step.a) && what.code != OpCode::k_where) {
    step.compare = compare_function(what.code);
    step.int_tile = int_tile_function(what.code);
    step.kind = step.compare ? Step::kCompare : Step::kInteger;
  } else {
    step.tile = tile_function(what.code);
  }
  const bool known = step.tile || step.int_tile || step.compare || step.kind >= Step::kWhereInteger;
  if (!known)
    throw unimplemented(
        "device cpu has no kernel for {} of {} elements; use float32 for these values and the parameters behind them, "
        "or ref devices, which compute in any type",
        def(what.code).name, name_of(what.dtype));
  return step;
}

std::unique_ptr<Kernel> bind_body(const KernelSpec& spec, CpuDevice& device, const FusedBody& body) {
  Program p;
  const Dims& dims = spec.out[0].dims;
  p.elements = element_count(dims);
  p.row = std::max<int64_t>(last_dim(spec.out[0]), 1);
  p.global = GlobalIndex(spec.box, dims);
  p.parameters = spec.step;
  p.samples = spec.row;
  const size_t inputs = spec.in.size(), slots = inputs + body.steps.size();
  // An integer operand that is only cast to float is loaded as float at once.
  std::vector<bool> is_int(slots), only_cast(inputs, true);
  for (size_t i = 0; i < inputs; ++i) is_int[i] = integer(spec.in[i].dtype);
  for (const FusedStep& step : body.steps)
    for (const int i : step.operands)
      if (i < static_cast<int>(inputs) && (step.code != OpCode::k_cast || integer(step.dtype))) only_cast[i] = false;
  for (const int i : body.results)
    if (i < static_cast<int>(inputs)) only_cast[i] = false;
  for (size_t i = 0; i < inputs; ++i) {
    is_int[i] = is_int[i] && !only_cast[i];
    p.inputs.push_back(make_input(spec.in[i], dims, is_int[i]));
  }
  for (size_t s = 0; s < body.steps.size(); ++s) {
    is_int[inputs + s] = integer(body.steps[s].dtype);
    p.steps.push_back(make_step(body.steps[s], is_int));
  }
  const bool wide = std::find(is_int.begin(), is_int.end(), true) != is_int.end();
  p.tile = std::min<int64_t>(kTileBytes / (wide ? 8 : 4) / static_cast<int64_t>(slots), 2048) / 64 * 64;
  if (p.tile == 0 || slots > 256)
    throw unimplemented("op '{}' fuses {} values, the cpu device takes {}", spec.name, slots, 96);
  p.tile = find_periods(p.inputs, p.tile);
  p.slot_bytes = p.tile * (wide ? 8 : 4);
  for (size_t r = 0; r < spec.out.size(); ++r) {
    const Operand& y = spec.out[r];
    const int slot = body.results[r];
    const int step = slot - static_cast<int>(inputs);
    // Write in place of the slot, unless a later step reads an input that lies there.
    bool direct = step >= 0 && y.dtype == DType::kF32 && !is_int[slot] && !p.steps[step].direct;
    for (size_t s = static_cast<size_t>(step) + 1; direct && s < body.steps.size(); ++s)
      for (const int i : body.steps[s].operands)
        if (i < static_cast<int>(inputs) && overlap(spec.in[i], y.data, p.elements * 4)) direct = false;
    if (direct)
      p.steps[step].direct = static_cast<char*>(y.data);
    else
      p.results.push_back({slot, static_cast<char*>(y.data), y.dtype, is_int[slot]});
  }
  const int threads = device.threads();
  return make_kernel(0, [p = std::move(p), threads](char*) {
    const int64_t tiles = (p.elements + p.tile - 1) / p.tile;
    parallel_for(threads, tiles, std::max<int64_t>(1, 16384 / p.tile),
                 [&](int64_t b, int64_t e) { run_range(p, b * p.tile, std::min(p.elements, e * p.tile)); });
  });
}

std::unique_ptr<Kernel> bind_fused(const KernelSpec& spec, CpuDevice& device) {
  return bind_body(spec, device, decode(*spec.attrs, static_cast<int>(spec.in.size())));
}

std::unique_ptr<Kernel> bind_single(const KernelSpec& spec, CpuDevice& device) {
  FusedStep step;
  step.code = spec.op;
  step.dtype = spec.out[0].dtype;
  for (size_t i = 0; i < spec.in.size(); ++i) step.operands.push_back(static_cast<int>(i));
  const int result = static_cast<int>(spec.in.size());
  if (spec.op == OpCode::k_dropout) {
    step.value = attr_float(*spec.attrs, "rate");
    step.key = spec.key != 0 ? spec.key : static_cast<uint64_t>(attr_int(*spec.attrs, "key"));
  }
  if (spec.op == OpCode::k_accumulate) {
    const std::string& combine = attr_string(*spec.attrs, "combine");
    step.code = combine == "max" ? OpCode::k_maximum : combine == "min" ? OpCode::k_minimum : OpCode::k_add;
  }
  return bind_body(spec, device, {{step}, {result}});
}

// cast to the same type, stop_gradient, and one-bit or wide values that must not pass through float.
std::unique_ptr<Kernel> bind_copy_or_single(const KernelSpec& spec, CpuDevice& device) {
  if (spec.in[0].dtype != spec.out[0].dtype) return bind_single(spec, device);
  const auto* from = static_cast<const char*>(spec.in[0].data);
  auto* to = static_cast<char*>(spec.out[0].data);
  const int64_t bytes = count(spec.out[0]) * size_of(spec.out[0].dtype);
  return make_kernel(0, [=, threads = device.threads()](char*) {
    if (from == to) return;
    parallel_for(threads, bytes, 1 << 16,
                 [=](int64_t b, int64_t e) { std::memcpy(to + b, from + b, static_cast<size_t>(e - b)); });
  });
}

constexpr KernelEntry kTable[] = {
// clang-format off
#define WHALE_ROW(name) {OpCode::k_##name, bind_single, nullptr},
    WHALE_ROW(add) WHALE_ROW(sub) WHALE_ROW(mul) WHALE_ROW(div) WHALE_ROW(pow) WHALE_ROW(maximum) WHALE_ROW(minimum)
    WHALE_ROW(equal) WHALE_ROW(not_equal) WHALE_ROW(less) WHALE_ROW(less_equal) WHALE_ROW(greater) WHALE_ROW(greater_equal)
    WHALE_ROW(logical_and) WHALE_ROW(logical_or) WHALE_ROW(logical_not) WHALE_ROW(where) WHALE_ROW(neg) WHALE_ROW(abs)
    WHALE_ROW(sign) WHALE_ROW(floor) WHALE_ROW(exp) WHALE_ROW(log) WHALE_ROW(log1p) WHALE_ROW(sqrt) WHALE_ROW(rsqrt)
    WHALE_ROW(square) WHALE_ROW(reciprocal) WHALE_ROW(sin) WHALE_ROW(cos) WHALE_ROW(erf) WHALE_ROW(tanh) WHALE_ROW(sigmoid)
    WHALE_ROW(softplus) WHALE_ROW(relu) WHALE_ROW(gelu) WHALE_ROW(gelu_erf) WHALE_ROW(silu) WHALE_ROW(relu_grad)
    WHALE_ROW(gelu_grad) WHALE_ROW(gelu_erf_grad) WHALE_ROW(silu_grad) WHALE_ROW(bce_with_logits)
    WHALE_ROW(squared_difference) WHALE_ROW(dropout) WHALE_ROW(accumulate)
#undef WHALE_ROW
    // clang-format on
    {OpCode::k_cast, bind_copy_or_single, nullptr},
    {OpCode::k_stop_gradient, bind_copy_or_single, nullptr},
    {OpCode::k_fused, bind_fused, nullptr},
};

}  // namespace

std::span<const KernelEntry> elementwise_kernels() { return kTable; }

}  // namespace whale::cpu
