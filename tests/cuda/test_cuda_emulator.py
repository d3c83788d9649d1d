# SPDX-License-Identifier: Apache-2.0
"""The emulator runs TVM's CUDA code as a GPU does, and finds what a GPU would not forgive."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import tvm
from tvm import tirx

from cuda_emulator import in_emulator
from cuda_kernels import (
    ALL_LANES,
    allocate,
    load,
    local,
    loop,
    one_launch,
    parameter,
    sequence,
    shared,
    store,
    synchronise,
    vector,
    when,
)


def fails(function, arrays) -> str:
    """The error of a launch on copies of arrays."""
    from cuda_emulator import device

    return failure(function, [device.to_device(array) for array in arrays])


def failure(function, tensors) -> str:
    """The error of a launch, without TVM's own words."""
    from cuda_emulator import device

    module = device.build(function)
    with pytest.raises(RuntimeError) as caught:
        module["main"](*tensors)
    return re.search(r"CUDALaunch Error: (.*)\n", str(caught.value))[1]


def exponentials(dtype: str):
    """y = exp(x) of 2048 values: 8 a thread, copied 16 bytes at a time."""
    x, y = parameter(2048, dtype, "x"), parameter(2048, dtype, "y")
    given, made = local(8, dtype, "given"), local(8, dtype, "made")

    def body(block, thread):
        at = (block * 128 + thread) * 8
        compute = loop(
            8,
            lambda i: store(
                made, i, tirx.Cast(dtype, tirx.exp(tirx.Cast("float32", load(given, i))))
            ),
        )
        copy_in = store(given, vector(0, 8), load(x, vector(at, 8)))
        copy_out = store(y, vector(at, 8), load(made, vector(0, 8)))
        return sequence(allocate(given), allocate(made), copy_in, compute, copy_out)

    return tirx.PrimFunc([x, y], one_launch(2, 128, body)).with_attr("tirx.noalias", True)


@in_emulator
def test_sixteen_byte_copies_and_float16_arithmetic():
    from cuda_emulator import device

    x = np.linspace(-3, 3, 2048, dtype=np.float16)
    (y,) = device.run(exponentials("float16"), [x, np.empty_like(x)], outputs=[1])
    np.testing.assert_array_equal(y, np.exp(x.astype(np.float32)).astype(np.float16))


def sums_of_blocks(*, forgets_barrier: bool = False, diverges: bool = False):
    """Partial sums of 4 blocks in shared memory, added by a second launch's warp."""
    x, part, total = (
        parameter(4096, "float32", "x"),
        parameter(4, "float32", "part"),
        parameter(1, "float32", "total"),
    )
    zero = tirx.const(0.0, "float32")

    def first(block, thread):
        seen, own = shared(128, "float32", "seen"), local(1, "float32", "own")
        reads = loop(
            8,
            lambda i: store(own, 0, load(own, 0) + load(x, block * 1024 + i * 128 + thread)),
        )
        body = [allocate(seen), allocate(own), store(own, 0, zero), reads]
        body += [store(seen, thread, load(own, 0)), synchronise()]
        for distance in (64, 32, 16, 8, 4, 2, 1):
            added = store(seen, thread, load(seen, thread) + load(seen, thread + distance))
            is_adder = thread < distance
            if diverges:
                body.append(when(is_adder, sequence(added, synchronise())))
            else:
                body.append(when(is_adder, added))
                body += [] if forgets_barrier else [synchronise()]
        return sequence(*body, when(tirx.EQ(thread, 0), store(part, block, load(seen, 0))))

    def second(_block, thread):
        own = local(1, "float32", "own")
        body = [allocate(own), store(own, 0, zero)]
        body.append(when(thread < 4, store(own, 0, load(part, thread))))
        for distance in (16, 8, 4, 2, 1):
            other = tirx.op.tvm_warp_shuffle_xor(ALL_LANES, load(own, 0), distance, 32, 32)
            body.append(store(own, 0, load(own, 0) + other))
        return sequence(*body, when(tirx.EQ(thread, 0), store(total, 0, load(own, 0))))

    launches = sequence(one_launch(4, 128, first), one_launch(1, 32, second))
    return tirx.PrimFunc([x, part, total], launches).with_attr("tirx.noalias", True)


SUMMANDS = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
OF_FOUR, OF_ONE = np.empty(4, np.float32), np.empty(1, np.float32)


@in_emulator
def test_shared_memory_barriers_shuffles_and_two_launches():
    from cuda_emulator import device

    part, total = device.run(sums_of_blocks(), [SUMMANDS, OF_FOUR, OF_ONE], outputs=[1, 2])
    # 4096 summands of size 1 in a tree of depth 20: 20 roundings of at most 2^-24 of sum |x|.
    bound = 20 * 2.0**-24 * np.abs(SUMMANDS).sum()
    np.testing.assert_allclose(part, SUMMANDS.reshape(4, 1024).sum(1), rtol=0, atol=bound)
    np.testing.assert_allclose(total[0], SUMMANDS.astype(np.float64).sum(), rtol=0, atol=bound)


@in_emulator
def test_a_missing_barrier_is_found_by_the_order_of_threads():
    from cuda_emulator import device

    function = sums_of_blocks(forgets_barrier=True)
    with pytest.raises(AssertionError, match="depends on the order of threads or blocks"):
        device.run(function, [SUMMANDS, OF_FOUR, OF_ONE], outputs=[1, 2])


@in_emulator
def test_a_barrier_that_some_threads_miss_is_an_error():
    error = fails(sums_of_blocks(diverges=True), [SUMMANDS, OF_FOUR, OF_ONE])
    assert re.fullmatch(
        r"main_kernel, block \(0, 0, 0\), thread \(127, 0, 0\): threads wait for each other for "
        r"ever: threads 0 to 63 are at __syncthreads in line \d+; threads 64 to 127 are at the "
        r"kernel's end",
        error,
    )


def shifted_copy(shift: int, *, vectors: bool):
    """y[i] = x[i + shift] of 1024 floats, 4 a thread."""
    x, y = parameter(1024, "float32", "x"), parameter(1024, "float32", "y")

    def body(block, thread):
        at = (block * 128 + thread) * 4
        if vectors:
            return store(y, vector(at, 4), load(x, vector(at + shift, 4)))
        return loop(4, lambda i: store(y, at + i, load(x, at + i + shift)))

    return tirx.PrimFunc([x, y], one_launch(2, 128, body)).with_attr("tirx.noalias", True)


NUMBERS = np.arange(1024, dtype=np.float32)


@in_emulator
def test_a_read_past_the_end_is_an_error():
    error = fails(shifted_copy(64, vectors=False), [NUMBERS, NUMBERS])
    assert error == (
        "main_kernel, block (1, 0, 0), thread (112, 0, 0): an access to memory that is not the "
        "kernel's: 0 bytes past the end of an allocation of 4096 bytes"
    )


@in_emulator
def test_a_write_past_the_end_is_an_error():
    y = parameter(10, "float32", "y")
    one = tirx.const(1.0, "float32")
    launch = one_launch(1, 12, lambda _block, thread: store(y, thread, one))
    error = fails(tirx.PrimFunc([y], launch), [np.zeros(10, np.float32)])
    assert error == "main_kernel wrote 0 bytes past the end of an allocation of 40 bytes"


@in_emulator
def test_an_access_that_is_not_aligned_to_its_size_is_an_error():
    from cuda_emulator import device

    aligned = torch.zeros(1040)
    eight_bytes_on = aligned[aligned.data_ptr() % 16 // 4 + 2 :][:1024]
    x, y = device.share(eight_bytes_on), device.to_device(NUMBERS)
    error = failure(shifted_copy(0, vectors=True), [x, y])
    assert error == (
        "main_kernel, block (0, 0, 0), thread (0, 0, 0): an access that is not aligned to its "
        "size, an index outside of a local or shared array, a shift by too much, a division by "
        "zero or an overflow of a signed integer"
    )


@in_emulator
def test_an_index_outside_of_registers_is_an_error():
    y = parameter(128, "float32", "y")
    own = local(4, "float32", "own")

    def body(_block, thread):
        return sequence(
            allocate(own),
            store(own, 0, tirx.const(0.0, "float32")),
            store(y, thread, load(own, thread)),
        )

    error = fails(tirx.PrimFunc([y], one_launch(1, 128, body)), [np.zeros(128, np.float32)])
    assert error.startswith("main_kernel, block (0, 0, 0), thread (4, 0, 0): an access that is not")


@in_emulator
def test_memory_that_nobody_wrote_is_not_a_number():
    from cuda_emulator import device

    fresh = tvm.runtime.empty((8,), "float32", device.device())
    assert np.isnan(fresh.numpy()).all()


@in_emulator
def test_a_shuffle_from_a_lane_that_is_not_there_is_an_error():
    y = parameter(16, "float32", "y")

    def body(_block, thread):
        value = tirx.Cast("float32", thread)
        return store(y, thread, tirx.op.tvm_warp_shuffle_xor(ALL_LANES, value, 16, 32, 32))

    error = fails(tirx.PrimFunc([y], one_launch(1, 16, body)), [np.zeros(16, np.float32)])
    assert re.search(r"line \d+: asks for the value of lane 16, which gives none$", error)


@in_emulator
def test_dynamic_shared_memory_is_one_array_of_several_buffers():
    from cuda_emulator import device

    y = parameter(256, "float32", "y")

    def body(_block, thread):
        first = tirx.decl_buffer((256,), "float32", "first", scope="shared.dyn")
        second = tirx.decl_buffer((256,), "int32", "second", scope="shared.dyn")
        other = 255 - thread
        added = load(first, other) + tirx.Cast("float32", load(second, other))
        return sequence(
            allocate(first),
            allocate(second),
            store(first, thread, tirx.Cast("float32", thread)),
            store(second, thread, thread * 2),
            synchronise(),
            store(y, thread, added),
        )

    function = tirx.PrimFunc([y], one_launch(1, 256, body))
    (found,) = device.run(function, [np.empty(256, np.float32)], outputs=[0])
    np.testing.assert_array_equal(found, 3.0 * np.arange(255, -1, -1))


@in_emulator
def test_a_step_of_the_virtual_machine_asks_the_device_for_launches_alone():
    from cuda_emulator import device

    vm = tvm.relax.VirtualMachine(device.build_program(doubled_twice()), device.device())
    x = device.to_device(NUMBERS)
    y, z = device.to_device(NUMBERS), device.to_device(NUMBERS)
    vm["main"](x, y, z)
    device.counters()
    vm["main"](x, y, z)
    assert device.counters() == device.Counters(
        launches=2, allocations=0, frees=0, copies=0, synchronisations=0, graph_launches=0
    )
    np.testing.assert_array_equal(z.numpy(), 4 * NUMBERS)


def doubled_twice() -> tvm.IRModule:
    """Writes 2 x and 4 x into memory that the caller gives, as planned steps do."""
    x, y = parameter(1024, "float32", "x"), parameter(1024, "float32", "y")

    def body(block, thread):
        at = block * 128 + thread
        return store(y, at, load(x, at) * tirx.const(2.0, "float32"))

    kernel = tirx.PrimFunc([x, y], one_launch(8, 128, body))
    tensor = tvm.relax.TensorType((1024,), "float32")
    names = [tvm.relax.Var(name, tensor) for name in ("x", "y", "z")]
    builder = tvm.relax.BlockBuilder()
    doubled = builder.add_func(kernel.with_attr("global_symbol", "doubled"), "doubled")
    with builder.function("main", names, pure=False):
        builder.emit(tvm.relax.Call(doubled, names[:2]))
        builder.emit(tvm.relax.Call(doubled, names[1:]))
        builder.emit_func_output(tvm.relax.Tuple([]))
    return builder.get()


@in_emulator
@pytest.mark.parametrize("refused", ["nothing", "an allocation"])
def test_a_captured_stream_keeps_launches_and_refuses_allocations(refused):
    from cuda_emulator import device

    module = device.build(exponentials("float16"))
    x = device.to_device(np.zeros(2048, np.float16))
    y = device.to_device(np.zeros(2048, np.float16))
    module["main"](x, y)
    device.poison(y)
    with device.captured() as graph:
        module["main"](x, y)
        if refused == "an allocation":
            with pytest.raises(
                RuntimeError, match="memory is allocated while a stream is captured"
            ):
                device.to_device(NUMBERS)
    assert np.isnan(y.numpy()).all()
    device.view(x)[:] = 1
    graph.launch()
    np.testing.assert_array_equal(y.numpy(), np.full(2048, np.exp(np.float32(1)), np.float16))
