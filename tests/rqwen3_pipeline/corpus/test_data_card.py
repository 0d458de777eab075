import json

import yaml

from model.files import read_json
from rqwen3_pipeline.corpus.data_card import LICENCES, card_path, data_card
from rqwen3_pipeline.corpus.hub_sources import DEFAULTS

PIN = {"dataset": "HuggingFaceFW/fineweb-edu", "config": "sample-100BT", "revision": "a" * 40}


def test_card_lies_beside_the_manifest_and_is_made_from_it_alone(root, built):
    manifest = read_json(root.manifest)
    assert card_path(root).read_text(encoding="utf-8") == data_card(json.loads(json.dumps(manifest)))
    assert card_path(root).parent == root.manifest.parent


def test_card_begins_with_the_hubs_header(root, built):
    _, header, body = data_card(read_json(root.manifest)).split("---\n", 2)
    found = yaml.safe_load(header)
    assert found["license"] == "other"
    assert found["language"] == ["en"]
    assert found["size_categories"] == ["n<1K"]
    assert found["viewer"] is False
    assert body.startswith("\n# RQwen3 pretraining corpus\n")


def test_card_states_every_figure_of_every_source(root, built):
    manifest = read_json(root.manifest)
    card = data_card(manifest)
    sections = {part.split("\n", 1)[0]: part for part in card.split("\n## ")[1:]}
    for name, facts in manifest["sources"].items():
        assert f"| {name} | {facts['rows']:,} | {facts['kept']:,} |" in sections["Filters"]
        for reason, count in facts["funnel"].items():
            assert reason == "kept" or not count or f"{reason} {count:,}" in sections["Filters"]
        assert f"| {name} | {facts['shadowed']:,} |" in sections["Deduplication"]
        assert f"| {name} | all | {facts['tokens_used']:,} |" in sections["Tokens"]
        held = f"| {name} | {facts['heldout_documents']:,} | {facts['heldout_tokens']:,} |"
        assert held in sections["Held-out documents"]
    assert "wikipedia 1" in sections["Deduplication"]
    assert "| stackexchange | example.org |" in sections["Tokens"]
    for key in ("lock_sha256", "settings_sha256"):
        assert manifest[key] in sections["How to make it again"]


def test_card_of_the_hubs_sources_names_revision_and_licence(root, built):
    manifest = read_json(root.manifest)
    manifest["sources"]["fineweb_edu"]["pin"] = PIN
    manifest["sources"]["pes2o"]["pin"] = PIN | {"dataset": "someone/else"}
    card = data_card(manifest)
    assert f"sample-100BT | `{'a' * 40}` | 2 | ODC-BY" in card
    assert "see the data set's own card" in card
    assert yaml.safe_load(card.split("---\n")[1])["source_datasets"] == ["HuggingFaceFW/fineweb-edu", "someone/else"]


def test_card_shows_the_largest_sites_and_adds_up_the_others(root, built):
    manifest = read_json(root.manifest)
    manifest["sources"]["stackexchange"]["sites"] = {f"s{i}.example": 1000 - i for i in range(60)}
    card = data_card(manifest)
    assert "s39.example" in card
    assert "s40.example" not in card
    assert f"| stackexchange | 20 others | {sum(1000 - i for i in range(40, 60)):,} |" in card
    assert "| pes2o | all |" in card


def test_card_of_a_short_corpus_says_so(root, built):
    manifest = read_json(root.manifest)
    manifest["sources"]["pes2o"] |= {"missing_tokens": 77, "heldout_documents": 0}
    card = data_card(manifest)
    assert "77 are missing" in card
    assert "pes2o: no held-out document." in card


def test_licences_are_of_the_data_sets_that_are_read():

    assert set(LICENCES) <= {
        source["dataset"] if isinstance(source, dict) else source.dataset for source in DEFAULTS.values()
    }
