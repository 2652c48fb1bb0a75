// Updates of the rows of tables that a step looked up, and of split weights. The gradients of a row are summed in order
// of occurrence, then the row goes through the arithmetic of optimizer.cc: the same bits as with a dense gradient.
#include <bit>
#include <cmath>
#include <cstring>

#include "device/cpu/operands.h"
#include "device/cpu/parallel.h"
#include "device/cpu/tile.h"
#include "device/cpu/update_rule.h"
#include "device/pad_to_batch.h"

namespace whale::cpu {
namespace {

constexpr int64_t kChunk = 16384, kTile = 1024;  // elements
constexpr int64_t kRows = 256;                   // named rows of a task
constexpr int64_t kAhead = 6;                    // rows that are fetched before they are needed

// Where an op's tuples stand: p, states, then ids and dy, or a gradient.
struct Form {
  Rule rule;
  int updates, first, states;
  bool split;
};

// One table and where its part of the scratch area lies (in elements of int32). Occurrences of a row are a chain.
struct Table {
  Operand p, ids, dy;  // p and state as results: in a plan they lie on the operands
  Operand state[2];
  int64_t rows, width, bag, begin,
      named;  // the rows [begin, begin + rows) of a whole table; named: at most so many different rows
  double decay;
  size_t slots, slot_bits, at;
};
struct Chains {
  int32_t *slots, *rows, *head, *tail, *next, *count;
};

size_t scratch_of(const Table& t) { return t.slots + 4 * static_cast<size_t>(t.named) + 16; }

Chains chains_of(const Table& t, char* scratch) {
  auto* base = reinterpret_cast<int32_t*>(scratch) + t.at;
  const auto n = static_cast<size_t>(t.named);
  Chains c{};
  c.slots = base, c.rows = base + t.slots, c.head = c.rows + n, c.tail = c.head + n, c.next = c.tail + n;
  c.count = c.next + n;
  return c;
}

int64_t index_at(const Operand& ids, int64_t i) {
  return ids.dtype == DType::kI64 ? static_cast<const int64_t*>(ids.data)[i] : static_cast<const int32_t*>(ids.data)[i];
}

// Rows in order of their first occurrence, each with the chain of its occurrences.
void coalesce(const Table& t, const Chains& c) {
  std::fill(c.slots, c.slots + t.slots, -1);
  int32_t count = 0;
  const size_t mask = t.slots - 1;
  for (int32_t i = 0; i < static_cast<int32_t>(t.named); ++i) {
    const int64_t id = index_at(t.ids, i) - t.begin;
    if (id < 0 || id >= t.rows) continue;
    c.next[i] = -1;
    size_t slot = static_cast<size_t>((static_cast<uint64_t>(id) * 0x9E3779B97F4A7C15u) >> (64 - t.slot_bits));
    while (c.slots[slot] >= 0 && c.rows[c.slots[slot]] != id) slot = (slot + 1) & mask;
    const int32_t at = c.slots[slot];
    if (at >= 0) {
      c.next[c.tail[at]] = i;
      c.tail[at] = i;
      continue;
    }
    c.slots[slot] = count;
    c.rows[count] = static_cast<int32_t>(id), c.head[count] = i, c.tail[count] = i;
    ++count;
  }
  *c.count = count;
}

inline void prefetch_row(const Operand& x, int64_t row, int64_t width) {
  const int64_t bytes = width * size_of(x.dtype);
  const char* at = static_cast<const char*>(x.data) + row * bytes;
  for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(at + b, 1);
}

// The sum of columns [c, c + n) of the occurrences of a row. One alone is read where it is.
const float* sum_of(const Table& t, const Chains& chains, int32_t head, int64_t c, int64_t n, float scale, float* sum,
                    float* room) {
  const auto load = [&](int32_t i, float* to) -> const float* {
    const int64_t at = i / t.bag * t.width + c;
    if (t.dy.dtype == DType::kF32) return static_cast<const float*>(t.dy.data) + at;
    load_tile(t.dy.dtype, t.dy.data, at, to, n);
    return to;
  };
  const int32_t second = chains.next[head];
  const float* first = load(head, sum);
  if (second < 0 && scale == 1) return first;
  for (int64_t k = 0; k < n; ++k) sum[k] = scale * first[k];
  for (int32_t i = second; i >= 0; i = chains.next[i]) {
    const float* x = load(i, room);
    for (int64_t k = 0; k < n; ++k) sum[k] += scale * x[k];
  }
  return sum;
}

struct RowUpdate {
  Form form;
  std::vector<Table> tables;
  Operand lr, updates, scale;
  RuleSettings settings;
  bool mean;
  std::vector<std::pair<Operand, Operand>> copies;  // of operands that results do not lie on
};

void update_part(const RowUpdate& u, const Table& t, const Chains& chains, int32_t named, int64_t c, int64_t n,
                 float scale, const UpdateNumbers& k) {
  alignas(64) float buffers[6][kTile];
  const int64_t at = chains.rows[named] * t.width + c;
  UpdateTile tile{};
  tile.n = n;
  tile.in[1] = sum_of(t, chains, chains.head[named], c, n, scale, buffers[0], buffers[1]);
  const int whole = 1 + (u.form.split ? 0 : u.form.states);  // float tensors of the table's shape
  for (int j = 0; j < whole; ++j) {
    const Operand& x = j == 0 ? t.p : t.state[j - 1];
    float* buffer = buffers[2 + j];
    if (u.form.split) {
      join_halves(static_cast<const uint16_t*>(t.p.data) + at, static_cast<const uint16_t*>(t.state[0].data) + at,
                  buffer, n);
    } else if (x.dtype == DType::kF32) {
      buffer = static_cast<float*>(x.data) + at;
    } else {
      load_tile(x.dtype, x.data, at, buffer, n);
    }
    tile.in[j == 0 ? 0 : j + 1] = buffer;
    tile.out[j] = buffer;
  }
  update_tile(u.form.rule, tile, k);
  if (u.form.split)
    return split_halves(tile.out[0], static_cast<uint16_t*>(t.p.data) + at,
                        static_cast<uint16_t*>(t.state[0].data) + at, n);
  for (int j = 0; j < whole; ++j) {
    const Operand& x = j == 0 ? t.p : t.state[j - 1];
    if (x.dtype != DType::kF32) store_tile(x.dtype, tile.out[j], x.data, at, n);
  }
}

void update_rows(const RowUpdate& u, const Table& t, const Chains& chains, int64_t begin, UpdateNumbers k) {
  const int64_t count = *chains.count, end = std::min(count, begin + kRows);
  k.decay = static_cast<float>(t.decay);
  const float scale = u.mean ? 1 / static_cast<float>(t.bag) : 1;
  for (int64_t r = begin; r < end; ++r) {
    if (r + kAhead < count) {
      prefetch_row(t.p, chains.rows[r + kAhead], t.width);
      for (int s = 0; s < u.form.states; ++s) prefetch_row(t.state[s], chains.rows[r + kAhead], t.width);
      prefetch_row(t.dy, chains.head[r + kAhead] / t.bag, t.width);
    }
    for (int64_t c = 0; c < t.width; c += kTile)
      update_part(u, t, chains, static_cast<int32_t>(r), c, std::min(kTile, t.width - c), scale, k);
  }
}

Table table_of(const KernelSpec& spec, size_t at, size_t result, int states, double decay, size_t offset) {
  Table t{};
  t.p = spec.out[result];
  for (int s = 0; s < states; ++s) t.state[s] = spec.out[result + 1 + static_cast<size_t>(s)];
  t.ids = spec.in[at + 1 + static_cast<size_t>(states)], t.dy = spec.in[at + 2 + static_cast<size_t>(states)];
  t.rows = t.p.dims[0], t.width = t.p.dims[1], t.named = count(t.ids), t.decay = decay, t.at = offset;
  t.begin = attr_int(*spec.attrs, "row_begin");
  const bool bags = !t.ids.dims.empty() && t.ids.dims.size() == t.dy.dims.size();
  t.bag = bags ? std::max<int64_t>(t.ids.dims.back(), 1) : 1;
  if (t.rows > INT32_MAX || t.named > INT32_MAX / 4)
    throw unimplemented("op '{}': a table of {} rows, {} ids; row updates take less than 2^31 rows and 2^29 ids",
                        spec.name, t.rows, t.named);
  t.slots = std::bit_ceil(static_cast<size_t>(2 * t.named + 2));
  t.slot_bits = static_cast<size_t>(std::countr_zero(t.slots));
  return t;
}

double decay_of(const KernelSpec& spec, size_t tuple) {
  const Ints& decays = attr_ints(*spec.attrs, "decays");
  return tuple < decays.size() && decays[tuple] == 0 ? 0 : attr_float(*spec.attrs, "weight_decay");
}

std::unique_ptr<Kernel> bind_rows(const KernelSpec& spec, CpuDevice& device, const Form& form) {
  auto u = std::make_shared<RowUpdate>();
  u->form = form;
  u->settings = rule_settings(form.rule, *spec.attrs);
  u->mean = attr_bool(*spec.attrs, "mean");
  const auto operand = [&](int i) { return i < 0 ? Operand{} : spec.in[i]; };
  u->lr = operand(0), u->updates = operand(form.updates), u->scale = operand(form.first - 1);
  size_t scratch = 0;
  int64_t tasks = 0;  // of the table with the most ids
  const auto first = static_cast<size_t>(form.first), width = 3 + static_cast<size_t>(form.states);
  for (size_t at = first; at + width <= spec.in.size(); at += width) {
    const size_t tuple = (at - first) / width, results = 1 + static_cast<size_t>(form.states);
    u->tables.push_back(table_of(spec, at, tuple * results, form.states, decay_of(spec, tuple), scratch));
    for (size_t k = 0; k < results; ++k)
      if (spec.in[at + k].data != spec.out[tuple * results + k].data)
        u->copies.emplace_back(spec.in[at + k], spec.out[tuple * results + k]);
    scratch += scratch_of(u->tables.back());
    tasks = std::max(tasks, (u->tables.back().named + kRows - 1) / kRows);
  }
  return make_kernel(scratch * sizeof(int32_t), [u, tasks, threads = device.threads()](char* area) {
    const UpdateNumbers now = numbers_now(u->settings, u->lr, u->updates, u->scale);
    for (const auto& [from, to] : u->copies)
      std::memcpy(to.data, from.data, static_cast<size_t>(count(from) * size_of(from.dtype)));
    if (std::isnan(now.clip)) return;
    const auto tables = static_cast<int64_t>(u->tables.size());
    const auto table = [&](int64_t i) -> const Table& { return u->tables[i]; };
    parallel_tasks(threads, tables, [&](int64_t i, int) { coalesce(table(i), chains_of(table(i), area)); });
    parallel_tasks(threads, tables * tasks, [&](int64_t i, int) {
      const Table& t = table(i / tasks);
      update_rows(*u, t, chains_of(t, area), i % tasks * kRows, now);
    });
  });
}

std::unique_ptr<Kernel> bind_sgd_rows(const KernelSpec& spec, CpuDevice& device) {
  return bind_rows(spec, device, {Rule::kSgd, -1, 2, 0, false});
}
std::unique_ptr<Kernel> bind_adagrad_rows(const KernelSpec& spec, CpuDevice& device) {
  return bind_rows(spec, device, {Rule::kAdagrad, -1, 2, 1, false});
}
std::unique_ptr<Kernel> bind_adam_rows(const KernelSpec& spec, CpuDevice& device) {
  return bind_rows(spec, device, {Rule::kAdam, 1, 3, 2, false});
}
std::unique_ptr<Kernel> bind_split_sgd_rows(const KernelSpec& spec, CpuDevice& device) {
  return bind_rows(spec, device, {Rule::kSgd, -1, 2, 1, true});
}

// Whole split weights.
struct SplitChunk {
  const uint16_t *high, *low;
  uint16_t *new_high, *new_low;
  Operand g;
  double decay;
  int64_t at, n;
};

void run_split(const SplitChunk& c, UpdateNumbers k) {
  k.decay = static_cast<float>(c.decay);
  alignas(64) float p[kTile], room[kTile];
  for (int64_t at = c.at; at < c.at + c.n; at += kTile) {
    UpdateTile t{};
    t.n = std::min(kTile, c.at + c.n - at);
    join_halves(c.high + at, c.low + at, p, t.n);
    t.in[0] = p, t.in[1] = room, t.out[0] = p;
    if (c.g.dtype == DType::kF32)
      t.in[1] = static_cast<const float*>(c.g.data) + at;
    else
      load_tile(c.g.dtype, c.g.data, at, room, t.n);
    update_tile(Rule::kSgd, t, k);
    split_halves(p, c.new_high + at, c.new_low + at, t.n);
  }
}

std::unique_ptr<Kernel> bind_split_sgd(const KernelSpec& spec, CpuDevice& device) {
  std::vector<SplitChunk> chunks;
  for (size_t i = 2; i + 3 <= spec.in.size(); i += 3) {
    const int64_t n = count(spec.in[i]);
    const size_t tuple = (i - 2) / 3;
    for (int64_t at = 0; at < n; at += kChunk)
      chunks.push_back(
          {static_cast<const uint16_t*>(spec.in[i].data), static_cast<const uint16_t*>(spec.in[i + 1].data),
           static_cast<uint16_t*>(spec.out[tuple * 2].data), static_cast<uint16_t*>(spec.out[tuple * 2 + 1].data),
           spec.in[i + 2], decay_of(spec, tuple), at, std::min(kChunk, n - at)});
  }
  return make_kernel(0, [=, lr = spec.in[0], scale = spec.in[1], settings = rule_settings(Rule::kSgd, *spec.attrs),
                         threads = device.threads()](char*) {
    const UpdateNumbers now = numbers_now(settings, lr, {}, scale);
    if (std::isnan(now.clip)) return;
    parallel_for(threads, static_cast<int64_t>(chunks.size()), 1, [&](int64_t b, int64_t e) {
      for (int64_t i = b; i < e; ++i) run_split(chunks[i], now);
    });
  });
}

std::unique_ptr<Kernel> bind_pad_to_batch(const KernelSpec& spec, CpuDevice&) {
  return make_kernel(0, [pad = PadToBatch(spec)](char*) { pad(); });
}

constexpr KernelEntry kTable[] = {
    {OpCode::k_pad_to_batch, bind_pad_to_batch, nullptr}, {OpCode::k_sgd_rows, bind_sgd_rows, nullptr},
    {OpCode::k_adagrad_rows, bind_adagrad_rows, nullptr}, {OpCode::k_adam_rows, bind_adam_rows, nullptr},
    {OpCode::k_split_sgd, bind_split_sgd, nullptr},       {OpCode::k_split_sgd_rows, bind_split_sgd_rows, nullptr},
};

}  // namespace

std::span<const KernelEntry> row_update_kernels() { return kTable; }

}  // namespace whale::cpu
