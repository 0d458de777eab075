import importlib.util
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model import checkpoint, evaluate, likelihood
from model.benchmark_data import go_offline
from model.bits_per_byte import heldout_scores, heldout_streams
from model.config import CoreConfig
from model.errors import ConfigError, CorpusError, EnvironmentProblem
from model.files import read_json, sha256_file, write_json
from model.likelihood import ClozeItem, encode_pair, log_likelihoods, plain_tokenizer, read_items, score_cloze
from model.rqwen3 import RQwen3

EOS_ID = 256
SHAPE = CoreConfig(
    vocab_size=272,
    d_model=32,
    n_layer=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    max_seq_len=64,
)


def make_model(seed: int = 3, scale: float = 12.0) -> RQwen3:
    """A random model with weights so large that its log-likelihoods differ between texts."""
    model = RQwen3(SHAPE)
    model.initialise(seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    return model.eval()


def make_items(n: int, seed: int = 0) -> list[ClozeItem]:
    """Questions of two to four choices of unequal length, some of them not ASCII."""
    draw = random.Random(seed)
    words = ["cat", "dog", "moon", "river", "naïve", "fox", "sees", "élan", "日本", "a", "grammatically"]
    items = []
    for number in range(n):
        choices = tuple(" ".join(draw.sample(words, draw.randint(1, 3))) for _ in range(draw.randint(2, 4)))
        context = " ".join(draw.choice(words) for _ in range(draw.randint(1, 12)))
        gold = draw.randrange(len(choices))
        items.append(ClozeItem(id=f"q{number}", source="wikipedia", context=context, choices=choices, gold=gold))
    return items


def write_items(path: Path, items: list[ClozeItem]) -> Path:
    rows = [
        {"id": i.id, "source": i.source, "context": i.context, "choices": list(i.choices), "gold": i.gold}
        for i in items
    ]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def plain_log_likelihood(model: RQwen3, context: list[int], continuation: list[int]) -> float:
    """One text at a time, all its logits, softmax in float64."""
    ids = (context + continuation)[-SHAPE.max_seq_len - 1 :]
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]]))[0].double().numpy()
    total = 0.0
    for place in range(len(ids) - len(continuation), len(ids)):
        row = logits[place - 1] - logits[place - 1].max()
        total += row[ids[place]] - math.log(np.exp(row).sum())
    return total


def save_checkpoint(path: Path, model: RQwen3, step: int = 12) -> Path:
    state = {
        "step": step,
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": {},
        "scheduler_state_dict": {},
        "loss_history": [],
        "data_offset": 0,
    }
    checkpoint.save(path, state, {})
    return path


@pytest.fixture(autouse=True)
def one_thread():
    """So small a model only loses by a second thread, much so on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def inputs(tiny, tmp_path):
    """A checkpoint, a corpus and questions, scored by our own code."""
    return evaluate.Inputs(
        checkpoint=save_checkpoint(tiny.checkpoints / "step_12.pt", make_model()),
        config=tiny.config_path,
        manifest=tiny.manifest_path,
        items=write_items(tmp_path / "cloze.jsonl", make_items(30)),
        engine="own",
    )


def tokenizer_of(tiny):
    return plain_tokenizer(tiny.root / "tokenizer.json")


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=7),
    batch=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_log_likelihoods_any_batch_equal_a_plain_loop(lengths, batch, seed):
    draw = random.Random(seed)
    pairs = [([draw.randrange(257) for _ in range(a)], [draw.randrange(257) for _ in range(b)]) for a, b in lengths]
    model = make_model()
    found = log_likelihoods(model, pairs, batch)
    for (log, _), (context, continuation) in zip(found, pairs, strict=True):
        assert log == pytest.approx(plain_log_likelihood(model, context, continuation), abs=1e-4)


def test_log_likelihoods_greedy_flag_is_set_for_the_likeliest_tokens_only():
    model = make_model()
    context = [5, 9, 200]
    ids = list(context)
    for _ in range(4):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    greedy = ids[3:]
    other = [*greedy[:-1], (greedy[-1] + 1) % 257]
    assert [flag for _, flag in log_likelihoods(model, [(context, greedy), (context, other)], 2)] == [True, False]


def test_log_likelihoods_long_context_drops_the_oldest_tokens():
    draw = random.Random(1)
    context, continuation = [draw.randrange(257) for _ in range(150)], [7, 8, 9]
    model = make_model()
    (full, _), (tail, _) = log_likelihoods(
        model, [(context, continuation), (context[-SHAPE.max_seq_len + 2 :], continuation)], 2
    )
    assert full == pytest.approx(tail, abs=1e-5)


def test_log_likelihoods_continuation_longer_than_the_context_is_refused():
    with pytest.raises(ConfigError, match=r"65 tokens.*max_seq_len = 64"):
        log_likelihoods(make_model(), [([1], [2] * 65)], 1)


def test_encode_pair_joined_text_has_the_tokens_of_both(tiny):
    tokenizer = tokenizer_of(tiny)
    for context, continuation in (("the cat", " sees"), ("the cat ", "sees"), ("line\n", "next"), ("", " alone")):
        context_ids, continuation_ids = encode_pair(tokenizer, context, continuation, EOS_ID)
        ids = [token for token in context_ids if token != EOS_ID] + continuation_ids
        assert tokenizer.decode(ids) == context + continuation
        assert context_ids[-1] != tokenizer.encode(" ").ids[0]


def test_plain_tokenizer_end_of_text_in_a_text_stays_text(tiny):
    ids = tokenizer_of(tiny).encode("a<|endoftext|>b", add_special_tokens=False).ids
    assert len(ids) == len("a<|endoftext|>b")
    assert EOS_ID not in ids


def test_score_cloze_equals_the_definitions_written_plainly(tiny):
    model, tokenizer, items = make_model(), tokenizer_of(tiny), make_items(40)
    right, right_norm = [], []
    for item in items:
        logs = [
            plain_log_likelihood(model, tokenizer.encode(item.context).ids, tokenizer.encode(" " + choice).ids)
            for choice in item.choices
        ]
        right.append(int(np.argmax(logs)) == item.gold)
        right_norm.append(
            int(np.argmax([log / len(c) for log, c in zip(logs, item.choices, strict=True)])) == item.gold
        )
    scores = score_cloze(model, tokenizer, items, EOS_ID, 8)
    assert scores["acc"] == pytest.approx(np.mean(right))
    assert scores["acc_norm"] == pytest.approx(np.mean(right_norm))
    assert right != right_norm, "or the test could not tell them apart"
    assert scores["acc_stderr"] == pytest.approx(np.std(right, ddof=1) / math.sqrt(40))
    assert scores["acc_norm_stderr"] == pytest.approx(np.std(right_norm, ddof=1) / math.sqrt(40))
    assert scores["n"] == 40
    assert scores["chance"] == pytest.approx(np.mean([1 / len(item.choices) for item in items]))


def test_score_cloze_model_that_knows_the_answer_scores_one(tiny):
    tokenizer = tokenizer_of(tiny)
    model = RQwen3(SHAPE)
    model.initialise(0)
    item = ClozeItem(id="q", source="s", context="the cat", choices=("dog", "sees the moon"), gold=1)
    ids = torch.tensor([tokenizer.encode("the cat sees the moon").ids])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()
    wrong = ClozeItem(id="r", source="s", context="the cat", choices=("dog", "sees the moon"), gold=0)
    scores = score_cloze(model, tokenizer, [item, wrong], EOS_ID, 4)
    assert (scores["acc"], scores["acc_norm"]) == (0.5, 0.5)
    assert score_cloze(model, tokenizer, [item, item], EOS_ID, 4)["acc"] == 1.0


def test_score_cloze_single_question_has_no_standard_error_and_says_why(tiny):
    scores = score_cloze(make_model(), tokenizer_of(tiny), make_items(1), EOS_ID, 4)
    assert scores["acc"] in (0.0, 1.0)
    assert scores["acc_stderr"] is None
    assert "standard error" in scores["reason"]


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs the extra `evaluation`")
def test_score_cloze_with_harness_agrees_with_our_own_code(tiny):
    go_offline()
    from lm_eval.api.instance import Instance

    from model.generate import Sampling, generate
    from model.harness import HarnessModel, score_cloze_with_harness

    model, tokenizer, items = make_model(), tokenizer_of(tiny), make_items(40)
    own = score_cloze(model, tokenizer, items, EOS_ID, 8)
    harness = score_cloze_with_harness(model, tokenizer, items, EOS_ID, 8)
    assert set(harness) == set(own)
    for name, value in own.items():
        assert harness[name] == pytest.approx(value, abs=1e-4), name

    wrapped = HarnessModel(model, tokenizer, EOS_ID, 3)
    texts = [(item.context, " " + choice) for item in items for choice in item.choices] + [("", " alone"), ("a\n", "b")]
    requests = [Instance("loglikelihood", {}, text, i) for i, text in enumerate(texts)]
    pairs = [encode_pair(tokenizer, *text, EOS_ID) for text in texts]
    ours = [log for log, _ in log_likelihoods(model, pairs, 8)]
    theirs = [log for log, _ in wrapped.loglikelihood(requests, disable_tqdm=True)]
    assert theirs == pytest.approx(ours, abs=1e-4)

    text = "the cat sees the moon and follows the river to the naïve fox. " * 2
    (rolling,) = wrapped.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    ids = tokenizer.encode(text).ids
    windows = [([EOS_ID], ids[:64])] + [(ids[:k][-64 + len(ids[k : k + 64]) - 1 :], ids[k : k + 64]) for k in (64,)]
    assert len(ids) <= 128
    assert rolling == pytest.approx(sum(log for log, _ in log_likelihoods(model, windows, 1)), abs=1e-3)

    options = {"until": ["\n"], "max_gen_toks": 6}
    (made,) = wrapped.generate_until([Instance("generate_until", {}, ("the cat", options), 0)])
    expected = generate(model, tokenizer.encode("the cat").ids, 256, EOS_ID, Sampling(new_tokens=6))
    assert made == tokenizer.decode(expected).split("\n")[0]


def test_evaluate_scores_hold_what_they_were_made_from(inputs, tiny):
    scores = evaluate.evaluate(inputs)
    assert scores["engine"] == "own"
    assert scores["engine_version"]
    assert scores["checkpoint"] == {
        "path": str(inputs.checkpoint),
        "sha256": sha256_file(inputs.checkpoint),
        "step": 12,
    }
    assert scores["manifest_sha256"] == tiny.manifest.sha256
    assert scores["versions"]["torch"] == torch.__version__
    streams, _ = heldout_streams(tiny.manifest, 400)
    expected = heldout_scores(make_model(), streams, 32, 1)
    assert expected is not None
    assert set(scores["bits_per_byte"]) == {"wikipedia", "textbooks", "all"}
    for source, values in scores["bits_per_byte"].items():
        assert values["bits_per_byte"] == pytest.approx(expected[source]["bits_per_byte"], abs=1e-4)
    json.dumps(scores, allow_nan=False)


def test_evaluate_source_without_held_out_documents_is_null_with_a_reason(inputs, tiny):
    manifest = read_json(tiny.manifest_path)
    manifest["heldout"] = [entry for entry in manifest["heldout"] if entry["source"] != "textbooks"]
    write_json(tiny.manifest_path, manifest)
    scores = evaluate.evaluate(inputs)["bits_per_byte"]
    assert scores["textbooks"]["bits_per_byte"] is None
    assert "held out" in scores["textbooks"]["reason"]
    assert scores["wikipedia"]["bits_per_byte"] == pytest.approx(scores["all"]["bits_per_byte"])
    write_json(tiny.manifest_path, manifest | {"heldout": []})
    nothing = evaluate.evaluate(inputs)["bits_per_byte"]
    assert nothing["all"]["bits_per_byte"] is None
    assert "reason" in nothing["all"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_evaluate_weights_that_are_not_finite_give_null_and_a_reason(inputs, bad):
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight[0] = bad
    save_checkpoint(inputs.checkpoint, model)
    scores = evaluate.evaluate(inputs)
    cloze = scores["tasks"]["heldout_cloze"]
    assert (cloze["acc"], cloze["acc_norm"], cloze["acc_stderr"]) == (None, None, None)
    assert "not finite" in cloze["reason"]
    assert scores["bits_per_byte"]["all"]["bits_per_byte"] is None
    assert "not finite" in scores["bits_per_byte"]["all"]["reason"]
    json.dumps(scores, allow_nan=False)


def test_choose_engine_without_the_harness_takes_our_own_and_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert evaluate.choose_engine("auto") == "own"
    assert evaluate.choose_engine("own") == "own"
    with pytest.raises(EnvironmentProblem, match=r"pip install.*lm-eval"):
        evaluate.choose_engine("harness")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not a cloze question"),
        ('{"id": 1, "source": "s", "context": "c", "choices": ["a", "b"]}', "gold"),
        ('{"id": 1, "source": "s", "context": "c", "choices": ["a", "b"], "gold": 2}', "gold = 2"),
        ('{"id": 1, "source": "s", "context": "c", "choices": ["a"], "gold": 0}', "1 choices"),
        ('{"id": 1, "source": "s", "context": "c", "choices": ["a", ""], "gold": 0}', "non-empty"),
        ("", "line 2"),
    ],
)
def test_read_items_damaged_line_is_named(tmp_path, line, message):
    path = write_items(tmp_path / "cloze.jsonl", make_items(1))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(CorpusError, match=message):
        read_items(path)


def test_read_items_every_line_separator_of_unicode_stays_in_its_text(tmp_path):
    item = ClozeItem(id="q", source="s", context="one\u2028two\x85three\x0cfour", choices=("a\u2029b", "c"), gold=0)
    assert read_items(write_items(tmp_path / "cloze.jsonl", [item])) == [item]


@pytest.mark.parametrize("content", [None, ""])
def test_read_items_missing_or_empty_file_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "cloze.jsonl").write_text(content)
    with pytest.raises(CorpusError, match=r"cloze\.jsonl"):
        read_items(tmp_path / "cloze.jsonl")


@pytest.mark.parametrize("flags", [{"engine": "best"}, {"device": "tpu"}, {"batch": 0}])
def test_inputs_unusable_flag_is_refused(inputs, flags):
    plain = {name: getattr(inputs, name) for name in ("checkpoint", "config", "manifest", "items")}
    with pytest.raises(ConfigError, match=f"--{next(iter(flags))}"):
        evaluate.Inputs(**plain, **flags)


def command(inputs: evaluate.Inputs, out: Path) -> list[str]:
    return [
        *("--checkpoint", str(inputs.checkpoint), "--config", str(inputs.config)),
        *("--manifest", str(inputs.manifest), "--items", str(inputs.items), "--out", str(out)),
        *("--engine", inputs.engine, "--device", "cpu"),
    ]


def test_main_as_a_process_writes_the_scores(inputs, tmp_path):
    out = tmp_path / "evaluations" / "tiny" / "scores.json"
    arguments = [sys.executable, "-m", "model.evaluate", *command(inputs, out)]
    done = subprocess.run(
        arguments,
        cwd=Path(evaluate.__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert read_json(out) == evaluate.evaluate(inputs)
    assert "heldout_cloze acc" in done.stdout


def test_main_damaged_checkpoint_exits_with_a_message_and_writes_nothing(inputs, tmp_path, capsys):
    inputs.checkpoint.write_bytes(inputs.checkpoint.read_bytes()[:-10])
    assert evaluate.main(command(inputs, tmp_path / "scores.json")) == 1
    assert "step_12.pt" in capsys.readouterr().err
    assert not (tmp_path / "scores.json").exists()


def test_delimiter_is_the_harness_default():
    assert likelihood.DELIMITER == " "
