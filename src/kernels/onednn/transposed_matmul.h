// SPDX-License-Identifier: Apache-2.0
// The product of a transposed matrix and another in bfloat16, the gradient of a weight, on AMX.
#ifndef AMP_IR_KERNELS_TRANSPOSED_MATMUL_H_
#define AMP_IR_KERNELS_TRANSPOSED_MATMUL_H_

#include <cstdint>

#include "onednn/plan.h"
#include "tensors/strided_tensor.h"

namespace amp_ir::onednn {

// out [m, n] = beta * out + alpha * (a [m, k] @ b [k, n]), with a stored column after column, b and
// out row after row: sums run over the rows of two matrices as they are stored.
//
// AMX multiplies tiles of 16 rows by 32 terms and of 16 pairs of terms by 16 columns; oneDNN 3.2
// spends as long on making such tiles of a transposed matrix as on multiplying them. Here a block
// of the result is summed over 256 terms at a time. Those of b become tiles that stay in the cache
// of the second level; those of 32 rows of a are made while the tiles of the 32 rows before are
// multiplied, as are finished parts of the result written: the tile unit and the vector unit work
// at the same time (the panels of Goto and van de Geijn, "Anatomy of High-Performance Matrix
// Multiplication", 2008).
//
// Sums are float32's. Their order depends on the shapes alone, so results do not depend on the
// number of threads.
class TransposedMatmul {
 public:
  // Whether this CPU and build multiply these, and faster than oneDNN 3.2.
  static bool IsFaster(const StridedTensor& a, const StridedTensor& b, const StridedTensor& out);

  TransposedMatmul(const StridedTensor& a, const StridedTensor& b, const StridedTensor& out,
                   int threads);
  int64_t workspace_nbytes() const;
  // `workspace` is aligned to 64 bytes. With a `beta` of 0 what is at `out` is not read.
  void Run(const uint16_t* a, const uint16_t* b, float* out, float alpha, float beta,
           char* workspace) const;

 private:
  friend class BlockSum;

  int64_t sums_nbytes() const;
  int64_t thread_nbytes() const;
  int64_t row_blocks() const;
  int64_t column_blocks() const;

  int64_t rows_, columns_, terms_;            // m, n, k
  int64_t a_stride_, b_stride_, out_stride_;  // elements from a row as it is stored to the next
  int64_t block_rows_, block_columns_;        // of a task
  int64_t block_terms_;
  int64_t parts_, part_terms_;  // tasks that share a block, and the terms of each
  int threads_;
};

struct TransposedOperands {
  struct Operand {
    const StridedTensor& view;
    Plan::Id id;
  };
  Operand a, b, out;
};

// out = total * (out + factor * product), where `factor` and `total` are float32 arguments or -1,
// for 1; or the product alone.
struct ScaledSum {
  bool is_on = false;
  Plan::Id factor = -1, total = -1;
};

// Adds the product to a plan; false where it is not for that.
bool AddTransposedMatmul(const TransposedOperands& operands, const ScaledSum& sum, Plan* plan);

}  // namespace amp_ir::onednn

#endif  // AMP_IR_KERNELS_TRANSPOSED_MATMUL_H_
