// Loops over one token's rows: add, score, mix; and the tokens shared out over torch's threads.

#pragma once

#include <cmath>
#include <limits>

#include <torch/csrc/stable/ops.h>

#include "vectors.h"

namespace {

// Ask for what a later token reads.  Into the second cache, not the first, which lets so few requests
// wait at a time that the loops stand still behind them.
inline void request(const void* line) { __builtin_prefetch(line, 0, 2); }

// partial + delta, rounded to the activation dtype before it is a source; delta where it is fresh.
// `next` is how far away the next token's delta is, which is requested early; 0 asks for nothing.
template <class D>
FLAT void update(
    typename D::Element* partial, const typename D::Element* delta, bool fresh, int64_t hidden,
    int64_t next = 0) {
  for (int64_t at = 0; at < hidden; at += kStep) request(delta + at + next);
  if (fresh) {
    std::memcpy(partial, delta, hidden * sizeof *delta);
    return;
  }
  steps(hidden, [&](int64_t at, int64_t n) {
    const Step sum = load<D>(partial + at, n), more = load<D>(delta + at, n);
    store<D>(partial + at, {sum.low + more.low, sum.high + more.high}, n);
  });
}

// G rows scored by one query; `next` as above, of the rows.
template <class D, int64_t G>
FLAT void score(
    float* scores,
    const typename D::Element* const* rows,
    const float* query,
    float eps,
    int64_t hidden,
    int64_t next = 0) {
  constexpr int64_t U = kGroup / G;  // sums of a row
  Vec dots[U][G] = {}, squares[U][G] = {};
  unrolled<(U + 1) / 2>(hidden, [&](int64_t p, int64_t at, int64_t n) {
    const int64_t low = 2 * p % U, high = (2 * p + 1) % U;
    const Step q = Float32::widen(query + at);
#pragma GCC unroll 4
    for (int64_t g = 0; g < G; ++g) {
      const Step x = load<D>(rows[g] + at, n);
      request(rows[g] + at + next);
      dots[low][g] += x.low * q.low;
      squares[low][g] += x.low * x.low;
      dots[high][g] += x.high * q.high;
      squares[high][g] += x.high * x.high;
    }
  });
  for (int64_t g = 0; g < G; ++g) {
    for (int64_t u = 1; u < U; ++u) {
      dots[0][g] += dots[u][g];
      squares[0][g] += squares[u][g];
    }
    scores[g] = sum(dots[0][g]) / std::sqrt(sum(squares[0][g]) / hidden + eps);
  }
}

// R rows and G queries: all their products.
template <class D, int64_t R, int64_t G>
FLAT void products(
    float* const* to, int64_t stride, const typename D::Element* const* rows,
    const float* const* queries, int64_t hidden) {
  Vec dots[R][G] = {};
  steps(hidden, [&](int64_t at, int64_t n) {
    Vec low[G], high[G];
#pragma GCC unroll 4
    for (int64_t g = 0; g < G; ++g) {
      const Step q = Float32::widen(queries[g] + at);
      low[g] = q.low;
      high[g] = q.high;
    }
#pragma GCC unroll 4
    for (int64_t r = 0; r < R; ++r) {
      const Step x = load<D>(rows[r] + at, n);
#pragma GCC unroll 4
      for (int64_t g = 0; g < G; ++g) {
        dots[r][g] += x.low * low[g];
        dots[r][g] += x.high * high[g];
      }
    }
  });
  for (int64_t r = 0; r < R; ++r)
    for (int64_t g = 0; g < G; ++g) to[r][g * stride] = sum(dots[r][g]);
}

template <class D>
FLAT Vec square(const typename D::Element* row, int64_t hidden, int64_t next) {
  Vec squares[4] = {};
  unrolled<2>(hidden, [&](int64_t p, int64_t at, int64_t n) {
    const Step x = load<D>(row + at, n);
    request(row + at + next);
    squares[2 * p] += x.low * x.low;
    squares[2 * p + 1] += x.high * x.high;
  });
  return (squares[0] + squares[1]) + (squares[2] + squares[3]);
}

// Logits of rows for all `queries`, to[row * row_stride + site * site_stride]; `next` as above.
template <class D>
void score_sites(
    float* to, int64_t row_stride, int64_t site_stride, const typename D::Element* const* rows,
    int64_t count, const float* queries, int64_t sites, float eps, int64_t hidden,
    int64_t next = 0) {
  in_groups<kPair>(count, [&](int64_t row, auto pair) {
    constexpr int64_t R = pair;
    float scale[R];
    for (int64_t r = 0; r < R; ++r)
      scale[r] = 1 / std::sqrt(sum(square<D>(rows[row + r], hidden, next)) / hidden + eps);
    in_groups(sites, [&](int64_t site, auto group) {
      constexpr int64_t G = group;
      float* cells[R];
      const float* by[G];
      for (int64_t r = 0; r < R; ++r) cells[r] = to + (row + r) * row_stride + site * site_stride;
      for (int64_t g = 0; g < G; ++g) by[g] = queries + (site + g) * padded(hidden);
      products<D, R, G>(cells, site_stride, rows + row, by, hidden);
      for (int64_t r = 0; r < R; ++r)
        for (int64_t g = 0; g < G; ++g) cells[r][g * site_stride] *= scale[r];
    });
  });
}

// Scores to weights in place; returns the log-sum-exp.
float softmax(float* scores, int64_t count) {
  float top = scores[0], total = 0;
  for (int64_t i = 1; i < count; ++i) top = std::fmax(top, scores[i]);
  for (int64_t i = 0; i < count; ++i) total += scores[i] = std::exp(scores[i] - top);
  for (int64_t i = 0; i < count; ++i) {
    scores[i] /= total;
    // Below 2^-126, where every product takes a hundred times as long, a weight counts as none.
    if (scores[i] < std::numeric_limits<float>::min()) scores[i] = 0;
  }
  return top + std::log(total);
}

// G weighted sums of the same rows, and their squares.  An `answer` has the weight behind theirs.
template <class D, int64_t G>
FLAT void mix(
    float* const* to, Vec* squares, const typename D::Element* const* rows,
    const float* const* weights, int64_t count, int64_t hidden,
    const typename D::Element* answer = nullptr) {
  constexpr int64_t P = G == 1 ? 2 : 1;  // steps in turn
  for (int64_t g = 0; g < G; ++g) squares[g] = Vec{};
  const auto turn = [&](int64_t at, auto several, int64_t n) {
    constexpr int64_t V = several;
    Vec low[V][G] = {}, high[V][G] = {};
    const auto take = [&](const typename D::Element* row, int64_t index) {
#pragma GCC unroll 2
      for (int64_t v = 0; v < V; ++v) {
        const Step x = load<D>(row + at + v * kStep, n);
#pragma GCC unroll 4
        for (int64_t g = 0; g < G; ++g) {
          low[v][g] += weights[g][index] * x.low;
          high[v][g] += weights[g][index] * x.high;
        }
      }
    };
    for (int64_t row = 0; row < count; ++row) take(rows[row], row);
    if (answer) take(answer, count);
    for (int64_t v = 0; v < V; ++v)
      for (int64_t g = 0; g < G; ++g) {
        Float32::narrow(to[g] + at + v * kStep, {low[v][g], high[v][g]});
        squares[g] += low[v][g] * low[v][g];
        squares[g] += high[v][g] * high[v][g];
      }
  };
  int64_t at = 0;
  for (; at + P * kStep <= hidden; at += P * kStep)
    turn(at, std::integral_constant<int64_t, P>{}, kStep);
  for (; at < hidden; at += kStep)
    turn(at, std::integral_constant<int64_t, 1>{}, std::min(kStep, hidden - at));
}

template <class F>
void for_tokens(int64_t tokens, int64_t elements_each, const F& body) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements_each));
  if (tokens <= grain) return body(0, tokens);
  torch::stable::parallel_for(0, tokens, grain, body);
}

}  // namespace
