# SPDX-License-Identifier: Apache-2.0
# DNNL::dnnl where oneDNN 3 is installed; nothing where it is not: the library is optional.
#
# The wheels onednn-cpu-gomp and onednn-devel-cpu-gomp put headers and CMake files into the
# interpreter's prefix, so that is looked at first. With build isolation, pip installs the build
# requirements elsewhere and names them in PYTHONPATH; `site` then does not list them, `sys.path` does.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
          "import pathlib, sys, sysconfig
site = [str(pathlib.Path(p).parents[2]) for p in sys.path if p.endswith('-packages')]
print(';'.join([sysconfig.get_path('data'), *site]))"
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE amp_ir_python_prefixes)
list(PREPEND CMAKE_PREFIX_PATH ${amp_ir_python_prefixes})
find_package(dnnl 3 CONFIG QUIET)
