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

// By whole lines of the cache, as rows are read: what lies across two stores could not be read
// before both have left the core.
inline void copy(void* to, const void* from, int64_t bytes) {
  constexpr int64_t line = sizeof(Vec);
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
  int64_t at = 0;
  for (; at + line <= bytes; at += line) {
    Bits some;
    std::memcpy(&some, source + at, line);
    std::memcpy(target + at, &some, line);
  }
  std::memcpy(target + at, source + at, bytes - at);
}

// partial + delta, rounded to the activation dtype before it is a source; delta where it is fresh.
// `next` is how far away the next token's delta is, which is requested early; 0 asks for nothing.
template <class D>
FLAT void update(
    typename D::Element* partial, const typename D::Element* delta, bool fresh, int64_t hidden,
    int64_t next = 0) {
  for (int64_t at = 0; at < hidden; at += kStep) request(delta + at + next);
  if (fresh) return copy(partial, delta, hidden * sizeof *delta);
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
  Vec dots[2][G] = {}, squares[2][G] = {};
  steps(hidden, [&](int64_t at, int64_t n) {
    const Step q = Float32::widen(query + at);
    each<G>([&](auto g) {
      const Step x = load<D>(rows[g] + at, n);
      request(rows[g] + at + next);
      dots[0][g] += x.low * q.low;
      squares[0][g] += x.low * x.low;
      dots[1][g] += x.high * q.high;
      squares[1][g] += x.high * x.high;
    });
  });
  float dot[G], square[G];
  each<G>([&](auto g) {
    dots[0][g] += dots[1][g];
    squares[0][g] += squares[1][g];
  });
  sums<G>(dot, dots[0]);
  sums<G>(square, squares[0]);
  for (int64_t g = 0; g < G; ++g) scores[g] = dot[g] / std::sqrt(square[g] / hidden + eps);
}

// R rows and G queries: all their products, those of a row times its scale.
template <class D, int64_t R, int64_t G>
FLAT void products(
    float* const* to, int64_t stride, const typename D::Element* const* rows, const float* scale,
    const float* const* queries, int64_t hidden) {
  Vec dots[G][R] = {};
  steps(hidden, [&](int64_t at, int64_t n) {
    Step x[R];
    each<R>([&](auto r) { x[r] = load<D>(rows[r] + at, n); });
    each<G>([&](auto g) {
      Step q = Float32::widen(queries[g] + at);
      HELD(q.low);
      HELD(q.high);
      each<R>([&](auto r) { dots[g][r] += x[r].low * q.low; });
      each<R>([&](auto r) { dots[g][r] += x[r].high * q.high; });
    });
  });
  each<G>([&](auto g) {
    float found[R];
    sums<R>(found, dots[g]);
    each<R>([&](auto r) { found[r] *= scale[r]; });
    if (stride == 1)
      std::memcpy(to[g], found, sizeof found);
    else
      each<R>([&](auto r) { to[g][r * stride] = found[r]; });
  });
}

// What normalises R rows: one over the root of their mean square.  `next` as above.
template <class D, int64_t R>
FLAT void scales(
    float* to, const typename D::Element* const* rows, float eps, int64_t hidden, int64_t next) {
  Vec low[R] = {}, high[R] = {};
  steps(hidden, [&](int64_t at, int64_t n) {
    each<R>([&](auto r) {
      const Step x = load<D>(rows[r] + at, n);
      request(rows[r] + at + next);
      low[r] += x.low * x.low;
      high[r] += x.high * x.high;
    });
  });
  each<R>([&](auto r) { low[r] += high[r]; });
  sums<R>(to, low);
  for (int64_t r = 0; r < R; ++r) to[r] = 1 / std::sqrt(to[r] / hidden + eps);
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
    scales<D, R>(scale, rows + row, eps, hidden, next);
    in_groups(sites, [&](int64_t site, auto group) {
      constexpr int64_t G = group;
      float* cells[G];
      const float* by[G];
      for (int64_t g = 0; g < G; ++g) {
        cells[g] = to + row * row_stride + (site + g) * site_stride;
        by[g] = queries + (site + g) * padded(hidden);
      }
      products<D, R, G>(cells, row_stride, rows + row, scale, by, hidden);
    });
  });
}

// Room for the scores of a site, which are read and written by whole vectors.
inline int64_t whole(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// The scores of G sites to weights in place, `whole(count)` of each; and the log-sum-exps.
template <int64_t G>
FLAT void softmax(float* const* scores, float* log_sums, int64_t count) {
  constexpr float none = -std::numeric_limits<float>::infinity();
  for (int64_t g = 0; g < G; ++g)
    std::fill(scores[g] + count, scores[g] + whole(count), none);
  const auto change = [&](const auto& body) {
    for (int64_t at = 0; at < count; at += kLanes)
      each<G>([&](auto g) {
        Vec some;
        std::memcpy(&some, scores[g] + at, sizeof some);
        some = body(g, some);
        std::memcpy(scores[g] + at, &some, sizeof some);
      });
  };
  Vec tops[G], totals[G] = {};
  float top[G], total[G];
  each<G>([&](auto g) { tops[g] = Vec{} + none; });
  change([&](auto g, Vec some) { return tops[g] = larger(some, tops[g]), some; });
  each<G>([&](auto g) { top[g] = reduce(tops[g], larger); });
  change([&](auto g, Vec some) {
    some = exponential(some - top[g]);
    totals[g] += some;
    return some;
  });
  sums<G>(total, totals);
  // Below 2^-126, where every product takes a hundred times as long, a weight counts as none.
  change([&](auto g, Vec some) {
    some /= total[g];
    return some < std::numeric_limits<float>::min() ? Vec{} : some;
  });
  if (log_sums)
    for (int64_t g = 0; g < G; ++g) log_sums[g] = top[g] + std::log(total[g]);
}

// G weighted sums of the same rows, and their squares.  An `answer` has the weight behind theirs.
template <class D, int64_t G>
FLAT void mix(
    float* const* to, Vec* squares, const typename D::Element* const* rows,
    const float* const* weights, int64_t count, int64_t hidden,
    const typename D::Element* answer = nullptr) {
  constexpr int64_t P = G == 1 ? 4 : G < 4 ? 2 : 1;  // steps in turn
  Vec total[G] = {};
  const auto turn = [&](int64_t at, auto several, int64_t n) {
    constexpr int64_t V = several;
    Vec low[V][G] = {}, high[V][G] = {};
    const auto take = [&](const typename D::Element* row, int64_t index) {
      Step x[V];
      each<V>([&](auto v) { x[v] = load<D>(row + at + v * kStep, n); });
      each<G>([&](auto g) {
        const float weight = weights[g][index];
        each<V>([&](auto v) {
          low[v][g] += weight * x[v].low;
          high[v][g] += weight * x[v].high;
        });
      });
    };
    for (int64_t row = 0; row < count; ++row) take(rows[row], row);
    if (answer) take(answer, count);
    each<V>([&](auto v) {
      each<G>([&](auto g) {
        Float32::narrow(to[g] + at + v * kStep, {low[v][g], high[v][g]});
        total[g] += low[v][g] * low[v][g];
        total[g] += high[v][g] * high[v][g];
      });
    });
  };
  const int64_t turned = hidden / (P * kStep) * (P * kStep);
  steps(hidden - turned, [&](int64_t at, int64_t n) {
    turn(turned + at, std::integral_constant<int64_t, 1>{}, n);
  });
  for (int64_t at = 0; at < turned; at += P * kStep)
    turn(at, std::integral_constant<int64_t, P>{}, kStep);
  each<G>([&](auto g) { squares[g] = total[g]; });
}

template <class F>
void for_tokens(int64_t tokens, int64_t elements_each, const F& body) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements_each));
  if (tokens <= grain) return body(0, tokens);
  torch::stable::parallel_for(0, tokens, grain, body);
}

}  // namespace
