// What models of recommendation need: bags of rows of a table, and dot products between all pairs of vectors.
#include <algorithm>

#include "device/ref/table.h"

namespace whale::ref {
namespace {

struct Bags {
  In ids;
  int64_t bag, count;
  double scale;  // of a row that is added
  Bags(const KernelSpec& spec, size_t at) : ids(in(spec, at)), bag(spec.in[at].dims.back()) {
    count = bag == 0 ? 0 : ids.count / bag;
    scale = attr_string(*spec.attrs, "mode") == "mean" ? 1 / static_cast<double>(std::max<int64_t>(bag, 1)) : 1;
  }
};

Body bind_embedding_bag(const KernelSpec& spec) {
  const In table = in(spec, 0);
  const Bags bags(spec, 1);
  const Out y = out(spec, 0);
  const int64_t rows = spec.in[0].dims[0], width = spec.in[0].dims[1];
  const int64_t begin = attr_int(*spec.attrs, "row_begin");
  return [=] {
    for (int64_t i = 0; i < y.count; ++i) {
      double sum = 0;
      for (int64_t k = 0; k < bags.bag; ++k) {
        const int64_t id = bags.ids.integer(i / width * bags.bag + k) - begin;
        if (id >= 0 && id < rows) sum += table[id * width + i % width];
      }
      y.set(i, sum * bags.scale);
    }
  };
}

Body bind_embedding_bag_grad(const KernelSpec& spec) {
  const In dy = in(spec, 0);
  const Bags bags(spec, 1);
  const Out dtable = out(spec, 0);
  const int64_t rows = spec.out[0].dims[0], width = spec.out[0].dims[1];
  const int64_t begin = attr_int(*spec.attrs, "row_begin");
  return [=, sum = room(dtable.count)]() mutable {
    std::fill(sum.begin(), sum.end(), 0.0);
    for (int64_t i = 0; i < bags.count * bags.bag; ++i) {
      const int64_t id = bags.ids.integer(i) - begin;
      if (id < 0 || id >= rows) continue;
      for (int64_t e = 0; e < width; ++e) sum[id * width + e] += dy[i / bags.bag * width + e] * bags.scale;
    }
    write(dtable, sum);
  };
}

// Pair (i, j), i > j, stands at i (i - 1) / 2 + j.
Body bind_pairwise_dot(const KernelSpec& spec) {
  std::vector<In> x;
  for (size_t i = 0; i < spec.in.size(); ++i) x.push_back(in(spec, i));
  const Out y = out(spec, 0);
  const int64_t n = static_cast<int64_t>(x.size()), width = spec.in[0].dims.back(), pairs = n * (n - 1) / 2;
  return [=] {
    for (int64_t r = 0; r < y.count / std::max<int64_t>(pairs, 1); ++r) {
      int64_t at = r * pairs;
      for (size_t i = 0; i < x.size(); ++i) {
        for (size_t j = 0; j < i; ++j) {
          double sum = 0;
          for (int64_t k = r * width; k < (r + 1) * width; ++k) sum += x[i][k] * x[j][k];
          y.set(at++, sum);
        }
      }
    }
  };
}

Body bind_pairwise_dot_grad(const KernelSpec& spec) {
  const In dy = in(spec, 0);
  std::vector<In> x;
  std::vector<Out> dx;
  for (size_t i = 1; i < spec.in.size(); ++i) x.push_back(in(spec, i)), dx.push_back(out(spec, i - 1));
  const int64_t n = static_cast<int64_t>(x.size()), width = spec.in[1].dims.back(), pairs = n * (n - 1) / 2;
  return [=] {
    for (int64_t k = 0; k < x[0].count; ++k) {
      const auto pair = [&](int64_t i, int64_t j) { return dy[k / width * pairs + i * (i - 1) / 2 + j]; };
      for (int64_t i = 0; i < n; ++i) {
        double sum = 0;
        for (int64_t j = 0; j < n; ++j)
          if (i != j) sum += pair(std::max(i, j), std::min(i, j)) * x[j][k];
        dx[i].set(k, sum);
      }
    }
  };
}

constexpr Row kRows[] = {
    {OpCode::k_embedding_bag, bind_embedding_bag},
    {OpCode::k_embedding_bag_grad, bind_embedding_bag_grad},
    {OpCode::k_pairwise_dot, bind_pairwise_dot},
    {OpCode::k_pairwise_dot_grad, bind_pairwise_dot_grad},
};

}  // namespace

Rows recommend_rows() { return kRows; }

}  // namespace whale::ref
