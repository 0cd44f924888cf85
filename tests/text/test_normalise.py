import random
import unicodedata

import pytest

from asr.text.normalise import Normaliser


@pytest.mark.parametrize(
    "written",
    [
        "\ufeffgood day",
        "good day\r",
        " good\tday \n",
        "good\u00a0day",
        "good\u3000day",
        "good\u200b day",
        "go\u2060od\u0085day",
    ],
)
def test_one_text_for_all_encodings_of_spaces_and_invisibles(written):
    assert Normaliser()(written) == "good day"


def test_composed_and_decomposed_are_one_form():
    composed, decomposed = "café", "cafe\u0301"
    assert composed != decomposed
    assert Normaliser()(composed) == Normaliser()(decomposed) == composed
    assert Normaliser(unicode_form="NFD")(composed) == decomposed


def test_a_zero_width_space_does_not_keep_a_mark_from_its_letter():
    assert Normaliser()("e\u200b\u0301") == "é"


@pytest.mark.parametrize(
    ("settings", "text", "expected"),
    [
        ({"case": "lower"}, "Straße ÉCOLE", "straße école"),
        ({"case": "upper"}, "straße", "STRASSE"),
        ({"case": "lower", "unicode_form": "NFKC"}, "ℋello", "hello"),
        ({"width": "half"}, "ＡＢＣ１２３！", "ABC123!"),
        ({"width": "half"}, "Ａ\u0301", "Á"),
        ({"punctuation": "remove"}, "Don’t stop, dogs' 'tis -- twenty-one!", "Don't stop dogs tis twenty one"),
        ({"punctuation": "remove"}, "你好，世界。", "你好 世界"),
        ({"punctuation": "remove"}, "cafe\u0301's a''b $5", "café's a b $5"),
        ({}, "<blk> ▁ #1, it's", "<blk> ▁ #1, it's"),
        ({}, "", ""),
        ({"case": "lower", "punctuation": "remove"}, " \u200b... ", ""),
    ],
)
def test_policies(settings, text, expected):
    assert Normaliser(**settings)(text) == expected


def test_twice_is_once():
    rng = random.Random(0)
    alphabet = [
        chr(code) for code in (*range(0x250), *range(0x300, 0x340), *range(0x2000, 0x2070), *range(0xFF00, 0xFF60))
    ]
    alphabet += ["İ", "ℋ", "ß", "ŉ", "Σ", "한", "ᄒ", "\ud800", "'", "’", "e", "E"] * 10
    for settings in (
        {},
        {"case": "lower", "punctuation": "remove"},
        {"case": "upper", "unicode_form": "NFKC", "width": "half"},
        {"case": "lower", "unicode_form": "NFKD", "width": "half", "punctuation": "remove"},
    ):
        normalise = Normaliser(**settings)
        for _ in range(500):
            once = normalise("".join(rng.choices(alphabet, k=12)))
            assert normalise(once) == once
            assert unicodedata.is_normalized(normalise.unicode_form, once)


def test_wrong_settings_are_refused_in_words():
    with pytest.raises(ValueError, match=r"normaliser.case='lowercase'.*keep, lower, upper"):
        Normaliser(case="lowercase")
    with pytest.raises(ValueError, match=r"no key casing.*unicode_form"):
        Normaliser.of({"casing": "lower"})
