// SPDX-License-Identifier: Apache-2.0
#include "onednn/tile_matmul.h"

#include <omp.h>

#include <algorithm>

#include "onednn/plan.h"
#include "onednn/tiles.h"

namespace amp_ir::onednn {
namespace {

// How many terms are summed at a time: a panel of a's tiles and one of b's fit a cache of 48 KiB.
// Few terms are summed at once, so that the result is written evenly and not at the end.
constexpr int64_t kTerms = 256, kFewTerms = 512;
// A task's block of the result at most: its sums and b's tiles fit a cache of 2 MiB. Blocks become
// smaller for more threads, but not than this.
constexpr int64_t kMostRows = 384, kMostColumns = 768, kLeastExtent = 2 * kPanel;
// Tasks that share one block of the result are at most so many, and each has so many terms. Their
// sums take at most an eighth of the operands' bytes.
constexpr int64_t kMostParts = 16, kTermsOfPart = 1024, kShareOfOperands = 8;

// Smaller products take up to twice oneDNN's time.
constexpr int64_t kLeastTerms = 32, kLeastColumns = 16, kLeastProducts = 1 << 20;

// Beside oneDNN 3.2 on two cores with AMX, shapes with 64 to 30522 rows and columns and 32 to 50176
// terms. With a transposed: half of 457 take 0.64 to 0.89 of the time, 0.60 to 0.83 where they are
// added to what is at `out`; 8 and 4 in 100 take more than 1.05. With both stored row after row it
// is half of the time to as much from these on, and up to twice as much below.
constexpr int64_t kManyTerms = 2048, kManyColumns = 256;

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whether few threads wait for the last tasks.
bool IsBalanced(int64_t tasks, int64_t threads) {
  return tasks >= 8 * threads || 10 * tasks >= 9 * threads * DivideUp(tasks, threads);
}

// A power of two, as numbers of threads mostly are.
int64_t Parts(int64_t rows, int64_t columns, int64_t terms) {
  if (rows > kMostRows || columns > kMostColumns) return 1;
  const int64_t operands = terms * (rows + columns) * static_cast<int64_t>(sizeof(uint16_t));
  const int64_t sums = rows * columns * static_cast<int64_t>(sizeof(float));
  const int64_t most =
      std::min({kMostParts, terms / kTermsOfPart, operands / kShareOfOperands / sums});
  int64_t parts = 1;
  while (2 * parts <= most) parts *= 2;
  return parts;
}

bool HasUnitStride(const StridedTensor& matrix) {
  return matrix.strides[0] == 1 || matrix.strides[1] == 1;
}

}  // namespace

TileMatmul::TileMatmul(const StridedTensor& a, const StridedTensor& b, const StridedTensor& out,
                       int threads)
    : rows_(out.dims[0]),
      columns_(out.dims[1]),
      terms_(b.dims[0]),
      a_has_rows_(a.strides[1] == 1),
      b_has_rows_(b.strides[1] == 1),
      is_low_(IsBfloat16(out.dtype)),
      a_stride_(a.strides[a_has_rows_ ? 0 : 1]),
      b_stride_(b.strides[b_has_rows_ ? 0 : 1]),
      out_stride_(out.strides[0]) {
  const int64_t parts = Parts(rows_, columns_, terms_);
  block_terms_ = terms_ <= kFewTerms ? DivideUp(terms_, kTileTerms) * kTileTerms : kTerms;
  part_terms_ = DivideUp(DivideUp(terms_, parts), block_terms_) * block_terms_;
  parts_ = DivideUp(terms_, part_terms_);
  int64_t down = DivideUp(rows_, kMostRows), across = DivideUp(columns_, kMostColumns);
  while (!IsBalanced(down * across * parts_, threads) && parts_ == 1) {
    const int64_t high = rows_ / down, wide = columns_ / across;
    if (std::max(high, wide) < kLeastExtent) break;
    ++(2 * high > wide ? down : across);
  }
  block_rows_ = DivideUp(DivideUp(rows_, down), kPanel) * kPanel;
  block_columns_ = DivideUp(DivideUp(columns_, across), kPanel) * kPanel;
  threads_ = static_cast<int>(std::min<int64_t>(threads, row_blocks() * column_blocks() * parts_));
}

int64_t TileMatmul::row_blocks() const { return DivideUp(rows_, block_rows_); }
int64_t TileMatmul::column_blocks() const { return DivideUp(columns_, block_columns_); }

#if AMP_IR_HAS_TILES

namespace {

// A panel of the result whose sums are known: some rows and columns from `out` on.
struct Finished {
  const float* sums = nullptr;
  char* out = nullptr;
  int64_t rows = 0, columns = 0;
};

}  // namespace

// One task: a block of the result, summed over some of the terms.
class BlockSum {
 public:
  // Elements of b's tiles, of two panels of a, and floats of two panels of the result.
  static int64_t NumBytes(int64_t columns, int64_t terms) {
    return ((Panels(columns) + 2) * kPanel * terms + kStepElements) *
               static_cast<int64_t>(sizeof(uint16_t)) +
           2 * kPanelFloats * static_cast<int64_t>(sizeof(float));
  }
  static int64_t Panels(int64_t extent) { return DivideUp(extent, kPanel); }

  // `sums`: where the panels of the block are summed.
  AMP_IR_TILES BlockSum(const TileMatmul& m, const uint16_t* a, const uint16_t* b, void* out,
                        Scale scale, int64_t row, int64_t column, float* sums, char* buffers)
      : m_(m),
        a_(a + row * (m.a_has_rows_ ? m.a_stride_ : 1)),
        b_(b + column * (m.b_has_rows_ ? 1 : m.b_stride_)),
        out_(static_cast<char*>(out) + (row * m.out_stride_ + column) * m.out_nbytes()),
        scale_(scale),
        rows_(std::min(m.block_rows_, m.rows_ - row)),
        columns_(std::min(m.block_columns_, m.columns_ - column)),
        sums_(sums),
        right_(reinterpret_cast<uint16_t*>(buffers)),
        left_(right_ + Panels(m.block_columns_) * panel_elements()),
        pairs_(left_ + 2 * panel_elements()),
        two_(reinterpret_cast<float*>(pairs_ + kStepElements)) {}

  // Sums the terms of the part that begins at `first`; writes the result where there is one part.
  AMP_IR_TILES void Run(int64_t first) {
    const int64_t last = std::min(first + m_.part_terms_, m_.terms_);
    for (int64_t term = first; term < last; term += m_.block_terms_) {
      AddTerms(term, last, term == first);
    }
    for (int64_t row = 0; row < kPanel; ++row) Finish(finished_, row);
  }

  // Writes a panel of the result: the sum of all parts.
  AMP_IR_TILES void FinishParts(int64_t panel) {
    const int64_t across = Panels(columns_), panels = Panels(rows_) * across;
    const float* part = sums_ + panel * kPanelFloats;
    AddFloats(part, m_.parts_, panels * kPanelFloats, kPanelFloats, two_);
    const Finished sum = At(panel / across, panel % across, two_);
    for (int64_t row = 0; row < kPanel; ++row) Finish(sum, row);
  }

 private:
  // Sums the terms from `term` on, as many as are summed at a time, of those before `last`.
  AMP_IR_TILES void AddTerms(int64_t term, int64_t last, bool is_first) {
    const int64_t terms = std::min(m_.block_terms_, last - term);
    const bool is_last = term + terms == last && m_.parts_ == 1;
    const int64_t steps = DivideUp(terms, kTileTerms), across = Panels(columns_);
    for (int64_t step = 0; step < steps; ++step) {
      for (int64_t panel = 0; panel < across; ++panel) MakeRight(term, terms, panel, step, steps);
    }
    for (int64_t step = 0; step < steps; ++step) MakeLeft(term, terms, 0, step);
    Following following{b_ + (term + terms) * m_.b_stride_, 0,
                        m_.b_has_rows_ ? std::min(m_.block_terms_, last - term - terms) : 0};
    // A panel's tiles of a are made in equal intervals, while the panel before is multiplied.
    for (int64_t down = 0; down < Panels(rows_); ++down) {
      int64_t calls = 0, made = 0;
      for (int64_t panel = 0; panel < across; ++panel) {
        float* sums = sums_ + (down * across + panel) * kPanelFloats;
        if (is_first && is_last) sums = two_ + (panel + down * across) % 2 * kPanelFloats;
        const Finished before = finished_;
        finished_ = is_last ? At(down, panel, sums) : Finished();
        MultiplyTiles(left_ + down % 2 * panel_elements(), right_ + panel * steps * kStepElements,
                      sums, steps, is_first, [&](int64_t step) AMP_IR_TILES_INLINE {
                        const int64_t from = kPanel * step / steps,
                                      to = kPanel * (step + 1) / steps;
                        for (int64_t row = from; row < to; ++row) {
                          Finish(before, row);
                          Expect(finished_, row);
                        }
                        following.Expect(m_.b_stride_, columns_);
                        if (calls++ % across == 0 && down + 1 < Panels(rows_)) {
                          MakeLeft(term, terms, down + 1, made++);
                        }
                      });
      }
    }
  }

  // The rows of b that are read after these: the memory is asked for them ahead of time.
  struct Following {
    const uint16_t* rows;
    int64_t row, count;
    AMP_IR_TILES_INLINE void Expect(int64_t stride, int64_t columns) {
      if (row == count) return;
      constexpr int64_t kLine = 32;
      for (int64_t i = 0; i < columns; i += kLine) Prefetch(rows + row * stride + i);
      ++row;
    }
  };

  AMP_IR_TILES_INLINE void MakeRight(int64_t term, int64_t terms, int64_t panel, int64_t step,
                                     int64_t steps) {
    const int64_t first = term + step * kTileTerms, count = terms - step * kTileTerms;
    const int64_t column = panel * kPanel;
    uint16_t* tiles = right_ + (panel * steps + step) * kStepElements;
    if (m_.b_has_rows_) {
      PairRows<0>(b_ + first * m_.b_stride_ + column, m_.b_stride_, count, columns_ - column,
                  tiles);
      return;
    }
    CopyRows<0>(b_ + column * m_.b_stride_ + first, m_.b_stride_, columns_ - column, count, pairs_);
    TransposeStep(pairs_, tiles);
  }

  AMP_IR_TILES_INLINE void MakeLeft(int64_t term, int64_t terms, int64_t down, int64_t step) {
    const int64_t first = term + step * kTileTerms, count = terms - step * kTileTerms;
    const int64_t row = down * kPanel;
    uint16_t* tiles = left_ + down % 2 * panel_elements() + step * kStepElements;
    if (m_.a_has_rows_) {
      CopyRows<kPanel>(a_ + row * m_.a_stride_ + first, m_.a_stride_, rows_ - row, count, tiles);
      return;
    }
    PairRows<2 * kPanel>(a_ + first * m_.a_stride_ + row, m_.a_stride_, count, rows_ - row, pairs_);
    TransposeStep(pairs_, tiles);
  }

  AMP_IR_TILES_INLINE Finished At(int64_t down, int64_t panel, const float* sums) const {
    return {sums, out_ + (down * kPanel * m_.out_stride_ + panel * kPanel) * m_.out_nbytes(),
            std::min(kPanel, rows_ - down * kPanel), std::min(kPanel, columns_ - panel * kPanel)};
  }

  AMP_IR_TILES_INLINE void Finish(const Finished& one, int64_t row) const {
    if (row >= one.rows) return;
    char* out = one.out + row * m_.out_stride_ * m_.out_nbytes();
    if (m_.is_low_) {
      WriteRow(one.sums, row, reinterpret_cast<uint16_t*>(out), one.columns);
    } else {
      WriteRow(one.sums, row, scale_, reinterpret_cast<float*>(out), one.columns);
    }
  }

  AMP_IR_TILES_INLINE void Expect(const Finished& one, int64_t row) const {
    if (row >= one.rows) return;
    const char* out = one.out + row * m_.out_stride_ * m_.out_nbytes();
    PrefetchToWrite(out);
    PrefetchToWrite(out + (one.columns - 1) * m_.out_nbytes());
  }

  int64_t panel_elements() const { return kPanel * m_.block_terms_; }

  const TileMatmul& m_;
  const uint16_t *a_, *b_;
  char* out_;
  Scale scale_;
  int64_t rows_, columns_;
  float* sums_;
  uint16_t *right_, *left_, *pairs_;
  float* two_;
  Finished finished_;
};

bool TileMatmul::IsFor(const StridedTensor& a, const StridedTensor& b, const StridedTensor& out) {
  const bool is_low = IsBfloat16(a.dtype) && IsBfloat16(b.dtype) &&
                      (IsFloat(out.dtype, 32) || IsBfloat16(out.dtype));
  const bool is_large = b.dims[0] >= kLeastTerms && out.numel() * b.dims[0] >= kLeastProducts &&
                        std::min(out.dims[0], out.dims[1]) >= kLeastColumns;
  // oneDNN says so only after the system has let this process use tiles.
  return out.rank == 2 && is_low && is_large && out.strides[1] == 1 && HasUnitStride(a) &&
         HasUnitStride(b) && HasIsa(dnnl::cpu_isa::avx512_core_amx);
}

bool TileMatmul::IsFaster(const StridedTensor& a, const StridedTensor& b,
                          const StridedTensor& out) {
  if (!IsFor(a, b, out) || b.strides[1] != 1) return false;
  return a.strides[0] == 1 || (b.dims[0] >= kManyTerms && out.dims[1] >= kManyColumns);
}

int64_t TileMatmul::sums_nbytes() const {
  return BlockSum::Panels(block_rows_) * BlockSum::Panels(block_columns_) * kPanelFloats *
         static_cast<int64_t>(sizeof(float));
}

int64_t TileMatmul::thread_nbytes() const {
  const bool keeps_sums = parts_ == 1 && terms_ > block_terms_;
  return BlockSum::NumBytes(block_columns_, block_terms_) + (keeps_sums ? sums_nbytes() : 0);
}

int64_t TileMatmul::workspace_nbytes() const {
  return threads_ * thread_nbytes() + (parts_ == 1 ? 0 : parts_ * sums_nbytes());
}

AMP_IR_TILES void TileMatmul::Run(const uint16_t* a, const uint16_t* b, void* out, float alpha,
                                  float beta, char* workspace) const {
  const int64_t down = row_blocks(), tasks = down * column_blocks() * parts_;
  char* shared = workspace + threads_ * thread_nbytes();
  const Scale scale{alpha, beta};
#pragma omp parallel num_threads(threads_)
  {
    char* own = workspace + omp_get_thread_num() * thread_nbytes();
    char* own_sums = own + BlockSum::NumBytes(block_columns_, block_terms_);
    const TilesInUse tiles;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t part = task % parts_, block = task / parts_;
      char* sums = parts_ == 1 ? own_sums : shared + part * sums_nbytes();
      BlockSum(*this, a, b, out, scale, block % down * block_rows_, block / down * block_columns_,
               reinterpret_cast<float*>(sums), own)
          .Run(part * part_terms_);
    }
    if (parts_ > 1) {
      const int64_t panels = BlockSum::Panels(rows_) * BlockSum::Panels(columns_);
#pragma omp for
      for (int64_t panel = 0; panel < panels; ++panel) {
        BlockSum(*this, a, b, out, scale, 0, 0, reinterpret_cast<float*>(shared), own)
            .FinishParts(panel);
      }
    }
  }
}

bool AddTileMatmul(const TileOperands& operands, const ScaledSum& sum, Plan* plan) {
  const auto& [a, b, out] = operands;
  const bool is_for = TileMatmul::IsFor(a.view, b.view, out.view);
  if (!is_for || (sum.is_on && !IsFloat(out.view.dtype, 32))) return false;
  const TileMatmul matmul(a.view, b.view, out.view, omp_get_max_threads());
  std::vector<Plan::Id> args{a.id, b.id, out.id, plan->AddWorkspace(matmul.workspace_nbytes())};
  const bool has_factor = sum.factor >= 0, has_total = sum.total >= 0;
  if (has_factor) args.push_back(sum.factor);
  if (has_total) args.push_back(sum.total);
  plan->AddCall(
      [matmul, has_factor, has_total, sums = sum.is_on](const std::vector<void*>& given) {
        const float factor = has_factor ? *static_cast<const float*>(given[4]) : 1.F;
        const float total = has_total ? *static_cast<const float*>(given.back()) : 1.F;
        matmul.Run(static_cast<const uint16_t*>(given[0]), static_cast<const uint16_t*>(given[1]),
                   given[2], total * factor, sums ? total : 0.F, static_cast<char*>(given[3]));
      },
      args);
  plan->AddNote("matmul tiles");
  return true;
}

#else

bool AddTileMatmul(const TileOperands&, const ScaledSum&, Plan*) { return false; }
bool TileMatmul::IsFor(const StridedTensor&, const StridedTensor&, const StridedTensor&) {
  return false;
}
bool TileMatmul::IsFaster(const StridedTensor&, const StridedTensor&, const StridedTensor&) {
  return false;
}
int64_t TileMatmul::workspace_nbytes() const { return 0; }
void TileMatmul::Run(const uint16_t*, const uint16_t*, void*, float, float, char*) const {}

#endif

}  // namespace amp_ir::onednn
