// SPDX-License-Identifier: Apache-2.0
// Custom ops in C++ for tests: cube of a tensor and its gradient.
#include <torch/library.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>

namespace {

at::Tensor Cube(const at::Tensor& x) { return at::mul(at::mul(x, x), x); }

at::Tensor CubeBackward(const at::Tensor& grad, const at::Tensor& x) { return at::mul(at::mul(grad, at::mul(x, x)), 3); }

at::Tensor CubeMeta(const at::Tensor& x) { return at::empty_like(x); }

at::Tensor CubeBackwardMeta(const at::Tensor& grad, const at::Tensor& x) {
  return at::empty_like(x);
}

}  // namespace

TORCH_LIBRARY(amp_ir_test_cpp, m) {
  m.def("cube(Tensor x) -> Tensor");
  m.def("cube_backward(Tensor grad, Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(amp_ir_test_cpp, CPU, m) {
  m.impl("cube", Cube);
  m.impl("cube_backward", CubeBackward);
}

TORCH_LIBRARY_IMPL(amp_ir_test_cpp, Meta, m) {
  m.impl("cube", CubeMeta);
  m.impl("cube_backward", CubeBackwardMeta);
}
