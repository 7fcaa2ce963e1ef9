// The operators of the cpp backend, for every dtype: they check their arguments and pass them to
// the kernels of their dtype.  Operators and arguments are described in interface.py.

#if __has_include(<Python.h>)
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#endif

#include <torch/csrc/stable/library.h>

#include "direct.h"
#include "recurrence.h"

namespace attnres {
namespace {

#define SITE_PARAMETERS                                                                    \
  int64_t slot, int64_t eps, Tensor query, Tensor key_norm, std::optional<Tensor> bias,   \
      Tensor norm_weight
#define SITE_ARGUMENTS(hidden) \
  Numbers(slot, eps),          \
      Site(query, key_norm, bias, norm_weight, hidden, Numbers(slot, eps).row + 1)

void single_pass(Tensor x, Tensor bank, SITE_PARAMETERS) {
  const State state(x, bank);
  kernels(state.dtype).attend(state, 0, {}, SITE_ARGUMENTS(state.hidden));
}

// A tensor that was made ahead of a site.
void* made_ahead(
    const Tensor& tensor, std::initializer_list<int64_t> shape,
    ScalarType dtype = ScalarType::Float) {
  bool fits = tensor.dim() == static_cast<int64_t>(shape.size()) && tensor.is_contiguous() &&
              tensor.scalar_type() == dtype;
  int64_t dim = 0;
  for (int64_t size : shape) fits = fits && tensor.size(dim++) == size;
  STD_TORCH_CHECK(fits, "answers must be contiguous and of the bank's size");
  return tensor.data_ptr();
}

void phase_1(
    Tensor x, Tensor bank, Tensor answers, Tensor log_sums, int64_t slot, int64_t eps,
    bool completes, Tensors queries, Tensors key_norms, std::optional<Tensors> biases,
    Tensor norm_weight) {
  const State state(x, bank);
  const Numbers numbers(slot, eps);
  const int64_t hidden = state.hidden, later = queries.size() - 1, row = numbers.row;
  const Keys keys = keys_of(queries, key_norms, biases, hidden, row + 1, row + completes);
  void* answer = made_ahead(answers, {later, state.tokens, hidden}, state.dtype);
  void* log_sum = made_ahead(log_sums, {later, state.tokens});
  kernels(state.dtype).attend_group(
      state, numbers, completes, keys, NormWeight(norm_weight, hidden), answer,
      static_cast<float*>(log_sum));
}

void phase_2(
    Tensor x, Tensor bank, Tensor answers, Tensor log_sums, int64_t position, int64_t first,
    SITE_PARAMETERS) {
  const State state(x, bank);
  const int64_t sites = answers.size(0);
  STD_TORCH_CHECK(position >= 0 && position < sites, "the site is not among those of the answers");
  const void* answer = made_ahead(answers, {sites, state.tokens, state.hidden}, state.dtype);
  const void* log_sum = made_ahead(log_sums, {sites, state.tokens});
  const Ahead known = answered(state, answer, static_cast<const float*>(log_sum), position);
  kernels(state.dtype).attend(state, first, known, SITE_ARGUMENTS(state.hidden));
}

void add_to_row(Tensor delta, Tensor bank, int64_t row) {
  const State state(delta, bank);
  state.check_rows(0, row);
  kernels(state.dtype).add_to_row(state, row);
}

void situ_experts(
    Tensor x, Tensor gate_up, Tensor down, Tensor shares, Tensor ids, double beta, double clip,
    Tensor out) {
  STD_TORCH_CHECK(
      x.dim() == 2 && gate_up.dim() == 3 && down.dim() == 3 && ids.dim() == 2 && out.dim() == 2 &&
          shares.dim() == 2 && down.size(1) == x.size(1) && gate_up.size(2) == x.size(1) &&
          gate_up.size(0) == down.size(0) && gate_up.size(1) == 2 * down.size(2) &&
          ids.size(0) == x.size(0) && shares.size(0) == x.size(0) &&
          shares.size(1) == ids.size(1) && out.size(0) == x.size(0) && out.size(1) == x.size(1),
      "the arguments of experts do not fit each other");
  STD_TORCH_CHECK(
      x.scalar_type() == gate_up.scalar_type() && x.scalar_type() == down.scalar_type() &&
          shares.scalar_type() == ScalarType::Float && out.scalar_type() == ScalarType::Float &&
          ids.scalar_type() == ScalarType::Long,
      "experts take weights of their tokens' type, float32 shares and int64 numbers");
  for (const Tensor& one : {x, gate_up, down, shares, ids, out})
    STD_TORCH_CHECK(one.is_contiguous(), "experts take what is contiguous");
  kernels(x.scalar_type())
      .situ_experts(
          {.x = x.const_data_ptr(), .gate_up = gate_up.const_data_ptr(),
           .down = down.const_data_ptr(),
           .shares = static_cast<const float*>(shares.const_data_ptr()),
           .ids = static_cast<const int64_t*>(ids.const_data_ptr()),
           .out = static_cast<float*>(out.data_ptr()), .tokens = x.size(0), .latent = x.size(1),
           .experts = down.size(0), .width = down.size(2), .top_k = ids.size(1),
           .beta = static_cast<float>(beta), .clip = static_cast<float>(clip)});
}

}  // namespace

#define STATE "Tensor(a!) x, Tensor(b!) bank, "
#define SITE \
  "int slot, int eps, Tensor query, Tensor key_norm, Tensor? bias, Tensor norm_weight) -> ()"

STABLE_TORCH_LIBRARY(attnres_serve, library) {
  library.def("cpp_single_pass(" STATE SITE);
  library.def(
      "cpp_phase_1(" STATE "Tensor(c!) answers, Tensor(d!) log_sums, int slot, int eps, "
      "bool completes, Tensor[] queries, Tensor[] key_norms, Tensor[]? biases, "
      "Tensor norm_weight) -> ()");
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

}  // namespace attnres
