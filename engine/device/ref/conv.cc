// Convolution, its two gradients and its transpose: the same visit of (output, tap, input), with another of the three
// summed into.
#include <algorithm>

#include "device/ref/window.h"

namespace whale::ref {
namespace {

struct Conv {
  Window window;
  int64_t batch, channels, filters, groups;
  Conv(const KernelSpec& spec, const Dims& x, const Dims& y, const Dims& w)
      : window(*spec.attrs, x, y, Dims(w.begin() + 1, w.end() - 1)),
        batch(x[0]),
        channels(x.back()),
        filters(y.back()),
        groups(std::max<int64_t>(attr_int(*spec.attrs, "groups", 1), 1)) {}

  // visit(index in y, index in w, index in x, count): `count` neighbouring channels of w and x meet one element of y.
  template <class Visit>
  void each(Visit visit) const {
    const int64_t run = channels / groups, per_group = filters / groups;
    for (int64_t n = 0; n < batch; ++n) {
      for (int64_t at = 0; at < window.outputs(); ++at) {
        for (int64_t tap = 0; tap < window.taps(); ++tap) {
          const int64_t from = window.source(at, tap);
          if (from < 0) continue;
          for (int64_t o = 0; o < filters; ++o) {
            visit(static_cast<size_t>((n * window.outputs() + at) * filters + o),
                  static_cast<size_t>((o * window.taps() + tap) * run),
                  static_cast<size_t>((n * window.inputs() + from) * channels + o / per_group * run),
                  static_cast<size_t>(run));
          }
        }
      }
    }
  }
};

Body bind_conv(const KernelSpec& spec) {
  const Conv conv(spec, spec.in[0].dims, spec.out[0].dims, spec.in[1].dims);
  const In x = in(spec, 0), w = in(spec, 1), bias = in(spec, 2);
  const Out y = out(spec, 0);
  return [=, xs = room(x.count), ws = room(w.count), ys = room(y.count)]() mutable {
    read(x, xs);
    read(w, ws);
    for (int64_t i = 0; i < y.count; ++i) ys[i] = bias.present() ? bias[i % conv.filters] : 0.0;
    conv.each([&](size_t iy, size_t iw, size_t ix, size_t count) {
      for (size_t c = 0; c < count; ++c) ys[iy] += xs[ix + c] * ws[iw + c];
    });
    write(y, ys);
  };
}

Body bind_grad_input(const KernelSpec& spec) {
  const Conv conv(spec, spec.out[0].dims, spec.in[0].dims, spec.in[1].dims);
  const In dy = in(spec, 0), w = in(spec, 1);
  const Out dx = out(spec, 0);
  return [=, dys = room(dy.count), ws = room(w.count), dxs = room(dx.count)]() mutable {
    read(dy, dys);
    read(w, ws);
    std::fill(dxs.begin(), dxs.end(), 0.0);
    conv.each([&](size_t iy, size_t iw, size_t ix, size_t count) {
      for (size_t c = 0; c < count; ++c) dxs[ix + c] += dys[iy] * ws[iw + c];
    });
    write(dx, dxs);
  };
}

Body bind_conv_transpose(const KernelSpec& spec) {
  const Conv conv(spec, spec.out[0].dims, spec.in[0].dims, spec.in[1].dims);
  const In x = in(spec, 0), w = in(spec, 1), bias = in(spec, 2);
  const Out y = out(spec, 0);
  return [=, xs = room(x.count), ws = room(w.count), ys = room(y.count)]() mutable {
    read(x, xs);
    read(w, ws);
    for (int64_t i = 0; i < y.count; ++i) ys[i] = bias.present() ? bias[i % conv.channels] : 0.0;
    conv.each([&](size_t ix, size_t iw, size_t iy, size_t count) {
      for (size_t o = 0; o < count; ++o) ys[iy + o] += xs[ix] * ws[iw + o];
    });
    write(y, ys);
  };
}

Body bind_grad_weight(const KernelSpec& spec) {
  const Conv conv(spec, spec.in[0].dims, spec.in[1].dims, spec.out[0].dims);
  const In x = in(spec, 0), dy = in(spec, 1);
  Results results(spec);
  const Out dw = results.take(), dbias = results.take(attr_bool(*spec.attrs, "bias"));
  return [=, xs = room(x.count), dys = room(dy.count), dws = room(dw.count), dbiases = room(dbias.count)]() mutable {
    read(x, xs);
    read(dy, dys);
    std::fill(dws.begin(), dws.end(), 0.0);
    conv.each([&](size_t iy, size_t iw, size_t ix, size_t count) {
      for (size_t c = 0; c < count; ++c) dws[iw + c] += dys[iy] * xs[ix + c];
    });
    write(dw, dws);
    if (!dbias.present()) return;
    std::fill(dbiases.begin(), dbiases.end(), 0.0);
    for (int64_t i = 0; i < dy.count; ++i) dbiases[i % conv.filters] += dys[i];
    write(dbias, dbiases);
  };
}

constexpr Row kRows[] = {
    {OpCode::k_conv, bind_conv},
    {OpCode::k_conv_grad_input, bind_grad_input},
    {OpCode::k_conv_grad_weight, bind_grad_weight},
    {OpCode::k_conv_transpose, bind_conv_transpose},
};

}  // namespace

Rows conv_rows() { return kRows; }

}  // namespace whale::ref
