// Depth attention on CPU: one pass over memory per site, tokens shared out over torch's threads.
//
// Vectors are the compiler's own (16 floats, split as the machine needs), so the source names no
// instruction set.  Activations are read and written in their dtype, everything between is float32.
// The functions and their arguments are described in backends.py.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Half.h>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

constexpr int64_t kLanes = 16;
constexpr int64_t kGroup = 4;        // rows or sites that share the loads of one loop
constexpr int64_t kGrain = 1 << 15;  // elements read that are worth a second thread

typedef float Vec __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Narrow __attribute__((vector_size(32)));

struct Float32 {
  using Element = float;
  static Vec widen(const Element* from) {
    Vec wide;
    std::memcpy(&wide, from, sizeof wide);
    return wide;
  }
  static void narrow(Element* to, Vec wide) { std::memcpy(to, &wide, sizeof wide); }
};

struct BFloat16 {
  using Element = uint16_t;
  static Vec widen(const Element* from) {
    Narrow half;
    std::memcpy(&half, from, sizeof half);
    return (Vec)(__builtin_convertvector(half, Bits) << 16);
  }
  static void narrow(Element* to, Vec wide) {  // to nearest, ties to even; NaN stays NaN
    const Bits bits = (Bits)wide, is_nan = (Bits)(wide != wide);
    const Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Narrow half = __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), Narrow);
    std::memcpy(to, &half, sizeof half);
  }
};

struct Float16 {
  using Element = c10::Half;
  static Vec widen(const Element* from) {
    Vec wide;
    for (int lane = 0; lane < kLanes; ++lane) wide[lane] = static_cast<float>(from[lane]);
    return wide;
  }
  static void narrow(Element* to, Vec wide) {
    for (int lane = 0; lane < kLanes; ++lane) to[lane] = static_cast<c10::Half>(wide[lane]);
  }
};

// `count` is kLanes but for the tail of a row, which is padded with zeros.
template <class D>
inline Vec load(const typename D::Element* from, int64_t count) {
  if (count == kLanes) return D::widen(from);
  typename D::Element padded[kLanes] = {};
  std::memcpy(padded, from, count * sizeof *from);
  return D::widen(padded);
}

template <class D>
inline void store(typename D::Element* to, Vec wide, int64_t count) {
  if (count == kLanes) return D::narrow(to, wide);
  typename D::Element padded[kLanes];
  D::narrow(padded, wide);
  std::memcpy(to, padded, count * sizeof *to);
}

template <class F>
inline void chunks(int64_t hidden, const F& body) {
  int64_t at = 0;
  for (; at + kLanes <= hidden; at += kLanes) body(at, kLanes);
  if (at < hidden) body(at, hidden - at);
}

// body(at, G) for groups of kGroup, and for what is left one by one.
template <class F>
inline void in_groups(int64_t count, const F& body) {
  int64_t at = 0;
  for (; at + kGroup <= count; at += kGroup) body(at, std::integral_constant<int64_t, kGroup>{});
  for (; at < count; ++at) body(at, std::integral_constant<int64_t, 1>{});
}

inline float sum(Vec wide) {
  float total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += wide[lane];
  return total;
}

// Float32 vectors of `hidden` elements, padded so that whole vectors can be read and written.
struct Rows {
  int64_t stride;
  std::vector<float> values;
  Rows(int64_t rows, int64_t hidden)
      : stride((hidden + kLanes - 1) / kLanes * kLanes), values(rows * stride) {}
  float* operator[](int64_t row) { return values.data() + row * stride; }
  const float* operator[](int64_t row) const { return values.data() + row * stride; }
};

template <class D>
struct Matrix {  // [tokens, hidden], rows any distance apart
  typename D::Element* data;
  int64_t stride;
  typename D::Element* operator[](int64_t token) const { return data + token * stride; }
};

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
Matrix<D> matrix(const Tensor& tensor, const Tensor& like) {
  STD_TORCH_CHECK(
      tensor.dim() == 2 && tensor.size(0) == like.size(0) && tensor.size(1) == like.size(1) &&
          tensor.scalar_type() == like.scalar_type(),
      "every source must be [tokens, hidden] of one size and dtype");
  STD_TORCH_CHECK(tensor.size(1) <= 1 || tensor.stride(1) == 1, "rows must be contiguous");
  return {static_cast<typename D::Element*>(tensor.data_ptr()), tensor.stride(0)};
}

template <class D>
std::vector<Matrix<D>> matrices(const Tensors& tensors, const Tensor& like) {
  std::vector<Matrix<D>> all;
  for (const Tensor& tensor : tensors) all.push_back(matrix<D>(tensor, like));
  return all;
}

void read_vector(float* to, const Tensor& vector, int64_t hidden) {
  STD_TORCH_CHECK(vector.numel() == hidden && vector.is_contiguous(), "a weight must be [hidden]");
  dispatch(vector.scalar_type(), [&](auto dtype) {
    using D = decltype(dtype);
    const auto* from = static_cast<const typename D::Element*>(vector.const_data_ptr());
    chunks(hidden, [&](int64_t at, int64_t n) { store<Float32>(to + at, load<D>(from + at, n), n); });
  });
}

// Pseudo-queries times key-norm weights and the scale of the logits: only the product matters.
Rows fold(const Tensors& queries, const Tensors& key_norms, float scale, int64_t hidden) {
  Rows folded(queries.size(), hidden), weight(1, hidden);
  for (size_t site = 0; site < queries.size(); ++site) {
    read_vector(folded[site], queries[site], hidden);
    read_vector(weight[0], key_norms[site], hidden);
    for (int64_t at = 0; at < hidden; ++at) folded[site][at] *= weight[0][at] * scale;
  }
  return folded;
}

struct Norm {
  Rows weight;
  float eps;
  Norm(const Tensor& tensor, double eps, int64_t hidden)
      : weight(1, hidden), eps(static_cast<float>(eps)) {
    read_vector(weight[0], tensor, hidden);
  }
  // RMSNorm of a float32 row whose squares sum to `squares`.
  template <class D>
  void apply(typename D::Element* to, const float* row, Vec squares, int64_t hidden) const {
    const float scale = 1 / std::sqrt(sum(squares) / hidden + eps);
    chunks(hidden, [&](int64_t at, int64_t n) {
      const Vec x = Float32::widen(row + at) * scale * Float32::widen(weight[0] + at);
      store<D>(to + at, x, n);
    });
  }
};

// What a site has learned, in float32.
struct Site {
  int64_t hidden;
  Rows query;
  float key_eps, bias = 0;
  Norm norm;
  Site(
      const Tensor& query, const Tensor& key_norm, double logit_scale, double key_eps,
      const std::optional<Tensor>& bias, const Tensor& norm_weight, double norm_eps)
      : hidden(query.numel()),
        query(fold({query}, {key_norm}, logit_scale, query.numel())),
        key_eps(static_cast<float>(key_eps)),
        norm(norm_weight, norm_eps, query.numel()) {
    if (bias) read_vector(&this->bias, *bias, 1);
  }
};

void check_site(const Site& site, const Tensor& source) {
  STD_TORCH_CHECK(
      source.dim() == 2 && source.size(1) == site.hidden,
      "a query must have one element for each of a source [tokens, hidden]");
}

// partial + delta, rounded to the activation dtype before it is a source.
template <class D>
void add(
    typename D::Element* to,
    const typename D::Element* partial,
    const typename D::Element* delta,
    int64_t hidden) {
  chunks(hidden, [&](int64_t at, int64_t n) {
    store<D>(to + at, load<D>(partial + at, n) + load<D>(delta + at, n), n);
  });
}

// G rows scored by one query.
template <class D, int64_t G>
void score(
    float* scores,
    const typename D::Element* const* rows,
    const float* query,
    float eps,
    int64_t hidden) {
  Vec dots[G] = {}, squares[G] = {};
  chunks(hidden, [&](int64_t at, int64_t n) {
    const Vec q = Float32::widen(query + at);
#pragma GCC unroll 4
    for (int64_t g = 0; g < G; ++g) {
      const Vec x = load<D>(rows[g] + at, n);
      dots[g] += x * q;
      squares[g] += x * x;
    }
  });
  for (int64_t g = 0; g < G; ++g) scores[g] = sum(dots[g]) / std::sqrt(sum(squares[g]) / hidden + eps);
}

// One row scored by G queries.
template <class D, int64_t G>
void score_sites(
    float* const* scores, const typename D::Element* row, const float* const* queries,
    int64_t hidden) {
  Vec dots[G] = {};
  chunks(hidden, [&](int64_t at, int64_t n) {
    const Vec x = load<D>(row + at, n);
#pragma GCC unroll 4
    for (int64_t g = 0; g < G; ++g) dots[g] += x * Float32::widen(queries[g] + at);
  });
  for (int64_t g = 0; g < G; ++g) *scores[g] = sum(dots[g]);
}

template <class D>
Vec square(const typename D::Element* row, int64_t hidden) {
  Vec squares = {};
  chunks(hidden, [&](int64_t at, int64_t n) {
    const Vec x = load<D>(row + at, n);
    squares += x * x;
  });
  return squares;
}

// Scores to weights in place; returns the log-sum-exp.
float softmax(float* scores, int64_t count) {
  float top = scores[0], total = 0;
  for (int64_t i = 1; i < count; ++i) top = std::fmax(top, scores[i]);
  for (int64_t i = 0; i < count; ++i) total += scores[i] = std::exp(scores[i] - top);
  for (int64_t i = 0; i < count; ++i) scores[i] /= total;
  return top + std::log(total);
}

// G weighted sums of the same rows, and their squares.
template <class D, int64_t G>
void mix(
    float* const* to, Vec* squares, const typename D::Element* const* rows,
    const float* const* weights, int64_t count, int64_t hidden) {
  for (int64_t g = 0; g < G; ++g) squares[g] = Vec{};
  chunks(hidden, [&](int64_t at, int64_t n) {
    Vec mixed[G] = {};
    for (int64_t row = 0; row < count; ++row) {
      const Vec x = load<D>(rows[row] + at, n);
#pragma GCC unroll 4
      for (int64_t g = 0; g < G; ++g) mixed[g] += weights[g][row] * x;
    }
#pragma GCC unroll 4
    for (int64_t g = 0; g < G; ++g) {
      Float32::narrow(to[g] + at, mixed[g]);
      squares[g] += mixed[g] * mixed[g];
    }
  });
}

template <class F>
void for_tokens(int64_t tokens, int64_t elements_each, const F& body) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements_each));
  torch::stable::parallel_for(0, tokens, grain, body);
}

// Sources are `blocks` and then the sum of `addends`: one tensor as it is, or two whose sum is
// written to `updated`.
void attend_and_norm(
    Tensor& normed, Tensor* updated, const Tensors& blocks, const Tensors& addends,
    const Site& site) {
  const Tensor& like = addends[0];
  check_site(site, like);
  const int64_t tokens = like.size(0), hidden = like.size(1), count = blocks.size() + 1;
  dispatch(like.scalar_type(), [&](auto dtype) {
    using D = decltype(dtype);
    auto sources = matrices<D>(blocks, like);
    const auto terms = matrices<D>(addends, like);
    sources.push_back(updated ? matrix<D>(*updated, like) : terms[0]);
    const auto out = matrix<D>(normed, like);
    for_tokens(tokens, count * hidden, [&](int64_t begin, int64_t end) {
      std::vector<const typename D::Element*> rows(count);
      std::vector<float> weights(count);
      Rows mixed(1, hidden);
      for (int64_t token = begin; token < end; ++token) {
        for (int64_t row = 0; row < count; ++row) rows[row] = sources[row][token];
        if (updated)
          add<D>(sources.back()[token], terms[0][token], terms[1][token], hidden);
        in_groups(count, [&](int64_t row, auto group) {
          score<D, group>(&weights[row], &rows[row], site.query[0], site.key_eps, hidden);
        });
        weights.back() += site.bias;
        softmax(weights.data(), count);
        float* to = mixed[0];
        const float* by = weights.data();
        Vec squares;
        mix<D, 1>(&to, &squares, rows.data(), &by, count, hidden);
        site.norm.apply<D>(out[token], to, squares, hidden);
      }
    });
  });
}

void merge_and_norm(
    Tensor& normed, Tensor* updated, const Tensor& answers, const Tensor& log_sums,
    int64_t position, const Tensors& addends, const Site& site) {
  const Tensor& like = addends[0];
  check_site(site, like);
  const int64_t tokens = like.size(0), hidden = like.size(1);
  STD_TORCH_CHECK(
      answers.dim() == 3 && answers.size(1) == tokens && answers.size(2) == hidden &&
          answers.is_contiguous() && answers.scalar_type() == ScalarType::Float &&
          position >= 0 && position < answers.size(0),
      "answers must be [sites, tokens, hidden], contiguous float32");
  STD_TORCH_CHECK(
      log_sums.dim() == 2 && log_sums.size(0) == answers.size(0) && log_sums.size(1) == tokens &&
          log_sums.is_contiguous() && log_sums.scalar_type() == ScalarType::Float,
      "log_sums must be [sites, tokens], contiguous float32");
  const float* answer = static_cast<const float*>(answers.const_data_ptr()) + position * tokens * hidden;
  const float* log_sum = static_cast<const float*>(log_sums.const_data_ptr()) + position * tokens;
  dispatch(like.scalar_type(), [&](auto dtype) {
    using D = decltype(dtype);
    const auto terms = matrices<D>(addends, like);
    const auto own = updated ? matrix<D>(*updated, like) : terms[0];
    const auto out = matrix<D>(normed, like);
    for_tokens(tokens, 3 * hidden, [&](int64_t begin, int64_t end) {
      Rows mixed(1, hidden);
      for (int64_t token = begin; token < end; ++token) {
        if (updated) add<D>(own[token], terms[0][token], terms[1][token], hidden);
        const typename D::Element* row = own[token];
        float logit;
        score<D, 1>(&logit, &row, site.query[0], site.key_eps, hidden);
        const float weight = 1 / (1 + std::exp(log_sum[token] - logit - site.bias));
        Vec squares = {};
        chunks(hidden, [&](int64_t at, int64_t n) {
          const Vec other = load<Float32>(answer + token * hidden + at, n);
          const Vec merged = other + weight * (load<D>(row + at, n) - other);
          Float32::narrow(mixed[0] + at, merged);
          squares += merged * merged;
        });
        site.norm.apply<D>(out[token], mixed[0], squares, hidden);
      }
    });
  });
}

Tensor mix_norm(
    Tensors sources, Tensor query, Tensor key_norm, double logit_scale, double key_eps,
    std::optional<Tensor> bias, Tensor norm_weight, double norm_eps) {
  const Site site(query, key_norm, logit_scale, key_eps, bias, norm_weight, norm_eps);
  STD_TORCH_CHECK(!sources.empty(), "mix_norm takes at least one source");
  const Tensor last = sources.back();
  sources.pop_back();
  Tensor normed = torch::stable::new_empty(last, {last.size(0), last.size(1)});
  attend_and_norm(normed, nullptr, sources, {last}, site);
  return normed;
}

std::tuple<Tensor, Tensor> add_mix_norm(
    Tensors blocks, Tensor partial, Tensor delta, Tensor query, Tensor key_norm,
    double logit_scale, double key_eps, std::optional<Tensor> bias, Tensor norm_weight,
    double norm_eps) {
  const Site site(query, key_norm, logit_scale, key_eps, bias, norm_weight, norm_eps);
  Tensor normed = torch::stable::new_empty(delta, {delta.size(0), delta.size(1)});
  Tensor updated = torch::stable::new_empty(delta, {delta.size(0), delta.size(1)});
  attend_and_norm(normed, &updated, blocks, {partial, delta}, site);
  return {normed, updated};
}

Tensor merge_norm(
    Tensor answers, Tensor log_sums, int64_t position, Tensor own, Tensor query, Tensor key_norm,
    double logit_scale, double key_eps, std::optional<Tensor> bias, Tensor norm_weight,
    double norm_eps) {
  const Site site(query, key_norm, logit_scale, key_eps, bias, norm_weight, norm_eps);
  Tensor normed = torch::stable::new_empty(own, {own.size(0), own.size(1)});
  merge_and_norm(normed, nullptr, answers, log_sums, position, {own}, site);
  return normed;
}

std::tuple<Tensor, Tensor> add_merge_norm(
    Tensor answers, Tensor log_sums, int64_t position, Tensor partial, Tensor delta, Tensor query,
    Tensor key_norm, double logit_scale, double key_eps, std::optional<Tensor> bias,
    Tensor norm_weight, double norm_eps) {
  const Site site(query, key_norm, logit_scale, key_eps, bias, norm_weight, norm_eps);
  Tensor normed = torch::stable::new_empty(delta, {delta.size(0), delta.size(1)});
  Tensor updated = torch::stable::new_empty(delta, {delta.size(0), delta.size(1)});
  merge_and_norm(normed, &updated, answers, log_sums, position, {partial, delta}, site);
  return {normed, updated};
}

std::tuple<Tensor, Tensor> inter_block(
    Tensors blocks, Tensors queries, Tensors key_norms, double logit_scale,
    double key_eps) {
  STD_TORCH_CHECK(
      !blocks.empty() && !queries.empty() && queries.size() == key_norms.size(),
      "inter_block takes at least one block, and a key norm for every query");
  const Tensor& like = blocks[0];
  STD_TORCH_CHECK(like.dim() == 2, "every source must be [tokens, hidden]");
  const int64_t tokens = like.size(0), hidden = like.size(1);
  const int64_t count = blocks.size(), sites = queries.size();
  Tensor answers = torch::stable::new_empty(like, {sites, tokens, hidden}, ScalarType::Float);
  Tensor log_sums = torch::stable::new_empty(like, {sites, tokens}, ScalarType::Float);
  float* answer = static_cast<float*>(answers.data_ptr());
  float* log_sum = static_cast<float*>(log_sums.data_ptr());
  const Rows folded = fold(queries, key_norms, logit_scale, hidden);
  dispatch(like.scalar_type(), [&](auto dtype) {
    using D = decltype(dtype);
    const auto sources = matrices<D>(blocks, like);
    for_tokens(tokens, (count + sites) * hidden, [&](int64_t begin, int64_t end) {
      std::vector<const typename D::Element*> rows(count);
      std::vector<float> weights(sites * count);
      Rows mixed(kGroup, hidden);
      for (int64_t token = begin; token < end; ++token) {
        for (int64_t row = 0; row < count; ++row) {
          rows[row] = sources[row][token];
          const float scale =
              1 / std::sqrt(sum(square<D>(rows[row], hidden)) / hidden + static_cast<float>(key_eps));
          in_groups(sites, [&](int64_t site, auto group) {
            constexpr int64_t G = group;
            float* scores[G];
            const float* by[G];
            for (int64_t g = 0; g < G; ++g) {
              scores[g] = &weights[(site + g) * count + row];
              by[g] = folded[site + g];
            }
            score_sites<D, G>(scores, rows[row], by, hidden);
            for (int64_t g = 0; g < G; ++g) *scores[g] *= scale;
          });
        }
        in_groups(sites, [&](int64_t site, auto group) {
          constexpr int64_t G = group;
          float* to[G];
          const float* by[G];
          Vec squares[G];
          for (int64_t g = 0; g < G; ++g) {
            float* scores = &weights[(site + g) * count];
            log_sum[(site + g) * tokens + token] = softmax(scores, count);
            by[g] = scores;
            to[g] = mixed[g];
          }
          mix<D, G>(to, squares, rows.data(), by, count, hidden);
          for (int64_t g = 0; g < G; ++g)
            std::memcpy(
                answer + ((site + g) * tokens + token) * hidden, to[g], hidden * sizeof(float));
        });
      }
    });
  });
  return {answers, log_sums};
}

}  // namespace

#define SITE \
  "Tensor query, Tensor key_norm, float logit_scale, float key_eps, Tensor? bias, " \
  "Tensor norm_weight, float norm_eps"

STABLE_TORCH_LIBRARY(attnres_serve, library) {
  library.def("mix_norm(Tensor[] sources, " SITE ") -> Tensor");
  library.def(
      "add_mix_norm(Tensor[] blocks, Tensor partial, Tensor delta, " SITE ") -> (Tensor, Tensor)");
  library.def(
      "inter_block(Tensor[] blocks, Tensor[] queries, Tensor[] key_norms, float logit_scale, "
      "float key_eps) -> (Tensor, Tensor)");
  library.def(
      "merge_norm(Tensor answers, Tensor log_sums, int position, Tensor own, " SITE ") -> Tensor");
  library.def(
      "add_merge_norm(Tensor answers, Tensor log_sums, int position, Tensor partial, "
      "Tensor delta, " SITE ") -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(attnres_serve, CPU, library) {
  library.impl("mix_norm", TORCH_BOX(&mix_norm));
  library.impl("add_mix_norm", TORCH_BOX(&add_mix_norm));
  library.impl("inter_block", TORCH_BOX(&inter_block));
  library.impl("merge_norm", TORCH_BOX(&merge_norm));
  library.impl("add_merge_norm", TORCH_BOX(&add_merge_norm));
}
