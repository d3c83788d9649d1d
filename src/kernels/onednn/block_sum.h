// SPDX-License-Identifier: Apache-2.0
// One task of a matmul on AMX: a block of the result, summed over some of the terms.
#ifndef AMP_IR_KERNELS_BLOCK_SUM_H_
#define AMP_IR_KERNELS_BLOCK_SUM_H_

#include <algorithm>
#include <cstdint>

#include "onednn/divide_up.h"
#include "onednn/make_tiles.h"
#include "onednn/tiles.h"

namespace amp_ir::onednn {

inline int64_t Panels(int64_t extent) { return DivideUp(extent, kPanel); }

// What out [rows, columns] = a [rows, terms] @ b [terms, columns] is divided into.
struct BlockShape {
  int64_t rows, columns, terms;
  bool a_has_rows, b_has_rows;             // or columns, one after the other
  bool is_low;                             // the result
  int64_t a_stride, b_stride, out_stride;  // elements from one of them to the next
  int64_t block_rows, block_columns;       // of a task
  int64_t block_terms, sub_terms;          // made into tiles at a time, and summed at once
  int64_t parts, part_terms;               // tasks that share a block, and the terms of each

  int64_t out_nbytes() const { return is_low ? 2 : 4; }
  int64_t block_panels() const { return Panels(block_rows) * Panels(block_columns); }
  // Panels whose sums wait for further terms.
  int64_t waiting_panels() const {
    if (terms > block_terms) return parts == 1 ? block_panels() : 0;
    return block_terms > sub_terms ? Panels(block_columns) : 0;
  }
  // Bytes of a thread's tiles and sums: the tiles of a block of b, those of two panels of a, two
  // panels of sums, and those that wait.
  int64_t thread_nbytes() const {
    const int64_t elements = (Panels(block_columns) + 2) * kPanel * block_terms;
    return elements * static_cast<int64_t>(sizeof(uint16_t)) +
           (2 + waiting_panels()) * kPanelFloats * static_cast<int64_t>(sizeof(float));
  }
};

#if AMP_IR_HAS_TILES

// What a matmul reads and writes; `bias` has a number for each column, and 0 beyond, or is null.
struct BlockOperands {
  const uint16_t *a, *b;
  const float* bias;
  void* out;
  Scale scale;
};

// The tiles of b are made for the whole block and stay in the cache of the second level. Those of a
// come in panels of 32 rows, of which the next is made while this one is multiplied by all of b's.
class BlockSum {
 public:
  // `row` and `column` are where the block begins, `sums` where the parts of a block are summed.
  AMP_IR_TILES BlockSum(const BlockShape& s, const BlockOperands& operands, int64_t row,
                        int64_t column, float* sums, char* buffers)
      : s_(s),
        a_(operands.a + row * (s.a_has_rows ? s.a_stride : 1)),
        b_(operands.b + column * (s.b_has_rows ? 1 : s.b_stride)),
        bias_(operands.bias == nullptr ? nullptr : operands.bias + column),
        out_(static_cast<char*>(operands.out) + (row * s.out_stride + column) * s.out_nbytes()),
        scale_(operands.scale),
        rows_(std::min(s.block_rows, s.rows - row)),
        columns_(std::min(s.block_columns, s.columns - column)),
        right_(reinterpret_cast<uint16_t*>(buffers)),
        left_(right_ + Panels(s.block_columns) * panel_elements()),
        two_(reinterpret_cast<float*>(left_ + 2 * panel_elements())),
        sums_(sums == nullptr ? two_ + 2 * kPanelFloats : sums) {}

  // Sums the terms of the part that begins at `first`; writes the result where there is one part.
  AMP_IR_TILES void Run(int64_t first) {
    const int64_t last = std::min(first + s_.part_terms, s_.terms);
    for (int64_t term = first; term < last; term += s_.block_terms) {
      AddTerms(term, last, term == first);
    }
    for (int64_t row = 0; row < kPanel; ++row) Finish(finished_, row);
  }

  // Writes a panel of the result: the sum of all parts.
  AMP_IR_TILES void FinishParts(int64_t panel) {
    const int64_t across = Panels(columns_), panels = Panels(rows_) * across;
    const float* part = sums_ + panel * kPanelFloats;
    AddFloats(part, s_.parts, panels * kPanelFloats, kPanelFloats, two_);
    const Finished sum = At(panel / across, panel % across, two_);
    for (int64_t row = 0; row < kPanel; ++row) Finish(sum, row);
  }

 private:
  // A panel of the result whose sums are known: some rows and columns from `out` on.
  struct Finished {
    const float* sums = nullptr;
    const float* bias = nullptr;
    char* out = nullptr;
    int64_t rows = 0, columns = 0;
  };

  // The rows of b that are read after these: the memory is asked for them ahead of time.
  struct Following {
    const uint16_t* rows;
    int64_t count;
    AMP_IR_TILES_INLINE void Expect(int64_t stride, int64_t columns) {
      if (count <= 0) return;
      constexpr int64_t kLine = 32;
      for (int64_t i = 0; i < columns; i += kLine) Prefetch(rows + i);
      rows += stride;
      --count;
    }
  };

  // Sums the terms from `term` on, as many as are made into tiles, of those before `last`.
  AMP_IR_TILES void AddTerms(int64_t term, int64_t last, bool is_first) {
    const int64_t terms = std::min(s_.block_terms, last - term);
    const bool is_last = term + terms == last && s_.parts == 1;
    const int64_t steps = DivideUp(terms, kTileTerms), sub_steps = s_.sub_terms / kTileTerms;
    const int64_t panels = Panels(rows_), across = Panels(columns_), calls = across * steps;
    MakeRight(term, terms, steps);
    const Making making = MakingOfA(s_.a_has_rows);
    const int64_t slices = Slices::Count(making, steps);
    Slices first(making, steps);
    for (int64_t i = 0; i < slices; ++i, first.Next()) MakeLeft(making, term, terms, 0, first);
    Following following{b_ + (term + terms) * s_.b_stride,
                        s_.b_has_rows ? std::min(s_.block_terms, last - term - terms) : 0};
    for (int64_t down = 0; down < panels; ++down) {
      // The panel that follows is made in equal parts, while this one is multiplied.
      Slices next(making, steps);
      int64_t left = down + 1 < panels ? slices : 0, due = 0;
      for (int64_t sub = 0; sub < steps; sub += sub_steps) {
        const int64_t count = std::min(sub_steps, steps - sub);
        const bool begins = is_first && sub == 0, ends = is_last && sub + count == steps;
        const int64_t rows_a_step = DivideUp(kPanel, count);
        for (int64_t panel = 0; panel < across; ++panel) {
          float* sums = begins && ends ? two_ + (down * across + panel) % 2 * kPanelFloats
                                       : SumsOf(down, panel);
          const Finished before = finished_;
          finished_ = ends ? At(down, panel, sums) : Finished();
          int64_t row = 0;
          MultiplyTiles(left_ + down % 2 * panel_elements() + sub * kStepElements,
                        right_ + (panel * steps + sub) * kStepElements, sums, count, begins,
                        [&](int64_t) AMP_IR_TILES_INLINE {
                          for (int64_t i = 0; i < rows_a_step; ++i, ++row) {
                            Finish(before, row);
                            Expect(finished_, row);
                          }
                          following.Expect(s_.b_stride, columns_);
                          for (due += slices; due >= calls && left > 0; due -= calls, --left) {
                            MakeLeft(making, term, terms, down + 1, next);
                            next.Next();
                          }
                        });
        }
      }
    }
  }

  // Where a panel's sums wait: with those of all of the block, or of the panels beside it.
  AMP_IR_TILES_INLINE float* SumsOf(int64_t down, int64_t panel) const {
    const bool is_all = s_.terms > s_.block_terms || s_.parts > 1;
    return sums_ + (is_all ? down * Panels(columns_) + panel : panel) * kPanelFloats;
  }

  // Makes the tiles of b, in the order of the memory.
  AMP_IR_TILES void MakeRight(int64_t term, int64_t terms, int64_t steps) {
    const Making making = MakingOfB(s_.b_has_rows);
    const int64_t across = Panels(columns_);
    const auto make = [&](int64_t panel, int64_t step, int64_t part) AMP_IR_TILES_INLINE {
      const int64_t first = term + step * kTileTerms, count = terms - step * kTileTerms;
      const int64_t column = panel * kPanel, columns = columns_ - column;
      const Lines lines =
          s_.b_has_rows ? Lines{b_ + first * s_.b_stride + column, s_.b_stride, count, columns, 0}
                        : Lines{b_ + column * s_.b_stride + first, s_.b_stride, columns, count, 0};
      MakePart(making, lines, part, right_ + (panel * steps + step) * kStepElements);
    };
    if (!s_.b_has_rows) {
      for (int64_t panel = 0; panel < across; ++panel) {
        Slices slice(making, steps);
        const int64_t slices = Slices::Count(making, steps);
        for (int64_t i = 0; i < slices; ++i, slice.Next()) make(panel, slice.step(), slice.part());
      }
      return;
    }
    const int64_t parts = Slices::Count(making, 1);
    for (int64_t step = 0; step < steps; ++step) {
      for (int64_t panel = 0; panel < across; ++panel) {
        for (int64_t part = 0; part < parts; ++part) make(panel, step, part);
      }
    }
  }

  // Makes a slice of a panel of a's tiles, and asks the memory for that of one to come.
  AMP_IR_TILES_INLINE void MakeLeft(Making making, int64_t term, int64_t terms, int64_t down,
                                    const Slices& at) {
    const int64_t first = term + at.step() * kTileTerms, count = terms - at.step() * kTileTerms;
    const int64_t row = down * kPanel, rows = rows_ - row, stride = s_.a_stride;
    const Lines lines = s_.a_has_rows
                            ? Lines{a_ + row * stride + first, stride, rows, count, kPanel * stride}
                            : Lines{a_ + first * stride + row, stride, count, rows, 2 * kPanel};
    MakePart(making, lines, at.part(),
             left_ + down % 2 * panel_elements() + at.step() * kStepElements);
  }

  AMP_IR_TILES_INLINE Finished At(int64_t down, int64_t across, const float* sums) const {
    return {sums, bias_ == nullptr ? nullptr : bias_ + across * kPanel,
            out_ + (down * kPanel * s_.out_stride + across * kPanel) * s_.out_nbytes(),
            std::min(kPanel, rows_ - down * kPanel), std::min(kPanel, columns_ - across * kPanel)};
  }

  AMP_IR_TILES_INLINE void Finish(const Finished& one, int64_t row) const {
    if (row >= one.rows) return;
    char* out = one.out + row * s_.out_stride * s_.out_nbytes();
    if (s_.is_low) {
      WriteRow(one.sums, row, one.bias, reinterpret_cast<uint16_t*>(out), one.columns);
    } else {
      WriteRow(one.sums, row, scale_, one.bias, reinterpret_cast<float*>(out), one.columns);
    }
  }

  AMP_IR_TILES_INLINE void Expect(const Finished& one, int64_t row) const {
    if (row >= one.rows) return;
    const char* out = one.out + row * s_.out_stride * s_.out_nbytes();
    PrefetchToWrite(out);
    PrefetchToWrite(out + (one.columns - 1) * s_.out_nbytes());
  }

  int64_t panel_elements() const { return kPanel * s_.block_terms; }

  const BlockShape& s_;
  const uint16_t *a_, *b_;
  const float* bias_;
  char* out_;
  Scale scale_;
  int64_t rows_, columns_;
  uint16_t *right_, *left_;
  float *two_, *sums_;
  Finished finished_;
};

#endif

}  // namespace amp_ir::onednn

#endif  // AMP_IR_KERNELS_BLOCK_SUM_H_
