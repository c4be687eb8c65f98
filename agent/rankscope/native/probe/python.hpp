// The part of Python's C API that the probe calls, declared by hand: one binary then serves every
// Python from 3.11 on, and none of its headers is needed to compile it.
//
// All of it is exported by each of them, and nearly all belongs to the stable ABI. What does not
// (frames, Vectorcall, PyInstanceMethod_New) has kept its form since 3.11. The layouts are those
// of builds with the interpreter lock; the free-threaded ones have others and are refused before.

#pragma once

#include <cstddef>
#include <cstdint>
#include <sys/types.h>

using Py_ssize_t = ssize_t;
struct PyThreadState; // opaque
struct PyFrameObject;
struct PyCodeObject;
struct PyTypeObject;
enum PyGILState_STATE : int {};

struct _object { // so named in torch's own headers too
  Py_ssize_t references;
  PyTypeObject* type;
};
using PyObject = _object;

using PyCFunction = PyObject* (*)(PyObject*, PyObject*);
struct PyMethodDef {
  const char* name;
  PyCFunction function;
  int flags;
  const char* doc;
};
constexpr int METH_VARARGS = 1, METH_KEYWORDS = 2, METH_NOARGS = 4, METH_O = 8, METH_FASTCALL = 128;

struct PyModuleDef {
  PyObject head{1, nullptr};
  void* init = nullptr;
  Py_ssize_t index = 0;
  PyObject* copy = nullptr;
  const char* name;
  const char* doc;
  Py_ssize_t size;
  PyMethodDef* methods;
  void *slots = nullptr, *traverse = nullptr, *clear = nullptr, *free = nullptr;
};
constexpr int PYTHON_ABI_VERSION = 3; // of the stable ABI

extern "C" {
extern PyObject _Py_NoneStruct, PyType_Type, PyList_Type, PyDict_Type;
extern PyObject *PyExc_OSError, *PyExc_RuntimeError, *PyExc_ValueError;

void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
int Py_IsFinalizing() __attribute__((weak)); // 3.13 and newer
int _Py_IsFinalizing() __attribute__((weak)); // before

PyGILState_STATE PyGILState_Ensure();
void PyGILState_Release(PyGILState_STATE);
PyThreadState* PyGILState_GetThisThreadState();
PyThreadState* PyThreadState_Get();
PyFrameObject* PyThreadState_GetFrame(PyThreadState*);
PyFrameObject* PyFrame_GetBack(PyFrameObject*);
PyCodeObject* PyFrame_GetCode(PyFrameObject*);
int PyFrame_GetLasti(PyFrameObject*);
int PyFrame_GetLineNumber(PyFrameObject*);

int PyArg_ParseTuple(PyObject*, const char*, ...);
PyObject* PyBytes_FromStringAndSize(const char*, Py_ssize_t);
PyObject* PyCMethod_New(PyMethodDef*, PyObject*, PyObject*, PyTypeObject*);
int PyDict_Next(PyObject*, Py_ssize_t*, PyObject**, PyObject**);
PyObject* PyInstanceMethod_New(PyObject*);
PyObject* PyList_GetItem(PyObject*, Py_ssize_t); // borrowed
Py_ssize_t PyList_Size(PyObject*);
long PyLong_AsLong(PyObject*);
PyObject* PyLong_FromLongLong(long long);
PyObject* PyMapping_GetItemString(PyObject*, const char*);
int PyModule_AddStringConstant(PyObject*, const char*, const char*);
PyObject* PyModule_Create2(PyModuleDef*, int);
PyObject* PyObject_CallFunction(PyObject*, const char*, ...);
PyObject* PyObject_GetAttrString(PyObject*, const char*);
int PyObject_IsTrue(PyObject*);
PyObject* PyObject_Vectorcall(PyObject*, PyObject* const*, size_t, PyObject*);
PyObject* PyTuple_GetItem(PyObject*, Py_ssize_t); // borrowed
Py_ssize_t PyTuple_Size(PyObject*);
int PyType_IsSubtype(PyTypeObject*, PyTypeObject*);
const char* PyUnicode_AsUTF8AndSize(PyObject*, Py_ssize_t*);

PyObject* PyErr_Occurred();
void PyErr_Clear();
void PyErr_Fetch(PyObject**, PyObject**, PyObject**);
void PyErr_Restore(PyObject*, PyObject*, PyObject*);
void PyErr_SetString(PyObject*, const char*);
PyObject* PyErr_SetFromErrnoWithFilename(PyObject*, const char*);
}

inline PyObject* none() {
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}

inline Py_ssize_t num_positional(size_t of_a_vectorcall) {
  constexpr size_t ROOM_BEFORE = size_t(1) << (8 * sizeof(size_t) - 1); // a flag of the caller's
  return Py_ssize_t(of_a_vectorcall & ~ROOM_BEFORE);
}

inline bool interpreter_ends() {
  return (Py_IsFinalizing != nullptr ? Py_IsFinalizing() : _Py_IsFinalizing()) != 0;
}

// pybind11's object, as far as the probe reads it; `num_owners` in probe.cpp compares.
struct Instance {
  PyObject head;
  void* simple_value_holder[3]; // the value, then its holder of up to two pointers
  PyObject* weak_references;
  bool owned : 1;
  bool simple_layout : 1;
};
