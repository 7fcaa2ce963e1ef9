// Sites for compiled graphs; see direct.py.  They hold Python's lock, as the loops of
// inductor do.  Python.h stands before every other header.

#pragma once

#include "tables.h"

#ifdef PY_VERSION_HEX
namespace attnres {
namespace {

void* (*data_of)(PyObject*) = nullptr;  // of a tensor, by torch

int64_t bits(int64_t from, int at, int count) { return (from >> at) & ((int64_t{1} << count) - 1); }

struct NoNumber {};  // Python has set the error

// Those of a function: the arguments of its operator, the number of tokens and the layout.
struct Arguments {
  PyObject* const* all;
  int64_t tokens, layout;
  Arguments(PyObject* const* all, int64_t count)
      : all(all), tokens(number(count - 2)), layout(number(count - 1)) {}
  int64_t number(int64_t i) const {
    const int64_t value = PyLong_AsLongLong(all[i]);
    if (value == -1 && PyErr_Occurred()) throw NoNumber();
    return value;
  }
  void* data(int64_t i) const { return data_of(all[i]); }
  float* floats(int64_t i) const { return static_cast<float*>(data(i)); }
  const float* bias(int64_t i) const { return all[i] == Py_None ? nullptr : floats(i); }
  State state() const {
    const auto dtype = static_cast<ScalarType>(bits(layout, 48, 8));
    return State(
        dtype, dtype == ScalarType::Float ? 4 : 2, tokens, bits(layout, 0, 32),
        bits(layout, 32, 16), data(0), data(1));
  }
  NormWeight norm_weight(int64_t i) const {
    return NormWeight(data(i), static_cast<ScalarType>(bits(layout, 56, 7)));
  }
  Numbers numbers(int64_t i) const { return Numbers(number(i), number(i + 1)); }
  Site site(int64_t i) const {  // the four tensors from there on
    return {floats(i), floats(i + 1), bias(i + 2), norm_weight(i + 3)};
  }
  // Of a list of queries and, behind it, one of key norms and one of biases or None.
  Keys keys(int64_t i) const {
    const auto of_list = [&](int64_t list, Py_ssize_t at) {
      return static_cast<const float*>(data_of(PyList_GET_ITEM(all[list], at)));
    };
    const bool biased = all[i + 2] != Py_None;
    Keys keys;
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(all[i]); ++at)
      keys.push_back({of_list(i, at), of_list(i + 1, at), biased ? of_list(i + 2, at) : nullptr});
    return keys;
  }
};

template <class F>
PyObject* called(PyObject* const* arguments, Py_ssize_t count, Py_ssize_t expected, const F& body) {
  if (count != expected) {
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, not %zd", expected, count);
    return nullptr;
  }
  try {
    body(Arguments(arguments, count));
  } catch (const NoNumber&) {
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "a site ended by an unknown exception");
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* single_pass_direct(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return called(arguments, count, 10, [](const Arguments& all) {
    const State state = all.state();
    kernels(state.dtype).attend(state, 0, {}, all.numbers(2), all.site(4));
  });
}

PyObject* phase_1_direct(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return called(arguments, count, 13, [](const Arguments& all) {
    const State state = all.state();
    kernels(state.dtype).attend_group(
        state, all.numbers(4), all.number(6), all.keys(7), all.norm_weight(10), all.data(2),
        all.floats(3));
  });
}

PyObject* phase_2_direct(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return called(arguments, count, 14, [](const Arguments& all) {
    const State state = all.state();
    kernels(state.dtype).attend(
        state, all.number(5), answered(state, all.data(2), all.floats(3), all.number(4)),
        all.numbers(6), all.site(8));
  });
}

#define METHOD(name)                                                                            \
  {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&name##_direct)), METH_FASTCALL, \
   nullptr}
PyMethodDef methods[] = {METHOD(single_pass), METHOD(phase_1), METHOD(phase_2)};

}  // namespace
}  // namespace attnres

// The functions above, in this order.
extern "C" PyObject* attnres_serve_direct(void* torchs_data_of) {
  using namespace attnres;
  data_of = reinterpret_cast<void* (*)(PyObject*)>(torchs_data_of);
  PyObject* functions = PyTuple_New(std::size(methods));
  for (size_t i = 0; functions && i < std::size(methods); ++i)
    PyTuple_SET_ITEM(functions, i, PyCFunction_New(&methods[i], nullptr));
  return functions;
}
#endif
