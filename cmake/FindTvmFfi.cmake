# SPDX-License-Identifier: Apache-2.0
# tvm_ffi::header and tvm_ffi::shared, of the Python that builds the package.
#
# The interpreter is asked, never a system path: headers and libtvm_ffi.so must be those that the
# package will meet at run time.
find_package(Python COMPONENTS Interpreter REQUIRED)
execute_process(
  COMMAND "${Python_EXECUTABLE}" -m tvm_ffi.config --cmakedir
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE tvm_ffi_ROOT RESULT_VARIABLE tvm_ffi_failed)
if(tvm_ffi_failed)
  message(FATAL_ERROR "${Python_EXECUTABLE} has no tvm_ffi: pip install apache-tvm-ffi, or pass "
                      "-DPython_EXECUTABLE=<the environment's python>")
endif()
find_package(tvm_ffi CONFIG REQUIRED)
