// Depth attention on CPU: one pass over memory per site, tokens shared out over torch's threads.
// The operators and their arguments are described in interface.py.

#if __has_include(<Python.h>)
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#endif

#include <torch/csrc/stable/library.h>

#include "direct.h"
#include "experts.h"
#include "recurrence.h"

namespace {

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
  "int slot, int eps, Tensor query, Tensor key_norm, Tensor? bias, Tensor norm_weight) -> ()"

STABLE_TORCH_LIBRARY(attnres_serve, library) {
  library.def("cpp_single_pass(" STATE SITE);
  library.def(
      "cpp_phase_1(" STATE "Tensor(c!) answers, Tensor(d!) log_sums, int slot, int eps, "
      "bool completes, Tensor[] queries, Tensor[] key_norms, Tensor? bias, Tensor norm_weight) "
      "-> ()");
  library.def(
      "cpp_phase_2(" STATE "Tensor answers, Tensor log_sums, int position, int first, " SITE);
  library.def("cpp_add_to_row(Tensor delta, Tensor(a!) bank, int row) -> ()");
  library.def(
      "cpp_recurrence(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor? beta, Tensor(a!) state, "
      "Tensor slots, Tensor starts, Tensor has_history, float scale, Tensor(b!) out) -> ()");
  library.def(
      "cpp_situ_experts(Tensor x, Tensor gate_up, Tensor down, Tensor shares, Tensor ids, "
      "float beta, float clip, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(attnres_serve, CPU, library) {
  library.impl("cpp_single_pass", TORCH_BOX(&single_pass));
  library.impl("cpp_phase_1", TORCH_BOX(&phase_1));
  library.impl("cpp_phase_2", TORCH_BOX(&phase_2));
  library.impl("cpp_add_to_row", TORCH_BOX(&add_to_row));
  library.impl("cpp_recurrence", TORCH_BOX(&recurrence));
  library.impl("cpp_situ_experts", TORCH_BOX(&situ_experts));
}
