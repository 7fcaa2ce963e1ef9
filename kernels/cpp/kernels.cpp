// The functions of one dtype of activations: DTYPE, a macro on the compiler's command line.

#include "experts.h"
#include "group.h"

namespace attnres {
namespace {

void add_to_row(const State& state, int64_t row) {
  const auto from = state.x_rows<DTYPE>(), to = state.bank_rows<DTYPE>();
  for_tokens(state.tokens, 3 * state.hidden, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token)
      update<DTYPE>(to(token, row), from(token, 0), false, state.hidden);
  });
}

constexpr Kernels kernels = {attend<DTYPE>, attend_group<DTYPE>, add_to_row, situ_experts<DTYPE>};

}  // namespace
}  // namespace attnres

extern "C" const void* attnres_serve_kernels() { return &attnres::kernels; }
