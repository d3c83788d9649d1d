# SPDX-License-Identifier: Apache-2.0
# add_amp_ir_library(<name> <source>...): one shared library libamp_ir_<name> beside the package.
function(add_amp_ir_library name)
  set(target amp_ir_${name})
  add_library(${target} SHARED ${ARGN})
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/include"
                             "${PROJECT_SOURCE_DIR}/src/kernels")
  target_compile_options(${target} PRIVATE -Wall -Wextra)
  target_link_libraries(${target} PRIVATE tvm_ffi::header tvm_ffi::shared ${CMAKE_DL_LIBS})
  # No run path: libtvm_ffi, libgomp and libdnnl are already loaded (host/native.py sees to it) and are
  # found by their SONAME, so that the process holds one copy of each.
  set_target_properties(${target} PROPERTIES
    LIBRARY_OUTPUT_DIRECTORY "${AMP_IR_LIBRARY_DIR}"
    SKIP_BUILD_RPATH TRUE)
endfunction()
