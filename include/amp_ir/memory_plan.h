// SPDX-License-Identifier: Apache-2.0
#ifndef AMP_IR_MEMORY_PLAN_H_
#define AMP_IR_MEMORY_PLAN_H_

#include <cstdint>
#include <vector>

namespace amp_ir {

// One tensor's claim on memory. Times are binding indices; both ends are inclusive.
struct LiveInterval {
  int64_t nbytes;
  int64_t first_use;
  int64_t last_use;
};

struct MemoryPlan {
  std::vector<int64_t> offset_bytes;  // one an interval, in the order given
  int64_t peak_bytes;                 // end of the highest interval
  int64_t lower_bound_bytes;          // most bytes alive at one time: no plan can need less
};

// Gives every interval an offset in one block of memory, trying to keep the block small.
//
// Finding the smallest block is NP-hard (dynamic storage allocation), so several orders are tried,
// each interval going to the lowest gap or to the tightest one, and the smallest block is kept.
//
// Requires: nbytes >= 0, first_use <= last_use, alignment_bytes a power of two; the caller checks.
// Ensures:  intervals alive at the same time never share a byte; every offset is a multiple of
//           alignment_bytes; lower_bound_bytes <= peak_bytes.
// Cost:     O(orders * n^2) in the worst case; stops at the first order that meets the lower bound.
//           Measured for n = 20 000, two cores: see tests/test_memory_plan.py.
// Source:   Pisarchyk and Lee 2020, "Efficient Memory Management for Deep Neural Net Inference",
//           section 5 (greedy by size); the other orders are ours.
MemoryPlan PlanMemory(const std::vector<LiveInterval>& intervals, int64_t alignment_bytes);

}  // namespace amp_ir

#endif  // AMP_IR_MEMORY_PLAN_H_
