# SPDX-License-Identifier: Apache-2.0
"""`amp-ir profile` and `amp-ir report`: what they print and write, and trainings from a file."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from amp_ir import cli
from amp_ir.commands import measure
from amp_ir.demo.training_file import load_training
from amp_ir.errors import OptionError
from amp_ir.host import native
from amp_ir.host.peak_rates import MachinePeaks
from amp_ir.ir.memory_plan import MemoryPlan
from amp_ir.report.exchange_profile import ExchangeProfile
from amp_ir.report.kernel_profile import KernelProfile
from amp_ir.report.memory import report_memory
from amp_ir.report.memory_chart import rounded_ticks
from amp_ir.report.step_page import step_page
from device_messages import no_gpu

pytestmark = pytest.mark.skipif(
    not native.has("amp_ir.call_clock.take"), reason="this build has no clock (no OpenMP)"
)

TRAINING = """
    import torch
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(32, 8),)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if __name__ == "__main__":
        raise SystemExit("the training loop ran")
"""
# Elements that HTML closes by themselves.
VOID = {"meta", "input", "br"}


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def training(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(TRAINING))
    return path


class Page(HTMLParser):
    """Checks that tags nest, and collects what the tests look at."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: dict[str, int] = {}
        self.paths: list[dict[str, str | None]] = []
        self.table = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.table = dict(attrs).get("id") or ""
        if tag == "tr":
            self.rows[self.table] = self.rows.get(self.table, 0) + 1
        if tag == "path":
            self.paths.append(dict(attrs))
            self.open.pop()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "path":
            self.paths.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_profile_prints_the_table_and_writes_what_is_asked_for(
    training: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "load_warning", lambda: "The machine is busy")
    trace, document = tmp_path / "trace.json", tmp_path / "profile.json"
    words = ["profile", str(training), "--steps", "2", "--trace", str(trace)]
    assert cli.main([*words, "--json", str(document)]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert re.fullmatch(r"[\d.]+ ms a step \(median of 2\), in kernels .*", lines[0])
    assert any(line.startswith("onednn.matmul bf16") or "torch.matmul" in line for line in lines)
    assert lines[-3].startswith("AMP saved ")
    assert lines[-2:] == [f"wrote {trace}", f"wrote {document}"]
    assert shown.err.splitlines() == [
        "building", "capturing the step", "choosing casts", "planning memory",
        "compiling and timing", "timing float32 and PyTorch beside it", "The machine is busy",
    ]  # fmt: skip
    parts = json.loads(document.read_text())
    assert len(parts["memory"]["timeline"]) == len(parts["profile"]["calls"])
    assert len(json.loads(trace.read_text())["traceEvents"]) > len(parts["profile"]["calls"])


def test_the_page_has_everything_and_loads_nothing(
    training: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "load_warning", lambda: "The machine is <busy>")
    out = tmp_path / "report.html"
    words = ["report", str(training), "--steps", "2", "--errors", "20", "--out", str(out)]
    assert cli.main(words) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    text = out.read_text()
    assert "<b>The machine is &lt;busy&gt;</b>" in text
    assert not re.search(r"(src|href)=|https?://|@import|url\(", text)
    page = Page()
    page.feed(text)
    assert not page.open
    assert page.rows["held"] > 3 and page.rows["kernels"] > 3
    moments = json.loads(re.findall(r'id="moments">(.*?)</script>', text, re.DOTALL)[0])
    # Each area has two points for each call above, two below, and one at its start.
    counts = {len(re.findall(r"[ML]", path["d"] or "")) for path in page.paths}
    assert counts == {4 * len(moments) + 1}
    assert "role-parameter" in {path["class"] for path in page.paths}
    for words in (
        "AMP saved",
        "<title>train.py in bfloat16</title>",
        "Alive at the peak",
        "dtypes by op",
    ):
        assert words in text
    # Itself, its float32 step and PyTorch's, below a line of heads; a source line of each kernel.
    assert page.rows["peers"] == 4
    assert page.rows["errors"] > 4 and "casts for relax.matmul in 0 (forward)" in text
    assert "train.py:" in text
    assert 'class="band phase-forward"' in text and 'class="band phase-backward"' in text
    assert ">0.0%<" not in text
    # On a telephone each value alive is a few lines, not a row that scrolls; later rules win.
    assert text.index("td.name { ") < text.index("#held tr { display: flex")


def test_the_page_of_a_step_without_casts_says_so(training: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    words = ["report", str(training), "--steps", "1", "--amp-dtype", "float32"]
    assert cli.main([*words, "--out", str(out)]) == 0
    text = out.read_text()
    assert "Error of the gradients" not in text
    assert "The step was compiled without casts." in text and "AMP saved" not in text


def test_a_workload_is_reported_by_name(tmp_path: Path) -> None:
    out = tmp_path / "mlp.html"
    assert cli.main(["report", "mlp", "--small", "--steps", "1", "--out", str(out)]) == 0
    assert "<title>mlp in bfloat16</title>" in out.read_text()


def test_names_cannot_break_the_page() -> None:
    profile = KernelProfile(1.0, 1, (), (), MachinePeaks({"float32": 1.0}, 1.0, "1 thread"))
    text = step_page("<b>&", report_memory(MemoryPlan(0, 0, (), 0, 0, 0)), profile, None, "a<b")
    assert "<title>&lt;b&gt;&amp;</title>" in text and "a&lt;b" in text
    assert "The step runs nothing." in text


def test_the_page_of_a_step_of_several_ranks_shows_its_exchanges() -> None:
    first = ExchangeProfile(
        "all_reduce of bucket 0, float32[64]", 2**20, 4.0, 1.0, "all_reduce", "float32", 2, 3.0, 5.0
    )
    profile = KernelProfile(
        10.0, 1, (), (), MachinePeaks({"float32": 1.0}, 1.0, "1 thread"), exchanges=(first,)
    )
    text = step_page("a", report_memory(MemoryPlan(0, 0, (), 0, 0, 0)), profile, None, "here")
    assert "Exchange of 1.00 MiB with other ranks: 1 ms exposed, 10.0% of the step" in text
    row = "".join(
        f'<td class="number">{one}</td>' for one in ("2", "1.00", "5", "8", "4", "1", "3")
    )
    assert f"<td>all_reduce</td><td>float32</td>{row}" in text
    # Handed over after half of the step, waited for in the last of its four milliseconds.
    assert '<i class="phase-forward" style="left:50.00%;width:30.00%">' in text
    assert '<i class="phase-backward" style="left:80.00%;width:10.00%">' in text


THROUGH_JIT = (
    "where a function such as main() makes them, have it call the step through amp_ir, and the "
    "commands take them from its first call: `train = amp_ir.jit(step, model=model, "
    "optimizer=optimizer)` and `train(*batch)`"
)


def test_a_training_file_is_run_without_its_loop(training: Path) -> None:
    found = load_training(training)
    assert found.name == "train.py" and len(found.batch) == 1
    assert found.optimizer is not None and found.scaler is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "batch = ()",
            "{} does not define `step` (the function to capture), `model` (a module or a list of "
            "them); define them at its top level: `amp-ir examine --help` shows "
            "a file that the commands take; or, "
            f"{THROUGH_JIT}",
        ),
        (
            "step = model = None; batch = [1]",
            "`batch` in {} is a list; expected the tuple of the arguments of `step`: (x, y), or "
            "(batch,) for a single one",
        ),
    ],
)
def test_a_file_that_lacks_something(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(source)
    with pytest.raises(OptionError) as caught:
        load_training(path)
    assert str(caught.value) == message.format(path)


@pytest.mark.parametrize(
    ("name", "kind"), [("berd1", "neither a workload nor a file"), ("/", "a folder")]
)
def test_a_name_that_is_neither_is_a_wrong_use(name: str, kind: str, capsys: Any) -> None:
    assert cli.main(["report", name]) == 2
    expected = f"amp-ir report: {name} is {kind}; expected one of bert1, mlp, gpt2, resnet50, ssd, "
    expected += "lstm, or a .py file; `amp-ir examine --help` shows a file that the commands take"
    assert capsys.readouterr().err.splitlines()[-1] == expected


@pytest.mark.parametrize("command", ["profile", "report"])
def test_a_gpu_that_is_not_here_is_told_before_anything_else(command: str, capsys: Any) -> None:
    device = f"cuda:{torch.cuda.device_count()}"
    assert cli.main([command, "bert1", "--device", device]) == 2
    shown = capsys.readouterr()
    why = no_gpu(device)
    if torch.cuda.is_available():
        why = f"device={device!r} is not here: this machine has {device[5:]} GPU(s)"
    assert (shown.out, shown.err) == ("", f"amp-ir {command}: {why}\n")


@pytest.mark.parametrize(
    ("top", "ticks"),
    [
        (398 * 2**20, [0, 100, 200, 300, 400]),
        (2**20, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (1100 * 2**20, [0, 500, 1000, 1500]),
    ],
)
def test_the_axis_counts_round_numbers_of_mebibytes(top: int, ticks: list[float]) -> None:
    assert [one / 2**20 for one in rounded_ticks(top)] == pytest.approx(ticks, rel=1e-6)


@pytest.mark.parametrize("top", [3, 777, 2**10, 2**20 - 1, 123456789, 7 * 2**40])
def test_every_peak_has_a_handful_of_ticks_above_it(top: int) -> None:
    ticks = rounded_ticks(top)
    assert 3 <= len(ticks) <= 6
    assert ticks[-2] < top <= ticks[-1]


SCRIPT = """
    import argparse
    from {helper} import Network
    import torch
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=4)
    width = parser.parse_args().width
    model = Network(width)
    batch = (torch.randn(2, width),)

    def train_step(x):
        return model(x).sum()
"""
HELPER = """
    import torch

    class Network(torch.nn.Linear):
        def __init__(self, width):
            super().__init__(width, 2)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that reads its command line, and imports from its own folder."""
    monkeypatch.setattr("sys.path", list(sys.path))
    helper = f"helper_of_{tmp_path.name}"
    (tmp_path / f"{helper}.py").write_text(textwrap.dedent(HELPER))
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT.format(helper=helper)) + "\n\nstep = train_step\n")
    return path


def test_a_file_has_its_own_command_line_and_folder(script: Path, capsys: Any) -> None:
    before = list(sys.argv)
    assert load_training(script).batch[0].shape == (2, 4)
    assert load_training(script, ["--width", "6"]).batch[0].shape == (2, 6)
    assert sys.argv == before
    assert cli.main(["examine", str(script), "--", "--width", "8"]) == 0
    assert "step (train.py:" in capsys.readouterr().out.replace("train_step", "step")


def test_a_file_that_ends_early_is_told_about_its_command_line(script: Path, capsys: Any) -> None:
    assert cli.main(["examine", str(script), "--", "--width", "wide"]) == 2
    shown = capsys.readouterr().err
    assert "error: argument --width: invalid int value: 'wide'" in shown
    assert shown.splitlines()[-1] == (
        f"amp-ir examine: {script} ended (exit code 2) before its parts could be read. What it "
        f"reads from its command line follows --: amp-ir examine {script} -- --lr 0.1; what trains "
        'belongs below `if __name__ == "__main__":`'
    )


def test_a_file_that_fails_shows_where(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import torch\nmodel = torch.nn.Linaer(2, 2)\n")
    with pytest.raises(OptionError) as caught:
        load_training(path)
    text = str(caught.value)
    assert text.startswith(f"{path} failed while its parts were read:\nTraceback")
    assert f'File "{path}", line 2' in text and "runpy" not in text
    assert "AttributeError: module 'torch.nn' has no attribute 'Linaer'" in text
    assert text.endswith(f"Check that `python {path}` gets past this line")


def test_a_step_of_another_name_is_suggested(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("model = 1; batch = ()\ndef evaluate(): ...\ndef train_step(): ...\n")
    with pytest.raises(OptionError) as caught:
        load_training(path)
    assert str(caught.value) == (
        f"{path} does not define `step` (the function to capture); `step = train_step` names it; "
        "define it at its top level: `amp-ir examine --help` shows a file that the commands take; "
        f"or, {THROUGH_JIT}"
    )


def test_words_after_the_dashes_need_a_file(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--", "--lr", "1"])
    expected = "amp-ir: error: doctor takes no file whose arguments could follow --\n"
    assert capsys.readouterr().err.endswith(expected)


def test_a_step_whose_first_run_changes_the_model_has_times_beside_pytorch(
    tmp_path: Path, capsys: Any
) -> None:
    """As Hugging Face's classifiers, which find the kind of their problem in the first batch."""
    path = tmp_path / "train.py"
    found = "if model.problem is None: model.problem = 'regression'"
    changed = TRAINING.replace("loss = ", f"{found}\n        loss = ", 1)
    path.write_text(textwrap.dedent(changed).replace("batch =", "model.problem = None\nbatch =", 1))
    assert cli.main(["profile", str(path), "--steps", "1"]) == 0
    shown = capsys.readouterr()
    assert "no times beside" not in shown.err and "PyTorch float32" in shown.out
