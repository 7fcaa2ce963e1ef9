// The recurrence of linear attention; what it computes is described in recurrence/operator.py.
//
// A row of a state, the part of one value channel, needs no other row: a thread takes some of them
// through all tokens of a sequence.  With s the decayed row, both products are known in one pass:
//     delta = beta (v - s k),  o = scale (s q + delta k q),  s <- s + delta k

#pragma once

#include <optional>

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/BFloat16.h>

#include "vectors.h"

namespace {

constexpr int64_t kRows = 32;    // rows of a state that a thread takes at once
constexpr int64_t kTokens = 16;  // tokens whose keys lie in the first cache at once

// Elements of any dtype, to float32 and from it; `to` is padded with zeros up to `padded`.
using Read = void (*)(float* to, const void* from, int64_t count, int64_t padded);
using Write = void (*)(void* to, const float* from, int64_t count);

template <class E>
void to_floats(float* to, const void* from, int64_t count, int64_t padded) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(static_cast<const E*>(from)[i]);
  std::fill(to + count, to + padded, 0.0f);
}

template <class E>
void from_floats(void* to, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) static_cast<E*>(to)[i] = static_cast<E>(from[i]);
}

// A tensor's elements, the last dimension contiguous.
struct Elements {
  char* data;
  int64_t size;
  Read read;
  Write write;
  explicit Elements(const Tensor& tensor)
      : data(static_cast<char*>(tensor.data_ptr())), size(tensor.element_size()) {
    switch (tensor.scalar_type()) {
      case ScalarType::Float: of<float>(); break;
      case ScalarType::BFloat16: of<c10::BFloat16>(); break;
      case ScalarType::Half: of<c10::Half>(); break;
      default: STD_TORCH_CHECK(false, "the recurrence takes float32, bfloat16 and float16");
    }
  }
  template <class E>
  void of() {
    read = to_floats<E>;
    write = from_floats<E>;
  }
  char* at(int64_t element) const { return data + element * size; }
};

int64_t integer(const Tensor& tensor, int64_t index) {
  index *= tensor.stride(0);
  if (tensor.scalar_type() == ScalarType::Int)
    return static_cast<const int32_t*>(tensor.const_data_ptr())[index];
  return static_cast<const int64_t*>(tensor.const_data_ptr())[index];
}

inline Vec vector_at(const float* from) {
  Vec vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

// Some tokens of one head, as float32; rows of q, k and decay are `width` apart, of v and o kRows.
struct Chunk {
  int64_t tokens, width;
  float *q, *k, *decay, *v, *o;
  float beta[kTokens], key_query[kTokens];
  bool has_beta;
};

// R rows through the tokens of a chunk, in registers where their N vectors are known.
template <int64_t R, int64_t N>
FLAT void advance(float* rows, const Chunk& chunk, int64_t first, float scale) {
  const int64_t width = chunk.width, vectors = N ? N : width / kLanes;
  [[maybe_unused]] Vec kept[R][N ? N : 1];
  const auto get = [&](int64_t r, int64_t i) {
    if constexpr (N > 0) return kept[r][i];
    return vector_at(rows + r * width + i * kLanes);
  };
  const auto put = [&](int64_t r, int64_t i, Vec value) {
    if constexpr (N > 0) kept[r][i] = value;
    else std::memcpy(rows + r * width + i * kLanes, &value, sizeof value);
  };
  if constexpr (N > 0) std::memcpy(kept, rows, sizeof kept);
  for (int64_t t = 0; t < chunk.tokens; ++t) {
    const float *q = chunk.q + t * width, *k = chunk.k + t * width, *d = chunk.decay + t * width;
    const float* v = chunk.v + t * kRows + first;
    float* o = chunk.o + t * kRows + first;
    Vec by_key[R] = {}, by_query[R] = {};
#pragma GCC unroll 8
    for (int64_t i = 0; i < vectors; ++i) {
      const Vec key = vector_at(k + i * kLanes), query = vector_at(q + i * kLanes);
      const Vec decay = vector_at(d + i * kLanes);
#pragma GCC unroll 4
      for (int64_t r = 0; r < R; ++r) {
        const Vec s = get(r, i) * decay;
        put(r, i, s);
        by_key[r] += s * key;
        by_query[r] += s * query;
      }
    }
    float delta[R];
#pragma GCC unroll 4
    for (int64_t r = 0; r < R; ++r) {
      delta[r] = chunk.has_beta ? chunk.beta[t] * (v[r] - sum(by_key[r])) : v[r];
      o[r] = scale * (sum(by_query[r]) + delta[r] * chunk.key_query[t]);
    }
#pragma GCC unroll 8
    for (int64_t i = 0; i < vectors; ++i) {
      const Vec key = vector_at(k + i * kLanes);
#pragma GCC unroll 4
      for (int64_t r = 0; r < R; ++r) put(r, i, get(r, i) + delta[r] * key);
    }
  }
  if constexpr (N > 0) std::memcpy(rows, kept, sizeof kept);
}

void advance_all(float* rows, int64_t count, const Chunk& chunk, float scale) {
  const auto by = [&](auto group, auto vectors) {
    in_groups<group>(count, [&](int64_t first, auto some) {
      advance<some, vectors>(rows + first * chunk.width, chunk, first, scale);
    });
  };
  switch (chunk.width) {
    case 128: return by(std::integral_constant<int64_t, 2>{}, std::integral_constant<int64_t, 8>{});
    case 64: return by(std::integral_constant<int64_t, 4>{}, std::integral_constant<int64_t, 4>{});
    default: return by(std::integral_constant<int64_t, 4>{}, std::integral_constant<int64_t, 0>{});
  }
}

void recurrence(
    Tensor q, Tensor k, Tensor v, Tensor decay, std::optional<Tensor> beta, Tensor state,
    Tensor slots, Tensor starts, Tensor has_history, double scale, Tensor out) {
  const int64_t tokens = v.size(0), heads = v.size(1), values = v.size(2), keys = q.size(2);
  const int64_t groups = q.size(1), sequences = slots.size(0), blocks = state.size(0);
  STD_TORCH_CHECK(
      heads % groups == 0 && k.size(1) == groups && k.size(2) == keys && state.size(1) == heads &&
          state.size(2) == values && state.size(3) == keys && decay.size(2) == keys &&
          starts.size(0) == sequences + 1 && has_history.size(0) == sequences,
      "the arguments of the recurrence do not fit each other");
  STD_TORCH_CHECK(
      q.stride(2) == 1 && k.stride(2) == 1 && v.stride(2) == 1 && out.is_contiguous() &&
          state.stride(1) == values * keys && state.stride(2) == keys && state.stride(3) == 1,
      "heads and blocks of the recurrence must be contiguous");
  STD_TORCH_CHECK(
      decay.scalar_type() == ScalarType::Float &&
          (!beta || beta->scalar_type() == ScalarType::Float),
      "decay and beta of the recurrence must be float32");
  for (int64_t n = 0; n < sequences; ++n)
    STD_TORCH_CHECK(
        integer(slots, n) < blocks && 0 <= integer(starts, n) &&
            integer(starts, n) <= integer(starts, n + 1) && integer(starts, n + 1) <= tokens,
        "a sequence of the recurrence is outside of its tokens or blocks");

  const Elements queries(q), keys_(k), values_(v), states(state), outs(out);
  const int64_t width = (keys + kLanes - 1) / kLanes * kLanes, parts = (values + kRows - 1) / kRows;
  const bool in_place = width == keys && state.scalar_type() == ScalarType::Float;
  const auto* decays = static_cast<const float*>(decay.const_data_ptr());
  const auto* had = static_cast<const bool*>(has_history.const_data_ptr());

  const auto run = [&](int64_t n, int64_t head, int64_t first) {
    const int64_t begin = integer(starts, n), end = integer(starts, n + 1), slot = integer(slots, n);
    if (slot <= 0 || begin == end) return;
    const int64_t count = std::min(kRows, values - first), group = head / (heads / groups);
    const int64_t own = slot * state.stride(0) + (head * values + first) * keys;
    float* place = scratch(kStates, (kRows + 3 * kTokens) * width + 2 * kTokens * kRows);
    float* rows = in_place ? reinterpret_cast<float*>(states.at(own)) : place;
    place += kRows * width;
    Chunk chunk{.tokens = 0, .width = width, .has_beta = beta.has_value()};
    for (float** at : {&chunk.q, &chunk.k, &chunk.decay}) *at = place, place += kTokens * width;
    for (float** at : {&chunk.v, &chunk.o}) *at = place, place += kTokens * kRows;
    if (!had[n * has_history.stride(0)]) std::fill(rows, rows + count * width, 0.0f);
    else if (!in_place)
      for (int64_t r = 0; r < count; ++r)
        states.read(rows + r * width, states.at(own + r * keys), keys, width);
    for (int64_t at = begin; at < end; at += kTokens) {
      chunk.tokens = std::min(kTokens, end - at);
      for (int64_t t = 0; t < chunk.tokens; ++t) {
        const int64_t token = at + t;
        float *to_q = chunk.q + t * width, *to_k = chunk.k + t * width;
        queries.read(to_q, queries.at(token * q.stride(0) + group * q.stride(1)), keys, width);
        keys_.read(to_k, keys_.at(token * k.stride(0) + group * k.stride(1)), keys, width);
        values_.read(
            chunk.v + t * kRows,
            values_.at(token * v.stride(0) + head * v.stride(1) + first), count, count);
        const float* from = decays + token * decay.stride(0) + head * decay.stride(1);
        for (int64_t i = 0; i < keys; ++i) chunk.decay[t * width + i] = from[i * decay.stride(2)];
        std::fill(chunk.decay + t * width + keys, chunk.decay + (t + 1) * width, 0.0f);
        if (beta)
          chunk.beta[t] = static_cast<const float*>(
              beta->const_data_ptr())[token * beta->stride(0) + head * beta->stride(1)];
        Vec both = {};
        for (int64_t i = 0; i < width; i += kLanes) both += vector_at(to_q + i) * vector_at(to_k + i);
        chunk.key_query[t] = sum(both);
      }
      advance_all(rows, count, chunk, static_cast<float>(scale));
      for (int64_t t = 0; t < chunk.tokens; ++t)
        outs.write(
            outs.at(((at + t) * heads + head) * values + first), chunk.o + t * kRows, count);
    }
    if (!in_place)
      for (int64_t r = 0; r < count; ++r)
        states.write(states.at(own + r * keys), rows + r * width, keys);
  };
  // Sequences differ in length: each thread takes all of them, and some heads.
  const int64_t each = kRows * width * std::max<int64_t>(1, tokens / std::max<int64_t>(1, sequences));
  const auto body = [&](int64_t from, int64_t to) {
    for (int64_t item = from; item < to; ++item) {
      const int64_t part = item / sequences;
      run(item % sequences, part / parts, part % parts * kRows);
    }
  };
  const int64_t grain = std::max<int64_t>(1, kGrain / each);
  torch::stable::parallel_for(0, heads * parts * sequences, grain, body);
}

}  // namespace
