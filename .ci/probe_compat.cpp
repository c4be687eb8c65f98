// Linked into the ready-made probes only: what the compiler's newer libraries would be asked for, so
// that a binary loads wherever PyTorch's own (manylinux_2_28) do. Nothing of it is seen from outside.

#include <cstddef>
#include <new>
#include <sstream>

// GLIBCXX_3.4.26: the constructor became part of the library; here it is instantiated.
template std::ostringstream::basic_ostringstream();
#if __cplusplus >= 202002L
template std::string std::stringbuf::str() &&; // GLIBCXX_3.4.29
#endif

namespace compat {

// GLIBC_2.32: 0 stands for "there may be threads".
extern "C" __attribute__((visibility("hidden"))) char single_threaded asm("__libc_single_threaded");
char single_threaded = 0;

// GLIBCXX_3.4.29
[[noreturn]] __attribute__((visibility("hidden"))) void throw_bad_array_new_length() asm(
    "_ZSt28__throw_bad_array_new_lengthv");
void throw_bad_array_new_length() { throw std::bad_alloc(); }

// CXXABI_1.3.13: before, the destructor did it.
void destroy_exception_pointer(void** pointer) asm("_ZNSt15__exception_ptr13exception_ptrD1Ev");
__attribute__((visibility("hidden"))) void release_exception_pointer(void** pointer) asm(
    "_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void release_exception_pointer(void** pointer) {
  destroy_exception_pointer(pointer);
  *pointer = nullptr;
}

} // namespace compat
