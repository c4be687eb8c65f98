// What a type made in C needs of Python's C API, beside what the probe calls. All of it belongs to
// the stable ABI.

#pragma once

#include "../probe/python.hpp"

struct PyMemberDef {
  const char* name;
  int type;
  Py_ssize_t offset;
  int flags;
  const char* doc;
};
constexpr int T_INT = 1, T_DOUBLE = 4, T_OBJECT = 6, T_ULONG = 12, T_BOOL = 14, T_LONGLONG = 17;

struct PyType_Slot {
  int slot;
  void* function;
};
constexpr int TP_DOC = 56, TP_INIT = 60, TP_METHODS = 64, TP_MEMBERS = 72;

struct PyType_Spec {
  const char* name;
  int basicsize, itemsize;
  unsigned int flags;
  PyType_Slot* slots;
};
constexpr unsigned int TYPE_FLAGS = 1u << 18 | 1u << 10; // the default, and a base of others

struct Py_buffer {
  void* memory;
  PyObject* owner;
  Py_ssize_t length, item_size;
  int readonly, num_dimensions;
  char* format;
  Py_ssize_t *shape, *strides, *suboffsets;
  void* internal;
};
constexpr int WRITABLE = 1;

extern "C" {
extern PyObject* PyExc_TypeError;

int PyObject_GetBuffer(PyObject*, Py_buffer*, int);

PyObject* PyBool_FromLong(long);
PyObject* PyLong_FromLong(long);
long long PyLong_AsLongLong(PyObject*);
int PyModule_AddObjectRef(PyObject*, const char*, PyObject*);
PyObject* Py_BuildValue(const char*, ...);
PyObject* PyType_FromSpec(PyType_Spec*);
}
