// Functions that read rows for several sites at once.

#pragma once

#include <tuple>

#include "one_site.h"

namespace {

void score_rows(
    Tensor bank, Tensor scores, int64_t position, int64_t first, int64_t count, Tensors queries,
    Tensors key_norms, double logit_scale, double key_eps) {
  STD_TORCH_CHECK(bank.dim() == 3 && scores.dim() == 3, "bank and scores must have three dimensions");
  STD_TORCH_CHECK(
      0 <= first && 1 <= count && first + count <= bank.size(1), "the row is outside of the bank");
  STD_TORCH_CHECK(bank.size(2) <= 1 || bank.stride(2) == 1, "rows must be contiguous");
  const int64_t tokens = bank.size(0), slots = bank.size(1), hidden = bank.size(2);
  const int64_t sites = scores.size(1), ahead = queries.size();
  STD_TORCH_CHECK(
      position >= 0 && position + ahead == sites, "the sites are not the last of the scores");
  float* to = static_cast<float*>(made_ahead(scores, {tokens, sites, slots}));
  to += position * slots + first;
  const float* folded = fold_all(
      queries, key_norms, static_cast<float>(logit_scale), hidden, bank.scalar_type());
  dispatch(bank.scalar_type(), [&](auto dtype) {
    using D = decltype(dtype);
    const auto source = rows_of<D>(bank);
    for_tokens(tokens, count * ahead * hidden, [&](int64_t begin, int64_t end) {
      std::vector<const typename D::Element*> rows(end - begin);
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t token = begin; token < end; ++token)
          rows[token - begin] = source(token, first + i);
        score_sites<D>(
            to + begin * sites * slots + i, sites * slots, slots, rows.data(), rows.size(), folded,
            ahead, static_cast<float>(key_eps), hidden);
      }
    });
  });
}

std::tuple<Tensor, Tensor> open_group(
    Tensor x, Tensor bank, int64_t place, int64_t eps, bool completes, Tensors queries,
    Tensors key_norms, std::optional<Tensor> bias, Tensor norm_weight) {
  const State state(x, bank);
  const Numbers numbers(place, eps);
  const int64_t row = numbers.row;
  const float key_eps = numbers.key_eps;
  const int64_t tokens = state.tokens, hidden = state.hidden, sites = queries.size();
  const int64_t count = row + 1, later_count = row + completes;
  state.check_rows(0, row);
  STD_TORCH_CHECK(later_count > 0, "later sites have no finished block to attend to");
  const float* folded = fold_all(queries, key_norms, numbers.logit_scale, hidden, state.dtype);
  const Norm norm(NormWeight(norm_weight, hidden), numbers.norm_eps, hidden, state.dtype);
  const float own_bias = read_bias(floats(bias, 1));
  Tensor answers = torch::stable::new_empty(bank, {sites - 1, tokens, hidden});
  Tensor log_sums = torch::stable::new_empty(bank, {sites - 1, tokens}, ScalarType::Float);
  float* log_sum = static_cast<float*>(log_sums.data_ptr());
  dispatch(state.dtype, [&](auto dtype) {
    using D = decltype(dtype);
    const auto delta = state.x_rows<D>(), blocks = state.bank_rows<D>();
    const auto answer = rows_of<D>(answers);
    for_tokens(tokens, (count + sites) * hidden, [&](int64_t begin, int64_t end) {
      std::vector<const typename D::Element*> rows(count);
      float* weights = scratch(kWeights, sites * count);
      float* mixed = scratch(kMixed, kGroup * padded(hidden));
      for (int64_t token = begin; token < end; ++token) {
        const bool more = token + 1 < end;
        update<D>(
            blocks(token, row), delta(token, 0), numbers.fresh, hidden, more ? delta.stride : 0);
        for (int64_t i = 0; i < count; ++i) rows[i] = blocks(token, i);
        score_sites<D>(
            weights, 1, count, rows.data(), later_count, folded, sites, key_eps, hidden,
            more ? blocks.stride : 0);
        if (!completes)
          score<D, 1>(&weights[row], &rows[row], folded, key_eps, hidden);
        weights[row] += own_bias;
        softmax(weights, count);
        const float* first = weights;
        Vec own;
        mix<D, 1>(&mixed, &own, rows.data(), &first, count, hidden);
        norm.apply<D>(delta(token, 0), mixed, own, hidden);
        in_groups(sites - 1, [&](int64_t site, auto group) {
          constexpr int64_t G = group;
          float* to[G];
          const float* by[G];
          Vec squares[G];
          for (int64_t g = 0; g < G; ++g) {
            float* scores = weights + (1 + site + g) * count;
            log_sum[(site + g) * tokens + token] = softmax(scores, later_count);
            by[g] = scores;
            to[g] = mixed + g * padded(hidden);
          }
          mix<D, G>(to, squares, rows.data(), by, later_count, hidden);
          for (int64_t g = 0; g < G; ++g)
            steps(hidden, [&](int64_t at, int64_t n) {
              store<D>(answer(site + g, token) + at, Float32::widen(to[g] + at), n);
            });
        });
      }
    });
  });
  return {answers, log_sums};
}

}  // namespace
