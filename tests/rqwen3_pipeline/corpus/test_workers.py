"""Workers: forked from one process, which they share, and gone when they should be."""

import itertools
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.context import SpawnProcess

import psutil
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from rqwen3_pipeline.corpus.workers import Pool
from rqwen3_pipeline.settings import RunRoot


def family():
    """The fork server and its workers."""
    (server,) = (psutil.Process(process.pid) for process in multiprocessing.active_children())
    return server, server.children()


def large_tokenizer(path):
    """A tokenizer.json whose vocabulary takes tens of megabytes."""
    words = ("".join(pair) for pair in itertools.product(map(str, range(100, 700)), map(str, range(100, 700))))
    vocabulary = {word: i for i, word in enumerate((*pre_tokenizers.ByteLevel.alphabet(), *words))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))


def test_workers_that_are_new_share_the_tokenizer_that_was_loaded(tmp_path):
    root = RunRoot(tmp_path)
    large_tokenizer(root.tokenizer)
    with Pool(3) as pool:
        pool.load_tokenizer(root, 2)
        _, before = family()
        small = max(worker.memory_info().rss for worker in before)
        pool.renew()
        pool.load_tokenizer(root, 3)
        server, workers = family()
        assert len(before) == 2
        assert len(workers) == 3
        assert not {worker.pid for worker in before} & {worker.pid for worker in workers}
        assert not any(worker.is_running() for worker in before)
        loaded = server.memory_info().rss - small
        assert loaded > 20e6
        assert all(worker.memory_full_info().uss < loaded / 2 for worker in workers)
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


def test_interrupt_that_another_thread_takes_while_the_server_starts_comes_when_it_has_started(monkeypatch):
    start = SpawnProcess.start

    def interrupted(process):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        start(process)

    monkeypatch.setattr(SpawnProcess, "start", interrupted)
    with Pool(2) as pool:
        waiting = threading.Thread(target=time.sleep, args=(2,))  # takes the signal, which this thread has blocked
        waiting.start()
        with pytest.raises(KeyboardInterrupt):
            pool.start()
        assert multiprocessing.active_children()
        waiting.join()
    assert not multiprocessing.active_children()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
