"""`rqwen3 corpus build | stitch | verify | card`: files side by side, and what is said when it does not work out."""

import json
import os
import re
import shutil
import signal
import subprocess
import time

import psutil
import pytest

from model.files import read_json
from rqwen3_pipeline.corpus.claims import claimed
from rqwen3_pipeline.settings import RunRoot
from tests.rqwen3_pipeline.corpus.made import prose, tree, write
from tests.rqwen3_pipeline.site import Site, make_site
from tests.rqwen3_pipeline.test_corpus_commands import rqwen3

SOURCE, FILES = "textbooks", 4


def locked(folder) -> Site:
    """A site whose textbooks lie in four files, some documents in several of them; locked."""
    site = make_site(folder)
    (site.sources / f"{SOURCE}.parquet").unlink()
    for i in range(FILES):
        rows = [{"text": prose(100 * (i if j % 5 else 0) + j)} for j in range(60)]
        write(site.sources / SOURCE / f"{i}.parquet", rows)
    assert rqwen3(site, "sources", "lock", "--folder", str(site.sources)).returncode == 0
    return site


@pytest.fixture
def site(tmp_path) -> Site:
    return locked(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Site:
    """A site that was built by one call; tests must not change it."""
    site = locked(tmp_path_factory.mktemp("whole"))
    done = rqwen3(site, "corpus", "build")
    assert done.returncode == 0, done.stderr
    return site


def comparable(site: Site) -> dict[str, bytes]:
    """Everything but where the folder lay."""
    return {name: data for name, data in tree(RunRoot(site.home)).items() if name != "raw/origin.json"}


def test_build_shows_progress_and_ends_with_the_manifest(site):
    done = rqwen3(site, "corpus", "build")
    assert done.returncode == 0
    for stage, total in (("raw", "11/11 files"), ("survivors", "5/5 groups"), ("tokens", "11/11 files")):
        assert f"{stage}: {total}" in done.stderr
    assert done.stdout.endswith(f"{site.home / 'manifest.json'}\n")
    assert re.search(r"[\d,]+ tokens for training of [\d,]+, in \d+ shards", done.stdout)


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.25])
def test_build_interrupted_while_workers_start_says_so_in_one_sentence(site, after_s):
    command = site.command("corpus", "build", "--workers", "2")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as child:
        while child.poll() is None and not psutil.Process(child.pid).children():
            time.sleep(0.01)
        time.sleep(after_s)
        os.killpg(child.pid, signal.SIGINT)
        said = child.communicate(timeout=60)[0]
    assert "Traceback" not in said
    assert child.returncode == 130, said
    assert "stopped. The same command goes on from here." in said


def test_build_with_a_tokenizer_that_it_would_not_use_is_refused(site, tmp_path):
    done = rqwen3(site, "corpus", "build", "--tokenizer", str(tmp_path / "any.json"))
    assert done.returncode != 0
    assert "trains a tokenizer of its own and would not use this one" in done.stderr


def test_builds_of_different_files_side_by_side_and_stitch_equal_one_build(site, whole):
    """As a job array does it, in one run root: whoever is first waits for the others' digests."""
    others = ("fineweb_edu", "wikipedia", "openwebmath", "stackexchange", "pes2o")
    parts = [("--source", SOURCE, "--files", "0-1"), ("--source", SOURCE, "--files", "2-3", "--workers", "2")]
    parts.append(tuple(flag for source in others for flag in ("--source", source)))
    commands = [site.command("corpus", "build", *part, "--wait-s", "250") for part in parts]
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
    ended = [(child.communicate(), child.returncode) for child in running]
    assert [code for _, code in ended] in ([0, 0, 0], [75, 0, 0], [0, 75, 0], [75, 75, 0]), ended
    done = rqwen3(site, "corpus", "stitch")
    assert done.returncode == 0, done.stderr
    assert comparable(site) == comparable(whole)


@pytest.mark.parametrize(
    ("repeats", "advice"), [("true", "reads documents of it again"), ("false", "allow_repeats = true")]
)
def test_build_of_too_small_a_corpus_asks_for_more_unless_it_may_be_read_again(site, repeats, advice):
    text = site.profile.read_text().replace("[data]", f"[data]\nallow_repeats = {repeats}")
    site.profile.write_text(text.replace("max_steps = 30", "max_steps = 9000"))
    done = rqwen3(site, "corpus", "build")
    assert done.returncode == 0, done.stderr
    for source in ("fineweb_edu", SOURCE):
        (line,) = (line for line in done.stderr.splitlines() if line.startswith(f"  {source}: "))
        assert advice in line


def test_build_of_some_files_says_which_others_it_waits_for(site, monkeypatch):
    from rqwen3_pipeline.corpus import build

    monkeypatch.setattr(build, "GRACE_S", 0.1)
    done = rqwen3(site, "corpus", "build", "--source", SOURCE, "--files", "1-3")
    assert done.returncode == 75
    assert f"waits for those of 1 other files, which nobody is making now ({SOURCE}/00000)" in done.stdout
    assert not list((site.home / "tokens").rglob("*.bin"))
    done = rqwen3(site, "corpus", "build", "--source", SOURCE, "--files", "0", "--until", "digests")
    assert done.returncode == 0
    assert "1 files are made, up to digests" in done.stdout
    done = rqwen3(site, "corpus", "build", "--source", SOURCE, "--files", "1-3")
    assert done.returncode == 75, "the tokenizer is trained on all sources"
    assert (site.home / "survivors" / f"{SOURCE}.json").exists()


def test_build_of_files_that_another_build_has_is_refused_with_host_and_process(site):
    with claimed(RunRoot(site.home), "raw", [(SOURCE, "00002")]):
        refused = rqwen3(site, "corpus", "build", "--source", SOURCE, "--files", "2-3")
    assert refused.returncode == 73
    assert f"raw {SOURCE}/00002: in use by another build (host" in refused.stderr


def test_build_with_a_file_that_fails_names_it_and_makes_the_other_groups(site):
    path = next((site.sources / SOURCE).iterdir())
    path.write_bytes(path.read_bytes()[:-100])
    done = rqwen3(site, "corpus", "build", "--source", SOURCE, "--source", "pes2o")
    assert done.returncode == 1
    assert f"raw {SOURCE}/" in done.stderr
    assert "the others are made" in done.stderr
    assert (site.home / "survivors" / "pes2o.json").exists()
    assert not (site.home / "survivors" / f"{SOURCE}.json").exists()


def test_stitch_of_two_run_roots_equals_one_build(tmp_path, site, whole):
    halves = []
    for name, files in (("one", "0-1"), ("two", "2-3")):
        half = Site(site.folder)
        half.home = tmp_path / name
        shutil.copytree(site.home, half.home)
        done = rqwen3(half, "corpus", "build", "--files", files, "--until", "digests")
        assert done.returncode == 0, done.stderr
        halves.append(str(half.home))
    fresh = Site(site.folder)
    fresh.home = tmp_path / "fresh"
    done = rqwen3(fresh, "corpus", "stitch", *halves)
    assert done.returncode == 0, done.stderr
    assert "filtered: 11 pieces taken" in done.stderr
    assert comparable(fresh) == comparable(whole)


def test_stitch_of_a_folder_that_is_none_is_refused(site, tmp_path):
    refused = rqwen3(site, "corpus", "stitch", str(tmp_path / "nowhere"))
    assert refused.returncode == 2
    assert "no such folder" in refused.stderr


def test_verify_of_a_good_corpus_keeps_every_promise(whole):
    done = rqwen3(whole, "corpus", "verify", "--workers", "2")
    assert done.returncode == 0
    assert done.stdout.count("kept ") == 10
    assert done.stdout.endswith("every promise is kept\n")


def test_verify_of_a_damaged_shard_names_it_and_the_command_that_repairs_it(site, whole):
    shutil.copytree(whole.home, site.home, dirs_exist_ok=True)
    shard = next((site.home / "tokens").glob("pes2o-*.bin"))
    data = bytearray(shard.read_bytes())
    data[9] ^= 4
    shard.write_bytes(bytes(data))
    done = rqwen3(site, "corpus", "verify")
    assert done.returncode == 1
    assert "broken  hashes" in done.stdout
    assert f"{shard}: SHA-256" in done.stdout
    found = json.loads(rqwen3(site, "corpus", "verify", "--json").stdout)
    (defect,) = found["hashes"]
    remove, build = defect[defect.index("rm -f") :].split(" && ")
    subprocess.run(["bash", "-c", remove], check=True)
    assert rqwen3(site, *build.split()[1:]).returncode == 0
    assert rqwen3(site, "corpus", "verify").returncode == 0
    assert comparable(site) == comparable(whole)


def test_verify_before_anything_is_built_says_so(site):
    refused = rqwen3(site, "corpus", "verify")
    assert refused.returncode == 1
    assert "no manifest. Build the corpus first: rqwen3 --profile " in refused.stderr


def test_build_of_a_budget_larger_than_the_corpus_says_what_to_add(site, whole):
    shutil.copytree(whole.home, site.home, dirs_exist_ok=True)
    site.profile.write_text(site.profile.read_text().replace("max_steps = 30", "max_steps = 3000"))
    done = rqwen3(site, "corpus", "build")
    assert done.returncode == 0
    assert re.search(r"wikipedia: the run wants [\d,]+ tokens, the corpus has [\d,]+, in 1 files", done.stderr)
    done = rqwen3(site, "corpus", "verify")
    assert done.returncode == 1
    assert "broken  budgets" in done.stdout


def test_build_with_another_tokenizer_over_old_shards_is_refused(site, whole):
    shutil.copytree(whole.home, site.home, dirs_exist_ok=True)
    site.profile.write_text(site.profile.read_text().replace("vocab_size = 400", "vocab_size = 390", 1))
    refused = rqwen3(site, "corpus", "build")
    assert refused.returncode == 1
    assert "made with vocab_size = 400, now vocab_size = 390" in refused.stderr


def test_build_with_another_size_of_shards_refuses_the_old_ones(site, whole):
    shutil.copytree(whole.home, site.home, dirs_exist_ok=True)
    site.profile.write_text(site.profile.read_text().replace("shard_max_tokens = 4000", "shard_max_tokens = 2000"))
    refused = rqwen3(site, "corpus", "build")
    assert refused.returncode == 1
    assert "made with shard_max_tokens = 4000, now shard_max_tokens = 2000" in refused.stderr
    assert rqwen3(site, "corpus", "build", "--rebuild").returncode == 0
    assert rqwen3(site, "corpus", "verify").returncode == 0


def test_card_is_the_one_beside_the_manifest(whole):
    assert rqwen3(whole, "corpus", "card").stdout == (whole.home / "DATA_CARD.md").read_text(encoding="utf-8")


def test_counts_of_a_source_in_several_files_add_up_to_the_global_ones(whole):
    """Duplicates go across the files of a source, and what each partition says adds up to what the manifest says."""
    facts = read_json(whole.home / "manifest.json")["sources"][SOURCE]
    stamps = [read_json(path)["report"] for path in sorted((whole.home / "tokens").glob(f"{SOURCE}-*.stamp.json"))]
    assert len(stamps) == FILES
    for key in ("documents", "heldout_documents", "tokens", "heldout_tokens"):
        assert sum(stamp[key] for stamp in stamps) == facts[key]
    texts = {prose(100 * (i if j % 5 else 0) + j) for i in range(FILES) for j in range(60)}
    assert facts["documents"] + facts["heldout_documents"] == len(texts)
    assert facts["shadowed"] == facts["kept"] - len(texts)
