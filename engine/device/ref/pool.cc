// Max and average pooling. Padding never wins a maximum; averages count it only when include_pad says so.
#include <algorithm>
#include <cmath>

#include "device/ref/window.h"

namespace whale::ref {
namespace {

struct Pool {
  Window window;
  int64_t batch, channels;
  bool include_pad;
  Pool(const KernelSpec& spec, const Dims& x, const Dims& y)
      : window(*spec.attrs, x, y, attr_ints(*spec.attrs, "window")),
        batch(x[0]),
        channels(x.back()),
        include_pad(attr_bool(*spec.attrs, "include_pad")) {}
  int64_t x_at(int64_t n, int64_t position, int64_t c) const { return (n * window.inputs() + position) * channels + c; }
  int64_t y_at(int64_t n, int64_t at, int64_t c) const { return (n * window.outputs() + at) * channels + c; }
  // What an average divides by.
  double count(int64_t at) const {
    int64_t inside = 0;
    for (int64_t tap = 0; tap < window.taps(); ++tap) inside += window.source(at, tap) >= 0;
    return static_cast<double>(include_pad ? window.taps() : std::max<int64_t>(inside, 1));
  }
  template <class Visit>  // visit(n, output position, channel)
  void each(Visit visit) const {
    for (int64_t n = 0; n < batch; ++n)
      for (int64_t at = 0; at < window.outputs(); ++at)
        for (int64_t c = 0; c < channels; ++c) visit(n, at, c);
  }
};

Body bind_max(const KernelSpec& spec) {
  const Pool pool(spec, spec.in[0].dims, spec.out[0].dims);
  const In x = in(spec, 0);
  const Out y = out(spec, 0), index = out(spec, 1);
  return [=] {
    pool.each([&](int64_t n, int64_t at, int64_t c) {
      double best = -std::numeric_limits<double>::infinity();
      int64_t winner = -1;
      for (int64_t tap = 0; tap < pool.window.taps(); ++tap) {
        const int64_t from = pool.window.source(at, tap);
        if (from < 0) continue;
        const double value = x[pool.x_at(n, from, c)];
        if (winner >= 0 && (value <= best || std::isnan(best))) continue;  // a NaN wins
        best = value;
        winner = tap;
      }
      y.set(pool.y_at(n, at, c), best);
      if (index.present()) index.set(pool.y_at(n, at, c), static_cast<double>(std::max<int64_t>(winner, 0)));
    });
  };
}

Body bind_max_grad(const KernelSpec& spec) {
  const Pool pool(spec, spec.out[0].dims, spec.in[0].dims);
  const In dy = in(spec, 0), index = in(spec, 1);
  const Out dx = out(spec, 0);
  return [=, sums = room(dx.count)]() mutable {
    std::fill(sums.begin(), sums.end(), 0.0);
    pool.each([&](int64_t n, int64_t at, int64_t c) {
      const int64_t from = pool.window.source(at, index.integer(pool.y_at(n, at, c)));
      if (from >= 0) sums[pool.x_at(n, from, c)] += dy[pool.y_at(n, at, c)];
    });
    write(dx, sums);
  };
}

Body bind_average(const KernelSpec& spec) {
  const Pool pool(spec, spec.in[0].dims, spec.out[0].dims);
  const In x = in(spec, 0);
  const Out y = out(spec, 0);
  return [=] {
    pool.each([&](int64_t n, int64_t at, int64_t c) {
      double sum = 0;
      for (int64_t tap = 0; tap < pool.window.taps(); ++tap) {
        const int64_t from = pool.window.source(at, tap);
        if (from >= 0) sum += x[pool.x_at(n, from, c)];
      }
      y.set(pool.y_at(n, at, c), sum / pool.count(at));
    });
  };
}

Body bind_average_grad(const KernelSpec& spec) {
  const Pool pool(spec, spec.out[0].dims, spec.in[0].dims);
  const In dy = in(spec, 0);
  const Out dx = out(spec, 0);
  return [=, sums = room(dx.count)]() mutable {
    std::fill(sums.begin(), sums.end(), 0.0);
    pool.each([&](int64_t n, int64_t at, int64_t c) {
      const double share = dy[pool.y_at(n, at, c)] / pool.count(at);
      for (int64_t tap = 0; tap < pool.window.taps(); ++tap) {
        const int64_t from = pool.window.source(at, tap);
        if (from >= 0) sums[pool.x_at(n, from, c)] += share;
      }
    });
    write(dx, sums);
  };
}

constexpr Row kRows[] = {
    {OpCode::k_max_pool, bind_max},
    {OpCode::k_max_pool_grad, bind_max_grad},
    {OpCode::k_avg_pool, bind_average},
    {OpCode::k_avg_pool_grad, bind_average_grad},
};

}  // namespace

Rows pool_rows() { return kRows; }

}  // namespace whale::ref
