// The kernels of each dtype, which are loaded after the operators.

#pragma once

#include "tensors.h"

namespace attnres {
namespace {

constexpr int64_t kTables = 32;  // numbers of dtypes that are looked at
const Kernels* tables[kTables] = {};

const Kernels& kernels(ScalarType dtype) {
  const auto number = static_cast<int64_t>(dtype);
  const Kernels* table = number < kTables ? tables[number] : nullptr;
  STD_TORCH_CHECK(
      table, "the C++ backend takes float32, float16 and bfloat16, those of them that it was "
             "prepared for");
  return *table;
}

// The answer of one site among those of its group.
Ahead answered(const State& state, const void* answers, const float* log_sums, int64_t position) {
  Ahead known;
  known.answer =
      static_cast<const char*>(answers) + position * state.tokens * state.hidden * state.size;
  known.log_sum = log_sums + position * state.tokens;
  return known;
}

}  // namespace
}  // namespace attnres

// Has operators use the kernels of a dtype.
extern "C" void attnres_serve_use(int64_t dtype, const void* kernels) {
  attnres::tables[dtype] = static_cast<const attnres::Kernels*>(kernels);
}
