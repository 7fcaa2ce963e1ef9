// Loops over one token's rows: add, score, mix; and the tokens shared out over torch's threads.

#pragma once

#include <cmath>
#include <limits>

#include <torch/csrc/stable/ops.h>

#include "vectors.h"

namespace attnres {
namespace {

// Ask for what a later token reads.  Into the second cache, not the first, which lets so few requests
// wait at a time that the loops stand still behind them.
inline void request(const void* line) { __builtin_prefetch(line, 0, 2); }

// By whole lines of the cache, as rows are read: what lies across two stores could not be read
// before both have left the core.
inline void copy(void* to, const void* from, int64_t bytes) {
  constexpr int64_t line = sizeof(Vec);  // or a part of one
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

// R rows and G queries: all their products and, where `first`, the rows' squares.  `next` as above,
// of the rows.
template <class D, int64_t R, int64_t G, bool first>
FLAT void products(
    float* const* to, Vec* squared, const typename D::Element* const* rows,
    const float* const* queries, int64_t hidden, int64_t next) {
  static_assert(R * G <= 16);
  Vec dots[G][R] = {}, squares[R] = {};
  steps(hidden, [&](int64_t at, int64_t n) {
    Step x[R];
    each<R>([&](auto r) { x[r] = load<D>(rows[r] + at, n); });
    if constexpr (first) {
      each<R>([&](auto r) {
        squares[r] += x[r].low * x[r].low;
        if (next) request(rows[r] + at + next);
      });
    }
    each<G>([&](auto g) {
      Step q = Float32::widen(queries[g] + at);
      HELD(q.low);
      HELD(q.high);
      each<R>([&](auto r) { dots[g][r] += x[r].low * q.low; });
      each<R>([&](auto r) { dots[g][r] += x[r].high * q.high; });
    });
    if constexpr (first) each<R>([&](auto r) { squares[r] += x[r].high * x[r].high; });
  });
  if constexpr (first) each<R>([&](auto r) { squared[r] = squares[r]; });
  Vec all[16] = {};
  float products[16];
  each<G>([&](auto g) { each<R>([&](auto r) { all[g * R + r] = dots[g][r]; }); });
  sums(products, all);
  each<G>([&](auto g) { each<R>([&](auto r) { to[g][r] = products[g * R + r]; }); });
}

// Logits of rows for all `queries`, those of a site `apart`; `squared` has room for as many vectors,
// and `next` is as above.
template <class D>
void score_sites(
    float* to, int64_t apart, Vec* squared, const typename D::Element* const* rows, int64_t count,
    const float* queries, int64_t sites, float eps, int64_t hidden, int64_t next = 0) {
  in_groups<2>(count, [&](int64_t row, auto pair) {
    constexpr int64_t R = pair;
    in_equal_groups<kSites>(sites, [&](int64_t site, auto group) {
      constexpr int64_t G = group;
      float* cells[G];
      const float* by[G];
      for (int64_t g = 0; g < G; ++g) {
        cells[g] = to + row + (site + g) * apart;
        by[g] = queries + (site + g) * padded(hidden);
      }
      if (site == 0)
        products<D, R, G, true>(cells, squared + row, rows + row, by, hidden, next);
      else
        products<D, R, G, false>(cells, squared + row, rows + row, by, hidden, next);
    });
  });
  for (int64_t row = 0; row < count; row += 16) {
    float scale[16];
    sums(scale, squared + row);
    for (float& one : scale) one = 1 / std::sqrt(one / hidden + eps);  // sixteen at once
    for (int64_t site = 0; site < sites; ++site)
      for (int64_t at = row; at < std::min(row + 16, count); ++at)
        to[at + site * apart] *= scale[at - row];
  }
}

// Room for the scores of a site, which are read and written by whole vectors.
inline int64_t whole(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// The scores of G sites to weights in place, `whole(count)` of each, whose sum is 1 after they are
// multiplied by `inverse`; and the log-sum-exps.
template <int64_t G>
FLAT void softmax(float* const* scores, float* inverse, float* log_sums, int64_t count) {
  constexpr float none = -std::numeric_limits<float>::infinity();
  for (int64_t g = 0; g < G; ++g)
    std::fill(scores[g] + count, scores[g] + whole(count), none);
  Vec tops[G], totals[G] = {};
  float top[G], total[G];
  const auto every = [&](const auto& body) {
    for (int64_t at = 0; at < count; at += kLanes)
      each<G>([&](auto g) {
        Vec some;
        std::memcpy(&some, scores[g] + at, sizeof some);
        body(g, some, scores[g] + at);
      });
  };
  each<G>([&](auto g) { tops[g] = Vec{} + none; });
  every([&](auto g, Vec some, float*) { tops[g] = larger(some, tops[g]); });
  each<G>([&](auto g) { top[g] = reduce(tops[g], larger); });
  every([&](auto g, Vec some, float* to) {
    some = exponential(some - top[g]);
    totals[g] += some;
    std::memcpy(to, &some, sizeof some);
  });
  sums<G>(total, totals);
  for (int64_t g = 0; g < G; ++g) inverse[g] = 1 / total[g];
  if (log_sums)
    for (int64_t g = 0; g < G; ++g) log_sums[g] = top[g] + std::log(total[g]);
}

// Sites that mix a row at once.  More convert a row of a half less often, but read less of a row in
// turn.
template <class D>
constexpr int64_t kMixedAtOnce = sizeof(typename D::Element) == 2 ? kSites : kGroup;

// G weighted sums of the same rows, each times its `scale`, to take(g, at, sum, elements).  An
// `answer` has the weight behind those of the rows.
template <class D, int64_t G, class F>
FLAT void mix(
    const typename D::Element* const* rows, const float* const* weights, const float* scale,
    int64_t count, int64_t hidden, const typename D::Element* answer, const F& take) {
  constexpr int64_t P = G <= 2 ? 4 : G <= 4 ? 2 : 1;  // steps in turn
  const auto turn = [&](int64_t at, auto several, int64_t n) {
    constexpr int64_t V = several;
    Vec low[V][G] = {}, high[V][G] = {};
    const auto add = [&](const typename D::Element* row, int64_t index) {
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
    for (int64_t row = 0; row < count; ++row) add(rows[row], row);
    if (answer) add(answer, count);
    each<V>([&](auto v) {
      each<G>([&](auto g) {
        take(g, at + v * kStep, Step{low[v][g] * scale[g], high[v][g] * scale[g]}, n);
      });
    });
  };
  const int64_t turned = hidden / (P * kStep) * (P * kStep);
  steps(hidden - turned, [&](int64_t at, int64_t n) {
    turn(turned + at, std::integral_constant<int64_t, 1>{}, n);
  });
  for (int64_t at = 0; at < turned; at += P * kStep)
    turn(at, std::integral_constant<int64_t, P>{}, kStep);
}

// As above, to rows of float32 and, of each, its squares.
template <class D, int64_t G>
FLAT void mix_wide(
    float* const* to, Vec* squares, const typename D::Element* const* rows,
    const float* const* weights, const float* scale, int64_t count, int64_t hidden,
    const typename D::Element* answer) {
  Vec total[G][2] = {};  // sums that do not wait for each other
  mix<D, G>(
      rows, weights, scale, count, hidden, answer,
      [&](auto g, int64_t at, Step sum, int64_t) {
        Float32::narrow(to[g] + at, sum);
        total[g][0] += sum.low * sum.low;
        total[g][1] += sum.high * sum.high;
      });
  each<G>([&](auto g) { squares[g] = total[g][0] + total[g][1]; });
}

template <class F>
void for_tokens(int64_t tokens, int64_t elements_each, const F& body) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements_each));
  if (tokens <= grain) return body(0, tokens);
  torch::stable::parallel_for(0, tokens, grain, body);
}

}  // namespace
}  // namespace attnres
