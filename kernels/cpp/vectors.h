// Rows of activations as vectors of float32, step by step.
//
// Vectors are the compiler's own (16 floats, split as the machine needs), so the source names no
// instruction set.  Activations are read and written in their dtype, everything between is float32.

#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

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
// A vector that lies across two lines of the cache is read at half the speed.
struct alignas(sizeof(Vec)) Line {
  float floats[kLanes];
};
enum Use { kQueries, kNormWeight, kMixed, kWeights, kStates, kUses };
inline float* scratch(Use use, int64_t size) {
  thread_local std::vector<Line> kept[kUses];
  const size_t lines = (size + kLanes - 1) / kLanes;
  if (kept[use].size() < lines) kept[use].resize(lines);
  return kept[use].data()->floats;
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

}  // namespace
