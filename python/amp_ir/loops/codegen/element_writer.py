# SPDX-License-Identifier: Apache-2.0
"""Writer of a group's elements as TIR statements at one point of the kernel's loops."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import attrs
import tvm_ffi
from tvm import tirx
from tvm.tirx.analysis import undefined_vars

from amp_ir.ir.vector_instructions import LANES
from amp_ir.loops import math as m
from amp_ir.loops.body_context import let_as, reading
from amp_ir.loops.builders import flatten
from amp_ir.loops.codegen.coordinates import Position
from amp_ir.loops.codegen.held_rows import HeldRow
from amp_ir.loops.codegen.kernel_buffers import FlatBuffer, round_to, task_buffer
from amp_ir.loops.group import Group, is_inlined, storage_of
from amp_ir.loops.ir import Constant, Index, Pointwise, Reduction, Value, compute_dtype

# How many names may be substituted into each other before one is kept in memory: a load has a name,
# and arithmetic on it is kept. Deeper names also fail: TVM's interval analysis (0.27) gives up on a
# product with a `Select` of floats under a name ("IntImm supports only int").
MAX_DEPTH = 1


@attrs.define
class ElementWriter:
    """Elements at one `position`; statements are appended to `body` on demand.

    `lane` is the variable of the enclosing vector loop, if any; `allocations` must precede the
    loops. `is_scalar` becomes true when an element uses a function that cannot be
    vectorised. `row_elements` holds the values known for the whole row (results of reductions, and
    arithmetic on them) and `held` the rows that passes share; the writers of one row share both.
    """

    group: Group
    buffers: dict[int, FlatBuffer]
    position: Position
    row_elements: dict[int, Any]
    strict: bool = False
    lane: Any = None
    body: list[tirx.Stmt] = attrs.field(factory=list)
    allocations: list[tirx.Stmt] = attrs.field(factory=list)
    is_scalar: bool = False
    held: dict[int, HeldRow] = attrs.field(factory=dict)
    _elements: dict[int, Any] = attrs.field(factory=dict)
    _depths: dict[tirx.Var, int] = attrs.field(factory=dict)
    # Names whose elements differ between the lanes of a vector.
    _varying: set[tirx.Var] = attrs.field(factory=set)
    _named: dict[int, list[tuple[Any, Any]]] = attrs.field(factory=dict)
    _full: set[int] = attrs.field(init=False)
    _row: set[int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._full = {id(value) for value in self.group.full}
        self._row = {id(value) for value in self.group.row}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Direct reads and `let` of loop bodies to this writer inside the block."""
        with reading(self._read), let_as(self.let, self._need_scalar_loop):
            yield

    def let(self, element: Any) -> Any:
        """Give an expression a name in the kernel; an equal one at this position has it already."""
        if isinstance(element, (int, float, tirx.Var)) or m.literal(element) is not None:
            return element
        # Readers of one value each write what they need of it, as gelu and its slope the bell.
        alike = self._named.setdefault(tvm_ffi.structural_hash(element), [])
        for known, name in alike:
            if tvm_ffi.structural_equal(known, element):
                return name
        name = self._new_name(element)
        alike.append((element, name))
        return name

    def _new_name(self, element: Any) -> Any:
        if m.dtype_of(element) == "bool":
            # Code generation cannot take a vector of bool under a name (TVM 0.27).
            return tirx.NE(self.let(m.cast(element, "int32")), m.constant(0, "int32"))
        dtype = m.dtype_of(element)
        depth = 1 + max((self._depths.get(v, 0) for v in undefined_vars(element)), default=0)
        if dtype == "uint32" or depth > MAX_DEPTH:
            element, depth = self._hold(element, dtype), 0
        variable = tirx.Var("t", dtype)
        self.body.append(tirx.Bind(variable, element))
        self._depths[variable] = depth
        if self._varies(element):
            self._varying.add(variable)
        return variable

    def _varies(self, element: Any) -> bool:
        """Return whether an element may differ between the lanes of a vector."""
        if self.lane is None:
            return False
        used = undefined_vars(element)
        return any(one in self._varying or one.same_as(self.lane) for one in used)

    def _hold(self, element: Any, dtype: str) -> Any:
        """Store an element in local memory (a register, after compilation).

        TVM's simplifier (0.27), which runs on CUDA kernels, substitutes names into their uses, so
        that the text of a hash, or of a logarithm of an exponential, multiplies at every step; it
        does not look through memory. What all lanes have alike, as the row of a table, is one word:
        then what is read there is a vector, too, and not gathered.
        """
        count, lane = (LANES, self.lane) if self._varies(element) else (1, 0)
        word = task_buffer(count, dtype, "word")
        self.allocations.append(tirx.AllocBuffer(word))
        self.body.append(tirx.BufferStore(word, element, [lane]))
        return tirx.BufferLoad(word, [lane])

    def _need_scalar_loop(self) -> None:
        self.is_scalar = True

    def full(self, value: Value) -> Any:
        """Return the element of a FULL value at this position."""
        known = self._elements.get(id(value))
        if known is None:
            held = self.held.get(id(value))
            known = self._computed(value) if held is None else self._held(value, held)
            self._elements[id(value)] = known
        return known

    def _held(self, value: Value, held: HeldRow) -> Any:
        assert self.position.column is not None
        (column,) = self.position.column
        if held.is_written:
            return self.let(held.load(column))
        known = self._computed(value)
        self.body.append(held.store(column, known))
        return known

    def _computed(self, value: Value) -> Any:
        assert isinstance(value, Pointwise)
        with self.active():
            part = self.position.part_of(value)
            if part is None:
                element = value.body(*self.position.index(value.shape))
            else:
                element = part.value[part.index]
        return self.let(self._rounded(value, element))

    def row(self, value: Value) -> Any:
        """Return the element of a ROW value for this row; its reductions must be finished."""
        known = self.row_elements.get(id(value))
        if known is None:
            assert isinstance(value, Pointwise)  # the loop of a reduction has run
            with self.active():
                element = value.body(*self.position.row_index(value.shape))
            known = self.let(self._rounded(value, element))
            self.row_elements[id(value)] = known
        return known

    def reduced(self, value: Reduction) -> Any:
        """Return the element at this position that `value` reduces."""
        with self.active():
            element = value.body(*self.position.index(value.source_shape))
        return self.let(m.cast(element, value.dtype))

    def _rounded(self, value: Pointwise, element: Any) -> Any:
        element = m.cast(as_expression(element, value.dtype), compute_dtype(value.dtype))
        is_low = compute_dtype(value.dtype) != value.dtype
        # Other kernels read what memory holds; this kernel must read the same number.
        is_rounded = value.rounds or self.strict or id(value) in self.group.stored_and_read
        if not is_low or value.is_view or not is_rounded:
            return element
        # Rounding reads its argument several times: without memory, chains grow exponentially.
        return round_to(self._hold(element, compute_dtype(value.dtype)), value.dtype)

    def _read(self, value: Value, index: Index) -> Any:
        if isinstance(value, Constant):
            return m.constant(value.number, compute_dtype(value.dtype))
        member = self._member(value, value.shape, index)
        if member is not None:
            return member
        if isinstance(value, Pointwise) and value.is_reshape:
            return self._read_reshaped(value, index)
        if isinstance(value, Pointwise) and is_inlined(value):
            return self._rounded(value, value.body(*index))
        return self._load(value, self._flat(value.shape, index))

    def _is_member(self, value: Value) -> bool:
        return id(value) in self._full or id(value) in self._row

    def _member(self, owner: Value, shape: tuple[int, ...], index: Index) -> Any:
        """Return the element of a member of the group, read as of `shape` at `index`.

        None if it is no member, or a view that is read at another place than its own: legality
        looks through views, so such a reader may be in the group that also stores the view.
        """
        if id(owner) in self._full:
            own, element = self.position.index, self.full
        elif id(owner) in self._row:
            own, element = self.position.row_index, self.row
        else:
            return None
        if is_inlined(owner) and not _is_same(own(shape), index):
            return None
        return element(owner)

    def _read_reshaped(self, value: Pointwise, index: Index) -> Any:
        owner = storage_of(value)
        member = self._member(owner, value.shape, index)
        if member is not None:
            return member
        if id(owner) in self.buffers and not self._is_member(owner):
            return self._load(owner, self._flat(value.shape, index))
        # A reshape of a view: the view's own index is needed.
        if isinstance(owner, Pointwise) and self._is_here(value.shape, index):
            return self._rounded(owner, owner.body(*self.position.index(owner.shape)))
        return value.body(*index)

    def _flat(self, shape: tuple[int, ...], index: Index) -> Any:
        """Return the flat position of `index`; reuse the kernel's own position where they agree."""
        return self.position.flat() if self._is_here(shape, index) else flatten(index, shape)

    def _is_here(self, shape: tuple[int, ...], index: Index) -> bool:
        """Return whether `index` of a value of `shape` is the kernel's own position."""
        position = self.position
        if position.column is None or math.prod(shape) != position.domain.size:
            return False
        return _is_same(position.index(shape), index)

    def _load(self, value: Value, flat: Any) -> Any:
        return self.let(self.buffers[id(value)].load(flat))


def _is_same(own: Index, index: Index) -> bool:
    """Return whether two indices are the same objects; equal ones may count as others."""
    return all(a is b for a, b in zip(own, index, strict=True))


def as_expression(element: Any, dtype: str) -> Any:
    """Convert a Python number to a literal of `dtype`'s compute dtype; keep expressions."""
    return (
        m.constant(element, compute_dtype(dtype)) if isinstance(element, (int, float)) else element
    )
