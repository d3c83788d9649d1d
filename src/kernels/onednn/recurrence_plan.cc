// SPDX-License-Identifier: Apache-2.0
#include "onednn/recurrence_plan.h"

#include <omp.h>

#include "onednn/plan.h"

namespace amp_ir::onednn {
namespace {

constexpr DLDataType kFloat32{kDLFloat, 32, 1};
constexpr size_t kAlignment = 64;  // bytes: a cache line, and an avx512 register

// A slice of the hidden state's columns has a multiple of so many, a cache line of a low dtype; a
// block of samples at least so many. Less is not worth another thread.
constexpr int64_t kColumnUnit = 32, kLeastRows = 16;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

size_t Align(size_t nbytes) { return (nbytes + kAlignment - 1) / kAlignment * kAlignment; }

// While it lives, what oneDNN makes is made for one thread.
class OneThread {
 public:
  OneThread() : threads_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(threads_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int threads_;
};

}  // namespace

Form::Form(const ProductShape& shape, DLDataType dtype, int64_t rows, int64_t columns,
           const dnnl::memory::desc* layout) {
  using dnnl::memory;
  const memory::data_type low = DataType(dtype);
  const int64_t terms = shape.terms(), batch = shape.batch(), hidden = shape.hidden;
  const memory::dims strides = shape.is_backward ? memory::dims{terms * hidden, hidden, 1}
                                                 : memory::dims{hidden * hidden, 1, hidden};
  const memory::dims dims{batch, terms, columns};
  operand = memory::desc({1, rows, terms}, low, memory::dims{rows * terms, terms, 1});
  weight = memory::desc(dims, low, strides);
  product = memory::desc({batch, rows, columns}, memory::data_type::f32,
                         memory::dims{rows * columns, columns, 1});
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  const memory::desc any(dims, low, memory::format_tag::any);
  const dnnl::matmul::primitive_desc of_matmul(CpuEngine(), operand,
                                               layout == nullptr ? any : *layout, product, attr);
  packed = of_matmul.weights_desc();
  const dnnl::reorder::primitive_desc of_pack(CpuEngine(), weight, CpuEngine(), packed, attr);
  multiply = dnnl::matmul(of_matmul);
  pack = dnnl::reorder(of_pack);
  multiply_workspace = of_matmul.scratchpad_desc();
  pack_workspace = of_pack.scratchpad_desc();
  implementation = of_matmul.impl_info_str();
}

RecurrencePlan::RecurrencePlan(const ProductShape& shape)
    : shape_(shape), compute_(IsNative(shape.dtype) ? shape.dtype : kFloat32) {
  const int64_t threads = omp_get_max_threads();
  const OneThread one_thread;
  const int64_t slices = std::min(threads, CeilDiv(shape.hidden, kColumnUnit));
  const int64_t width = CeilDiv(CeilDiv(shape.hidden, slices), kColumnUnit) * kColumnUnit;
  const int64_t blocks = std::max<int64_t>(1, std::min(threads / slices, shape.rows / kLeastRows));
  const int64_t height = CeilDiv(shape.rows, blocks);
  for (int64_t column = 0; column < shape.hidden; column += width) {
    AddSlice(column, std::min(width, shape.hidden - column), height);
  }
  if (is_widened()) {
    weight_offset_ = Take(sizeof(float) * shape.gates * shape.hidden * shape.hidden);
    for (size_t& offset : operand_offsets_) {
      offset = Take(sizeof(float) * shape.rows * shape.terms());
    }
  }
  if (shape.is_carried) carried_offset_ = Take(sizeof(float) * shape.rows * shape.hidden);
}

std::string RecurrencePlan::implementation() const {
  return std::string("recurrence") + (is_widened() ? " widen+" : " ") + "pack+matmul " +
         forms_.begin()->second->implementation;
}

size_t RecurrencePlan::Take(size_t nbytes) {
  const size_t offset = workspace_nbytes_;
  workspace_nbytes_ += Align(nbytes);
  return offset;
}

void RecurrencePlan::AddSlice(int64_t column, int64_t columns, int64_t height) {
  size_t packed_offset = 0;
  const dnnl::memory::desc* layout = nullptr;
  for (int64_t row = 0; row < shape_.rows; row += height) {
    const int64_t rows = std::min(height, shape_.rows - row);
    std::unique_ptr<Form>& form = forms_[{rows, columns}];
    if (form == nullptr) form = std::make_unique<Form>(shape_, compute_, rows, columns, layout);
    if (layout == nullptr) {
      layout = &form->packed;
      packed_offset = Take(layout->get_size());
    }
    tasks_.push_back({row, rows, column, columns, packed_offset, Take(form->product.get_size()),
                      Take(form->workspace_nbytes())});
  }
}

}  // namespace amp_ir::onednn
