// Matrix products. Operands are read once into canonical order ([m, k] and [k, n]); then three plain loops.
#include <algorithm>

#include "device/ref/scalar.h"
#include "device/ref/table.h"

namespace whale::ref {
namespace {

// A stack of matrices: count x rows x columns, after the transpose that the op asks for.
struct Matrices {
  int64_t count = 1, rows = 0, columns = 0;
  bool transposed = false;
  Matrices(const Dims& dims, bool transpose) : transposed(transpose) {
    const size_t rank = dims.size();
    for (size_t d = 0; d + 2 < rank; ++d) count *= dims[d];
    rows = dims[rank - 2];
    columns = dims[rank - 1];
    if (transposed) std::swap(rows, columns);
  }
  int64_t size() const { return rows * columns; }
  void read(const In& x, Values& values) const {
    for (int64_t c = 0; c < count; ++c)
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j)
          values[(c * rows + i) * columns + j] = x[c * size() + (transposed ? j * rows + i : i * columns + j)];
  }
};

Body bind_matmul(const KernelSpec& spec) {
  const Matrices as(spec.in[0].dims, attr_bool(*spec.attrs, "transpose_a"));
  const Matrices bs(spec.in[1].dims, attr_bool(*spec.attrs, "transpose_b"));
  const In a = in(spec, 0), b = in(spec, 1), bias = in(spec, 2);
  const Out y = out(spec, 0);
  const Unary finish = activation(attr_string(*spec.attrs, "activation"));
  const bool shared = spec.in[1].dims.size() == 2;
  return [=, left = room(a.count), right = room(b.count), row = room(bs.columns)]() mutable {
    as.read(a, left);
    bs.read(b, right);
    const int64_t n = bs.columns;
    for (int64_t i = 0; i < as.count * as.rows; ++i) {
      const double* weights = right.data() + (shared ? 0 : i / as.rows * bs.size());
      for (int64_t j = 0; j < n; ++j) row[j] = bias.present() ? bias[j] : 0.0;
      for (int64_t k = 0; k < as.columns; ++k) {
        const double x = left[i * as.columns + k];
        for (int64_t j = 0; j < n; ++j) row[j] += x * weights[k * n + j];
      }
      for (int64_t j = 0; j < n; ++j) {
        const double sum = row[j];
        y.set(i * n + j, finish ? finish(sum) : sum);
      }
    }
  };
}

Body bind_weight_grad(const KernelSpec& spec) {
  const In a = in(spec, 0), dy = in(spec, 1);
  const int64_t k = spec.in[0].dims.back(), n = spec.in[1].dims.back();
  const int64_t rows = n > 0 ? dy.count / n : 0;
  const bool transpose = attr_bool(*spec.attrs, "transpose");
  Results results(spec);
  const Out dw = results.take(), dbias = results.take(attr_bool(*spec.attrs, "bias"));
  return [=, left = room(a.count), right = room(dy.count), sum = room(k * n)]() mutable {
    read(a, left);
    read(dy, right);
    std::fill(sum.begin(), sum.end(), 0.0);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < k; ++i) {
        const double x = left[r * k + i];
        for (int64_t j = 0; j < n; ++j) sum[i * n + j] += x * right[r * n + j];
      }
    }
    for (int64_t i = 0; i < k; ++i)
      for (int64_t j = 0; j < n; ++j) dw.set(transpose ? j * k + i : i * n + j, sum[i * n + j]);
    for (int64_t j = 0; dbias.present() && j < n; ++j) {
      double total = 0;
      for (int64_t r = 0; r < rows; ++r) total += right[r * n + j];
      dbias.set(j, total);
    }
  };
}

constexpr Row kRows[] = {
    {OpCode::k_matmul, bind_matmul},
    {OpCode::k_matmul_weight_grad, bind_weight_grad},
};

}  // namespace

Rows matmul_rows() { return kRows; }

}  // namespace whale::ref
