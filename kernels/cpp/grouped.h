// Rows times the matrices of their groups; what it computes is described in grouped.py.

#pragma once

#include <torch/csrc/stable/ops.h>

#include "vectors.h"

namespace {

constexpr int64_t kBlock = 16;  // rows of a matrix that a thread takes at once

// Products of R rows of a matrix and G vectors in the order of D, to[g][0] to to[g][R - 1].
template <class D, int64_t R, int64_t G>
FLAT void multiply(
    float* const* to, const typename D::Element* const* rows, const float* const* vectors,
    int64_t width) {
  Vec dots[G][R] = {};
  steps(width, [&](int64_t at, int64_t n) {
    Step w[R];
    each<R>([&](auto r) { w[r] = load<D>(rows[r] + at, n); });
    each<G>([&](auto g) {
      Step x = Float32::widen(vectors[g] + at);
      HELD(x.low);
      HELD(x.high);
      each<R>([&](auto r) { dots[g][r] += w[r].low * x.low; });
      each<R>([&](auto r) { dots[g][r] += w[r].high * x.high; });
    });
  });
  each<G>([&](auto g) { sums<R>(to[g], dots[g]); });
}

struct Group {
  int64_t matrix, begin, end;  // and its rows
};

template <class D>
void grouped_linear_of(
    const float* x, const Tensor& weight, const std::vector<Group>& groups, int64_t rows,
    float* out) {
  const int64_t height = weight.size(1), width = weight.size(2), apart = padded(width);
  const auto* matrices = static_cast<const typename D::Element*>(weight.const_data_ptr());
  std::vector<float> vectors(rows * apart);
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kGrain / apart), [&](auto from, auto to) {
    for (int64_t row = from; row < to; ++row)
      steps(width, [&](int64_t at, int64_t n) {
        const Step step = D::arrange(load<Float32>(x + row * width + at, n));
        Float32::narrow(vectors.data() + row * apart + at, step);
      });
  });
  const int64_t blocks = (height + kBlock - 1) / kBlock, items = groups.size() * blocks;
  const int64_t grain = std::max<int64_t>(1, kGrain * groups.size() / (kBlock * width * rows));
  torch::stable::parallel_for(0, items, grain, [&](int64_t from, int64_t to) {
    for (int64_t item = from; item < to; ++item) {
      const Group group = groups[item / blocks];
      const int64_t first = item % blocks * kBlock, last = std::min(first + kBlock, height);
      in_groups<kPair>(last - first, [&](int64_t row, auto pair) {
        constexpr int64_t R = pair;
        const typename D::Element* of_matrix[R];
        for (int64_t r = 0; r < R; ++r)
          of_matrix[r] = matrices + (group.matrix * height + first + row + r) * width;
        in_groups(group.end - group.begin, [&](int64_t at, auto several) {
          constexpr int64_t G = several;
          const float* by[G];
          float* cells[G];
          for (int64_t g = 0; g < G; ++g) {
            by[g] = vectors.data() + (group.begin + at + g) * apart;
            cells[g] = out + (group.begin + at + g) * height + first + row;
          }
          multiply<D, R, G>(cells, of_matrix, by, width);
        });
      });
    }
  });
}

void grouped_linear(Tensor x, Tensor weight, Tensor starts, Tensor out) {
  const int64_t rows = x.size(0);
  STD_TORCH_CHECK(
      x.dim() == 2 && weight.dim() == 3 && out.dim() == 2 && x.size(1) == weight.size(2) &&
          out.size(0) == rows && out.size(1) == weight.size(1) &&
          starts.size(0) == weight.size(0) + 1,
      "the arguments of a grouped product do not fit each other");
  STD_TORCH_CHECK(
      x.scalar_type() == ScalarType::Float && out.scalar_type() == ScalarType::Float &&
          starts.scalar_type() == ScalarType::Long && x.is_contiguous() &&
          weight.is_contiguous() && out.is_contiguous() && starts.is_contiguous(),
      "a grouped product takes contiguous float32 rows and int64 starts");
  const auto* begins = static_cast<const int64_t*>(starts.const_data_ptr());
  std::vector<Group> groups;
  for (int64_t matrix = 0; matrix < weight.size(0); ++matrix) {
    const int64_t begin = begins[matrix], end = begins[matrix + 1];
    STD_TORCH_CHECK(0 <= begin && begin <= end && end <= rows, "a group is outside of the rows");
    if (begin < end) groups.push_back({matrix, begin, end});
  }
  if (groups.empty()) return;
  dispatch(weight.scalar_type(), [&](auto dtype) {
    grouped_linear_of<decltype(dtype)>(
        static_cast<const float*>(x.const_data_ptr()), weight, groups, rows,
        static_cast<float*>(out.data_ptr()));
  });
}

}  // namespace
