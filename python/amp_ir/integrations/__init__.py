# SPDX-License-Identifier: Apache-2.0
"""amp_ir inside of other tools: torch.compile and trainers. `import amp_ir` imports none of it."""
