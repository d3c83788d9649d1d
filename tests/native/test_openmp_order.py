# SPDX-License-Identifier: Apache-2.0
"""What `make sanitize SANITIZE=thread` needs: ThreadSanitizer sees what OpenMP's threads order."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "support" / "openmp_order.cc"
PROGRAM = """
#include <omp.h>

int main(int count, char**) {
  int written[2] = {0, 0}, read[2];
  for (int k = 0; k < 50; ++k) {
#pragma omp parallel num_threads(2)
    {
      const int thread = omp_get_thread_num();
      written[thread] = k;
      if (count == 1) {
#pragma omp barrier
      }
      read[thread] = written[1 - thread];
#pragma omp barrier
    }
  }
  return read[0] < 0;
}
"""


def _compile(*arguments: str) -> bool:
    return subprocess.run(["g++", "-O1", "-g", *arguments], capture_output=True).returncode == 0


def test_barriers_order_and_a_missing_one_is_a_race(tmp_path: Path) -> None:
    library, program, source = (str(tmp_path / name) for name in ("order.so", "team", "team.cc"))
    Path(source).write_text(PROGRAM)
    if not _compile("-fsanitize=thread", "-fopenmp", source, "-o", program):
        pytest.skip("this compiler has no ThreadSanitizer")
    assert _compile("-fPIC", "-shared", str(SOURCE), "-ltsan", "-lgomp", "-o", library)
    runtime = subprocess.run(
        ["g++", "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()

    def reports(*arguments: str) -> int:
        preloaded = os.environ | {"LD_PRELOAD": f"{runtime} {library}"}
        done = subprocess.run(
            [program, *arguments], env=preloaded, capture_output=True, text=True, check=False
        )
        assert done.returncode in (0, 66), done.stderr[-2000:]
        return done.stderr.count("WARNING: ThreadSanitizer: data race")

    assert reports() == 0
    assert reports("without the first barrier") > 0
