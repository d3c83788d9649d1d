# SPDX-License-Identifier: Apache-2.0
"""TVM is the same whether it is imported after amp_ir, in half of the time, or was before."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import tvm
import tvm_ffi
from tvm_ffi import core

OPS = """
import json
import torch
{first}
import amp_ir
amp_ir.jit
{then}
from tvm.ir import Op
from tvm_ffi.registry import get_registered_type_keys
names = sorted(Op.list_op_names())
printed = [str(Op.get(name).get_attr("TScriptPrinterName")) for name in names]
keys = sorted(get_registered_type_keys())
from tvm import relax
assert type(relax.BlockBuilder._stack).__module__ == "amp_ir.host.tvm_threads"
print(json.dumps([names, printed, keys]))
"""


# What the import asks for and is not there.
NOTE_FAILED = """
from tvm_ffi import core
failed = []
find = core._object_type_key_to_index
def finding(key):
    found = find(key)
    if found is None:
        failed.append(key)
    return found
core._object_type_key_to_index = finding
"""


def listed(first: str, then: str = "") -> list[list[str]]:
    code = [sys.executable, "-c", OPS.format(first=first, then=then)]
    ran = subprocess.run(code, capture_output=True, text=True, check=True)
    return json.loads(ran.stdout)


def test_ops_and_types_are_those_of_a_plain_import_and_no_error_is_raised_in_cpp():
    """The first error reads the symbols of all libraries, for 0.6 s."""
    check = "import tvm\nassert not failed, failed\ncore._object_type_key_to_index = find"
    names, printed, keys = listed(NOTE_FAILED, check)
    assert len(names) > 500 and len(keys) > 400
    assert [names, printed, keys] == listed("import tvm")


def test_nothing_of_tvm_stays_replaced():
    code = """
import sys
import tvm_ffi
from importlib.util import find_spec
from tvm_ffi import core
before = core._object_type_key_to_index, tvm_ffi.init_ffi_api
import amp_ir
assert find_spec("tvm").name == "tvm"
assert "tvm" not in sys.modules
import tvm
assert "torch" in sys.modules, "its OpenMP runtime comes first"
assert not any(type(one).__module__.startswith("amp_ir") for one in sys.meta_path)
assert "exec_module" not in vars(tvm.__spec__.loader)
from tvm.ir import _ffi_api
assert before == (core._object_type_key_to_index, tvm_ffi.init_ffi_api)
functions = _ffi_api.RegisterOp, _ffi_api.GetOp, _ffi_api.RegisterOpAttr
assert all(type(one) is core.Function for one in functions), functions
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert core._object_type_key_to_index("no.such.type") is None
    assert callable(tvm_ffi.init_ffi_api)
    with pytest.raises(AttributeError, match=r"no\.such\.op"):
        tvm.ir.Op.get("no.such.op")
