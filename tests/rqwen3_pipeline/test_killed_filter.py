"""`rqwen3 corpus filter` killed with SIGKILL at twenty random moments, and run again each time."""

import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from rqwen3_pipeline.settings import RunRoot
from tests.rqwen3_pipeline.corpus.made import prose, tree, write
from tests.rqwen3_pipeline.killing import killed_after, start
from tests.rqwen3_pipeline.site import make_site
from tests.rqwen3_pipeline.test_corpus_commands import fetch

KILLS, FILES, ROWS = 20, 10, 1500


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_filter_killed_anywhere_and_run_again_leaves_the_same_bytes(tmp_path):
    site = make_site(tmp_path)
    (site.sources / "textbooks.parquet").unlink()
    texts = [prose(i, 100) for i in range(ROWS)]
    for i in range(FILES):
        write(site.sources / "textbooks" / f"{i}.parquet", [{"text": f"{i} {text}"} for text in texts])
    fetch(site)
    command = site.command("corpus", "filter", "--workers", "2")
    fresh = tmp_path / "fetched"
    shutil.copytree(site.home, fresh)
    began = time.monotonic()
    first = start(command)
    _await_first_file(first, site.home)
    start_s = time.monotonic() - began
    assert first.wait() == 0
    filtering_s = time.monotonic() - began - start_s
    expected = tree(RunRoot(site.home))
    draw, struck = random.Random(3), 0
    for number in range(KILLS):
        shutil.rmtree(site.home)
        shutil.copytree(fresh, site.home)
        child = start(command)
        if number % 4:  # the clock of a busy machine would often strike before there is anything to tear
            _await_first_file(child, site.home)
        moment_s = draw.uniform(0, 0.9) * (filtering_s if number % 4 else start_s + filtering_s)
        if killed_after(child, moment_s, whole_group=number % 2 == 0):
            begun = any((site.home / "filtered").rglob("*"))
            struck += begun and tree(RunRoot(site.home)) != expected
        assert start(command).wait() == 0
        assert tree(RunRoot(site.home)) == expected, number
    assert struck >= KILLS // 5, "too few of the kills struck while files were being written"


def _await_first_file(child: "subprocess.Popen[bytes]", home: Path) -> None:
    while child.poll() is None and not any((home / "filtered").rglob("*.*")):
        time.sleep(0.01)
