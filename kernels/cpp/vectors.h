// Rows of activations as vectors of float32, step by step.
//
// Vectors are types of the compiler, so the source names no instruction.  They are as long as the
// machine's: GCC takes longer ones apart element by element.  Activations are read and written in
// their dtype, everything between is float32.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include <torch/headeronly/util/Half.h>

// Seen with clang 14: elements of a row's last, partial step; right with clang 16.
#if defined(__clang__) && __clang_major__ < 16 && defined(__AVX512FP16__)
#error "clang before version 16 computes float16 wrongly for this processor"
#endif

namespace attnres {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
constexpr int64_t kStep = 2 * kLanes;  // elements that are loaded at once
constexpr int64_t kGroup = 4;          // rows or sites that share the loads of one loop
#ifdef __AVX512F__
constexpr int64_t kPair = 4;           // rows of an expert that a group of tokens reads at once
constexpr int64_t kSites = 8;          // sites that score two rows at once
#else
constexpr int64_t kPair = 2;           // whose products would not stay in half as many registers
constexpr int64_t kSites = 4;
#endif
constexpr int64_t kTogether = 8;       // tokens that run together where few rows are read
constexpr int64_t kGrain = 1 << 14;    // elements read that are worth a second thread
constexpr int64_t kNear = 40 << 10;    // bytes that are still in the first cache when read again

// Everything that a hot loop calls is part of it, so that its sums stay in registers.
#define FLAT [[gnu::flatten]]

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Bits __attribute__((vector_size(kLanes * 4)));
typedef float Four __attribute__((vector_size(16)));
typedef uint32_t FourBits __attribute__((vector_size(16)));

// The elements of two vectors, numbered through, that are named.
#ifdef __clang__
#define SHUFFLED(Numbers, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(Numbers, a, b, ...) __builtin_shuffle(a, b, Numbers{__VA_ARGS__})
#endif

// Has a value stay in a register: GCC reads it from memory again for each use, and loads are then
// what a loop waits for.
#ifdef __AVX512F__
#define HELD(value) asm("" : "+v"(value))
#else
#define HELD(value)
#endif

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
  static void round(Element* to, Step step) { narrow(to, step); }
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
  static void round(Element* to, Step step) {
#ifdef __AVX512BF16__
    typedef uint16_t Halves __attribute__((vector_size(64)));
    typedef float Wide __attribute__((vector_size(64)));
    const auto halves = (Halves)_mm512_cvtne2ps_pbh((Wide)step.high, (Wide)step.low);
    const Halves two = SHUFFLED(
        Halves, halves, halves, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9,
        25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    std::memcpy(to, &two, sizeof two);
#else
    narrow(to, step);
#endif
  }
  static Step arrange(Step step) {
#if defined(__AVX512F__)
#define EVERY_SECOND(from)                                                                \
  SHUFFLED(Bits, step.low, step.high, from, from + 2, from + 4, from + 6, from + 8,       \
      from + 10, from + 12, from + 14, from + 16, from + 18, from + 20, from + 22, from + 24, \
      from + 26, from + 28, from + 30)
#elif defined(__AVX__)
#define EVERY_SECOND(from)                                                          \
  SHUFFLED(Bits, step.low, step.high, from, from + 2, from + 4, from + 6, from + 8, \
      from + 10, from + 12, from + 14)
#else
#define EVERY_SECOND(from) SHUFFLED(Bits, step.low, step.high, from, from + 2, from + 4, from + 6)
#endif
    return {EVERY_SECOND(0), EVERY_SECOND(1)};
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
  static void round(Element* to, Step step) { narrow(to, step); }
  static Step arrange(Step step) { return step; }
};

// `count` is kStep except in the tail of a row, which is padded with zeros.
template <class D>
inline Step load(const typename D::Element* from, int64_t count) {
  if (count == kStep) return D::widen(from);
  typename D::Element padded[kStep] = {};
  std::memcpy(padded, from, count * sizeof *from);
  return D::widen(padded);
}

template <class D, auto put = D::narrow>
inline void store(typename D::Element* to, Step step, int64_t count) {
  if (count == kStep) return put(to, step);
  typename D::Element padded[kStep];
  put(padded, step);
  std::memcpy(to, padded, count * sizeof *to);
}

// `round` is `narrow`, but may take what is not normal for zero.
template <class D>
inline void store_rounded(typename D::Element* to, Step step, int64_t count) {
  store<D, D::round>(to, step, count);
}

// The tail is taken first: it calls functions, which leave no sum in a register.
template <class F>
inline void steps(int64_t hidden, const F& body) {
  const int64_t tail = hidden / kStep * kStep;
  if (tail < hidden) body(tail, hidden - tail);
  for (int64_t at = 0; at < tail; at += kStep) body(at, kStep);
}

// body(0) to body(N - 1), of constants: a loop of N turns would keep in memory what stays in
// registers here.
template <int64_t N, class F>
inline void each(const F& body) {
  [&]<int64_t... I>(std::integer_sequence<int64_t, I...>) {
    (body(std::integral_constant<int64_t, I>{}), ...);
  }(std::make_integer_sequence<int64_t, N>{});
}

// body(at, G) for groups of G, and one smaller group for what is left.
template <int64_t G = kGroup, class F>
inline void in_groups(int64_t count, const F& body, int64_t at = 0) {
  for (; at + G <= count; at += G) body(at, std::integral_constant<int64_t, G>{});
  if constexpr (G > 1) in_groups<G - 1>(count, body, at);
}

// body(at, G) for as few groups of at most G as there can be, of about one size.
template <int64_t G, class F>
inline void of_size(int64_t size, const F& body) {
  if (size == G) return body(std::integral_constant<int64_t, G>{});
  if constexpr (G > 1) of_size<G - 1>(size, body);
}
template <int64_t G, class F>
inline void in_equal_groups(int64_t count, const F& body, int64_t at = 0) {
  for (int64_t left = (count - at + G - 1) / G; left; --left) {
    const int64_t size = (count - at + left - 1) / left;
    of_size<G>(size, [&](auto group) { body(at, group); });
    at += size;
  }
}

// A vector's halves, taken from its register.
#if defined(__clang__) || __GNUC__ >= 12
template <class Half, class Wide, class F>
inline Half halves(Wide wide, const F& both) {
  constexpr int64_t count = sizeof(Half) / sizeof(float);
  return [&]<int... I>(std::integer_sequence<int, I...>) {
    return both(
        __builtin_shufflevector(wide, wide, I...),
        __builtin_shufflevector(wide, wide, (I + int{count})...));
  }(std::make_integer_sequence<int, count>{});
}
#else  // by way of memory
template <class Half, class Wide, class F>
inline Half halves(Wide wide, const F& both) {
  Half low, high;
  std::memcpy(&low, &wide, sizeof low);
  std::memcpy(&high, reinterpret_cast<const char*>(&wide) + sizeof low, sizeof high);
  return both(low, high);
}
#endif

template <class F>
inline Four quarter(Vec wide, const F& both) {
#if defined(__AVX512F__)
  typedef float Eight __attribute__((vector_size(32)));
  return halves<Four>(halves<Eight>(wide, both), both);
#elif defined(__AVX__)
  return halves<Four>(wide, both);
#else
  return wide;
#endif
}

constexpr auto plus = [](auto a, auto b) { return a + b; };
constexpr auto larger = [](auto a, auto b) { return a > b ? a : b; };

template <class F>
inline float reduce(Vec wide, const F& both) {  // as a tree
  const Four four = quarter(wide, both);
  return both(both(four[0], four[2]), both(four[1], four[3]));
}

inline float sum(Vec wide) { return reduce(wide, plus); }

// Each sum as the one above, to the bit; four together take half the instructions.
inline Four sums(Vec a, Vec b, Vec c, Vec d) {
  const Four p = quarter(a, plus), q = quarter(b, plus);
  const Four r = quarter(c, plus), s = quarter(d, plus);
  const Four low = SHUFFLED(FourBits, p, q, 0, 4, 1, 5) + SHUFFLED(FourBits, p, q, 2, 6, 3, 7);
  const Four high = SHUFFLED(FourBits, r, s, 0, 4, 1, 5) + SHUFFLED(FourBits, r, s, 2, 6, 3, 7);
  return SHUFFLED(FourBits, low, high, 0, 1, 4, 5) + SHUFFLED(FourBits, low, high, 2, 3, 6, 7);
}

// The sums of G vectors.
template <int64_t G>
inline void sums(float* to, const Vec* wide) {
  static_assert(G <= 4);
  if constexpr (G > 2) {
    const Four four = sums(wide[0], wide[1], wide[2], wide[G - 1]);
    each<G>([&](auto g) { to[g] = four[int64_t{g}]; });
  } else {
    each<G>([&](auto g) { to[g] = sum(wide[g]); });
  }
}

#ifdef __AVX512F__
// The sums of four times four vectors, in their order; each as above, to the bit.
inline Vec sums(const Vec (&wide)[4][4]) {
#define NEXT(at) at, at + 1, at + 2, at + 3
  Vec quarters[4], pairs[2];
  each<4>([&](auto r) {
    Vec halves[2];
    each<2>([&](auto i) {
      const Vec a = wide[2 * i][r], b = wide[2 * i + 1][r];
      halves[i] = SHUFFLED(Bits, a, b, NEXT(0), NEXT(4), NEXT(16), NEXT(20)) +
                  SHUFFLED(Bits, a, b, NEXT(8), NEXT(12), NEXT(24), NEXT(28));
    });
    quarters[r] = SHUFFLED(Bits, halves[0], halves[1], NEXT(0), NEXT(8), NEXT(16), NEXT(24)) +
                  SHUFFLED(Bits, halves[0], halves[1], NEXT(4), NEXT(12), NEXT(20), NEXT(28));
  });
#undef NEXT
#define IN_FOURS(a, b, c, d) \
  a, b, c, d, a + 4, b + 4, c + 4, d + 4, a + 8, b + 8, c + 8, d + 8, a + 12, b + 12, c + 12, d + 12
  each<2>([&](auto i) {
    const Vec a = quarters[2 * i], b = quarters[2 * i + 1];
    pairs[i] = SHUFFLED(Bits, a, b, IN_FOURS(0, 16, 1, 17)) +
               SHUFFLED(Bits, a, b, IN_FOURS(2, 18, 3, 19));
  });
  return SHUFFLED(Bits, pairs[0], pairs[1], IN_FOURS(0, 1, 16, 17)) +
         SHUFFLED(Bits, pairs[0], pairs[1], IN_FOURS(2, 3, 18, 19));
#undef IN_FOURS
}
#endif

// The sums of sixteen vectors.
inline void sums(float* to, const Vec* wide) {
#ifdef __AVX512F__
  Vec all[4][4];
  std::memcpy(all, wide, sizeof all);
  const Vec totals = sums(all);
  std::memcpy(to, &totals, sizeof totals);
#else
  for (int64_t at = 0; at < 16; at += 4) sums<4>(to + at, wide + at);
#endif
}

// Factors that normalise G rows with these sums of squares: one over the root of the mean square.
template <int64_t G>
inline Four scales(const Vec* squares, float eps, int64_t hidden) {
  float mean[4] = {};
  sums<G>(mean, squares);
  for (float& one : mean) one = 1 / std::sqrt(one / hidden + eps);  // four at once
  Four factors;
  std::memcpy(&factors, mean, sizeof factors);
  return factors;
}

// e to the power of each element, of those up to 0.  Where that is below 2^-126 it is 0, because
// every product of such a number takes a hundred times as long.  As Cephes has it: within two units
// in the last place.
inline Vec exponential(Vec x) {
  const Vec round = Vec{} + 0x1.8p23f;  // a sum with it has the bits of the nearest integer
  const Vec shifted = x * 0x1.715476p0f + round, power = shifted - round;
  const Vec rest = (x - power * 0x1.63p-1f) + power * 0x1.bd0106p-13f;  // ln 2 in two parts
  Vec value = Vec{} + 1.9875691500e-4f;
  for (const float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                           5.0000001201e-1f})
    value = value * rest + next;
  value = value * (rest * rest) + rest + 1;
  const Bits two_to = ((Bits)shifted - (Bits)round + 127) << 23;
  return x < -87.33654f ? Vec{} : value * (Vec)two_to;
}

// Memory of a thread that lasts: a site of one token would spend most of its time on allocations.
// A vector that lies across two lines of the cache is read at half the speed.
struct alignas(64) Line {
  float floats[16];
};
enum Use { kQueries, kNormWeight, kMixed, kWeights, kSquares, kStates, kUses };
inline float* scratch(Use use, int64_t size) {
  thread_local std::vector<Line> kept[kUses];
  const size_t lines = (size + 15) / 16;
  if (kept[use].size() < lines) kept[use].resize(lines);
  return kept[use].data()->floats;
}

// Rows of float32 lie so far apart that whole steps can be read and written; the rest is zero.
inline int64_t padded(int64_t hidden) { return (hidden + kStep - 1) / kStep * kStep; }

}  // namespace
}  // namespace attnres
