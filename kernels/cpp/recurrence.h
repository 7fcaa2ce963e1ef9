// The recurrence of linear attention; what it computes is described in recurrence/operator.py.
//
// A row of a state, the part of one value channel, needs no other row: a thread takes some of them
// through all tokens of a sequence.  With s the decayed row, both products are known in one pass:
//     delta = beta (v - s k),  o = scale (s q + delta k q),  s <- s + delta k

#pragma once

#include <optional>
#include <utility>

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/BFloat16.h>

#include "vectors.h"

namespace attnres {
namespace {

constexpr int64_t kRows = 64;    // rows of a state that a thread takes at once
constexpr int64_t kTokens = 16;  // tokens whose keys lie in the first cache at once

// Elements of any dtype, to float32 and from it; `to` is padded with zeros up to `padded`.
using ToFloats = void (*)(float* to, const void* from, int64_t count, int64_t padded);
using FromFloats = void (*)(void* to, const float* from, int64_t count);

template <class E>
void widened(float* to, const void* from, int64_t count, int64_t padded) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(static_cast<const E*>(from)[i]);
  std::fill(to + count, to + padded, 0.0f);
}

template <class E>
void narrowed(void* to, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) static_cast<E*>(to)[i] = static_cast<E>(from[i]);
}

// A tensor [tokens or blocks, heads, ...], read by the rows of its last dimension.
struct Rows3 {
  char* data;
  int64_t size, stride, by_head;
  ToFloats to_floats;
  FromFloats from_floats;
  explicit Rows3(const Tensor& tensor)
      : data(static_cast<char*>(tensor.data_ptr())), size(tensor.element_size()),
        stride(tensor.stride(0)), by_head(tensor.stride(1)) {
    switch (tensor.scalar_type()) {
      case ScalarType::Float: of<float>(); break;
      case ScalarType::BFloat16: of<c10::BFloat16>(); break;
      case ScalarType::Half: of<c10::Half>(); break;
      default: STD_TORCH_CHECK(false, "the recurrence takes float32, bfloat16 and float16");
    }
  }
  template <class E>
  void of() {
    to_floats = widened<E>;
    from_floats = narrowed<E>;
  }
  char* at(int64_t index, int64_t head, int64_t element = 0) const {
    return data + (index * stride + head * by_head + element) * size;
  }
};

struct Sequence {
  int64_t begin, end, slot;
  bool fresh;
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
  int64_t tokens = 0, width;
  float *q, *k, *decay, *v, *o;
  float beta[kTokens], key_query[kTokens];
  bool has_beta;
};

// R rows through the tokens of a chunk, in registers where their N vectors are known.
template <int64_t R, int64_t N>
FLAT [[gnu::noinline]] void advance(float* rows, const Chunk& chunk, int64_t first, float scale) {
  const int64_t width = N ? N * kLanes : chunk.width, vectors = width / kLanes;
  [[maybe_unused]] Vec kept[R][N ? N : 1];
  const auto at = [&](int64_t r, int64_t i) { return rows + r * width + i * kLanes; };
  const auto get = [&](int64_t r, int64_t i) {
    if constexpr (N > 0) return kept[r][i];
    else return vector_at(at(r, i));
  };
  const auto put = [&](int64_t r, int64_t i, Vec s) {
    if constexpr (N > 0) kept[r][i] = s;
    else std::memcpy(at(r, i), &s, sizeof s);
  };
  const auto each = [&](const auto& body) {
#pragma GCC unroll 16
    for (int64_t i = 0; i < vectors; ++i) {
#pragma GCC unroll 4
      for (int64_t r = 0; r < R; ++r) body(r, i);
    }
  };
  if constexpr (N > 0) each([&](int64_t r, int64_t i) { kept[r][i] = vector_at(at(r, i)); });
  for (int64_t t = 0; t < chunk.tokens; ++t) {
    const float *q = chunk.q + t * width, *k = chunk.k + t * width, *d = chunk.decay + t * width;
    const float* v = chunk.v + t * kRows + first;
    float* o = chunk.o + t * kRows + first;
    Vec by_key[R] = {}, by_query[R] = {};
    each([&](int64_t r, int64_t i) {
      const Vec s = get(r, i) * vector_at(d + i * kLanes);
      put(r, i, s);
      by_key[r] += s * vector_at(k + i * kLanes);
      by_query[r] += s * vector_at(q + i * kLanes);
    });
    float delta[R];
#pragma GCC unroll 4
    for (int64_t r = 0; r < R; ++r) {
      delta[r] = chunk.has_beta ? chunk.beta[t] * (v[r] - sum(by_key[r])) : v[r];
      o[r] = scale * (sum(by_query[r]) + delta[r] * chunk.key_query[t]);
    }
    each([&](int64_t r, int64_t i) { put(r, i, get(r, i) + delta[r] * vector_at(k + i * kLanes)); });
  }
  if constexpr (N > 0)
    each([&](int64_t r, int64_t i) { std::memcpy(at(r, i), &kept[r][i], sizeof(Vec)); });
}

template <int64_t G, int64_t N>
void in_rows(float* rows, int64_t count, const Chunk& chunk, float scale) {
  in_groups<G>(count, [&](int64_t first, auto some) {
    advance<some, N>(rows + first * chunk.width, chunk, first, scale);
  });
}

// A prompt has sixteen vectors of sixteen in registers, a single token eight: that one waits for
// memory, and the fewer it takes at once the sooner the next are requested.
void advance_all(float* rows, int64_t count, const Chunk& chunk, float scale) {
  const bool one = chunk.tokens == 1;
  switch (chunk.width) {
    case 64: return (one ? in_rows<2, 64 / kLanes> : in_rows<4, 64 / kLanes>)(rows, count, chunk, scale);
    case 128: return (one ? in_rows<1, 128 / kLanes> : in_rows<2, 128 / kLanes>)(rows, count, chunk, scale);
    case 256: return in_rows<1, 256 / kLanes>(rows, count, chunk, scale);
    default: return in_rows<4, 0>(rows, count, chunk, scale);
  }
}

// One call of the operator.
struct Recurrence {
  Rows3 q, k, v, decay, state, out;
  std::optional<Rows3> beta;
  int64_t keys, values, width, share;  // heads that share a key
  bool same_decay, in_place;           // one decay for a head; whether states are computed in place
  float scale;

  // Tokens of a head from `begin` on.
  void gather(Chunk& chunk, int64_t begin, int64_t head, int64_t first, int64_t count) const {
    for (int64_t t = 0; t < chunk.tokens; ++t) {
      float *to_q = chunk.q + t * width, *to_k = chunk.k + t * width, *to_d = chunk.decay + t * width;
      q.to_floats(to_q, q.at(begin + t, head / share), keys, width);
      k.to_floats(to_k, k.at(begin + t, head / share), keys, width);
      v.to_floats(chunk.v + t * kRows, v.at(begin + t, head, first), count, count);
      const auto* factors = reinterpret_cast<const float*>(decay.at(begin + t, head));
      if (same_decay) std::fill(to_d, to_d + width, *factors);
      else decay.to_floats(to_d, factors, keys, width);
      if (beta) chunk.beta[t] = *reinterpret_cast<const float*>(beta->at(begin + t, head));
      Vec both = {};
      for (int64_t i = 0; i < width; i += kLanes) both += vector_at(to_q + i) * vector_at(to_k + i);
      chunk.key_query[t] = sum(both);
    }
  }

  // A sequence through the rows of a head's state from `first` on.
  void run(const Sequence& sequence, int64_t head, int64_t first) const {
    const int64_t count = std::min(kRows, values - first);
    float* place = scratch(kStates, (kRows + 3 * kTokens) * width + 2 * kTokens * kRows);
    const auto take = [&](int64_t size) { return std::exchange(place, place + size); };
    float* rows = take(kRows * width);
    if (in_place) rows = reinterpret_cast<float*>(state.at(sequence.slot, head, first * keys));
    Chunk chunk{
        .width = width, .q = take(kTokens * width), .k = take(kTokens * width),
        .decay = take(kTokens * width), .v = take(kTokens * kRows), .o = take(kTokens * kRows),
        .has_beta = beta.has_value()};
    const auto kept = [&](int64_t r) { return state.at(sequence.slot, head, (first + r) * keys); };
    if (sequence.fresh) std::fill(rows, rows + count * width, 0.0f);
    else if (!in_place)
      for (int64_t r = 0; r < count; ++r) state.to_floats(rows + r * width, kept(r), keys, width);
    for (int64_t begin = sequence.begin; begin < sequence.end; begin += kTokens) {
      chunk.tokens = std::min(kTokens, sequence.end - begin);
      gather(chunk, begin, head, first, count);
      advance_all(rows, count, chunk, scale);
      for (int64_t t = 0; t < chunk.tokens; ++t)
        out.from_floats(out.at(begin + t, head, first), chunk.o + t * kRows, count);
    }
    if (!in_place)
      for (int64_t r = 0; r < count; ++r) state.from_floats(kept(r), rows + r * width, keys);
  }
};

std::vector<Sequence> sequences_of(
    const Tensor& slots, const Tensor& starts, const Tensor& has_history, int64_t tokens,
    int64_t blocks) {
  std::vector<Sequence> sequences;
  const auto* had = static_cast<const bool*>(has_history.const_data_ptr());
  for (int64_t n = 0; n < slots.size(0); ++n) {
    const int64_t begin = integer(starts, n), end = integer(starts, n + 1), slot = integer(slots, n);
    STD_TORCH_CHECK(
        slot < blocks && 0 <= begin && begin <= end && end <= tokens,
        "a sequence of the recurrence is outside of its tokens or blocks");
    if (slot > 0 && begin < end)
      sequences.push_back({begin, end, slot, !had[n * has_history.stride(0)]});
  }
  return sequences;
}

void recurrence(
    Tensor q, Tensor k, Tensor v, Tensor decay, std::optional<Tensor> beta, Tensor state,
    Tensor slots, Tensor starts, Tensor has_history, double scale, Tensor out) {
  const int64_t tokens = v.size(0), heads = v.size(1), values = v.size(2), keys = q.size(2);
  STD_TORCH_CHECK(
      heads % q.size(1) == 0 && k.size(1) == q.size(1) && k.size(2) == keys &&
          q.size(0) == tokens && k.size(0) == tokens && decay.size(0) == tokens &&
          (!beta || (beta->size(0) == tokens && beta->size(1) == heads)) && out.size(0) == tokens &&
          out.size(1) == heads && out.size(2) == values &&
          state.size(1) == heads && state.size(2) == values && state.size(3) == keys &&
          decay.size(1) == heads && decay.size(2) == keys &&
          starts.size(0) == slots.size(0) + 1 && has_history.size(0) == slots.size(0),
      "the arguments of the recurrence do not fit each other");
  STD_TORCH_CHECK(
      q.stride(2) == 1 && k.stride(2) == 1 && v.stride(2) == 1 && out.stride(2) == 1 &&
          decay.stride(2) <= 1 &&
          state.stride(1) == values * keys && state.stride(2) == keys && state.stride(3) == 1,
      "heads and blocks of the recurrence must be contiguous");
  STD_TORCH_CHECK(
      decay.scalar_type() == ScalarType::Float &&
          (!beta || beta->scalar_type() == ScalarType::Float),
      "decay and beta of the recurrence must be float32");
  for (const Tensor& numbers : {slots, starts})
    STD_TORCH_CHECK(
        numbers.scalar_type() == ScalarType::Int || numbers.scalar_type() == ScalarType::Long,
        "slots and starts of the recurrence must be int32 or int64");
  STD_TORCH_CHECK(
      has_history.scalar_type() == ScalarType::Bool, "has_history of the recurrence must be bool");
  const int64_t width = (keys + kLanes - 1) / kLanes * kLanes;
  const Recurrence call{
      .q = Rows3(q), .k = Rows3(k), .v = Rows3(v), .decay = Rows3(decay), .state = Rows3(state),
      .out = Rows3(out), .beta = beta ? std::optional(Rows3(*beta)) : std::nullopt, .keys = keys,
      .values = values, .width = width, .share = heads / q.size(1),
      .same_decay = decay.stride(2) == 0,
      .in_place = width == keys && state.scalar_type() == ScalarType::Float,
      .scale = static_cast<float>(scale)};
  const auto sequences = sequences_of(slots, starts, has_history, tokens, state.size(0));
  const int64_t count = sequences.size(), parts = (values + kRows - 1) / kRows;
  if (count == 0) return;
  // Sequences differ in length: each thread takes all of them, and some heads.
  const int64_t grain = std::max<int64_t>(1, kGrain * count / (kRows * width * tokens));
  torch::stable::parallel_for(0, heads * parts * count, grain, [&](int64_t from, int64_t to) {
    for (int64_t item = from; item < to; ++item) {
      const int64_t part = item / count;
      call.run(sequences[item % count], part / parts, part % parts * kRows);
    }
  });
}

}  // namespace
}  // namespace attnres
