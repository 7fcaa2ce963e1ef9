// The single pass for graphs that are compiled; see direct.py.  It holds Python's lock, as the loops
// of inductor do.  Python.h stands before every other header.

#pragma once

#include "one_site.h"

#ifdef PY_VERSION_HEX
namespace {

void* (*data_of)(PyObject*) = nullptr;  // of a tensor, by torch

int64_t bits(int64_t from, int at, int count) { return (from >> at) & ((int64_t{1} << count) - 1); }

PyObject* single_pass_direct(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 10) {
    PyErr_SetString(PyExc_TypeError, "single_pass takes six tensors and four numbers");
    return nullptr;
  }
  int64_t numbers[4];
  for (int i = 0; i < 4; ++i) {
    numbers[i] = PyLong_AsLongLong(given[6 + i]);
    if (numbers[i] == -1 && PyErr_Occurred()) return nullptr;
  }
  const auto [tokens, layout, place, eps] = numbers;
  const auto dtype = static_cast<ScalarType>(bits(layout, 48, 8));
  const auto norm_dtype = static_cast<ScalarType>(bits(layout, 56, 7));
  const int64_t size = dtype == ScalarType::Float ? 4 : 2;
  try {
    const State state(
        dtype, size, tokens, bits(layout, 0, 32), bits(layout, 32, 16), data_of(given[0]),
        data_of(given[1]));
    const auto floats = [&](int i) { return static_cast<const float*>(data_of(given[i])); };
    const float* bias = given[4] == Py_None ? nullptr : floats(4);
    attend(
        state, 0, {}, Numbers(place, eps),
        {floats(2), floats(3), bias, NormWeight(data_of(given[5]), norm_dtype)});
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "single_pass ended by an unknown exception");
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef single_pass_method = {
    "single_pass", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&single_pass_direct)),
    METH_FASTCALL, nullptr};

}  // namespace

extern "C" PyObject* attnres_serve_direct(void* torchs_data_of) {
  data_of = reinterpret_cast<void* (*)(PyObject*)>(torchs_data_of);
  return PyCFunction_New(&single_pass_method, nullptr);
}
#endif
