"""`rqwen3 corpus filter | funnel | show`, and the bad input that they must survive."""

import json
import os
import re
import resource
import subprocess
from dataclasses import dataclass

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from model.files import read_json
from rqwen3_pipeline.cli import main
from rqwen3_pipeline.corpus.build import items_of, run_stage
from rqwen3_pipeline.corpus.claims import claim_path, claimed
from rqwen3_pipeline.corpus.lock import lock_folder
from rqwen3_pipeline.corpus.sources import corpus_config
from rqwen3_pipeline.settings import RunRoot, Settings
from tests.rqwen3_pipeline.corpus.made import prose, tree, write
from tests.rqwen3_pipeline.site import Site, make_site

SOURCE, FILES = "textbooks", 4


def fetched(folder) -> Site:
    """A site whose textbooks lie in four files, locked and fetched."""
    site = make_site(folder)
    (site.sources / f"{SOURCE}.parquet").unlink()
    for i in range(FILES):
        rows = [{"text": prose(1000 * i + j) if j % 4 else f"short {j}"} for j in range(120)]
        write(site.sources / SOURCE / f"{i}.parquet", rows)
    fetch(site)
    return site


def fetch(site: Site) -> None:
    root, config = RunRoot(site.home), corpus_config(Settings(profile=str(site.profile)).run_config)
    lock = lock_folder(root, config, site.sources)
    assert not [o.error for o in run_stage("raw", root, config, lock, items_of("raw", config, lock)) if o.error]


@pytest.fixture
def site(tmp_path) -> Site:
    return fetched(tmp_path)


@pytest.fixture(scope="module")
def filtered(tmp_path_factory) -> Site:
    """A site with everything filtered; tests must not change it."""
    site = fetched(tmp_path_factory.mktemp("filtered"))
    done = rqwen3(site, "corpus", "filter")
    assert done.returncode == 0, done.stderr
    return site


@dataclass
class Done:
    """What a command answered."""

    returncode: int
    stdout: str
    stderr: str


def rqwen3(site: Site, *arguments: str) -> Done:
    """The command line in this process, which saves a second of imports each time."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PROFILE", "HOME", "WORKERS", "SOURCES", "TOKENIZER"):
            patch.setenv(f"RQWEN3_{name}", "")  # the command sets them; they are as they were afterwards
        result = CliRunner().invoke(main, site.command(*arguments)[3:])
    return Done(result.exit_code, result.stdout, result.stderr)


def made(site: Site) -> list[str]:
    return sorted(path.stem for path in (site.home / "filtered" / SOURCE).glob("*.parquet"))


def raw(site: Site, key: str):
    files = read_json(site.home / "sources.lock.json")["sources"][SOURCE]["files"]
    return site.home / "raw" / SOURCE / next(file["name"] for file in files if file["key"] == key)


def test_filter_of_some_files_makes_those_with_progress_and_a_funnel(site):
    done = rqwen3(site, "corpus", "filter", "--source", SOURCE, "--files", "1-2")
    assert done.returncode == 0, done.stderr
    assert made(site) == ["00001", "00002"]
    assert "filter: 2/2 files" in done.stderr
    assert "kept 90 of 120" in done.stderr
    assert "2 files made, 0 current, 0 failed; 240 rows" in done.stdout
    assert "2 of 4 files" in done.stdout
    again = rqwen3(site, "corpus", "filter", "--source", SOURCE)
    assert "2 files made, 2 current, 0 failed; 240 rows" in again.stdout


def test_filter_by_three_workers_gives_the_same_bytes(site, filtered):
    done = rqwen3(site, "corpus", "filter", "--workers", "3")
    assert done.returncode == 0, done.stderr
    one, other = (tree(RunRoot(each.home / "filtered")) for each in (site, filtered))
    assert one == other


def test_two_filters_side_by_side_on_different_files_both_succeed(site):
    halves = [site.command("corpus", "filter", "--source", SOURCE, "--files", files) for files in ("0-1", "2-3")]
    running = [subprocess.Popen(half, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for half in halves]
    assert [(child.communicate()[1], child.returncode)[1] for child in running] == [0, 0]
    assert made(site) == [f"{i:05d}" for i in range(FILES)]


@pytest.mark.parametrize("command", [("corpus", "filter"), ("corpus", "build", "--sources")])
def test_second_build_of_the_same_piece_is_refused_with_host_and_process(site, command):
    with claimed(RunRoot(site.home), "filtered", [(SOURCE, "00002")]):
        refused = rqwen3(site, *command, *([str(site.sources)] if "--sources" in command else []))
    assert refused.returncode == 73
    assert f"filtered {SOURCE}/00002: in use by another build (host {os.uname().nodename}, process {os.getpid()})" in (
        refused.stderr
    )
    assert made(site) == []
    assert not claim_path(RunRoot(site.home), "filtered", (SOURCE, "00002")).exists()
    assert rqwen3(site, "corpus", "filter").returncode == 0


def test_filter_of_an_unknown_source_or_file_lists_the_valid_ones(filtered):
    refused = rqwen3(filtered, "corpus", "filter", "--source", "wiki")
    assert refused.returncode == 2
    assert "no such source. Valid: fineweb_edu, wikipedia" in refused.stderr
    refused = rqwen3(filtered, "corpus", "filter", "--source", SOURCE, "--files", "3-9")
    assert refused.returncode == 2
    assert "textbooks has 4 files, 0 to 3" in refused.stderr


def test_filter_before_anything_is_locked_says_so(tmp_path):
    refused = rqwen3(make_site(tmp_path), "corpus", "filter")
    assert refused.returncode == 1
    assert "no source lock" in refused.stderr


def test_filter_with_a_changed_setting_is_refused_by_name_and_replaces_on_demand(site):
    assert rqwen3(site, "corpus", "filter").returncode == 0
    before = (site.home / "filtered" / SOURCE / "00000.parquet").read_bytes()
    changed = "[data.textbooks]\nmin_chars = 350\n"
    others = "".join(f"[data.{s}]\n" for s in ("fineweb_edu", "wikipedia", "openwebmath", "stackexchange", "pes2o"))
    site.profile.write_text(site.profile.read_text().replace("[model]", f"{changed}{others}[model]", 1))
    refused = rqwen3(site, "corpus", "filter", "--source", SOURCE)
    assert refused.returncode == 1
    assert "made with min_chars = 100, now min_chars = 350" in refused.stderr
    assert (site.home / "filtered" / SOURCE / "00000.parquet").read_bytes() == before
    assert rqwen3(site, "corpus", "filter", "--source", SOURCE, "--rebuild").returncode == 0
    assert (site.home / "filtered" / SOURCE / "00000.parquet").read_bytes() != before


def test_filter_of_a_page_damaged_behind_a_good_footer_fails_that_file_by_name(site):
    good = site.sources / SOURCE / "1.parquet"
    whole = good.read_bytes()
    data = bytearray(whole)
    place = pq.ParquetFile(good).metadata.row_group(3).column(0)
    start = place.dictionary_page_offset or place.data_page_offset
    data[start : start + place.total_compressed_size] = bytes(place.total_compressed_size)
    good.write_bytes(bytes(data))
    fetch(site)
    done = rqwen3(site, "corpus", "filter", "--source", SOURCE)
    assert done.returncode == 1
    assert "3 files made, 0 current, 1 failed" in done.stdout
    assert "1.parquet: damaged after row 48 of 120, columns text" in done.stderr
    assert len(made(site)) == 3
    assert not [path for path in site.home.rglob(".*") if path.is_file()]
    good.write_bytes(whole)
    fetch(site)
    assert rqwen3(site, "corpus", "filter", "--source", SOURCE).returncode == 0
    assert len(made(site)) == FILES


def test_filter_that_finds_no_room_leaves_nothing_and_goes_on_later(site):
    big = [{"text": os.urandom(2000).hex()} for _ in range(300)]
    write(site.sources / SOURCE / "3.parquet", big)
    fetch(site)

    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))

    command = site.command("corpus", "filter", "--source", SOURCE)
    done = subprocess.run(command, preexec_fn=little_room, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "3 files made, 0 current, 1 failed" in done.stdout
    assert "File too large" in done.stderr
    assert "RQWEN3_HOME" in done.stderr
    assert not [path for path in site.home.rglob(".*") if path.is_file()]
    assert rqwen3(site, "corpus", "filter", "--source", SOURCE).returncode == 0
    assert len(made(site)) == FILES


def test_run_root_that_can_not_be_written_is_named_with_the_way_out(site):
    fetch(site)
    command = [*site.command("sources", "lock")]
    command[command.index("--home") + 1] = "/sys/rqwen3"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(r"rqwen3: /sys/rqwen3.*: (Operation not permitted|Permission|Read-only).* --home DIR", done.stderr)
    assert "Traceback" not in done.stderr


def test_funnel_as_text_and_as_json_agree(filtered):
    shown = rqwen3(filtered, "corpus", "funnel", "--source", SOURCE).stdout
    found = json.loads(rqwen3(filtered, "corpus", "funnel", "--json").stdout)
    assert list(found) == ["fineweb_edu", "wikipedia", "openwebmath", "stackexchange", "pes2o", SOURCE]
    assert found[SOURCE]["funnel"] == {"kept": 360, "too_short": 120}
    assert found[SOURCE]["rows"] == 480
    assert f"{SOURCE:<14} kept                       360   75.00 %" in shown
    assert found["wikipedia"]["funnel"]["disambiguation"] == 1


def test_show_prints_the_documents_behind_a_number_the_same_each_time(filtered):
    arguments = ("corpus", "show", "--source", SOURCE, "--dropped-for", "too_short", "-n", "3")
    shown = rqwen3(filtered, *arguments)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == rqwen3(filtered, *arguments).stdout
    assert shown.stdout.count("· too_short") == 3
    documents = [json.loads(line) for line in rqwen3(filtered, *arguments, "--json").stdout.splitlines()]
    assert [document["reason"] for document in documents] == ["too_short"] * 3
    for document in documents:
        assert document["text"] == f"short {document['row']}"
        assert pq.read_table(document["path"]).column("text")[document["row"]].as_py() == document["text"]


def test_show_for_a_reason_that_nobody_has_lists_those_there_are(filtered):
    refused = rqwen3(filtered, "corpus", "show", "--source", SOURCE, "--dropped-for", "boring")
    assert refused.returncode == 2
    assert "There are: kept, too_short." in refused.stderr
