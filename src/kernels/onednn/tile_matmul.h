// SPDX-License-Identifier: Apache-2.0
// Matmuls in bfloat16 on AMX by a kernel of ours: first of all gradients of weights.
#ifndef AMP_IR_KERNELS_TILE_MATMUL_H_
#define AMP_IR_KERNELS_TILE_MATMUL_H_

#include <cstdint>

#include "onednn/plan.h"
#include "tensors/strided_tensor.h"

namespace amp_ir::onednn {

// out [m, n] = beta * out + alpha * (a [m, k] @ b [k, n]); out is stored row after row, in float32
// or bfloat16, a and b row after row or column after column.
//
// AMX multiplies tiles of 16 rows by 32 terms and of 16 pairs of terms by 16 columns; oneDNN 3.2
// spends as long on making such tiles of a transposed `a` as on multiplying them. Here a block of
// the result is summed over 256 terms at a time. Those of b become tiles that stay in the cache of
// the second level; those of 32 rows of a are made while the tiles of the 32 rows before are
// multiplied, as are finished parts of the result written: the tile unit and the vector unit work
// at the same time (the panels of Goto and van de Geijn, "Anatomy of High-Performance Matrix
// Multiplication", 2008).
//
// Sums are float32's. Their order depends on the shapes alone, so results do not depend on the
// number of threads.
class TileMatmul {
 public:
  // Whether this CPU and build multiply these, and they are worth tasks of their own.
  static bool IsFor(const StridedTensor& a, const StridedTensor& b, const StridedTensor& out);
  // Whether it is, besides, faster than oneDNN 3.2 with AMX.
  static bool IsFaster(const StridedTensor& a, const StridedTensor& b, const StridedTensor& out);

  TileMatmul(const StridedTensor& a, const StridedTensor& b, const StridedTensor& out, int threads);
  int64_t workspace_nbytes() const;
  // `workspace` is aligned to 64 bytes. With a `beta` of 0 what is at `out` is not read; in
  // bfloat16 alpha is 1 and beta 0.
  void Run(const uint16_t* a, const uint16_t* b, void* out, float alpha, float beta,
           char* workspace) const;

 private:
  friend class BlockSum;

  int64_t sums_nbytes() const;
  int64_t thread_nbytes() const;
  int64_t row_blocks() const;
  int64_t column_blocks() const;
  int64_t out_nbytes() const { return is_low_ ? 2 : 4; }

  int64_t rows_, columns_, terms_;            // m, n, k
  bool a_has_rows_, b_has_rows_;              // or columns, one after the other
  bool is_low_;                               // the result
  int64_t a_stride_, b_stride_, out_stride_;  // elements from one of them to the next
  int64_t block_rows_, block_columns_;        // of a task
  int64_t block_terms_;                       // summed at a time
  int64_t parts_, part_terms_;                // tasks that share a block, and the terms of each
  int threads_;
};

struct TileOperands {
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

// Adds the product to a plan; false where `TileMatmul` is not for it.
bool AddTileMatmul(const TileOperands& operands, const ScaledSum& sum, Plan* plan);

}  // namespace amp_ir::onednn

#endif  // AMP_IR_KERNELS_TILE_MATMUL_H_
