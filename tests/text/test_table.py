import pytest

from asr.text.table import read_tokens, write_tokens


def test_awkward_tokens_survive_the_file(tmp_path):
    tokens = ["<blk>", " ", "▁", "#1", "\u0301", "e\u0301", "a1", "7", "\\", "\u2028", "\u00a0", "'", "▁the", "  "]
    write_tokens(tmp_path / "tokens.txt", tokens)
    assert read_tokens(tmp_path / "tokens.txt") == tokens


def test_crlf_file_reads_the_same(tmp_path):
    (tmp_path / "tokens.txt").write_bytes("<blk> 0\r\n▁ 1\r\na 2\r\n".encode())
    assert read_tokens(tmp_path / "tokens.txt") == ["<blk>", "▁", "a"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("<blk> 0\na 2\n", r"tokens.txt:2: expected `token 1`"),
        ("<blk> 0\n\na 1\n", r"tokens.txt:2"),
        ("<blk> 0\na\n", r"tokens.txt:2"),
        ("<blk> 0\na 1\na 2\n", r"twice: 'a'"),
        ("", r"tokens.txt:1"),
    ],
)
def test_broken_files_are_named_with_their_line(tmp_path, content, complaint):
    (tmp_path / "tokens.txt").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=complaint):
        read_tokens(tmp_path / "tokens.txt")


@pytest.mark.parametrize("tokens", [["<blk>", "a", "a"], ["<blk>", "a\nb"]])
def test_tokens_that_a_file_cannot_hold_are_refused(tmp_path, tokens):
    with pytest.raises(ValueError, match=r"tokens.txt: token"):
        write_tokens(tmp_path / "tokens.txt", tokens)
