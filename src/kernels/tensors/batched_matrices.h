// SPDX-License-Identifier: Apache-2.0
// A matmul of batches of matrices with as few batch dims as its memory allows.
#ifndef AMP_IR_KERNELS_BATCHED_MATRICES_H_
#define AMP_IR_KERNELS_BATCHED_MATRICES_H_

#include <algorithm>

#include "tensors/strided_tensor.h"

namespace amp_ir {

// Gives `t` the rank of the result; repeated dims (stride 0) become 1 so that they broadcast.
inline StridedTensor AlignBatch(const StridedTensor& t, int rank) {
  StridedTensor wide = t;
  wide.rank = rank;
  const int missing = rank - t.rank;
  for (int i = 0; i < rank; ++i) {
    const bool absent = i < missing || (i < rank - 2 && t.strides[i - missing] == 0);
    wide.dims[i] = absent ? 1 : t.dims[i - missing];
    wide.strides[i] = absent ? 0 : t.strides[i - missing];
  }
  return wide;
}

// A row whose elements have gaps is a column-major matrix of one row: libraries want one stride of
// 1 in a matrix. Requires: strides of WithoutIdleStrides.
inline StridedTensor WithUnitStride(StridedTensor t) {
  if (t.dims[t.rank - 2] == 1 && t.strides[t.rank - 1] != 1) t.strides[t.rank - 2] = 1;
  return t;
}

// Batch dims of one matrix step over the whole of it, in either order of its rows and columns:
// oneDNN chooses by all strides, and takes a matrix that seems to overlap the next for an odd one.
inline StridedTensor WithIdleBatchStrides(StridedTensor t) {
  int64_t span = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    if (i < t.rank - 2 && t.dims[i] == 1) t.strides[i] = span;
    span = std::max(span, t.dims[i] * t.strides[i]);
  }
  return t;
}

// out [batch..., m, n] = a [batch..., m, k] @ b [batch..., k, n], all of one rank; a batch dim of 1
// repeats. The batch dims that can be are joined: those adjacent in memory with each other, and
// the last with m where b does not depend on it ([8, 128, 768] @ [768, 768] is one matmul of 1024
// rows).
struct BatchedMatrices {
  StridedTensor a, b, out;

  BatchedMatrices(const StridedTensor& left, const StridedTensor& right,
                  const StridedTensor& result)
      : a(AlignBatch(left, result.rank)), b(AlignBatch(right, result.rank)), out(result) {
    Join();
    for (StridedTensor* t : {&a, &b, &out}) {
      *t = WithIdleBatchStrides(WithUnitStride(WithoutIdleStrides(*t)));
    }
  }

 private:
  static void RemoveDim(StridedTensor* t, int dim) {
    for (int i = dim; i + 1 < t->rank; ++i) {
      t->dims[i] = t->dims[i + 1];
      t->strides[i] = t->strides[i + 1];
    }
    --t->rank;
  }

  // Whether dim `outer` continues dim `outer + 1` in `t` without a gap.
  static bool Continues(const StridedTensor& t, int outer) {
    return t.strides[outer] == t.strides[outer + 1] * t.dims[outer + 1];
  }

  bool Repeats(const StridedTensor& t, int dim) const {
    return t.dims[dim] == 1 && out.dims[dim] != 1;
  }

  void Join() {
    StridedTensor* all[] = {&a, &b, &out};
    for (int dim = out.rank - 3; dim >= 0; --dim) {
      const bool trivial = out.dims[dim] == 1;
      const bool into_rows = dim == out.rank - 3;
      bool joins = true;
      for (StridedTensor* t : all) {
        if (into_rows && t == &b) {
          joins = joins && t->dims[dim] == 1;
        } else {
          const bool repeats = Repeats(*t, dim);
          const bool inner_repeats = !into_rows && Repeats(*t, dim + 1);
          joins = joins && repeats == inner_repeats && (repeats || Continues(*t, dim));
        }
      }
      if (!trivial && !joins) continue;
      for (StridedTensor* t : all) {
        if (!trivial && !(into_rows && t == &b) && t->dims[dim] != 1) {
          t->dims[dim + 1] *= t->dims[dim];
        }
        RemoveDim(t, dim);
      }
    }
  }
};

}  // namespace amp_ir

#endif  // AMP_IR_KERNELS_BATCHED_MATRICES_H_
