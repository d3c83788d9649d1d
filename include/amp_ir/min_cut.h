// SPDX-License-Identifier: Apache-2.0
#ifndef AMP_IR_MIN_CUT_H_
#define AMP_IR_MIN_CUT_H_

#include <cstdint>
#include <vector>

namespace amp_ir {

// A directed edge. Cutting it, with `from` on the source's side and `to` on the sink's, costs
// `capacity`.
struct CutEdge {
  int64_t from;
  int64_t to;
  int64_t capacity;
};

struct MinCut {
  std::vector<bool> on_source_side;  // one a vertex
  int64_t value;                     // capacity of the cut edges, equal to the maximum flow
};

// Separates `source` from `sink` by edges of least total capacity.
//
// Of several minimum cuts it returns the one with the fewest vertices on the source's side. That
// one is unique, so the result depends neither on the order of the edges nor on how flow was found.
//
// Requires: 0 <= vertex < num_vertices in every edge, capacity >= 0, source != sink, the sum of the
//           capacities below 2^63 and fewer than 2^30 edges; the caller checks.
// Ensures:  on_source_side[source], not on_source_side[sink]; value equals the capacity of the
// edges
//           from a vertex on the source's side to one that is not.
// Cost:     O(V^2 E) in the worst case, near linear on the shallow graphs of a training step:
//           100 000 vertices in well under a second, measured in tests/memory/test_min_cut.py.
// Source:   Dinic 1970; the cut is read off as in Ford and Fulkerson 1956.
MinCut FindMinCut(int64_t num_vertices, const std::vector<CutEdge>& edges, int64_t source,
                  int64_t sink);

}  // namespace amp_ir

#endif  // AMP_IR_MIN_CUT_H_
