// SPDX-License-Identifier: Apache-2.0
// Matmuls in bfloat16 on AMX by a kernel of ours.
#ifndef AMP_IR_KERNELS_TILE_MATMUL_H_
#define AMP_IR_KERNELS_TILE_MATMUL_H_

#include <cstdint>
#include <optional>

#include "onednn/block_sum.h"
#include "onednn/plan.h"
#include "tensors/strided_tensor.h"

namespace amp_ir::onednn {

// out [m, n] = beta * out + alpha * (a [m, k] @ b [k, n]) + bias [n]; out is stored row after row,
// in float32 or bfloat16, a and b row after row or column after column.
//
// AMX multiplies tiles of 16 rows by 32 terms and of 16 pairs of terms by 16 columns; oneDNN 3.2
// spends as long on making such tiles of a transposed matrix as on multiplying them. Here a block
// of the result is summed over some terms at a time. Its tiles of b stay in the cache of the second
// level. Those of a are made 32 rows at a time while those before are multiplied, as are finished
// parts of the result written: the tile unit and the vector unit work at the same time (the panels
// of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).
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
  // `workspace` is aligned to 64 bytes. `bias` has a number for each column and 0 up to a multiple
  // of 32, or is null. With a `beta` of 0 what is at `out` is not read; in bfloat16 alpha is 1 and
  // beta 0.
  void Run(const uint16_t* a, const uint16_t* b, const float* bias, void* out, float alpha,
           float beta, char* workspace) const;

 private:
  int64_t row_blocks() const { return DivideUp(shape_.rows, shape_.block_rows); }
  int64_t column_blocks() const { return DivideUp(shape_.columns, shape_.block_columns); }
  int64_t part_nbytes() const;

  BlockShape shape_;
  int threads_;
};

struct TileOperands {
  struct Operand {
    const StridedTensor& view;
    Plan::Id id;
  };
  Operand a, b, out;
  std::optional<Operand> bias = std::nullopt;
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
