// Experts with Kimi K3's activation; what is computed is described in experts.py.
//
// Rows, each a token and one of its experts, are sorted by expert.  A thread takes some channels of
// an expert for all of its rows: weights come from memory once, and then from near.

#pragma once

#include "loops.h"
#include "tensors.h"

namespace attnres {
namespace {

constexpr int64_t kBlock = 16;  // channels of an expert's output that a thread takes at once
constexpr int64_t kAhead = 2;   // steps of kPair rows by which weights are requested early

// to[g][r] is the product of vector g and row r of a matrix that has `count` rows left;
// products behind them repeat one of these rows.  If a matrix is `fresh`, later rows are requested.
template <class D, int64_t G>
FLAT void multiply(
    float* const* to, const typename D::Element* matrix, int64_t count,
    const float* const* vectors, int64_t width, bool fresh) {
  const typename D::Element* rows[kPair];
  each<kPair>([&](auto r) { rows[r] = matrix + std::min<int64_t>(r, count - 1) * width; });
  Vec dots[G][kPair] = {};
  steps(width, [&](int64_t at, int64_t n) {
    Step w[kPair];
    if (fresh) {  // line by line, which the processor then does for itself too
      const auto* later = matrix + kPair * (kAhead * width + at);
      for (int64_t line = 0; line < kPair * kStep; line += 64 / sizeof *later) request(later + line);
    }
    each<kPair>([&](auto r) { w[r] = load<D>(rows[r] + at, n); });
    each<G>([&](auto g) {
      Step x = Float32::widen(vectors[g] + at);
      HELD(x.low);
      HELD(x.high);
      each<kPair>([&](auto r) { dots[g][r] += w[r].low * x.low; });
      each<kPair>([&](auto r) { dots[g][r] += w[r].high * x.high; });
    });
  });
  each<G>([&](auto g) { sums<kPair>(to[g], dots[g]); });
}

// Products of G vectors and `count` rows of a matrix, which fill whole groups of kPair.
template <class D, int64_t G, int64_t N>
void products(
    float (&to)[G][N], const typename D::Element* matrix, int64_t count,
    const float* const* vectors, int64_t width, bool fresh) {
  for (int64_t row = 0; row < count; row += kPair) {
    float* cells[G];
    for (int64_t g = 0; g < G; ++g) cells[g] = to[g] + row;
    multiply<D, G>(cells, matrix + row * width, count - row, vectors, width, fresh);
  }
}

inline Vec magnitude(Vec x) { return (Vec)((Bits)x & 0x7fffffff); }

inline Vec sigmoid(Vec x) {
  const Vec power = exponential(-magnitude(x)), other = 1 / (1 + power);
  return x < 0 ? power * other : other;
}

// As Cephes has it: near 0 by a polynomial, where a difference from 1 has few digits.
inline Vec tangent(Vec x) {
  const Vec power = exponential(-2 * magnitude(x)), large = (1 - power) / (1 + power);
  const Vec square = x * x;
  Vec small = Vec{} - 5.70498872745e-3f;
  for (const float next :
       {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f})
    small = small * square + next;
  return magnitude(x) < 0.625f ? small * square * x + x : (x < 0 ? -large : large);
}

struct Bounds {
  float gate, up;  // of the second 0 for none
};

inline Vec situ(Vec gate, Vec up, Bounds bounds) {
  if (bounds.up > 0) up = bounds.up * tangent(up / bounds.up);
  return bounds.gate * tangent(gate / bounds.gate) * sigmoid(gate) * up;
}

struct Part {
  int64_t expert, begin, end;  // and its rows
};

template <class D>
struct Experts {
  using Element = typename D::Element;
  const Element *gate_up, *down;
  int64_t latent, width, inputs, hiddens;  // with the floats between two rows of each
  Bounds bounds;
  std::vector<Part> parts;
  std::vector<const float*> x;  // of every row
  std::vector<float> shares, hidden, y;

  // body(part, first channel, their number) in every thread.
  template <class F>
  void for_channels(int64_t channels, int64_t block, int64_t read, const F& body) {
    const int64_t blocks = (channels + block - 1) / block, items = parts.size() * blocks;
    const int64_t work = block * read * static_cast<int64_t>(x.size() / parts.size());
    const int64_t grain = std::max<int64_t>(1, kGrain / work);
    torch::stable::parallel_for(0, items, grain, [&](int64_t from, int64_t to) {
      for (int64_t item = from; item < to; ++item) {
        const int64_t first = item % blocks * block;
        body(parts[item / blocks], first, std::min(block, channels - first));
      }
    });
  }

  void activate() {
    for_channels(width, kStep, 2 * latent, [&](Part part, int64_t first, int64_t count) {
      const Element* gate = gate_up + (part.expert * 2 * width + first) * latent;
      in_groups(part.end - part.begin, [&](int64_t at, auto several) {
        constexpr int64_t G = several;
        const int64_t row = part.begin + at;
        float gates[G][kStep], ups[G][kStep];
        products<D>(gates, gate, count, &x[row], latent, at == 0);
        products<D>(ups, gate + width * latent, count, &x[row], latent, at == 0);
        for (int64_t g = 0; g < G; ++g) {
          for (int64_t r = count; r < kStep; ++r) gates[g][r] = ups[g][r] = 0;
          const Step a = Float32::widen(gates[g]), b = Float32::widen(ups[g]);
          const Step both = {situ(a.low, b.low, bounds), situ(a.high, b.high, bounds)};
          Float32::narrow(&hidden[(row + g) * hiddens + first], D::arrange(both));
        }
      });
    });
  }

  void project() {
    for_channels(latent, kBlock, width, [&](Part part, int64_t first, int64_t count) {
      const Element* matrix = down + (part.expert * latent + first) * width;
      in_groups(part.end - part.begin, [&](int64_t at, auto several) {
        constexpr int64_t G = several;
        const int64_t row = part.begin + at;
        float sums_of_rows[G][kBlock];
        const float* from[G];
        for (int64_t g = 0; g < G; ++g) from[g] = &hidden[(row + g) * hiddens];
        products<D>(sums_of_rows, matrix, count, from, width, at == 0);
        for (int64_t g = 0; g < G; ++g)
          for (int64_t r = 0; r < count; ++r)
            y[(row + g) * latent + first + r] = shares[row + g] * sums_of_rows[g][r];
      });
    });
  }
};

template <class D>
void situ_experts(const SituExperts& call) {
  const int64_t tokens = call.tokens, latent = call.latent, experts = call.experts;
  const int64_t width = call.width, top_k = call.top_k, chosen = tokens * top_k;
  Experts<D> all{
      static_cast<const D::Element*>(call.gate_up), static_cast<const D::Element*>(call.down),
      latent, width, padded(latent), padded(width), {call.beta, call.clip}, {}, {}, {}, {}, {}};

  const int64_t* expert = call.ids;
  std::vector<int64_t> ends(experts), rows(chosen, -1);
  for (int64_t at = 0; at < chosen; ++at) {
    STD_TORCH_CHECK(-1 <= expert[at] && expert[at] < experts, "there is no expert ", expert[at]);
    if (expert[at] >= 0) ++ends[expert[at]];
  }
  int64_t count = 0;
  for (int64_t e = 0; e < experts; ++e) {
    if (ends[e]) all.parts.push_back({e, count, count + ends[e]});
    count += std::exchange(ends[e], count);
  }
  std::vector<float> widened(tokens * all.inputs);
  all.x.resize(count);
  all.shares.resize(count);
  for (int64_t at = 0; at < chosen; ++at)
    if (expert[at] >= 0) {
      const int64_t row = rows[at] = ends[expert[at]]++;
      all.x[row] = &widened[at / top_k * all.inputs];
      all.shares[row] = call.shares[at];
    }
  const auto* x = static_cast<const D::Element*>(call.x);
  for (int64_t token = 0; token < tokens; ++token)
    steps(latent, [&](int64_t at, int64_t n) {
      Float32::narrow(
          &widened[token * all.inputs + at], load<D>(x + token * latent + at, n));
    });
  if (count) {
    all.hidden.resize(count * all.hiddens);
    all.y.resize(count * latent);
    all.activate();
    all.project();
  }
  torch::stable::parallel_for(
      0, tokens, std::max<int64_t>(1, kGrain / (top_k * latent)), [&](int64_t from, int64_t to) {
        float* out = call.out;
        std::fill(out + from * latent, out + to * latent, 0.0f);
        for (int64_t at = from * top_k; at < to * top_k; ++at)
          if (rows[at] >= 0)
            for (int64_t channel = 0; channel < latent; ++channel)
              out[at / top_k * latent + channel] += all.y[rows[at] * latent + channel];
      });
}

}  // namespace
}  // namespace attnres
