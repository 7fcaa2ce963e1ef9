// Reads rows for several sites at once.

#pragma once

#include "one_site.h"

namespace attnres {
namespace {

// Runs the first site, and answers the others: `[sites - 1, tokens, hidden]`, with log-sum-exps.
template <class D>
void attend_group(
    const State& state, const Numbers& numbers, bool completes, const Keys& keys,
    const NormWeight& norm_weight, void* answers, float* log_sum) {
  const int64_t row = numbers.row;
  const float key_eps = numbers.key_eps;
  const int64_t tokens = state.tokens, hidden = state.hidden, sites = keys.size();
  const int64_t count = row + 1, later_count = row + completes;
  state.check_rows(0, row);
  STD_TORCH_CHECK(later_count > 0, "later sites have no finished block to attend to");
  const float* folded = fold_all<D>(keys, numbers.logit_scale, hidden);
  const Norm<D> norm(norm_weight, numbers.norm_eps, hidden);
  const bool biased = keys[0].bias != nullptr;
  const auto delta = state.x_rows<D>(), blocks = state.bank_rows<D>();
  const Rows<D> answer = {
      static_cast<typename D::Element*>(answers), tokens * hidden, hidden};
  for_tokens(tokens, (count + sites) * hidden, [&](int64_t begin, int64_t end) {
    std::vector<const typename D::Element*> rows(count);
    const int64_t apart = whole(count);
    float* weights = scratch(kWeights, sites * apart);
    auto* squared = reinterpret_cast<Vec*>(scratch(kSquares, (count + 15) / 16 * 16 * kLanes));
    float* mixed = scratch(kMixed, padded(hidden));
    for (int64_t token = begin; token < end; ++token) {
      const bool more = token + 1 < end;
      Vec squares = {};
      update<D>(
          blocks(token, row), delta(token, 0), numbers.fresh, hidden, more ? delta.stride : 0);
      for (int64_t i = 0; i < count; ++i) rows[i] = blocks(token, i);
      score_sites<D>(
          weights, apart, squared, rows.data(), later_count, folded, sites, key_eps, hidden,
          more ? blocks.stride : 0);
      if (!completes) score<D, 1>(&weights[row], &rows[row], folded, key_eps, hidden);
      for (int64_t site = 0; biased && site < sites; ++site)
        add_bias(weights + site * apart, keys[site].bias, site ? later_count : count);
      // G sites from this one on, which is the first one where `is_first`.
      const auto run = [&]<bool is_first>(int64_t site, auto group, std::bool_constant<is_first>) {
        constexpr int64_t G = group;
        float *scores[G], inverse[G], log_sums[G];
        for (int64_t g = 0; g < G; ++g) scores[g] = weights + (site + g) * apart;
        const int64_t read = is_first ? count : later_count;
        in_groups(G, [&](int64_t g, auto several) {
          softmax<several>(scores + g, inverse + g, log_sums + g, read);
        });
        typename D::Element* to[G];
        for (int64_t g = 0; g < G; ++g) {
          if (is_first && g == 0) continue;
          log_sum[(site + g - 1) * tokens + token] = log_sums[g];
          to[g] = answer(site + g - 1, token);
        }
        mix<D, G>(
            rows.data(), scores, inverse, read, hidden, nullptr,
            [&](auto g, int64_t at, Step sum, int64_t n) {
              if constexpr (!is_first || g > 0) return store_rounded<D>(to[g] + at, sum, n);
              Float32::narrow(mixed + at, sum);
              squares += sum.low * sum.low;
              squares += sum.high * sum.high;
            });
      };
      if (!completes)  // it reads one row more
        run(0, std::integral_constant<int64_t, 1>{}, std::true_type{});
      in_equal_groups<kMixedAtOnce<D>>(
          sites,
          [&](int64_t site, auto group) {
            if (site)
              run(site, group, std::false_type{});
            else
              run(site, group, std::true_type{});
          },
          !completes);
      auto* x = delta(token, 0);
      norm.template apply<1>(&x, &mixed, &squares, hidden);
    }
  });
}

}  // namespace
}  // namespace attnres
