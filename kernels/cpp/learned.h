// What sites have learned, as the loops read it: folded queries and wide norm weights.

#pragma once

#include <cmath>

#include "tensors.h"

namespace {

// Pseudo-query times key-norm weight and the scale of the logits: only the product matters.  It is
// put into the order of `dtype`.
void fold(
    float* to, const float* query, const float* key_norm, float scale, int64_t hidden,
    ScalarType dtype) {
  dispatch(dtype, [&](auto order) {
    steps(hidden, [&](int64_t at, int64_t n) {
      const Step a = load<Float32>(query + at, n), b = load<Float32>(key_norm + at, n);
      const Step both = {a.low * (b.low * scale), a.high * (b.high * scale)};
      Float32::narrow(to + at, decltype(order)::arrange(both));
    });
  });
}

// Queries of several sites, `padded(hidden)` apart.
const float* fold_all(
    const Tensors& queries, const Tensors& key_norms, float scale, int64_t hidden,
    ScalarType dtype) {
  STD_TORCH_CHECK(
      !queries.empty() && queries.size() == key_norms.size(), "every query must have a key norm");
  float* folded = scratch(kQueries, queries.size() * padded(hidden));
  for (size_t site = 0; site < queries.size(); ++site)
    fold(
        folded + site * padded(hidden), floats(queries[site], hidden),
        floats(key_norms[site], hidden), scale, hidden, dtype);
  return folded;
}

struct Norm {
  const float* weight;  // in the order of the activations' dtype
  float eps;
  Norm(const NormWeight& given, float eps, int64_t hidden, ScalarType dtype) : eps(eps) {
    float* wide = scratch(kNormWeight, padded(hidden));
    dispatch(given.dtype, [&](auto stored) {
      using W = decltype(stored);
      const auto* from = static_cast<const typename W::Element*>(given.data);
      dispatch(dtype, [&](auto order) {
        steps(hidden, [&](int64_t at, int64_t n) {
          Step step = load<W>(from + at, n);
          if constexpr (!std::is_same_v<W, decltype(order)>) step = reordered<W>(step, order);
          Float32::narrow(wide + at, step);
        });
      });
    });
    weight = wide;
  }
  // From the order of W to that of D.
  template <class W, class D>
  static Step reordered(Step step, D) {
    if constexpr (std::is_same_v<W, BFloat16>) {
      float even[kLanes], odd[kLanes], natural[kStep];
      std::memcpy(even, &step.low, sizeof even);
      std::memcpy(odd, &step.high, sizeof odd);
      for (int64_t i = 0; i < kLanes; ++i) natural[2 * i] = even[i], natural[2 * i + 1] = odd[i];
      return Float32::widen(natural);
    }
    return D::arrange(step);
  }
  // RMSNorm of a float32 row whose squares sum to `squares`.
  template <class D>
  FLAT void apply(
      typename D::Element* to, const float* row, Vec squares, int64_t hidden) const {
    const float scale = 1 / std::sqrt(sum(squares) / hidden + eps);
    steps(hidden, [&](int64_t at, int64_t n) {
      const Step x = Float32::widen(row + at), w = Float32::widen(weight + at);
      store<D>(to + at, {x.low * scale * w.low, x.high * scale * w.high}, n);
    });
  }
};

}  // namespace
