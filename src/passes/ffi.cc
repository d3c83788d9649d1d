// SPDX-License-Identifier: Apache-2.0
// The one file of passes that knows tvm-ffi: checks what Python sends, then calls plain C++.
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <limits>
#include <vector>

#include "amp_ir/memory_plan.h"

namespace {

namespace ffi = tvm::ffi;

void CheckInterval(size_t index, const amp_ir::LiveInterval& interval) {
  if (interval.nbytes < 0) {
    TVM_FFI_THROW(ValueError) << "interval " << index << " has " << interval.nbytes
                              << " bytes; a length cannot be negative";
  }
  if (interval.last_use < interval.first_use) {
    TVM_FFI_THROW(ValueError) << "interval " << index << " ends (" << interval.last_use
                              << ") before it begins (" << interval.first_use << ")";
  }
  if (interval.last_use == std::numeric_limits<int64_t>::max()) {
    TVM_FFI_THROW(ValueError) << "interval " << index << " ends at the last of all 64-bit numbers";
  }
}

// Raises: ValueError unless all intervals, rounded up, fit one above the other.
void CheckTotal(const std::vector<amp_ir::LiveInterval>& intervals, int64_t alignment_bytes) {
  int64_t total = 0;
  for (const amp_ir::LiveInterval& interval : intervals) {
    if (__builtin_add_overflow(total, interval.nbytes, &total) ||
        __builtin_add_overflow(total, alignment_bytes, &total)) {
      TVM_FFI_THROW(ValueError) << "the lengths of all intervals add up to more bytes than a "
                                   "64-bit number holds";
    }
  }
}

// Returns [peak_bytes, lower_bound_bytes, offset_bytes...].
ffi::Shape PlanMemory(const ffi::Shape& nbytes, const ffi::Shape& first_use,
                      const ffi::Shape& last_use, int64_t alignment_bytes) {
  if (nbytes.size() != first_use.size() || nbytes.size() != last_use.size()) {
    TVM_FFI_THROW(ValueError) << "plan_memory got " << nbytes.size() << " lengths, "
                              << first_use.size() << " first uses and " << last_use.size()
                              << " last uses; give one of each an interval";
  }
  if (alignment_bytes <= 0 || (alignment_bytes & (alignment_bytes - 1)) != 0) {
    TVM_FFI_THROW(ValueError) << "alignment is " << alignment_bytes
                              << " bytes; expected a power of two";
  }
  std::vector<amp_ir::LiveInterval> intervals;
  for (size_t i = 0; i < nbytes.size(); ++i) {
    intervals.push_back({nbytes[i], first_use[i], last_use[i]});
    CheckInterval(i, intervals.back());
  }
  CheckTotal(intervals, alignment_bytes);
  amp_ir::MemoryPlan plan = amp_ir::PlanMemory(intervals, alignment_bytes);
  std::vector<int64_t> result{plan.peak_bytes, plan.lower_bound_bytes};
  result.insert(result.end(), plan.offset_bytes.begin(), plan.offset_bytes.end());
  return ffi::Shape(result);
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef().def("amp_ir.plan_memory", PlanMemory);
}
