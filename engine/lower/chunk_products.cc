#include "lower/chunk_products.h"

#include <algorithm>
#include <iterator>
#include <map>

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
    for (size_t s = 0; s < p_.segments.size(); ++s) {
      List all{std::move(p_.segments[s].instructions), std::move(draft_.ops[s])};
      in_ = &all, out_ = {}, instead_.clear();
      for (size_t k = 0; k < all.size(); ++k) {
        if (const auto products = instead_.find(k); products != instead_.end()) {
          out_.append(std::move(products->second));
        } else if (!chunked(k)) {
          out_.add(std::move(all.instructions[k]), all.ops[k]);
        }
      }
      p_.segments[s].instructions = std::move(out_.instructions);
      draft_.ops[s] = std::move(out_.ops);
    }
  }

 private:
  // Instructions with the ops that they are of.
  struct List {
    std::vector<Instruction> instructions;
    std::vector<const Op*> ops;
    size_t size() const { return instructions.size(); }
    void add(Instruction i, const Op* op) {
      instructions.push_back(std::move(i));
      ops.push_back(op);
    }
    void append(List more) {
      for (size_t i = 0; i < more.size(); ++i) add(std::move(more.instructions[i]), more.ops[i]);
    }
    List cut(size_t from) {  // takes what stands from there on
      const auto at = static_cast<std::ptrdiff_t>(from);
      List tail{{std::make_move_iterator(instructions.begin() + at), std::make_move_iterator(instructions.end())},
                {ops.begin() + at, ops.end()}};
      instructions.resize(from);
      ops.resize(from);
      return tail;
    }
  };
  Buffer& buffer(BufferId b) { return p_.buffers[b]; }

  static bool is_product(const Graph& g, const Op& op) {
    return has_flag(op.code, kProduct) && !attr_bool(op.attrs, "transpose_a") &&
           g.tensor(op.inputs[1]).dims.size() == 2;
  }
  static bool communicates(const Instruction& i) { return i.group() != kNone || i.link() != kNone; }

  // Rows outside of the sub-axis that a collective cuts; without a sub-axis all dimensions but the last.
  RowsOf rows_of(const Dims& dims, const Instruction& collective) const {
    const auto& cuts = collective.as<work::Collective>()->cuts;
    RowsOf r;
    if (cuts.empty()) {
      r.flat = true;
      for (size_t d = 0; d + 1 < dims.size(); ++d) r.rows *= dims[d];
      return r;
    }
    while (r.dim + 1 < dims.size() && dims[r.dim] == 1) ++r.dim;
    if (static_cast<int>(r.dim) < cuts[0].sub_axis.dim) r.rows = dims[r.dim];
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
    const LinkRates& link = low_.lg.tasks.link(collective.stage, axis - 1);
    const bool twice = collective.code == OpCode::k_all_reduce;
    ProductWork work;
    work.product = {2 * static_cast<double>(rows) * share, moved + share * size};
    work.seconds_of_collective = (twice ? 2 : 1) * all_gather_seconds(moved, members, link.flow());
    work.latency_seconds = (twice ? 2 : 1) * all_gather_seconds(0, members, link);
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

  // Puts the collective and its product into out_ in chunks, if they go so.
  bool chunked(size_t k) {
    const Op* op = in_->ops[k];
    if (!op || in_->instructions[k].group() == kNone || op->inputs.size() != 1) return false;
    if (op->code == OpCode::k_all_gather) return after_gather(k, *op);
    return (op->code == OpCode::k_all_reduce || op->code == OpCode::k_reduce_scatter) && before_reduce(k, *op);
  }

  // Whether the product may go in chunks of what is gathered for it. Of the graph alone: members of the group that adds
  // up what it makes may have nothing to gather, and have to know it all the same.
  bool follows_gather(const Op& product) const {
    const TensorId x = product.inputs[0];
    const OpId made = g_.tensor(x).producer;
    return made != kNone && g_.op(made).code == OpCode::k_all_gather && goes_with(g_.op(made), product);
  }
  // It is the first that reads what is gathered.
  bool goes_with(const Op& gather, const Op& reader) const {
    const TensorId y = gather.outputs[0];
    const auto& readers = low_.readers[y];
    return gather.inputs.size() == 1 && !low_.kept[y] && !readers.empty() &&
           &g_.op(*std::min_element(readers.begin(), readers.end())) == &reader && is_product(g_, reader) &&
           reader.inputs[0] == y && reader.inputs[1] != y && gather.phase == reader.phase &&
           gather.stage == reader.stage && gather.region == reader.region;
  }

  // matmul -> all_reduce, reduce_scatter.
  bool before_reduce(size_t k, const Op& op) {
    const TensorId y = op.inputs[0];
    const OpId made = g_.tensor(y).producer;
    if (made == kNone || !is_product(g_, g_.op(made)) || low_.readers[y].size() != 1 || low_.kept[y] ||
        follows_gather(g_.op(made)))
      return false;
    const Instruction& collective = in_->instructions[k];
    const BufferId whole = collective.in[0], result = collective.out[0];
    size_t product = out_.size();
    while (product-- > 0) {
      const Instruction& i = out_.instructions[product];
      if (std::find(i.out.begin(), i.out.end(), whole) != i.out.end()) break;
      if (communicates(i)) return false;
    }
    if (product == SIZE_MAX || buffer(whole).alias != kNone || buffer(result).alias != kNone) return false;
    const RowsOf r = rows_of(buffer(whole).dims, collective);
    const int64_t n = chunks(g_.op(made), op, r, buffer(whole).dims);
    if (n == 1) return false;
    List between = out_.cut(product + 1), last = out_.cut(product);
    const Instruction& matmul = last.instructions[0];
    const Op* const matmul_op = last.ops[0];
    const bool in_place = op.code == OpCode::k_all_reduce;
    // What has no products to add is zero: filled as a whole before the first chunk leaves.
    const bool fills = !has_flag(matmul.kernel()->op, kProduct);
    if (fills) out_.add(matmul, matmul_op);
    for (int64_t c = 0; c < n; ++c) {
      Instruction a = chunk_of(matmul, c, n), b = chunk_of(collective, c, n);
      b.in[0] = part(whole, r, c, n);
      b.out[0] = in_place ? b.in[0] : part(result, r, c, n);
      if (!fills) {
        a.in[0] = part(matmul.in[0], r, c, n);
        a.out[0] = b.in[0];
        out_.add(std::move(a), matmul_op);
      }
      out_.add(std::move(b), &op);
    }
    out_.append(std::move(between));
    if (in_place) {
      buffer(result).alias = whole;
      buffer(result).kind = buffer(whole).kind;
    }
    count(n);
    return true;
  }

  // all_gather -> matmul: the first that reads the result.
  bool after_gather(size_t k, const Op& op) {
    const TensorId y = op.outputs[0];
    const auto& readers = low_.readers[y];
    if (readers.empty()) return false;
    const Op& reader = g_.op(*std::min_element(readers.begin(), readers.end()));
    if (!goes_with(op, reader)) return false;
    const Instruction& collective = in_->instructions[k];
    const BufferId from = collective.in[0], whole = collective.out[0];
    if (buffer(whole).alias != kNone) return false;
    const RowsOf r = rows_of(buffer(whole).dims, collective);
    const int64_t n = chunks(reader, op, r, buffer(whole).dims);
    if (n == 1) return false;
    size_t product = k + 1;
    while (product < in_->size()) {
      const Instruction& i = in_->instructions[product];
      if (std::find(i.in.begin(), i.in.end(), whole) != i.in.end()) break;
      ++product;
    }
    const bool follows = product < in_->size() && in_->ops[product] == &reader &&
                         has_flag(in_->instructions[product].kernel()->op, kProduct) &&
                         buffer(in_->instructions[product].out[0]).alias == kNone;
    List products;
    for (int64_t c = 0; c < n; ++c) {
      Instruction a = chunk_of(collective, c, n);
      a.in[0] = part(from, r, c, n);
      a.out[0] = part(whole, r, c, n);
      if (follows) {
        const Instruction& matmul = in_->instructions[product];
        Instruction b = chunk_of(matmul, c, n);
        b.in[0] = a.out[0];
        b.out[0] = part(matmul.out[0], r, c, n);
        products.add(std::move(b), &reader);
      }
      out_.add(std::move(a), &op);
    }
    count(n);
    if (follows) instead_.emplace(product, std::move(products));
    return true;
  }

  Draft& draft_;
  Program& p_;
  const Lowering& low_;
  const Graph& g_;
  ChunkReport& report_;
  List* in_ = nullptr;              // of the segment at work, in order
  List out_;                        // what becomes of it
  std::map<size_t, List> instead_;  // what stands in the place of products that are still to come
};

}  // namespace

void chunk_products(Draft& draft, const Lowering& lowering, ChunkReport& report) {
  Chunker(draft, lowering, report).run();
}

}  // namespace whale
