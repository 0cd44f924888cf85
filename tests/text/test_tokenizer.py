import json
import pickle
from pathlib import Path

import pytest
import torch
import yaml

from asr.text.tokenizer import KINDS, load_tokenizer, tokenizer_from_state, train_tokenizer

TEXTS = [
    "the café is #1 of 3",
    "你好 世界 the a▁b \\x \\",
    "<blk> <unk> <sos/eos> is text",
    "<0x41> <s> is text too",
    "nothing is as good as the good old day",
    "three of the four are as old as the café",
]
DIGITS = ["one two three", "four five six", "seven eight nine zero"]
CONF = Path(__file__).parents[2] / "conf" / "tokenizer"
VARIANTS = [
    (kind, options)
    for kind in KINDS
    for options in (
        {},
        {"unk": False},
        {"sos_eos": True},
        *([{"byte_fallback": True}, {"byte_fallback": True, "unk": False}] if kind in ("bpe", "unigram") else []),
    )
]


def settings(name):
    loaded = yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))
    assert loaded.pop("_target_") == "asr.text.tokenizer.train_tokenizer"
    return loaded


@pytest.mark.parametrize(("kind", "options"), VARIANTS)
def test_text_comes_back_and_no_text_is_a_special_token(kind, options):
    tokenizer = train_tokenizer(TEXTS, kind, **options)
    specials = [0, *(index for index in (tokenizer.unk_id, tokenizer.sos_eos_id) if index is not None)]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert not set(ids) & set(specials)
        assert tokenizer.decode(ids) == tokenizer.normaliser(text)
    assert tokenizer.decode([]) == "" and tokenizer.encode(" \u200b ") == []


@pytest.mark.parametrize(("kind", "options"), VARIANTS)
def test_table_is_sound(kind, options):
    tokenizer = train_tokenizer(TEXTS, kind, **options)
    assert tokenizer.tokens[tokenizer.blank_id] == "<blk>" and tokenizer.blank_id == 0
    assert len(set(tokenizer.tokens)) == tokenizer.vocab_size == len(tokenizer.tokens)
    has_unk = options.get("unk", True) and kind != "byte"
    assert tokenizer.unk_id == (1 if has_unk else None)
    assert tokenizer.sos_eos_id == ((2 if has_unk else 1) if options.get("sos_eos") else None)
    assert [tokenizer.tokens.count(name) for name in ("<blk>", "<unk>", "<sos/eos>")] == [
        1,
        int(has_unk),
        int("sos_eos" in options),
    ]


@pytest.mark.parametrize(("kind", "options"), VARIANTS)
def test_stored_in_folder_and_checkpoint(kind, options, tmp_path):
    tokenizer = train_tokenizer(TEXTS, kind, normaliser={"case": "upper"}, **options)
    tokenizer.save(tmp_path / "tokenizer")
    torch.save({"tokenizer": tokenizer.state_dict()}, tmp_path / "checkpoint.pt")
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["tokenizer"]
    copies = [
        load_tokenizer(tmp_path / "tokenizer"),
        tokenizer_from_state(state),
        pickle.loads(pickle.dumps(tokenizer)),
    ]
    for copy in copies:
        assert copy.hash == tokenizer.hash
        assert (copy.tokens, copy.unk_id, copy.sos_eos_id) == (tokenizer.tokens, tokenizer.unk_id, tokenizer.sos_eos_id)
        assert copy.normaliser == tokenizer.normaliser
        assert copy.encode("The new café") == tokenizer.encode("The new café")


@pytest.mark.parametrize("kind", ["char", "bpe", "unigram", "word"])
def test_training_is_deterministic_and_order_free(kind):
    first = train_tokenizer(TEXTS, kind)
    assert train_tokenizer(iter(TEXTS), kind).hash == first.hash
    assert train_tokenizer(TEXTS[::-1], kind).hash == first.hash


def test_hash_changes_with_whatever_changes_the_ids():
    variants = [
        train_tokenizer(TEXTS, "char"),
        train_tokenizer(TEXTS, "char", unk=False),
        train_tokenizer(TEXTS, "char", sos_eos=True),
        train_tokenizer(TEXTS, "char", normaliser={"case": "lower"}),
        train_tokenizer(TEXTS[1:], "char"),
        train_tokenizer(TEXTS, "word"),
        train_tokenizer(TEXTS, "bpe"),
        train_tokenizer(TEXTS, "unigram"),
    ]
    assert len({tokenizer.hash for tokenizer in variants}) == len(variants)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: "\ufeff" + t,
        lambda t: t + "\r\n",
        lambda t: t.replace(" ", "\u3000"),
        lambda t: t[0] + "\u200b" + t[1:],
    ],
)
@pytest.mark.parametrize("kind", ["char", "unigram"])
def test_files_of_other_systems_give_the_same_tokens(kind, spoil, tmp_path):
    clean, spoilt = train_tokenizer(TEXTS, kind), train_tokenizer(map(spoil, TEXTS), kind)
    assert clean.hash == spoilt.hash
    assert [clean.encode(text) for text in TEXTS] == [clean.encode(spoil(text)) for text in TEXTS]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_only_our_own_normalisation_is_applied(kind):
    text = "ﬁne ① Ａ…"
    tokenizer = train_tokenizer([text], kind)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    compatible = train_tokenizer([text], kind, normaliser={"unicode_form": "NFKC"})
    assert compatible.decode(compatible.encode(text)) == "fine 1 A..."


def test_char_table():
    tokenizer = train_tokenizer(["b a", "▁c"], "char")
    assert tokenizer.tokens == ["<blk>", "<unk>", "▁", "a", "b", "c", "\\▁"]
    assert tokenizer.encode("a b") == [3, 2, 4]
    assert tokenizer.decode([2, 3, 2, 2, 4, 2]) == "a b"


def test_char_table_holds_one_form_of_a_letter():
    assert train_tokenizer(["café", "cafe\u0301"], "char").tokens == ["<blk>", "<unk>", "a", "c", "f", "é"]


def test_most_frequent_symbols_are_kept():
    tokenizer = train_tokenizer(["a b a c a b"], "word", vocab_size=4)
    assert tokenizer.tokens == ["<blk>", "<unk>", "a", "b"]
    assert tokenizer.encode("a c") == [2, 1]


@pytest.mark.parametrize("kind", ["char", "word", "bpe", "unigram"])
def test_unknown_text_is_counted_and_never_printed(kind):
    tokenizer = train_tokenizer(["GOOD DAY"] * 3, kind)
    ids = tokenizer.encode("good day")
    assert 1 in ids
    assert tokenizer.decode(ids) == "" and tokenizer.decode([1]) == ""
    share, unknown = tokenizer.unknown_share(["good day", "good"])
    assert share == 1.0
    assert unknown == ({"good": 2, "day": 1} if kind == "word" else {"g": 2, "o": 4, "d": 3, "a": 1, "y": 1})
    assert tokenizer.unknown_share(["GOOD DAY"]) == (0.0, {})
    assert tokenizer.unknown_share([""]) == (0.0, {})
    without = train_tokenizer(["GOOD DAY"] * 3, kind, unk=False)
    assert without.decode(without.encode("good DAY")) == "DAY"
    assert without.unknown_share(["good DAY"])[0] == (0.5 if kind == "word" else 4 / 7)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_byte_fallback_knows_all_text(kind):
    tokenizer = train_tokenizer(DIGITS, kind, byte_fallback=True)
    assert tokenizer.decode(tokenizer.encode("Où ▁ 你好 😀 one")) == "Où ▁ 你好 😀 one"
    assert tokenizer.unknown_share(["Où ▁ 你好 😀 one"])[0] == 0.0


def test_character_coverage_leaves_rare_characters_to_bytes():
    texts = ["aaaa bbbb"] * 500 + ["你"]
    assert "你" not in train_tokenizer(texts, "bpe", byte_fallback=True, character_coverage=0.99).tokens
    assert "你" in train_tokenizer(texts, "bpe", byte_fallback=True).tokens


def test_bytes_and_broken_utf8():
    tokenizer = train_tokenizer([], "byte")
    assert tokenizer.vocab_size == 257
    assert tokenizer.encode("é") == [1 + 0xC3, 1 + 0xA9]
    assert tokenizer.decode([1 + ord("a"), 1 + 0xC3, 1 + ord("b")]) == "ab"


@pytest.mark.parametrize("unk", [True, False])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_size_is_what_was_asked_or_the_limits_are_named(kind, unk):
    with pytest.raises(ValueError, match="vocab_size=5000 is too large") as too_large:
        train_tokenizer(DIGITS, kind, vocab_size=5000, unk=unk)
    most = int(str(too_large.value).split("at most ")[1].split()[0])
    with pytest.raises(ValueError, match="vocab_size=3 is too small") as too_small:
        train_tokenizer(DIGITS, kind, vocab_size=3, unk=unk)
    least = int(str(too_small.value).split("alone are ")[1].split(";")[0])
    for size in (least, (least + most) // 2, most):
        assert train_tokenizer(DIGITS, kind, vocab_size=size, unk=unk).vocab_size == size
    for size, complaint in ((least - 1, "too small"), (most + 1, "too large")):
        with pytest.raises(ValueError, match=complaint):
            train_tokenizer(DIGITS, kind, vocab_size=size, unk=unk)
    assert least <= train_tokenizer(DIGITS, kind, unk=unk).vocab_size <= most


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("texts", [["a"], ["你"], ["a a a"], ["▁"]])
def test_auto_size_fits_the_smallest_texts(kind, texts):
    tokenizer = train_tokenizer(texts, kind)
    assert tokenizer.decode(tokenizer.encode(texts[0])) == texts[0]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"kind": "chars"}, "tokenizer.kind='chars'.*char, bpe"),
        ({"texts": ["", " "]}, "every training transcript is empty"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"vocab_size": 500}, "vocab_size=500: with char tokens this text allows 3 to"),
        ({"kind": "byte", "vocab_size": 300}, "257"),
        ({"byte_fallback": True}, "for bpe and unigram"),
    ],
)
def test_wrong_settings_are_refused_in_words(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        train_tokenizer(**({"texts": TEXTS} | arguments))


def test_training_says_nothing_and_leaves_no_files(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train_tokenizer(TEXTS, "unigram")
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_changed_or_missing_files_are_refused(tmp_path):
    tokenizer = train_tokenizer(TEXTS, "bpe")
    with pytest.raises(ValueError, match=r"tokenizer.json is missing"):
        load_tokenizer(tmp_path)
    tokenizer.save(tmp_path)
    tokens = (tmp_path / "tokens.txt").read_text(encoding="utf-8")
    (tmp_path / "tokens.txt").write_text(tokens.replace("▁<", "▁>"), encoding="utf-8")
    with pytest.raises(ValueError, match="do not belong together"):
        load_tokenizer(tmp_path)
    tokenizer.save(tmp_path)
    (tmp_path / "bpe.model").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="not a SentencePiece model"):
        load_tokenizer(tmp_path)
    (tmp_path / "bpe.model").unlink()
    with pytest.raises(ValueError, match=r"bpe.model is missing"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="no tokenizer's state"):
        tokenizer_from_state({"weights": 1})


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_table_or_setting_is_found_out(kind, tmp_path):
    def write(tokens):
        lines = "".join(f"{token} {index}\n" for index, token in enumerate(tokens))
        (tmp_path / "tokens.txt").write_text(lines, encoding="utf-8")

    tokenizer = train_tokenizer(TEXTS, kind)
    tokenizer.save(tmp_path)
    *others, before_last, last = tokenizer.tokens
    for tokens in ([*others, last, before_last], [*others, before_last, "another"], [*others, before_last]):
        write(tokens)
        with pytest.raises(ValueError, match="do not belong together"):
            load_tokenizer(tmp_path)
    write(tokenizer.tokens)
    assert load_tokenizer(tmp_path).hash == tokenizer.hash
    stored = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    for change in ({"normaliser": {**stored["normaliser"], "case": "lower"}}, {"hash": "0" * 64}):
        (tmp_path / "tokenizer.json").write_text(json.dumps(stored | change), encoding="utf-8")
        with pytest.raises(ValueError, match="do not belong together"):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", KINDS)
def test_yaml_trains(name):
    tokenizer = train_tokenizer(TEXTS, **settings(name))
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]


def test_every_yaml_is_a_kind():
    assert sorted(path.stem for path in CONF.glob("*.yaml")) == sorted([*KINDS, "saved"])
