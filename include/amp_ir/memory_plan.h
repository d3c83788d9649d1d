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
// each interval going to the lowest gap or to the tightest one; then the interval that reaches
// highest in the best plan is placed earlier, again and again. The smallest block met is kept.
//
// Requires: nbytes >= 0, first_use <= last_use, alignment_bytes a power of two; the caller checks.
// Ensures:  intervals alive at the same time never share a byte; every offset is a multiple of
//           alignment_bytes; lower_bound_bytes <= peak_bytes.
// Cost:     O(n^2) an order; stops where a plan meets the lower bound, and tries less when n is
// large.
//           n = 2 000: at most 0.1 s; n = 20 000: 0.2 s on a training step's lifetimes, 0.7 s on
//           random ones (one Zen 5 core).
// Source:   Pisarchyk and Lee 2020, "Efficient Memory Management for Deep Neural Net Inference",
//           section 5 (greedy by size); the other orders and the promotion are ours.
MemoryPlan PlanMemory(const std::vector<LiveInterval>& intervals, int64_t alignment_bytes);

}  // namespace amp_ir

#endif  // AMP_IR_MEMORY_PLAN_H_
