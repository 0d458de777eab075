"""`rqwen3 corpus build` killed with SIGKILL at twenty random moments, and taken up each time in another way."""

import random
import shutil
import time

import pytest

from rqwen3_pipeline.settings import RunRoot
from tests.rqwen3_pipeline.corpus.made import prose, tree, write
from tests.rqwen3_pipeline.killing import killed_after, start
from tests.rqwen3_pipeline.site import make_site
from tests.rqwen3_pipeline.test_corpus_commands import rqwen3

KILLS, FILES, ROWS = 20, 6, 500
WAITING = 75


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_build_killed_anywhere_and_taken_up_in_any_way_ends_with_the_same_bytes(tmp_path):
    """A chain of kills in one run root; each time the whole, or a random choice of files, by 1, 2 or 3 workers.

    When a build gets through, its bytes are compared and the next one begins from nothing.
    """
    site = make_site(tmp_path)
    (site.sources / "textbooks.parquet").unlink()
    for i in range(FILES):
        rows = [{"text": prose(ROWS * i + j if j % 9 else j, 120)} for j in range(ROWS)]
        write(site.sources / "textbooks" / f"{i}.parquet", rows)
    assert rqwen3(site, "sources", "lock", "--folder", str(site.sources)).returncode == 0
    fresh = tmp_path / "locked"
    shutil.copytree(site.home, fresh)
    began = time.monotonic()
    assert start(site.command("corpus", "build")).wait() == 0
    whole_s = time.monotonic() - began
    expected, draw = tree(RunRoot(site.home)), random.Random(5)
    shutil.rmtree(site.home)
    shutil.copytree(fresh, site.home)
    kills = struck = number = 0
    while kills < KILLS:
        number += 1
        command = site.command("corpus", "build", "--workers", str(draw.choice((1, 2, 3))))
        if partly := draw.random() < 0.5:
            files = ",".join(map(str, draw.sample(range(FILES), draw.randint(1, 3))))
            command += ["--source", "textbooks", "--files", files, "--wait-s", "0"]
        before = tree(RunRoot(site.home))
        child = start(command)
        if killed_after(child, draw.uniform(0.25, 0.95) * whole_s, whole_group=number % 2 == 0):
            kills += 1
            struck += tree(RunRoot(site.home)) not in (before, expected)
        else:
            assert child.returncode in ((0, WAITING) if partly else (0,))
        if not partly and child.returncode == 0:
            assert tree(RunRoot(site.home)) == expected, kills
            shutil.rmtree(site.home)
            shutil.copytree(fresh, site.home)
    assert start(site.command("corpus", "build")).wait() == 0
    assert tree(RunRoot(site.home)) == expected
    assert struck >= KILLS // 4, "too few of the kills struck while something was being made"
