"""The rule of tests/conftest.py: a skip is a failure, unless the test is marked `gpu`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
TESTS = """
import pytest

@pytest.mark.gpu
def test_on_a_gpu(): pytest.skip("no such GPU")

def test_that_skips_itself(): pytest.skip("not today")

@pytest.mark.skip(reason="never")
def test_that_is_marked(): pass

@pytest.mark.xfail(strict=True)
def test_that_is_known_to_fail(): assert False
"""


def test_only_gpu_tests_may_be_skipped(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "1 failed, 1 skipped, 1 xfailed, 1 error" in done.stdout, done.stdout
    assert "only tests marked gpu may be" in done.stdout
