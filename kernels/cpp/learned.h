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

struct Key {
  const float *query, *key_norm;
};
using Keys = std::vector<Key>;

Keys keys_of(const Tensors& queries, const Tensors& key_norms, int64_t hidden) {
  STD_TORCH_CHECK(
      !queries.empty() && queries.size() == key_norms.size(), "every query must have a key norm");
  Keys keys;
  for (size_t site = 0; site < queries.size(); ++site)
    keys.push_back({floats(queries[site], hidden), floats(key_norms[site], hidden)});
  return keys;
}

// Queries of several sites, `padded(hidden)` apart.
const float* fold_all(const Keys& keys, float scale, int64_t hidden, ScalarType dtype) {
  float* folded = scratch(kQueries, keys.size() * padded(hidden));
  for (size_t site = 0; site < keys.size(); ++site)
    fold(
        folded + site * padded(hidden), keys[site].query, keys[site].key_norm, scale, hidden,
        dtype);
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
  // RMSNorm of G float32 rows whose squares sum to `squares`.
  template <class D, int64_t G>
  FLAT void apply(
      typename D::Element* const* to, const float* const* rows, const Vec* squares,
      int64_t hidden) const {
    const Four found = scales<G>(squares, eps, hidden);
    float scale[4];
    std::memcpy(scale, &found, sizeof scale);
    steps(hidden, [&](int64_t at, int64_t n) {
      const Step w = Float32::widen(weight + at);
      each<G>([&](auto g) {
        const Step x = Float32::widen(rows[g] + at);
        store<D>(to[g] + at, {x.low * scale[g] * w.low, x.high * scale[g] * w.high}, n);
      });
    });
  }
};

}  // namespace
