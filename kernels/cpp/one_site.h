// Runs one site: by its rows alone, or by what is known ahead of some of them.

#pragma once

#include "learned.h"
#include "loops.h"

namespace attnres {
namespace {

inline void add_bias(float* scores, const float* bias, int64_t count) {
  for (int64_t i = 0; i < count; ++i) scores[i] += bias[i];
}

// Sources are what is known ahead and the rows from `first` to `row`, the last of which `x` is
// added to.
template <class D>
void attend(
    const State& state, int64_t first, const Ahead& known, const Numbers& numbers,
    const Site& site) {
  const int64_t hidden = state.hidden, row = numbers.row, count = row + 1 - first;
  state.check_rows(first, row);
  float* folded = scratch(kQueries, padded(hidden));
  fold<D>(folded, site.query, site.key_norm, numbers.logit_scale, hidden);
  const Norm<D> norm(site.norm_weight, numbers.norm_eps, hidden);
  const float key_eps = numbers.key_eps;
  const auto x = state.x_rows<D>(), bank = state.bank_rows<D>();
  const auto* answers = static_cast<const typename D::Element*>(known.answer);
  const int64_t sources = count + (answers != nullptr);
  for_tokens(state.tokens, count * hidden, [&](int64_t begin, int64_t end) {
    // Tokens that run together, whose latencies overlap: 1, 2, 4 or 8, for the first cache.
    const int64_t near = kNear / (sources * hidden * sizeof(typename D::Element));
    const int64_t most = std::bit_floor<uint64_t>(std::clamp<int64_t>(near, 1, kTogether));
    const int64_t apart = whole(sources), wide = padded(hidden);
    std::vector<const typename D::Element*> rows(most * count);
    float* weights = scratch(kWeights, most * (apart + count));
    float *mixes = scratch(kMixed, most * wide), *row_scores = weights + most * apart;
    for (int64_t first_token = begin; first_token < end; first_token += most) {
      const int64_t together = std::min(most, end - first_token);
      const int64_t next = first_token + together + most <= end ? most : 0;
      for (int64_t t = 0; t < together; ++t) {
        const int64_t token = first_token + t;
        update<D>(bank(token, row), x(token, 0), numbers.fresh, hidden, next * x.stride);
        for (int64_t i = 0; i < count; ++i) rows[t * count + i] = bank(token, first + i);
      }
      in_groups(together * count, [&](int64_t i, auto several) {
        score<D, several>(row_scores + i, &rows[i], folded, key_eps, hidden, next * bank.stride);
      });
      for (int64_t t = 0; t < together; ++t) {
        float* scores = weights + t * apart;
        std::copy_n(row_scores + t * count, count, scores);
        if (site.bias) add_bias(scores, site.bias + first, count);
        if (answers) scores[count] = known.log_sum[first_token + t];
      }
      float inverse[kTogether];
      in_groups(together, [&](int64_t t, auto several) {
        float* scores[several];
        for (int64_t g = 0; g < several; ++g) scores[g] = weights + (t + g) * apart;
        softmax<several>(scores, inverse + t, nullptr, sources);
      });
      Vec squares[kTogether];
      for (int64_t t = 0; t < together; ++t) {
        float *mixed = mixes + t * wide, *scores = weights + t * apart;
        mix_wide<D, 1>(
            &mixed, &squares[t], &rows[t * count], &scores, &inverse[t], count, hidden,
            answers ? answers + (first_token + t) * hidden : nullptr);
      }
      in_groups(together, [&](int64_t t, auto several) {
        typename D::Element* to[several];
        float* mixed[several];
        for (int64_t g = 0; g < several; ++g) {
          to[g] = x(first_token + t + g, 0);
          mixed[g] = mixes + (t + g) * wide;
        }
        norm.template apply<several>(to, mixed, squares + t, hidden);
      });
    }
  });
}

}  // namespace
}  // namespace attnres
