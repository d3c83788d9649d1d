// SPDX-License-Identifier: Apache-2.0
// Makes the minimum cut callable from Python: checks what is sent, then calls plain C++.
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include "amp_ir/min_cut.h"

namespace {

namespace ffi = tvm::ffi;

void CheckVertex(int64_t vertex, int64_t num_vertices, const char* what) {
  if (vertex < 0 || vertex >= num_vertices) {
    TVM_FFI_THROW(ValueError) << what << " is vertex " << vertex << "; there are " << num_vertices;
  }
}

// `edges` holds three numbers an edge: from, to, capacity. Returns [value, side...], a side being 1
// for a vertex on the source's side.
ffi::Shape MinCut(int64_t num_vertices, const ffi::Shape& edges, int64_t source, int64_t sink) {
  CheckVertex(source, num_vertices, "source");
  CheckVertex(sink, num_vertices, "sink");
  if (source == sink) {
    TVM_FFI_THROW(ValueError) << "source and sink are both vertex " << source;
  }
  if (edges.size() % 3 != 0) {
    TVM_FFI_THROW(ValueError) << "min_cut got " << edges.size()
                              << " numbers; give three an edge: from, to, capacity";
  }
  constexpr int64_t kMostVertices = int64_t{1} << 30;
  constexpr size_t kMostEdges = size_t{1} << 30;
  if (num_vertices > kMostVertices || edges.size() / 3 >= kMostEdges) {
    TVM_FFI_THROW(ValueError) << "min_cut got " << num_vertices << " vertices and "
                              << edges.size() / 3 << " edges; it takes at most 2^30 of each";
  }
  int64_t total = 0;
  std::vector<amp_ir::CutEdge> checked;
  checked.reserve(edges.size() / 3);
  for (size_t i = 0; i < edges.size(); i += 3) {
    checked.push_back({edges[i], edges[i + 1], edges[i + 2]});
    CheckVertex(checked.back().from, num_vertices, "the start of an edge");
    CheckVertex(checked.back().to, num_vertices, "the end of an edge");
    if (checked.back().capacity < 0) {
      TVM_FFI_THROW(ValueError) << "edge " << i / 3 << " has capacity " << checked.back().capacity
                                << "; a capacity cannot be negative";
    }
    if (__builtin_add_overflow(total, checked.back().capacity, &total)) {
      TVM_FFI_THROW(ValueError) << "the capacities of " << i / 3 + 1
                                << " edges add up to more than a 64-bit number holds";
    }
  }
  amp_ir::MinCut cut = amp_ir::FindMinCut(num_vertices, checked, source, sink);
  std::vector<int64_t> result{cut.value};
  result.insert(result.end(), cut.on_source_side.begin(), cut.on_source_side.end());
  return ffi::Shape(result);
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef().def("amp_ir.min_cut", MinCut);
}
