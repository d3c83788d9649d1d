# SPDX-License-Identifier: Apache-2.0
"""What a random op of a captured graph draws: `node.meta[DRAW_KEY]`, the index of the draw.

In the body of a loop it is the index in the loop's first step.
"""

DRAW_KEY = "amp_ir_draw"
