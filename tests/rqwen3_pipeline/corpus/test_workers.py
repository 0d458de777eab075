"""Workers: forked from one process, which they share, and gone when they should be."""

import multiprocessing
import shutil
from pathlib import Path

import psutil
import pytest

from rqwen3_pipeline.corpus.workers import Pool
from rqwen3_pipeline.settings import RunRoot

TOKENIZER = Path(__file__).resolve().parents[4] / "shared" / "tokenizer" / "tokenizer.json"


def family():
    """The fork server and its workers."""
    (server,) = (psutil.Process(process.pid) for process in multiprocessing.active_children())
    return server, server.children()


@pytest.mark.skipif(not TOKENIZER.is_file(), reason="no ../shared/tokenizer/tokenizer.json here")
def test_workers_that_are_new_share_the_tokenizer_that_was_loaded(tmp_path):
    root = RunRoot(tmp_path)
    root.tokenizer.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(TOKENIZER, root.tokenizer)
    with Pool(3) as pool:
        pool.load_tokenizer(root, 2)
        _, before = family()
        pool.renew()
        pool.load_tokenizer(root, 3)
        server, workers = family()
        assert len(before) == 2
        assert len(workers) == 3
        assert not {worker.pid for worker in before} & {worker.pid for worker in workers}
        assert not any(worker.is_running() for worker in before)
        loaded = server.memory_info().rss
        assert loaded > 150e6
        assert all(worker.memory_full_info().uss < loaded / 4 for worker in workers)
    assert not any(process.is_running() for process in (server, *workers))


def test_tokenizer_that_cannot_be_loaded_is_left_to_the_worker_that_needs_it(tmp_path):
    with Pool(2) as pool:
        pool.load_tokenizer(RunRoot(tmp_path), 2)
        pool.renew()
        pool.load_tokenizer(RunRoot(tmp_path), 2)
        server, workers = family()
        assert server.is_running()
        assert len(workers) == 2
    assert not any(process.is_running() for process in (server, *workers))


def test_pool_that_was_not_used_starts_nothing():
    with Pool(4):
        assert not multiprocessing.active_children()
