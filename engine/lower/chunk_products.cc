#include "lower/chunk_products.h"

#include <algorithm>
#include <set>

#include "cost/overlap.h"

namespace whale {
namespace {

// `rows` of a buffer that is [rows, rest]: what stands before is 1.
struct RowsOf {
  size_t dim = 0;
  int64_t rows = 1;
  bool flat = false;  // all dimensions but the last are rows
};

class Chunker {
 public:
  Chunker(Draft& draft, const Lowering& low, ChunkReport& report)
      : draft_(draft), p_(draft.program), low_(low), g_(low.lg.graph), report_(report) {}

  void run() {
    for (size_t s = 0; s < p_.segments.size(); ++s)
      for (size_t k = 0; k < p_.segments[s].instructions.size(); ++k) {
        const Op* op = draft_.ops[s][k];
        if (!op || p_.segments[s].instructions[k].group() == kNone) continue;
        if (op->inputs.size() != 1) continue;
        const bool gathers = op->code == OpCode::k_all_gather;
        if (gathers)
          k = after_gather(s, k, *op);
        else if (op->code == OpCode::k_all_reduce || op->code == OpCode::k_reduce_scatter)
          k = before_reduce(s, k, *op);
      }
  }

 private:
  std::vector<Instruction>& list(size_t s) { return p_.segments[s].instructions; }
  Buffer& buffer(BufferId b) { return p_.buffers[static_cast<size_t>(b)]; }

  static bool is_product(const Graph& g, const Op& op) {
    return has_flag(op.code, kProduct) && !attr_bool(op.attrs, "transpose_a") &&
           g.tensor(op.inputs[1]).dims.size() == 2;
  }
  static bool communicates(const Instruction& i) { return i.group() != kNone || i.link() != kNone; }

  // Rows outside of the digit that a collective cuts; without a digit all dimensions but the last.
  RowsOf rows_of(const Dims& dims, const Instruction& collective) const {
    const auto& cuts = collective.as<work::Collective>()->cuts;
    RowsOf r;
    if (cuts.empty()) {
      r.flat = true;
      for (size_t d = 0; d + 1 < dims.size(); ++d) r.rows *= dims[d];
      return r;
    }
    while (r.dim + 1 < dims.size() && dims[r.dim] == 1) ++r.dim;
    if (static_cast<int>(r.dim) < cuts[0].digit.dim) r.rows = dims[r.dim];
    return r;
  }

  // The same on every member of the group: of global extents and of what all of them hold.
  int64_t chunks(const Op& product, const Op& collective, const RowsOf& r, const Dims& whole) {
    if (low_.options.matmul_chunks == 1 || r.rows < 2) return 1;
    if (low_.options.matmul_chunks > 1) return std::min(low_.options.matmul_chunks, r.rows);
    const auto axis = static_cast<size_t>(attr_int(collective.attrs, "group")) + 1;
    const int64_t members = low_.lg.size(axis, collective.stage);
    const Dims& b = g_.tensor(product.inputs[1]).dims;
    const double share = static_cast<double>(element_count(b)) / static_cast<double>(members);
    int64_t rows = 1;
    for (size_t d = 0; d + 1 < whole.size(); ++d) rows *= whole[d];
    const double width = static_cast<double>(whole.back()), size = size_of(g_.tensor(product.inputs[0]).dtype);
    const double moved = static_cast<double>(rows) * width * size;
    const CostModel& cost = low_.lg.tasks.cost;
    const bool twice = collective.code == OpCode::k_all_reduce;
    ProductWork work;
    work.product = {2 * static_cast<double>(rows) * share, moved + share * size};
    work.seconds_of_collective = (twice ? 2 : 1) * all_gather_seconds(moved, members, cost.link.flow());
    work.latency_seconds = (twice ? 2 : 1) * all_gather_seconds(0, members, cost.link);
    work.rows = r.rows;
    const int64_t least =
        r.flat ? cost.product_rows : std::max<int64_t>(1, cost.product_rows * r.rows / std::max<int64_t>(rows, 1));
    const Chunks best = choose_chunks(work, cost.device, cost.beside, least);
    if (best.count > 1) report_.seconds += best.seconds, report_.whole_seconds += best.whole_seconds;
    return best.count;
  }

  // Row range k of n of a buffer.
  BufferId part(BufferId whole, const RowsOf& r, int64_t k, int64_t n) {
    Buffer b = buffer(whole);
    const int64_t begin = r.rows * k / n, end = r.rows * (k + 1) / n, bytes = b.bytes / r.rows;
    b.name += fmt::format("#{}", k);
    if (r.flat) {
      const int64_t width = b.dims.back();
      b.dims = {end - begin, width};
    } else {
      b.dims[r.dim] = end - begin;
    }
    b.bytes = bytes * (end - begin);
    b.alias = whole;
    b.at = bytes * begin;
    b.kind = b.kind == BufferKind::kInput ? BufferKind::kArena : b.kind;
    p_.buffers.push_back(std::move(b));
    const auto made = static_cast<BufferId>(p_.buffers.size()) - 1;
    draft_.lies_in[made] = whole;
    return made;
  }
  static Instruction chunk_of(const Instruction& whole, int64_t k, int64_t n) {
    Instruction i = whole;
    i.name += fmt::format("#{}", k);
    i.flops /= static_cast<double>(n);
    i.bytes /= static_cast<double>(n);
    return i;
  }

  void count(int64_t n) {
    ++report_.products;
    report_.chunks += n;
  }

  // Puts `made` in the places of instructions [first, ...] that are listed (in order) in `gone`.
  void replace(size_t s, const std::vector<size_t>& gone, std::vector<std::pair<Instruction, const Op*>> made,
               size_t at) {
    auto& instructions = list(s);
    auto& ops = draft_.ops[s];
    for (size_t i = gone.size(); i-- > 0;) {
      instructions.erase(instructions.begin() + static_cast<std::ptrdiff_t>(gone[i]));
      ops.erase(ops.begin() + static_cast<std::ptrdiff_t>(gone[i]));
    }
    for (size_t i = 0; i < made.size(); ++i) {
      instructions.insert(instructions.begin() + static_cast<std::ptrdiff_t>(at + i), std::move(made[i].first));
      ops.insert(ops.begin() + static_cast<std::ptrdiff_t>(at + i), made[i].second);
    }
  }

  // matmul -> all_reduce, reduce_scatter. Returns the last instruction that was looked at.
  size_t before_reduce(size_t s, size_t k, const Op& op) {
    const TensorId y = op.inputs[0];
    const OpId made = g_.tensor(y).producer;
    if (made == kNone || !is_product(g_, g_.op(made)) || low_.readers[static_cast<size_t>(y)].size() != 1 ||
        low_.kept[static_cast<size_t>(y)] || chunked_.contains(&g_.op(made)))
      return k;
    const Instruction collective = list(s)[k];
    const BufferId whole = collective.in[0], result = collective.out[0];
    size_t product = k;
    while (product-- > 0) {
      const Instruction& i = list(s)[product];
      if (std::find(i.out.begin(), i.out.end(), whole) != i.out.end()) break;
      if (communicates(i)) return k;
    }
    if (product == SIZE_MAX || buffer(whole).alias != kNone || buffer(result).alias != kNone) return k;
    const RowsOf r = rows_of(buffer(whole).dims, collective);
    const int64_t n = chunks(g_.op(made), op, r, buffer(whole).dims);
    if (n == 1) return k;
    const Instruction matmul = list(s)[product];
    const Op* matmul_op = draft_.ops[s][product];
    const bool in_place = op.code == OpCode::k_all_reduce;
    std::vector<std::pair<Instruction, const Op*>> instructions;
    // What has no products to add is zero: filled as a whole before the first chunk leaves.
    const bool fills = !has_flag(matmul.kernel()->op, kProduct);
    if (fills) instructions.emplace_back(matmul, matmul_op);
    for (int64_t c = 0; c < n; ++c) {
      Instruction a = chunk_of(matmul, c, n), b = chunk_of(collective, c, n);
      b.in[0] = part(whole, r, c, n);
      b.out[0] = in_place ? b.in[0] : part(result, r, c, n);
      if (!fills) {
        a.in[0] = part(matmul.in[0], r, c, n);
        a.out[0] = b.in[0];
        instructions.emplace_back(std::move(a), matmul_op);
      }
      instructions.emplace_back(std::move(b), &op);
    }
    if (in_place) {
      buffer(result).alias = whole;
      buffer(result).kind = buffer(whole).kind;
    }
    count(n);
    const size_t more = instructions.size();
    replace(s, {product, k}, std::move(instructions), product);
    return product + more - 1;
  }

  // all_gather -> matmul: the first that reads the result.
  size_t after_gather(size_t s, size_t k, const Op& op) {
    const TensorId y = op.outputs[0];
    const auto& readers = low_.readers[static_cast<size_t>(y)];
    if (readers.empty() || low_.kept[static_cast<size_t>(y)]) return k;
    const Op& reader = g_.op(*std::min_element(readers.begin(), readers.end()));
    if (!is_product(g_, reader) || reader.inputs[0] != y || reader.inputs[1] == y || op.phase != reader.phase ||
        op.stage != reader.stage || op.region != reader.region)
      return k;
    const Instruction collective = list(s)[k];
    const BufferId from = collective.in[0], whole = collective.out[0];
    if (buffer(whole).alias != kNone) return k;
    const RowsOf r = rows_of(buffer(whole).dims, collective);
    const int64_t n = chunks(reader, op, r, buffer(whole).dims);
    if (n == 1) return k;
    chunked_.insert(&reader);  // also where this device has none of it: what follows is decided for all members
    size_t product = k + 1;
    while (product < list(s).size()) {
      const Instruction& i = list(s)[product];
      if (std::find(i.in.begin(), i.in.end(), whole) != i.in.end()) break;
      ++product;
    }
    const bool follows = product < list(s).size() && draft_.ops[s][product] == &reader &&
                         has_flag(list(s)[product].kernel()->op, kProduct) &&
                         buffer(list(s)[product].out[0]).alias == kNone;
    std::vector<std::pair<Instruction, const Op*>> gathers, products;
    for (int64_t c = 0; c < n; ++c) {
      Instruction a = chunk_of(collective, c, n);
      a.in[0] = part(from, r, c, n);
      a.out[0] = part(whole, r, c, n);
      if (follows) {
        Instruction b = chunk_of(list(s)[product], c, n);
        b.in[0] = a.out[0];
        b.out[0] = part(list(s)[product].out[0], r, c, n);
        products.emplace_back(std::move(b), &reader);
      }
      gathers.emplace_back(std::move(a), &op);
    }
    count(n);
    const size_t more = gathers.size();
    if (follows) replace(s, {product}, std::move(products), product);
    replace(s, {k}, std::move(gathers), k);
    return k + more - 1;
  }

  Draft& draft_;
  Program& p_;
  const Lowering& low_;
  const Graph& g_;
  ChunkReport& report_;
  std::set<const Op*> chunked_;  // products in chunks of what they gather
};

}  // namespace

void chunk_products(Draft& draft, const Lowering& lowering, ChunkReport& report) {
  Chunker(draft, lowering, report).run();
}

}  // namespace whale
