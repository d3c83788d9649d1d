# SPDX-License-Identifier: Apache-2.0
"""`torch.compile(model, backend="amp_ir")`: forward and backward as two compiled programs.

backend.py         what torch.compile calls; refusals become one warning and eager PyTorch
backend_options.py `options=` and the environment
shape_family.py    a graph of symbolic sizes, compiled for each shape that comes
import_graph.py    AOTAutograd's graph -> StepModule
partition.py       joint graph -> forward and backward, by a minimum cut of what is saved
graph_program.py   a compiled program, called as AOTAutograd calls a graph
"""
