// Functions that run one site: by its rows alone, or by what is known ahead of some of them.

#pragma once

#include <bit>
#include <initializer_list>

#include "learned.h"
#include "loops.h"

namespace {

// A tensor that was made ahead of a site.
void* made_ahead(
    const Tensor& tensor, std::initializer_list<int64_t> shape,
    ScalarType dtype = ScalarType::Float) {
  bool fits = tensor.dim() == static_cast<int64_t>(shape.size()) && tensor.is_contiguous() &&
              tensor.scalar_type() == dtype;
  int64_t dim = 0;
  for (int64_t size : shape) fits = fits && tensor.size(dim++) == size;
  STD_TORCH_CHECK(fits, "answers must be contiguous and of the bank's size");
  return tensor.data_ptr();
}

// What is known before a site runs (two-phase): the answer to rows that are not read again.
struct Ahead {
  const void* answer = nullptr;  // of the first token, in the activation dtype
  const float* log_sum = nullptr;
};

// What a site is told besides tensors.  Five numbers come in two, as the bits of each half: with
// cold caches, as in decode, an argument costs a microsecond.
struct Numbers {
  int64_t row;
  bool fresh;
  float logit_scale, key_eps, norm_eps;
  Numbers(int64_t slot, int64_t eps)
      : row(static_cast<int32_t>(slot) >> 1), fresh(slot & 1),
        logit_scale(high(slot)), key_eps(high(eps)), norm_eps(low(eps)) {}

 private:
  static float low(int64_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits)); }
  static float high(int64_t bits) { return low(bits >> 32); }
};

// What a site has learned.
struct Site {
  const float *query, *key_norm, *bias;  // there may be no bias
  NormWeight norm_weight;
  Site(const float* query, const float* key_norm, const float* bias, NormWeight norm_weight)
      : query(query), key_norm(key_norm), bias(bias), norm_weight(norm_weight) {}
  Site(
      const Tensor& query, const Tensor& key_norm, const std::optional<Tensor>& bias,
      const Tensor& norm_weight, int64_t hidden)
      : Site(floats(query, hidden), floats(key_norm, hidden), floats(bias, 1),
             NormWeight(norm_weight, hidden)) {}
};

float read_bias(const float* bias) { return bias ? *bias : 0; }

#define SITE_PARAMETERS                                                                    \
  int64_t slot, int64_t eps, Tensor query, Tensor key_norm, std::optional<Tensor> bias,   \
      Tensor norm_weight
#define SITE_ARGUMENTS(hidden) \
  Numbers(slot, eps), Site(query, key_norm, bias, norm_weight, hidden)

// Sources are what is known ahead and the rows from `first` to `row`, the last of which `x` is
// added to.
void attend(
    const State& state, int64_t first, const Ahead& known, const Numbers& numbers,
    const Site& site) {
  const int64_t hidden = state.hidden, row = numbers.row, count = row + 1 - first;
  state.check_rows(first, row);
  float* folded = scratch(kQueries, padded(hidden));
  fold(folded, site.query, site.key_norm, numbers.logit_scale, hidden, state.dtype);
  const Norm norm(site.norm_weight, numbers.norm_eps, hidden, state.dtype);
  const float own_bias = read_bias(site.bias), key_eps = numbers.key_eps;
  dispatch(state.dtype, [&](auto dtype) {
    using D = decltype(dtype);
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
      float *mixes = scratch(kMixed, most * wide), *found = weights + most * apart;
      for (int64_t first_token = begin; first_token < end; first_token += most) {
        const int64_t together = std::min(most, end - first_token);
        const int64_t next = first_token + together + most <= end ? most : 0;
        for (int64_t t = 0; t < together; ++t) {
          const int64_t token = first_token + t;
          update<D>(bank(token, row), x(token, 0), numbers.fresh, hidden, next * x.stride);
          for (int64_t i = 0; i < count; ++i) rows[t * count + i] = bank(token, first + i);
        }
        in_groups(together * count, [&](int64_t i, auto several) {
          score<D, several>(found + i, &rows[i], folded, key_eps, hidden, next * bank.stride);
        });
        for (int64_t t = 0; t < together; ++t) {
          float* scores = weights + t * apart;
          std::copy_n(found + t * count, count, scores);
          scores[count - 1] += own_bias;
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
          norm.apply<D, several>(to, mixed, squares + t, hidden);
        });
      }
    });
  });
}

void single_pass(Tensor x, Tensor bank, SITE_PARAMETERS) {
  const State state(x, bank);
  attend(state, 0, {}, SITE_ARGUMENTS(state.hidden));
}

// The answer of one site among those of its group.
Ahead answered(const State& state, const void* answers, const float* log_sums, int64_t position) {
  Ahead known;
  known.answer =
      static_cast<const char*>(answers) + position * state.tokens * state.hidden * state.size;
  known.log_sum = log_sums + position * state.tokens;
  return known;
}

void phase_2(
    Tensor x, Tensor bank, Tensor answers, Tensor log_sums, int64_t position, int64_t first,
    SITE_PARAMETERS) {
  const State state(x, bank);
  const int64_t sites = answers.size(0);
  STD_TORCH_CHECK(position >= 0 && position < sites, "the site is not among those of the answers");
  const void* answer = made_ahead(answers, {sites, state.tokens, state.hidden}, state.dtype);
  const void* log_sum = made_ahead(log_sums, {sites, state.tokens});
  const Ahead known = answered(state, answer, static_cast<const float*>(log_sum), position);
  attend(state, first, known, SITE_ARGUMENTS(state.hidden));
}

}  // namespace
