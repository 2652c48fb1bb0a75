// Mixture of experts: routing, and the ways to the experts and back.
#include "ops/moe.h"

#include <algorithm>
#include <limits>

#include "device/expert_begin.h"
#include "device/ref/table.h"

namespace whale::ref {
namespace {

struct Router {
  int64_t groups, tokens, experts, k, capacity;
  bool normalize;
  explicit Router(const KernelSpec& spec)
      : groups(spec.in[0].dims[0]),
        tokens(spec.in[0].dims[1]),
        experts(spec.in[0].dims[2]),
        k(attr_int(*spec.attrs, "k", 1)),
        capacity(moe_capacity(*spec.attrs, tokens, experts)),
        normalize(attr_bool(*spec.attrs, "normalize")) {}

  // The softmax of token t's logits, and its k experts in descending order.
  void route(const In& logits, int64_t t, Values& p, std::vector<int64_t>& chosen) const {
    double top = -std::numeric_limits<double>::infinity(), sum = 0;
    for (int64_t e = 0; e < experts; ++e) top = std::max(top, logits[t * experts + e]);
    for (int64_t e = 0; e < experts; ++e) sum += at(p, e) = std::exp(logits[t * experts + e] - top);
    for (int64_t e = 0; e < experts; ++e) at(p, e) /= sum;
    for (int64_t j = 0; j < k; ++j) {
      int64_t best = -1;
      for (int64_t e = 0; e < experts; ++e) {
        if (std::find(chosen.begin(), chosen.begin() + j, e) != chosen.begin() + j) continue;
        if (best < 0 || logits[t * experts + e] > logits[t * experts + best]) best = e;
      }
      chosen[j] = best;
    }
  }
  // What the probabilities of the choices are divided by.
  double divisor(const Values& p, const std::vector<int64_t>& chosen) const {
    double sum = 0;
    for (const int64_t e : chosen) sum += p[e];
    return normalize ? sum : 1;
  }
  static double& at(Values& v, int64_t i) { return v[i]; }
};

Body bind_gate(const KernelSpec& spec) {
  const Router r(spec);
  const In logits = in(spec, 0);
  const Out slot = out(spec, 0), weight = out(spec, 1), aux = out(spec, 2), dropped = out(spec, 3);
  return [=, p = room(r.experts), chosen = std::vector<int64_t>(static_cast<size_t>(r.k)),
          choices = std::vector<int64_t>(static_cast<size_t>(r.tokens * r.k)), mean = room(r.experts),
          first = room(r.experts), taken = room(r.experts)]() mutable {
    for (int64_t g = 0; g < r.groups; ++g) {
      for (Values* v : {&mean, &first, &taken}) std::fill(v->begin(), v->end(), 0.0);
      for (int64_t s = 0; s < r.tokens; ++s) {
        const int64_t t = g * r.tokens + s;
        r.route(logits, t, p, chosen);
        const double divisor = r.divisor(p, chosen);
        for (int64_t e = 0; e < r.experts; ++e) r.at(mean, e) += r.at(p, e) / static_cast<double>(r.tokens);
        r.at(first, chosen[0]) += 1 / static_cast<double>(r.tokens);
        for (int64_t j = 0; j < r.k; ++j) {
          const int64_t e = chosen[j];
          choices[s * r.k + j] = e;
          weight.set(t * r.k + j, r.at(p, e) / divisor);
        }
      }
      int64_t full = 0;
      for (int64_t j = 0; j < r.k; ++j) {
        for (int64_t s = 0; s < r.tokens; ++s) {
          const int64_t e = choices[s * r.k + j], i = (g * r.tokens + s) * r.k + j;
          const auto place = static_cast<int64_t>(r.at(taken, e)++);
          slot.set(i, place < r.capacity ? static_cast<double>(e * r.capacity + place) : -1);
          if (place >= r.capacity) weight.set(i, 0), ++full;
        }
      }
      double balance = 0;
      for (int64_t e = 0; e < r.experts; ++e) balance += r.at(first, e) * r.at(mean, e);
      aux.set(g, static_cast<double>(r.experts) * balance);
      dropped.set(g, static_cast<double>(full));
    }
  };
}

Body bind_gate_grad(const KernelSpec& spec) {
  const Router r(spec);
  const In logits = in(spec, 0), slot = in(spec, 1), dweight = in(spec, 2), daux = in(spec, 3);
  const Out dlogits = out(spec, 0);
  return [=, p = room(r.experts), dp = room(r.experts), first = room(r.experts),
          chosen = std::vector<int64_t>(static_cast<size_t>(r.k))]() mutable {
    const auto tokens = static_cast<double>(r.tokens), experts = static_cast<double>(r.experts);
    for (int64_t g = 0; g < r.groups; ++g) {
      std::fill(first.begin(), first.end(), 0.0);
      for (int64_t s = 0; s < r.tokens; ++s) {
        r.route(logits, g * r.tokens + s, p, chosen);
        r.at(first, chosen[0]) += 1 / tokens;
      }
      for (int64_t s = 0; s < r.tokens; ++s) {
        const int64_t t = g * r.tokens + s;
        r.route(logits, t, p, chosen);
        for (int64_t e = 0; e < r.experts; ++e)
          r.at(dp, e) = daux.present() ? daux[g] * experts * r.at(first, e) / tokens : 0;
        const double divisor = r.divisor(p, chosen);
        const auto given = [&](int64_t j) {
          return dweight.present() && slot.integer(t * r.k + j) >= 0 ? dweight[t * r.k + j] : 0;
        };
        double shared = 0;  // what raising the divisor costs
        if (r.normalize)
          for (int64_t j = 0; j < r.k; ++j) shared += given(j) * (r.at(p, chosen[j]) / divisor);
        for (int64_t j = 0; j < r.k; ++j) r.at(dp, chosen[j]) += (given(j) - shared) / divisor;
        double inner = 0;
        for (int64_t e = 0; e < r.experts; ++e) inner += r.at(p, e) * r.at(dp, e);
        for (int64_t e = 0; e < r.experts; ++e) dlogits.set(t * r.experts + e, r.at(p, e) * (r.at(dp, e) - inner));
      }
    }
  };
}

// The rows of experts' places: [experts here, groups, capacity] of `width`.
struct Places {
  int64_t experts, groups, capacity, width, begin;
  Places(const KernelSpec& spec, const Dims& dims)
      : experts(dims[0]), groups(dims[1]), capacity(dims[2]), width(dims[3]), begin(expert_begin(spec)) {}
  // First element of slot `slot` of group g; -1: none, or another device's.
  int64_t element(int64_t slot, int64_t g) const {
    const int64_t expert = slot < 0 ? -1 : slot / capacity - begin;
    if (expert < 0 || expert >= experts) return -1;
    return ((expert * groups + g) * capacity + slot % capacity) * width;
  }
};

Body bind_dispatch(const KernelSpec& spec) {
  const In x = in(spec, 0), slot = in(spec, 1), weight = in(spec, 2);
  const Out y = out(spec, 0);
  const Places places(spec, spec.out[0].dims);
  const int64_t tokens = spec.in[1].dims[1], k = spec.in[1].dims[2];
  return [=] {
    for (int64_t i = 0; i < y.count; ++i) y.set(i, 0);
    for (int64_t i = 0; i < slot.count; ++i) {
      const int64_t t = i / k, to = places.element(slot.integer(i), t / tokens);
      const double scale = weight.present() ? weight[i] : 1;
      for (int64_t d = 0; to >= 0 && d < places.width; ++d) y.set(to + d, scale * x[t * places.width + d]);
    }
  };
}

Body bind_combine(const KernelSpec& spec) {
  const In y = in(spec, 0), slot = in(spec, 1), weight = in(spec, 2);
  const Out x = out(spec, 0);
  const Places places(spec, spec.in[0].dims);
  const int64_t tokens = spec.in[1].dims[1], k = spec.in[1].dims[2];
  return [=] {
    for (int64_t t = 0; t * k < slot.count; ++t) {
      for (int64_t d = 0; d < places.width; ++d) {
        double sum = 0;
        for (int64_t i = t * k; i < (t + 1) * k; ++i) {
          const int64_t from = places.element(slot.integer(i), t / tokens);
          if (from >= 0) sum += (weight.present() ? weight[i] : 1) * y[from + d];
        }
        x.set(t * places.width + d, sum);
      }
    }
  };
}

Body bind_weight_grad(const KernelSpec& spec) {
  const In x = in(spec, 0), y = in(spec, 1), slot = in(spec, 2);
  const Out dweight = out(spec, 0);
  const Places places(spec, spec.in[1].dims);
  const int64_t tokens = spec.in[2].dims[1], k = spec.in[2].dims[2];
  return [=] {
    for (int64_t i = 0; i < slot.count; ++i) {
      const int64_t t = i / k, from = places.element(slot.integer(i), t / tokens);
      double sum = 0;
      for (int64_t d = 0; from >= 0 && d < places.width; ++d) sum += x[t * places.width + d] * y[from + d];
      dweight.set(i, sum);
    }
  };
}

constexpr Row kRows[] = {
    {OpCode::k_moe_gate, bind_gate},
    {OpCode::k_moe_gate_grad, bind_gate_grad},
    {OpCode::k_moe_dispatch, bind_dispatch},
    {OpCode::k_moe_combine, bind_combine},
    {OpCode::k_moe_weight_grad, bind_weight_grad},
};

}  // namespace

Rows moe_rows() { return kRows; }

}  // namespace whale::ref
