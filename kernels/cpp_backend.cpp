// Depth attention on CPU: one pass over memory per site, tokens shared out over torch's threads.
//
// Vectors are the compiler's own (16 floats, split as the machine needs), so the source names no
// instruction set.  Activations are read and written in their dtype, everything between is float32.
// The functions and their arguments are described in backends.py.

#if __has_include(<Python.h>)
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Half.h>

// Seen with clang 14: elements of a row's last, partial step; right with clang 16.
#if defined(__clang__) && __clang_major__ < 16 && defined(__AVX512FP16__)
#error "clang before version 16 computes float16 wrongly for this processor"
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

constexpr int64_t kLanes = 16;
constexpr int64_t kStep = 2 * kLanes;  // elements that are loaded at once
constexpr int64_t kGroup = 4;          // rows or sites that share the loads of one loop
constexpr int64_t kPair = 2;           // rows that are scored by a group of sites at once
constexpr int64_t kGrain = 1 << 14;    // elements read that are worth a second thread

// Everything that a hot loop calls is part of it, so that its sums stay in registers.
#define FLAT [[gnu::flatten]]

typedef float Vec __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));

// kStep elements: one half behind the other, but of bfloat16 the even ones and the odd ones, which
// a shift and a mask tell apart where widening in order takes shuffles.  What is float32 beside a
// row (queries, norm weights, mixes) lies in the order of its dtype.
struct Step {
  Vec low, high;
};

struct Float32 {
  using Element = float;
  static Step widen(const Element* from) {
    Vec low, high;
    std::memcpy(&low, from, sizeof low);
    std::memcpy(&high, from + kLanes, sizeof high);
    return {low, high};
  }
  static void narrow(Element* to, Step step) {
    std::memcpy(to, &step.low, sizeof step.low);
    std::memcpy(to + kLanes, &step.high, sizeof step.high);
  }
  static Step arrange(Step step) { return step; }
};

struct BFloat16 {
  static_assert(std::endian::native == std::endian::little, "the even element is the lower half");
  using Element = uint16_t;
  static Step widen(const Element* from) {
    Bits two;
    std::memcpy(&two, from, sizeof two);
    return {(Vec)(two << 16), (Vec)(two & 0xffff0000)};
  }
  static void narrow(Element* to, Step step) {
    const Bits two = (rounded(step.low) >> 16) | (rounded(step.high) & 0xffff0000);
    std::memcpy(to, &two, sizeof two);
  }
  static Bits rounded(Vec wide) {  // the upper halves: to nearest, ties to even; NaN stays NaN
    const Bits bits = (Bits)wide, nan = Bits{} + 0x7fc00000;
    return wide == wide ? bits + 0x7fff + ((bits >> 16) & 1) : nan;
  }
  static Step arrange(Step step) {
#ifdef __clang__
#define EVERY_SECOND(from)                                                                  \
  __builtin_shufflevector(step.low, step.high, from, from + 2, from + 4, from + 6, from + 8, \
      from + 10, from + 12, from + 14, from + 16, from + 18, from + 20, from + 22, from + 24, \
      from + 26, from + 28, from + 30)
    return {EVERY_SECOND(0), EVERY_SECOND(1)};
#else
    const Bits even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    return {__builtin_shuffle(step.low, step.high, even),
            __builtin_shuffle(step.low, step.high, even + 1)};
#endif
  }
};

struct Float16 {
  using Element = c10::Half;
  static Step widen(const Element* from) {
    Step step;
    for (int lane = 0; lane < kLanes; ++lane) {
      step.low[lane] = static_cast<float>(from[lane]);
      step.high[lane] = static_cast<float>(from[kLanes + lane]);
    }
    return step;
  }
  static void narrow(Element* to, Step step) {
    for (int lane = 0; lane < kLanes; ++lane) {
      to[lane] = static_cast<c10::Half>(step.low[lane]);
      to[kLanes + lane] = static_cast<c10::Half>(step.high[lane]);
    }
  }
  static Step arrange(Step step) { return step; }
};

// `count` is kStep but for the tail of a row, which is padded with zeros.
template <class D>
inline Step load(const typename D::Element* from, int64_t count) {
  if (count == kStep) return D::widen(from);
  typename D::Element padded[kStep] = {};
  std::memcpy(padded, from, count * sizeof *from);
  return D::widen(padded);
}

template <class D>
inline void store(typename D::Element* to, Step step, int64_t count) {
  if (count == kStep) return D::narrow(to, step);
  typename D::Element padded[kStep];
  D::narrow(padded, step);
  std::memcpy(to, padded, count * sizeof *to);
}

template <class F>
inline void steps(int64_t hidden, const F& body) {
  int64_t at = 0;
  for (; at + kStep <= hidden; at += kStep) body(at, kStep);
  if (at < hidden) body(at, hidden - at);
}

// body(at, G) for groups of G, and for what is left groups of half the size.
template <int64_t G = kGroup, class F>
inline void in_groups(int64_t count, const F& body, int64_t at = 0) {
  for (; at + G <= count; at += G) body(at, std::integral_constant<int64_t, G>{});
  if constexpr (G > 1) in_groups<G / 2>(count, body, at);
}

// body(p, at, n) for P steps in turn, then for what is left: their sums go on side by side, because
// an addition waits for the one before it.
template <int64_t P, class F>
inline void unrolled(int64_t hidden, const F& body) {
  int64_t at = 0;
  for (; at + P * kStep <= hidden; at += P * kStep) {
#pragma GCC unroll 2
    for (int64_t p = 0; p < P; ++p) body(p, at + p * kStep, kStep);
  }
  for (; at < hidden; at += kStep) body(0, at, std::min(kStep, hidden - at));
}

template <class Half, class Wide>
inline Half halves(Wide wide) {
  Half low, high;
  std::memcpy(&low, &wide, sizeof low);
  std::memcpy(&high, reinterpret_cast<const char*>(&wide) + sizeof low, sizeof high);
  return low + high;
}

inline float sum(Vec wide) {  // as a tree
  typedef float Eight __attribute__((vector_size(32)));
  typedef float Four __attribute__((vector_size(16)));
  const Four four = halves<Four>(halves<Eight>(wide));
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// Memory of a thread that lasts: a site of one token would spend most of its time on allocations.
enum Use { kQueries, kNormWeight, kMixed, kWeights, kUses };
inline float* scratch(Use use, int64_t size) {
  thread_local std::vector<float> kept[kUses];
  if (static_cast<int64_t>(kept[use].size()) < size) kept[use].resize(size);
  return kept[use].data();
}

// Rows of float32 lie so far apart that whole steps can be read and written; the rest is zero.
inline int64_t padded(int64_t hidden) { return (hidden + kStep - 1) / kStep * kStep; }

template <class F>
void dispatch(ScalarType dtype, const F& run) {
  switch (dtype) {
    case ScalarType::Float: return run(Float32{});
    case ScalarType::BFloat16: return run(BFloat16{});
    case ScalarType::Half: return run(Float16{});
    default: STD_TORCH_CHECK(false, "depth attention on CPU takes float32, float16 and bfloat16");
  }
}

template <class D>
struct Rows {  // [tokens, rows, hidden] or answers [sites, tokens, hidden], any distance apart
  typename D::Element* data;
  int64_t stride, row_stride;
  typename D::Element* operator()(int64_t token, int64_t row) const {
    return data + token * stride + row * row_stride;
  }
};

// How far `count` things of `size` elements reach that begin `stride` apart; -1 where two overlap.
int64_t reach(int64_t count, int64_t stride, int64_t size) {
  if (size < 0 || count <= 1) return size;
  return stride < size ? -1 : (count - 1) * stride + size;
}

// The output of a sublayer, which the normed mix takes the place of, and the bank.  Threads write to
// both: they lie apart, and so do the rows of each.
struct State {
  ScalarType dtype;
  int64_t tokens, hidden, slots;
  void *x_data, *bank_data;
  int64_t x_stride, by_token, by_slot;
  State(const Tensor& x, const Tensor& bank)
      : dtype(x.scalar_type()), tokens(x.size(0)), hidden(x.size(-1)), slots(bank.size(1)),
        x_data(x.data_ptr()), bank_data(bank.data_ptr()) {
    STD_TORCH_CHECK(
        x.dim() == 2 && bank.dim() == 3 && bank.size(0) == tokens && bank.size(2) == hidden &&
            bank.scalar_type() == dtype,
        "the bank must be [tokens, slots, hidden] for x [tokens, hidden], of one dtype");
    STD_TORCH_CHECK(
        hidden <= 1 || (x.stride(1) == 1 && bank.stride(2) == 1), "rows must be contiguous");
    x_stride = x.stride(0), by_token = bank.stride(0), by_slot = bank.stride(1);
    check_apart(x.element_size());
  }
  // Both contiguous.
  State(ScalarType dtype, int64_t size, int64_t tokens, int64_t hidden, int64_t slots, void* x,
        void* bank)
      : dtype(dtype), tokens(tokens), hidden(hidden), slots(slots), x_data(x), bank_data(bank),
        x_stride(hidden), by_token(slots * hidden), by_slot(hidden) {
    check_apart(size);
  }
  void check_apart(int64_t size) const {
    const int64_t x_reach = reach(tokens, x_stride, hidden);
    const int64_t bank_reach = by_slot <= by_token
                                   ? reach(tokens, by_token, reach(slots, by_slot, hidden))
                                   : reach(slots, by_slot, reach(tokens, by_token, hidden));
    STD_TORCH_CHECK(x_reach >= 0, "rows of x must not overlap in memory");
    STD_TORCH_CHECK(bank_reach >= 0, "rows of the bank must not overlap in memory");
    const auto *from = static_cast<char*>(x_data), *to = static_cast<char*>(bank_data);
    STD_TORCH_CHECK(
        tokens == 0 || from + x_reach * size <= to || to + bank_reach * size <= from,
        "x must not share memory with the bank");
  }
  template <class D>
  Rows<D> x_rows() const {
    return {static_cast<typename D::Element*>(x_data), x_stride, 0};
  }
  template <class D>
  Rows<D> bank_rows() const {
    return {static_cast<typename D::Element*>(bank_data), by_token, by_slot};
  }
  void check_rows(int64_t first, int64_t last) const {
    STD_TORCH_CHECK(
        0 <= first && first <= last && last < slots, "the row is outside of the bank");
  }
};

template <class D>
Rows<D> rows_of(const Tensor& tensor) {
  auto* data = static_cast<typename D::Element*>(tensor.data_ptr());
  return {data, tensor.stride(0), tensor.stride(1)};
}

void check_vector(const Tensor& vector, int64_t hidden, bool float32) {
  STD_TORCH_CHECK(
      vector.numel() == hidden && vector.is_contiguous() &&
          (!float32 || vector.scalar_type() == ScalarType::Float),
      "a query, key norm or weight must be [hidden], and the first two float32");
}

const float* floats(const Tensor& vector, int64_t hidden) {
  check_vector(vector, hidden, true);
  return static_cast<const float*>(vector.const_data_ptr());
}

const float* floats(const std::optional<Tensor>& vector, int64_t hidden) {
  return vector ? floats(*vector, hidden) : nullptr;
}

struct NormWeight {
  const void* data;
  ScalarType dtype;
  NormWeight(const void* data, ScalarType dtype) : data(data), dtype(dtype) {}
  NormWeight(const Tensor& vector, int64_t hidden)
      : data(vector.const_data_ptr()), dtype(vector.scalar_type()) {
    check_vector(vector, hidden, false);
  }
};

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

// A tensor that was made ahead of a site.
void* made_ahead(
    const Tensor& tensor, std::initializer_list<int64_t> shape,
    ScalarType dtype = ScalarType::Float) {
  bool fits = tensor.dim() == static_cast<int64_t>(shape.size()) && tensor.is_contiguous() &&
              tensor.scalar_type() == dtype;
  int64_t dim = 0;
  for (int64_t size : shape) fits = fits && tensor.size(dim++) == size;
  STD_TORCH_CHECK(fits, "answers and scores must be contiguous and of the bank's size");
  return tensor.data_ptr();
}

// What is known before a site runs: the logits of finished rows (score on write), or the answer to
// rows that are not read again (two-phase).
struct Ahead {
  const float* scores = nullptr;  // of this site and the first token
  int64_t scores_stride = 0;      // from token to token
  const void* answer = nullptr;  // of the first token, in the activation dtype
  const float* log_sum = nullptr;
};

// What a site is told besides tensors.  Five numbers come in two, as the bits of each half: with
// cold caches, as in decode, an argument costs a microsecond.
struct Numbers {
  int64_t row;
  bool fresh;
  float logit_scale, key_eps, norm_eps;
  Numbers(int64_t place, int64_t eps)
      : row(static_cast<int32_t>(place) >> 1), fresh(place & 1),
        logit_scale(high(place)), key_eps(high(eps)), norm_eps(low(eps)) {}

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
  int64_t place, int64_t eps, Tensor query, Tensor key_norm, std::optional<Tensor> bias,   \
      Tensor norm_weight
#define SITE_ARGUMENTS(hidden) \
  Numbers(place, eps), Site(query, key_norm, bias, norm_weight, hidden)

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
    for_tokens(state.tokens, count * hidden, [&](int64_t begin, int64_t end) {
      std::vector<const typename D::Element*> rows(count);
      float* weights = scratch(kWeights, count + 1);
      float* mixed = scratch(kMixed, padded(hidden));
      for (int64_t token = begin; token < end; ++token) {
        const bool more = token + 1 < end;
        update<D>(bank(token, row), x(token, 0), numbers.fresh, hidden, more ? x.stride : 0);
        for (int64_t i = 0; i < count; ++i) rows[i] = bank(token, first + i);
        const int64_t scored = known.scores ? count - 1 : 0;
        if (scored)
          std::memcpy(weights, known.scores + token * known.scores_stride, scored * sizeof(float));
        in_groups(count - scored, [&](int64_t i, auto group) {
          score<D, group>(
              weights + scored + i, &rows[scored + i], folded, key_eps, hidden,
              more ? bank.stride : 0);
        });
        weights[count - 1] += own_bias;
        if (known.answer) weights[count] = known.log_sum[token];
        softmax(weights, count + (known.answer != nullptr));
        const float* by = weights;
        const auto* answer = static_cast<const typename D::Element*>(known.answer);
        if (answer) answer += token * hidden;
        Vec squares;
        mix<D, 1>(&mixed, &squares, rows.data(), &by, count, hidden, answer);
        norm.apply<D>(x(token, 0), mixed, squares, hidden);
      }
    });
  });
}

void single_pass(Tensor x, Tensor bank, SITE_PARAMETERS) {
  const State state(x, bank);
  attend(state, 0, {}, SITE_ARGUMENTS(state.hidden));
}

void merge(
    Tensor x, Tensor bank, Tensor answers, Tensor log_sums, int64_t position, int64_t first,
    SITE_PARAMETERS) {
  const State state(x, bank);
  const int64_t sites = answers.size(0);
  STD_TORCH_CHECK(position >= 0 && position < sites, "the site is not among those of the answers");
  Ahead known;
  const ScalarType dtype = bank.scalar_type();
  void* answer = made_ahead(answers, {sites, state.tokens, state.hidden}, dtype);
  known.answer = static_cast<char*>(answer) +
                 position * state.tokens * state.hidden * answers.element_size();
  void* log_sum = made_ahead(log_sums, {sites, state.tokens});
  known.log_sum = static_cast<float*>(log_sum) + position * state.tokens;
  attend(state, first, known, SITE_ARGUMENTS(state.hidden));
}

void mix_scored(Tensor x, Tensor bank, Tensor scores, int64_t position, SITE_PARAMETERS) {
  const State state(x, bank);
  const int64_t sites = scores.size(1), slots = state.slots;
  STD_TORCH_CHECK(position >= 0 && position < sites, "the site is not among those of the scores");
  Ahead known;
  void* first = made_ahead(scores, {state.tokens, sites, slots});
  known.scores = static_cast<float*>(first) + position * slots;
  known.scores_stride = sites * slots;
  attend(state, 0, known, SITE_ARGUMENTS(state.hidden));
}

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

void add_to_row(Tensor delta, Tensor bank, int64_t row) {
  const State state(delta, bank);
  state.check_rows(0, row);
  dispatch(state.dtype, [&](auto dtype) {
    using D = decltype(dtype);
    const auto from = state.x_rows<D>(), to = state.bank_rows<D>();
    for_tokens(state.tokens, 3 * state.hidden, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token)
        update<D>(to(token, row), from(token, 0), false, state.hidden);
    });
  });
}

}  // namespace

#define STATE "Tensor(a!) x, Tensor(b!) bank, "
#define SITE \
  "int place, int eps, Tensor query, Tensor key_norm, Tensor? bias, Tensor norm_weight) -> ()"

STABLE_TORCH_LIBRARY(attnres_serve, library) {
  library.def("cpp_single_pass(" STATE SITE);
  library.def(
      "cpp_open_group(" STATE "int place, int eps, bool completes, Tensor[] queries, "
      "Tensor[] key_norms, Tensor? bias, Tensor norm_weight) -> (Tensor, Tensor)");
  library.def(
      "cpp_merge(" STATE "Tensor answers, Tensor log_sums, int position, int first, " SITE);
  library.def(
      "cpp_score_rows(Tensor bank, Tensor(a!) scores, int position, int first, int count, "
      "Tensor[] queries, Tensor[] key_norms, float logit_scale, float key_eps) -> ()");
  library.def("cpp_mix_scored(" STATE "Tensor scores, int position, " SITE);
  library.def("cpp_add_to_row(Tensor delta, Tensor(a!) bank, int row) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(attnres_serve, CPU, library) {
  library.impl("cpp_single_pass", TORCH_BOX(&single_pass));
  library.impl("cpp_open_group", TORCH_BOX(&open_group));
  library.impl("cpp_merge", TORCH_BOX(&merge));
  library.impl("cpp_score_rows", TORCH_BOX(&score_rows));
  library.impl("cpp_mix_scored", TORCH_BOX(&mix_scored));
  library.impl("cpp_add_to_row", TORCH_BOX(&add_to_row));
}

#ifdef PY_VERSION_HEX
// The single pass for graphs that are compiled; see cpp_direct.py.  It holds Python's lock, as the
// loops of inductor do.
namespace {

void* (*data_of)(PyObject*) = nullptr;  // of a tensor, by torch

int64_t bits(int64_t from, int at, int count) { return (from >> at) & ((int64_t{1} << count) - 1); }

PyObject* single_pass_direct(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 10) {
    PyErr_SetString(PyExc_TypeError, "single_pass takes six tensors and four numbers");
    return nullptr;
  }
  int64_t numbers[4];
  for (int i = 0; i < 4; ++i) {
    numbers[i] = PyLong_AsLongLong(given[6 + i]);
    if (numbers[i] == -1 && PyErr_Occurred()) return nullptr;
  }
  const auto [tokens, layout, place, eps] = numbers;
  const auto dtype = static_cast<ScalarType>(bits(layout, 48, 8));
  const auto norm_dtype = static_cast<ScalarType>(bits(layout, 56, 7));
  const int64_t size = dtype == ScalarType::Float ? 4 : 2;
  try {
    const State state(
        dtype, size, tokens, bits(layout, 0, 32), bits(layout, 32, 16), data_of(given[0]),
        data_of(given[1]));
    const auto floats = [&](int i) { return static_cast<const float*>(data_of(given[i])); };
    const float* bias = given[4] == Py_None ? nullptr : floats(4);
    attend(
        state, 0, {}, Numbers(place, eps),
        {floats(2), floats(3), bias, NormWeight(data_of(given[5]), norm_dtype)});
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "single_pass ended by an unknown exception");
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef single_pass_method = {
    "single_pass", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&single_pass_direct)),
    METH_FASTCALL, nullptr};

}  // namespace

extern "C" PyObject* attnres_serve_direct(void* torchs_data_of) {
  data_of = reinterpret_cast<void* (*)(PyObject*)>(torchs_data_of);
  return PyCFunction_New(&single_pass_method, nullptr);
}
#endif
