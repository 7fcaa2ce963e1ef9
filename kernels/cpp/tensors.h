// Arguments of operators, checked, as the kernels of a dtype take them.

#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <vector>

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

namespace attnres {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

template <class D>
struct Rows {  // [tokens, rows, hidden] or answers [sites, tokens, hidden], any distance apart
  typename D::Element* data;
  int64_t stride, row_stride;
  typename D::Element* operator()(int64_t token, int64_t row) const {
    return data + token * stride + row * row_stride;
  }
};

// How far `count` things of `size` elements reach that begin `stride` apart; -1 where two overlap.
inline int64_t reach(int64_t count, int64_t stride, int64_t size) {
  if (size < 0 || count <= 1) return size;
  return stride < size ? -1 : (count - 1) * stride + size;
}

// The output of a sublayer, which the normed mix takes the place of, and the bank.  Threads write to
// both: they lie apart, and so do the rows of each.
struct State {
  ScalarType dtype;
  int64_t size, tokens, hidden, slots;  // the first in bytes, of an element
  void *x_data, *bank_data;
  int64_t x_stride, by_token, by_slot;
  State(const Tensor& x, const Tensor& bank)
      : dtype(x.scalar_type()), size(x.element_size()), tokens(x.size(0)), hidden(x.size(-1)),
        slots(bank.size(1)), x_data(x.data_ptr()), bank_data(bank.data_ptr()) {
    STD_TORCH_CHECK(
        x.dim() == 2 && bank.dim() == 3 && bank.size(0) == tokens && bank.size(2) == hidden &&
            bank.scalar_type() == dtype,
        "the bank must be [tokens, slots, hidden] for x [tokens, hidden], of one dtype");
    STD_TORCH_CHECK(
        hidden <= 1 || (x.stride(1) == 1 && bank.stride(2) == 1), "rows must be contiguous");
    x_stride = x.stride(0), by_token = bank.stride(0), by_slot = bank.stride(1);
    check_apart();
  }
  // Both contiguous.
  State(ScalarType dtype, int64_t size, int64_t tokens, int64_t hidden, int64_t slots, void* x,
        void* bank)
      : dtype(dtype), size(size), tokens(tokens), hidden(hidden), slots(slots), x_data(x),
        bank_data(bank), x_stride(hidden), by_token(slots * hidden), by_slot(hidden) {
    check_apart();
  }
  void check_apart() const {
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

inline void check_vector(const Tensor& vector, int64_t hidden, bool float32) {
  STD_TORCH_CHECK(
      vector.numel() == hidden && vector.is_contiguous() &&
          (!float32 || vector.scalar_type() == ScalarType::Float),
      "a query, key norm or weight must be [hidden], and the first two float32");
}

inline const float* floats(const Tensor& vector, int64_t hidden) {
  check_vector(vector, hidden, true);
  return static_cast<const float*>(vector.const_data_ptr());
}

// Numbers for the rows that a site reads, or none.
inline const float* bias_of(const std::optional<Tensor>& bias, int64_t rows) {
  STD_TORCH_CHECK(
      !bias || (bias->dim() == 1 && bias->size(0) >= rows && bias->is_contiguous() &&
                bias->scalar_type() == ScalarType::Float),
      "a bias must be float32 and have a number for each row that is read");
  return bias ? static_cast<const float*>(bias->const_data_ptr()) : nullptr;
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

// What is known before a site runs (two-phase): the answer to rows that are not read again.
struct Ahead {
  const void* answer = nullptr;  // of the first token, in the activation dtype
  const float* log_sum = nullptr;
};

// Arguments of a site besides tensors.  Five numbers come in two, as the bits of each half: with
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
  const float *query, *key_norm, *bias;  // of the rows that the site reads; or there is none
  NormWeight norm_weight;
  Site(const float* query, const float* key_norm, const float* bias, NormWeight norm_weight)
      : query(query), key_norm(key_norm), bias(bias), norm_weight(norm_weight) {}
  Site(
      const Tensor& query, const Tensor& key_norm, const std::optional<Tensor>& bias,
      const Tensor& norm_weight, int64_t hidden, int64_t rows)
      : Site(floats(query, hidden), floats(key_norm, hidden), bias_of(bias, rows),
             NormWeight(norm_weight, hidden)) {}
};

struct Key {
  const float *query, *key_norm, *bias;  // as of a site: all of a group have a bias, or none
};
using Keys = std::vector<Key>;

// The first site reads `rows`, the others `later_rows`.
inline Keys keys_of(
    const Tensors& queries, const Tensors& key_norms, const std::optional<Tensors>& biases,
    int64_t hidden, int64_t rows, int64_t later_rows) {
  STD_TORCH_CHECK(
      !queries.empty() && queries.size() == key_norms.size() &&
          (!biases || queries.size() == biases->size()),
      "every query must have a key norm, and a bias if one has");
  Keys keys;
  for (size_t site = 0; site < queries.size(); ++site)
    keys.push_back(
        {floats(queries[site], hidden), floats(key_norms[site], hidden),
         biases ? bias_of((*biases)[site], site ? later_rows : rows) : nullptr});
  return keys;
}

// Experts with Kimi K3's activation, by what experts.py says of them; all is contiguous.
struct SituExperts {
  const void *x, *gate_up, *down;  // [tokens, latent], [experts, 2 width, latent] and
                                   // [experts, latent, width] in one dtype
  const float* shares;             // [tokens, top_k]
  const int64_t* ids;              // [tokens, top_k]
  float* out;                      // [tokens, latent]
  int64_t tokens, latent, experts, width, top_k;
  float beta, clip;  // bounds of the gate and of what it gates, the latter 0 for none
};

// The functions of one dtype, which a separate library holds.
struct Kernels {
  void (*attend)(
      const State& state, int64_t first, const Ahead& known, const Numbers& numbers,
      const Site& site);
  void (*attend_group)(
      const State& state, const Numbers& numbers, bool completes, const Keys& keys,
      const NormWeight& norm_weight, void* answers, float* log_sum);
  void (*add_to_row)(const State& state, int64_t row);
  void (*situ_experts)(const SituExperts& call);
};

}  // namespace attnres
