// What sites have learned, as the loops read it: folded queries and wide norm weights.

#pragma once

#include <cmath>

#include "tensors.h"
#include "vectors.h"

namespace attnres {
namespace {

// Pseudo-query times key-norm weight and the scale of the logits: only the product matters.  It is
// put into the order of D.
template <class D>
void fold(
    float* to, const float* query, const float* key_norm, float scale, int64_t hidden) {
  steps(hidden, [&](int64_t at, int64_t n) {
    const Step a = load<Float32>(query + at, n), b = load<Float32>(key_norm + at, n);
    const Step both = {a.low * (b.low * scale), a.high * (b.high * scale)};
    Float32::narrow(to + at, D::arrange(both));
  });
}

// Queries of several sites, `padded(hidden)` apart.
template <class D>
const float* fold_all(const Keys& keys, float scale, int64_t hidden) {
  float* folded = scratch(kQueries, keys.size() * padded(hidden));
  for (size_t site = 0; site < keys.size(); ++site)
    fold<D>(
        folded + site * padded(hidden), keys[site].query, keys[site].key_norm, scale, hidden);
  return folded;
}

template <class D>
struct Norm {
  const float* weight;  // in the order of D
  float eps;
  Norm(const NormWeight& norm_weight, float eps, int64_t hidden) : eps(eps) {
    float* wide = scratch(kNormWeight, padded(hidden));
    const auto widen = [&](auto stored) {
      using W = decltype(stored);
      const auto* from = static_cast<const typename W::Element*>(norm_weight.data);
      steps(hidden, [&](int64_t at, int64_t n) {
        Step step = load<W>(from + at, n);
        if constexpr (!std::is_same_v<W, D>) step = reordered<W>(step);
        Float32::narrow(wide + at, step);
      });
    };
    switch (norm_weight.dtype) {
      case ScalarType::Float: widen(Float32{}); break;
      case ScalarType::BFloat16: widen(BFloat16{}); break;
      case ScalarType::Half: widen(Float16{}); break;
      default: STD_TORCH_CHECK(false, "norm weights must be float32, float16 or bfloat16");
    }
    weight = wide;
  }
  // From the order of W to that of D.
  template <class W>
  static Step reordered(Step step) {
    if constexpr (std::is_same_v<W, BFloat16>) {
      float even[kLanes], odd[kLanes], natural[kStep];
      std::memcpy(even, &step.low, sizeof even);
      std::memcpy(odd, &step.high, sizeof odd);
      for (int64_t i = 0; i < kLanes; ++i) natural[2 * i] = even[i], natural[2 * i + 1] = odd[i];
      return Float32::widen(natural);
    }
    return D::arrange(step);
  }
  // RMSNorm of G float32 rows whose squares sum to `squares`.
  template <int64_t G>
  FLAT void apply(
      typename D::Element* const* to, const float* const* rows, const Vec* squares,
      int64_t hidden) const {
    const Four factors = scales<G>(squares, eps, hidden);
    float scale[4];
    std::memcpy(scale, &factors, sizeof scale);
    steps(hidden, [&](int64_t at, int64_t n) {
      const Step w = Float32::widen(weight + at);
      each<G>([&](auto g) {
        const Step x = Float32::widen(rows[g] + at);
        store_rounded<D>(to[g] + at, {x.low * scale[g] * w.low, x.high * scale[g] * w.high}, n);
      });
    });
  }
};

}  // namespace
}  // namespace attnres
