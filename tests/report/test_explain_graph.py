# SPDX-License-Identifier: Apache-2.0
"""The drawing of a plan: every op and cast of it, in colours, where one can see it."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

import amp_ir
from amp_ir.report import explain_graph
from amp_ir.report.explain import rows_of
from amp_ir.report.explain_graph import drawing, graph_of, graph_page
from planned_network import captured


@pytest.fixture(scope="module")
def plan():
    return amp_ir.explain_plan(captured())


def test_a_box_an_op_and_an_edge_for_each_that_reads_another(plan):
    rows = rows_of(plan)
    graph = graph_of(plan, rows)
    assert [node.ops[0].id for node in graph.nodes] == [row.op.id for row in rows]
    pairs = {(edge.source.ops[0].id, edge.target.ops[0].id) for edge in graph.edges}
    shown = {row.op.id for row in rows}
    expected = {(source, row.op.id) for row in rows for source in row.op.sources if source in shown}
    assert pairs == expected
    assert pairs


def test_an_edge_is_a_cast_exactly_where_an_op_reads_what_was_left_in_another_dtype(plan):
    graph = graph_of(plan, rows_of(plan))
    for edge in graph.edges:
        (reader,) = edge.target.ops
        differs = any(
            left != read
            for source, left, read in zip(reader.sources, reader.left, reader.reads, strict=True)
            if source == edge.source.ops[0].id
        )
        assert bool(edge.casts) == differs
    assert any(edge.casts for edge in graph.edges)


def test_a_cell_of_the_grid_has_the_boxes_of_one_row_and_pass(plan):
    for graph in (graph_of(plan, rows_of(plan)),):
        root = ElementTree.fromstring(drawing(graph, plan.amp_dtype))
        cells = [one for one in root if "cell" in one.get("class", "")]
        areas = [one.get("style").removeprefix("grid-area:").split("/") for one in cells]
        assert len({tuple(area) for area in areas}) == len(areas)
        found = {
            (box.get("id"), int(row), ["forward", "backward", "optimizer"][int(lane) - 1])
            for cell, (row, lane) in zip(cells, areas, strict=True)
            for box in cell
        }
        # Row 1 has the names of the passes, and rows of a grid count from 1.
        assert found == {(f"n{one.number}", one.row + 2, one.phase) for one in graph.nodes}


def test_in_a_lane_edges_go_one_way(plan):
    for edge in graph_of(plan, rows_of(plan)).edges:
        if edge.source.phase == edge.target.phase == "forward":
            assert edge.source.row < edge.target.row
        if edge.source.phase == edge.target.phase == "backward":
            assert edge.source.row > edge.target.row


def test_a_large_step_is_an_outline_of_its_modules(plan, monkeypatch):
    monkeypatch.setattr(explain_graph, "MAX_OPS", 4)
    rows = rows_of(plan)
    page = graph_page("a step", plan, rows)
    assert 'class="outline"' in page and 'class="drawing"' not in page
    assert page.count("<details") == page.count("</details>") > 1


def test_the_page_is_one_file_with_dtypes_as_classes_and_marks_on_casts(plan):
    rows = rows_of(plan)
    text = graph_page("a <title>", plan, rows)
    assert "a &lt;title&gt;" in text
    assert not re.findall(r"https?:", text)
    root = ElementTree.fromstring(drawing(graph_of(plan, rows), plan.amp_dtype))
    boxes = [set(box.get("class").split()) for box in root.iter() if box.get("id")]
    assert {"node", "low"} in boxes
    assert {"node", "full"} in boxes
    edges = [one for one in root.iter("g") if one.get("data-ends")]
    marked = ["cast" in edge.get("class").split() for edge in edges]
    assert marked == [edge.find("g/circle") is not None for edge in edges]
    assert 0 < sum(marked) < len(marked)


def test_one_module_alone_can_be_drawn(plan):
    graph = graph_of(plan, rows_of(plan, "1"))
    assert {op.module for node in graph.nodes for op in node.ops} == {"1"}


def test_a_plan_keeps_its_edges_in_a_file(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    again = amp_ir.CastPlan.load(tmp_path / "plan.json")
    assert again == plan
    assert graph_page("x", again, rows_of(again)) == graph_page("x", plan, rows_of(plan))
