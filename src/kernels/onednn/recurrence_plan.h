// SPDX-License-Identifier: Apache-2.0
// How the products of a recurrent layer are shared among threads, worked out once.
//
// Columns of the hidden state are dealt to threads, and samples where threads are left: then a
// thread reads its own part of the weight alone, step after step out of its core's cache, computes
// the gates of its own states from its own products, and waits for the others once a step. oneDNN's
// primitives for several threads would begin and end a team twice a step and read the weight again.
#ifndef AMP_IR_KERNELS_ONEDNN_RECURRENCE_PLAN_H_
#define AMP_IR_KERNELS_ONEDNN_RECURRENCE_PLAN_H_

#include <algorithm>
#include <map>
#include <memory>
#include <oneapi/dnnl/dnnl.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tensors/strided_tensor.h"

namespace amp_ir::onednn {

// out [gates, n, h] = state [n, h] @ weight [gates * h, h]^T for each gate, or, backward,
// out [1, n, h] = grad [n, gates * h] @ weight.
struct ProductShape {
  int64_t rows, hidden, gates;
  bool is_backward;
  bool is_carried;  // whether the layer needs float32[n, h] between steps
  DLDataType dtype;

  int64_t terms() const { return is_backward ? gates * hidden : hidden; }
  int64_t batch() const { return is_backward ? 1 : gates; }
};

// The part of each step's work that one thread does: rows and columns of the hidden state. Between
// steps it needs nothing of the others but the operand of its product.
struct Task {
  int64_t row, rows, column, columns;
  // Bytes from the start of the workspace. Tasks on the same columns share the packed weight.
  size_t packed_offset, product_offset, workspace_offset;
};

// How a task of these extents computes its product, on one thread.
struct Form {
  // `layout`: how the weight is packed, if other tasks have that already.
  Form(const ProductShape& shape, DLDataType dtype, int64_t rows, int64_t columns,
       const dnnl::memory::desc* layout);
  size_t workspace_nbytes() const {
    return std::max(multiply_workspace.get_size(), pack_workspace.get_size());
  }

  dnnl::memory::desc operand, weight, packed, product, multiply_workspace, pack_workspace;
  dnnl::matmul multiply;
  dnnl::reorder pack;
  std::string implementation;
};

// The tasks of a layer's products and where in workspace each has its own. Immutable.
class RecurrencePlan {
 public:
  // For as many threads as OpenMP would use now.
  explicit RecurrencePlan(const ProductShape& shape);

  const ProductShape& shape() const { return shape_; }
  const std::vector<Task>& tasks() const { return tasks_; }
  const Form& FormOf(const Task& task) const { return *forms_.at({task.rows, task.columns}); }
  size_t workspace_nbytes() const { return workspace_nbytes_; }
  DLDataType compute_dtype() const { return compute_; }
  bool is_widened() const { return !SameDtype(compute_, shape_.dtype); }
  // Float32 copies of the weight and, in turns, of a step's operand, if it is widened.
  size_t weight_offset() const { return weight_offset_; }
  size_t operand_offset(int64_t step) const { return operand_offsets_[step % 2]; }
  // float32[n, h], if the layer needs it.
  size_t carried_offset() const { return carried_offset_; }
  std::string implementation() const;

 private:
  size_t Take(size_t nbytes);
  void AddSlice(int64_t column, int64_t columns, int64_t height);

  ProductShape shape_;
  DLDataType compute_;
  std::vector<Task> tasks_;
  std::map<std::pair<int64_t, int64_t>, std::unique_ptr<Form>> forms_;
  size_t workspace_nbytes_ = 0, weight_offset_ = 0, carried_offset_ = 0;
  size_t operand_offsets_[2] = {0, 0};
};

}  // namespace amp_ir::onednn

#endif  // AMP_IR_KERNELS_ONEDNN_RECURRENCE_PLAN_H_
