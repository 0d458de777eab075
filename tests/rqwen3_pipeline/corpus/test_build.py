import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from model.errors import CorpusError, SourceError
from rqwen3_pipeline.corpus.build import HTML_COST, STAGES, build_corpus, items_of, largest_first, pending, run_stage
from rqwen3_pipeline.corpus.lock import lock_folder
from rqwen3_pipeline.corpus.pieces import KEPT_BYTES, Task
from rqwen3_pipeline.corpus.workers import Pool
from rqwen3_pipeline.settings import SOURCES, RunRoot

from .made import prose, tree, write

BUILD = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from made import run_config
from rqwen3_pipeline.corpus.build import build_corpus
from rqwen3_pipeline.corpus.sources import corpus_config
from rqwen3_pipeline.settings import RunRoot

if __name__ == "__main__":
    def told(outcome):
        print(outcome.stage, outcome.source, outcome.key, flush=True)
    run = run_config()
    root, folder, count = RunRoot(Path(sys.argv[2])), Path(sys.argv[3]), int(sys.argv[4])
    build_corpus(root, corpus_config(run), run.training, folder, workers=count, progress=told)
    print("done", flush=True)
"""


def start(root: Path, folder: Path, workers: int) -> subprocess.Popen[str]:
    script = root.parent / "build.py"
    script.write_text(BUILD)
    command = [sys.executable, str(script), os.path.dirname(__file__), str(root), str(folder), str(workers)]  # noqa: PTH120
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="session")
def undisturbed(clean):
    """The files of a build in one process that nothing disturbed."""
    return tree(clean[0])


def test_build_with_two_workers_gives_the_same_bytes(root, config, training, folder, undisturbed):
    heard = []
    build_corpus(root, config, training, folder, workers=2, progress=heard.append)
    assert tree(root) == undisturbed
    lock = lock_folder(root, config, folder)
    wanted = [(stage, *item) for stage in STAGES[:-1] for item in items_of(stage, config, lock)]
    assert sorted((o.stage, o.source, o.key) for o in heard) == sorted(wanted)
    assert not any(o.error or o.skipped for o in heard)


@pytest.mark.parametrize(("workers", "lines"), [(1, 12), (1, 31), (2, 20)])
def test_build_killed_and_run_again_gives_the_same_bytes(
    tmp_path, config, training, folder, undisturbed, workers, lines
):
    root = RunRoot(tmp_path / "root")
    child = start(root.path, folder, workers)
    assert child.stdout is not None
    for _ in range(lines):
        assert child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.read()  # at its end only when the workers are gone too
    child.stdout.close()
    build_corpus(root, config, training, folder)
    assert tree(root) == undisturbed


def test_build_killed_inside_every_kind_of_write_gives_the_same_bytes(
    root, config, training, folder, undisturbed, monkeypatch
):
    """Stop where a file is about to get its final name, at each of them in turn, as a kill would."""
    import model.files as files
    from rqwen3_pipeline.corpus import shards

    class Killed(BaseException):
        pass

    honest = files.commit
    allowed = 0

    def stingy(temporary, path):
        nonlocal allowed
        if allowed == 0:
            shutil.copy(temporary, temporary.with_name(f".{path.name}.1.tmp"))
            raise Killed
        allowed -= 1
        honest(temporary, path)

    monkeypatch.setattr(files, "commit", stingy)
    monkeypatch.setattr(shards, "commit", stingy)
    kills = 0
    while True:
        allowed = 3 + 4 * kills
        try:
            build_corpus(root, config, training, folder)
            break
        except Killed:
            kills += 1
    assert kills >= 8
    assert tree(root) == undisturbed


def test_pending_follows_the_stages(root, config, folder):
    lock = lock_folder(root, config, folder)
    assert pending("raw", root, config, lock, "fineweb_edu") == ["00000", "00001"]
    assert pending("tokens", root, config, lock, "fineweb_edu") == ["00000", "00001"]
    run_stage("raw", root, config, lock, [("fineweb_edu", "00001")])
    assert pending("raw", root, config, lock, "fineweb_edu") == ["00000"]
    assert pending("survivors", root, config, lock, "fineweb_edu") == ["all"]
    assert pending("survivors", root, config, lock, "wikipedia_fineweb_edu") == ["all"]


def test_pending_after_a_build_is_nothing_and_after_a_lost_file_that_file(root, config, folder, built):
    lock = lock_folder(root, config, folder)
    assert not any(pending(stage, root, config, lock, source) for stage in STAGES[:-1] for source in SOURCES)
    root.digests("fineweb_edu", "00001").unlink()
    assert pending("digests", root, config, lock, "fineweb_edu") == ["00001"]
    assert pending("digests", root, config, lock, "pes2o") == []


def test_build_with_a_bad_file_does_the_others_and_names_it(root, config, training, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "bad")
    path = tmp_path / "bad" / "fineweb-edu" / "b.parquet"
    data = bytearray(path.read_bytes())
    data[4:2000] = bytes(1996)
    path.write_bytes(bytes(data))
    heard = []
    with pytest.raises(
        CorpusError, match=r"(?s)1 piece of .*filtered fineweb_edu/\d+: .*fineweb-edu__b\.parquet: damaged"
    ):
        build_corpus(root, config, training, tmp_path / "bad", progress=heard.append)
    done = {(o.stage, o.source) for o in heard if not o.error}
    assert ("survivors", "pes2o") in done
    assert ("survivors", "wikipedia_fineweb_edu") not in done
    assert not root.manifest.exists()
    shutil.copytree(folder, tmp_path / "bad", dirs_exist_ok=True)
    heard.clear()
    build_corpus(root, config, training, tmp_path / "bad", progress=heard.append)
    assert {o.source for o in heard if o.stage == "raw" and not o.skipped} == {"fineweb_edu"}


def test_build_after_a_raw_file_changed_makes_again_what_depends_on_it(root, config, training, folder, tmp_path, built):
    shutil.copytree(folder, tmp_path / "old")
    write(tmp_path / "old" / "pes2o.parquet", [{"content": prose(8000 + i, 300)} for i in range(30)])
    heard = []
    build_corpus(root, config, training, tmp_path / "old", progress=heard.append)
    again = {(o.stage, o.source) for o in heard if not o.skipped}
    assert {
        ("raw", "pes2o"),
        ("filtered", "pes2o"),
        ("digests", "pes2o"),
        ("survivors", "pes2o"),
        ("tokens", "pes2o"),
    } <= again
    assert not {source for stage, source in again if stage != "tokens"} - {"pes2o"}
    fresh = RunRoot(tmp_path / "fresh")
    build_corpus(fresh, config, training, tmp_path / "old")
    assert tree(fresh) == tree(root)


OWN = [
    ("raw/pes2o/pes2o.parquet", "filtered/pes2o/00000.parquet"),
    ("filtered/pes2o/00000.parquet", "digests/pes2o/00000.npy"),
    ("digests/pes2o/00000.npy", "survivors/pes2o/00000.npy"),
    ("survivors/pes2o/00000.npy", "tokens/pes2o-00000-00.bin"),
    ("tokenizer.json", "tokens/pes2o-00000-00.bin"),
]


@pytest.mark.parametrize(("damaged", "lost"), OWN, ids=[damaged for damaged, _ in OWN])
def test_build_over_one_flipped_bit_of_its_own_names_it_and_the_next_one_makes_it_anew(
    root, config, training, folder, built, undisturbed, damaged, lost
):
    (root.path / lost).unlink()
    data = bytearray((root.path / damaged).read_bytes())
    data[len(data) // 2] ^= 1
    (root.path / damaged).write_bytes(data)
    with pytest.raises(CorpusError, match=rf"{damaged}: SHA-256 is .* it is damaged; its stamp was removed\. Run the"):
        build_corpus(root, config, training, folder)
    build_corpus(root, config, training, folder)
    assert tree(root) == undisturbed


def test_build_with_other_settings_is_refused_and_rebuilt_on_demand(root, make_config, training, folder, built):
    other = make_config(textbooks={"min_chars": 10_000}, min_share_kept=1e-9)
    with pytest.raises(CorpusError, match=r"filtered textbooks/00000: .*min_chars = 100, now min_chars = 10000"):
        build_corpus(root, other, training, folder)
    looser = make_config(textbooks={"min_chars": 200})
    build_corpus(root, looser, training, folder, rebuild=True)
    assert json.loads(root.manifest.read_text())["settings"]["filtered"]["textbooks"]["min_chars"] == 200


def test_killed_workers_cost_their_pieces_and_no_others(root, config, folder):
    lock = lock_folder(root, config, folder)
    pipes = [root.raw(source, f"{source}.stamp.json") for source in ("pes2o", "textbooks")]
    for pipe in pipes:
        pipe.parent.mkdir(parents=True)

    def kill():
        for pipe in pipes:  # whoever reads this stamp waits for a writer, and opening succeeds when somebody does
            while True:
                try:
                    os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
                    break
                except OSError:
                    time.sleep(0.05)
        for worker in psutil.Process(multiprocessing.active_children()[0].pid).children():
            worker.kill()

    items = sorted(items_of("raw", config, lock), key=lambda item: item[0] not in ("pes2o", "textbooks"))
    killer = threading.Thread(target=kill)
    task = Task(stage="raw", root=root.path, config=config, lock=lock, rebuild=False)
    outcomes = []
    for pipe in pipes:
        os.mkfifo(pipe)
    killer.start()
    with Pool(2) as pool:
        pool.run(task, items, outcomes.append)
    killer.join()
    assert {o.source: "signal 9" in o.error for o in outcomes if o.error} == {"pes2o": True, "textbooks": True}
    assert len(outcomes) == len(items)


def test_killed_fork_server_costs_nothing(root, config, training, folder, undisturbed):
    stages, family = [], []

    def kill(outcome):
        if outcome.stage in ("raw", "tokens") and outcome.stage not in stages:
            stages.append(outcome.stage)
            (server,) = multiprocessing.active_children()
            family.extend((psutil.Process(server.pid), *psutil.Process(server.pid).children()))
            server.kill()

    build_corpus(root, config, training, folder, workers=2, progress=kill)
    assert stages == ["raw", "tokens"]
    assert len(family) == 6
    assert tree(root) == undisturbed
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


MEASURE = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from made import only
from rqwen3_pipeline.corpus.build import BuildOptions, build_files, items_of
from rqwen3_pipeline.corpus.lock import lock_folder
from rqwen3_pipeline.corpus.sources import corpus_config
from rqwen3_pipeline.settings import RunRoot

def peak_mib():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024

root, folder, tokenizer = RunRoot(Path(sys.argv[2])), *map(Path, sys.argv[3:5])
config = corpus_config(only("textbooks", {"max_chars": int(sys.argv[5])}, json.loads(sys.argv[6])))
lock = lock_folder(root, config, folder)
found = {"start": peak_mib()}
def told(outcome):
    assert outcome.error is None, outcome.error
    found[outcome.stage] = peak_mib()
    found["documents"] = outcome.report.get("documents", 0) + outcome.report.get("heldout_documents", 0)
build_files(root, config, lock, items_of("raw", config, lock), BuildOptions(tokenizer_file=tokenizer, progress=told))
print(json.dumps(found))
"""
HUGE_MIB = 40


@pytest.mark.long
@pytest.mark.parametrize(
    ("max_chars", "documents", "rows"), [(100_000, 1199, 7), (10**9, 1200, 13)], ids=["dropped", "kept"]
)
def test_build_of_a_file_with_one_huge_row_needs_a_few_times_that_row(
    root, tmp_path, tokenizer_file, pinned, max_chars, documents, rows
):
    path = tmp_path / "sources" / "textbooks.parquet"
    path.parent.mkdir()
    with pq.ParquetWriter(path, pa.schema([("text", pa.large_string())])) as writer:
        for group in range(3):
            text = [prose(400 * group + i, 100) for i in range(400)]
            text[200] = prose(9, 1000) * (HUGE_MIB * 2**20 // len(prose(9, 1000).encode())) if group == 1 else text[200]
            writer.write_table(pa.table({"text": pa.array(text, pa.large_string())}))
    given = [os.path.dirname(__file__), root.path, path.parent, tokenizer_file, max_chars, json.dumps(pinned)]  # noqa: PTH120
    command = [sys.executable, "-c", MEASURE, *map(str, given)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak_mib = json.loads(done.stdout)
    assert peak_mib["documents"] == documents
    assert peak_mib["tokens"] - peak_mib["start"] < rows * HUGE_MIB + KEPT_BYTES / 2**20, peak_mib


def test_run_stage_of_no_stage_is_refused(root, config, folder):
    with pytest.raises(ValueError, match="no stage of pieces"):
        run_stage("manifest", root, config, lock_folder(root, config, folder), [])


@pytest.mark.parametrize("workers", [1, 2])
def test_build_with_a_wrong_tokenizer_stops_before_anything_is_filtered(
    root, make_config, training, folder, pinned, tokenizer_file, tmp_path, workers
):
    other = tmp_path / "tokenizer.json"
    other.write_bytes(tokenizer_file.read_bytes() + b" ")
    with pytest.raises(SourceError, match="pins"):
        build_corpus(root, make_config(**pinned), training, folder, other, workers=workers)
    assert not (root.path / "filtered").exists()
    assert not multiprocessing.active_children()


def test_largest_pieces_go_first_and_html_counts_for_more(root, config, folder):
    lock = lock_folder(root, config, folder)
    for stage, factor in (("filtered", HTML_COST), ("tokens", 1)):
        task = Task(stage=stage, root=root.path, config=config, lock=lock, rebuild=False)
        items = items_of(stage, config, lock)
        order = largest_first(task, items)
        costs = [lock.file(*item).size_bytes * (factor if item[0] == "stackexchange" else 1) for item in order]
        assert costs == sorted(costs, reverse=True)
        assert sorted(order) == sorted(items)
