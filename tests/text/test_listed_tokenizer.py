import pickle

import pytest
import sentencepiece
import torch

from asr.text.listed_tokenizer import ListedTokenizer
from asr.text.tokenizer import load_tokenizer, saved_tokenizer, tokenizer_from_state, train_tokenizer

PIECES = ["<blk>", "<sos/eos>", "<unk>", "▁THE", "▁", "T", "H", "E", "▁CA", "CAT", "'", "S"]


def pieces(**options):
    return ListedTokenizer(PIECES, blank_id=0, unk_id=2, sos_eos_id=1, **options)


def named(tokenizer, text):
    return [tokenizer.tokens[index] for index in tokenizer.encode(text)]


def test_text_is_spelled_by_as_few_tokens_as_will_do():
    tokenizer = pieces()
    assert named(tokenizer, "THE CAT'S") == ["▁THE", "▁", "CAT", "'", "S"]
    assert named(tokenizer, "THE CA") == ["▁THE", "▁CA"]
    assert named(tokenizer, "THE XÉ E") == ["▁THE", "▁", "<unk>", "<unk>", "▁", "E"]
    assert tokenizer.decode(tokenizer.encode("THE CAT'S THE")) == "THE CAT'S THE"
    assert tokenizer.encode("") == [] and tokenizer.decode([0, 1, 2]) == ""
    share, unknown = tokenizer.unknown_share(["THE X"])
    assert share == pytest.approx(1 / 4) and unknown == {"X": 1}


def test_characters_with_and_without_a_token_for_space():
    letters = ListedTokenizer(["▁", *"abc", "<blank>"], blank_id=4)
    assert letters.encode("ab c") == [1, 2, 0, 3] and letters.decode([1, 2, 0, 3]) == "ab c"
    assert letters.encode("axb") == [1, 2], "without an unknown token it vanishes"
    chinese = ListedTokenizer(["<blank>", "<unk>", "广", "州", "<sos/eos>"], unk_id=1, sos_eos_id=4)
    assert chinese.encode("广 州市") == [2, 3, 1] and chinese.decode([2, 3]) == "广州"


def test_bytes_spell_what_no_token_does():
    tokens = ["<blk>", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = ListedTokenizer(tokens)
    assert tokenizer.encode("aé") == [1, 2 + 0xC3, 2 + 0xA9] and tokenizer.decode(tokenizer.encode("aé 好")) == "aé 好"


def test_a_sentencepiece_model_encodes_under_the_ids_of_the_list():
    model = train_tokenizer(["the cat sat on the mat", "a cat"], "unigram").state_dict()["model"]
    own = sentencepiece.SentencePieceProcessor(model_proto=bytes(model.numpy()))
    listed = ["<blank>", *(own.id_to_piece(i) for i in reversed(range(1, own.get_piece_size())))]
    tokenizer = ListedTokenizer(listed, unk_id=len(listed) - 1, model=bytes(model.numpy()))
    assert named(tokenizer, "the cat") == own.encode("the cat", out_type=str)
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat" and tokenizer.encode("?")[-1] == len(listed) - 1


@pytest.mark.parametrize("with_model", [False, True])
def test_stored_in_folder_and_checkpoint(tmp_path, with_model):
    model = bytes(train_tokenizer(["THE CAT"], "unigram").state_dict()["model"].numpy()) if with_model else b""
    tokenizer = pieces(model=model, normaliser={"case": "upper"})
    tokenizer.save(tmp_path / "tokenizer")
    torch.save(tokenizer.state_dict(), tmp_path / "state.pt")
    copies = [load_tokenizer(tmp_path / "tokenizer"), saved_tokenizer(str(tmp_path), ["ignored"]),
              tokenizer_from_state(torch.load(tmp_path / "state.pt", weights_only=True))]  # fmt: skip
    for copy in copies:
        assert copy.hash == tokenizer.hash and copy.tokens == PIECES
        assert (copy.blank_id, copy.unk_id, copy.sos_eos_id) == (0, 2, 1)
        assert copy.encode("the cat") == tokenizer.encode("THE CAT")
    assert saved_tokenizer(str(tmp_path), vocab_size=tokenizer.vocab_size).hash == tokenizer.hash
    with pytest.raises(ValueError, match=f"has {tokenizer.vocab_size} tokens; set tokenizer.vocab_size"):
        saved_tokenizer(str(tmp_path), vocab_size=500)


def test_a_list_that_is_none_is_refused():
    with pytest.raises(ValueError, match="appear twice: 'a'"):
        ListedTokenizer(["<blk>", "a", "a"])
    with pytest.raises(ValueError, match=r"\[3\] do not all lie in a list of 2"):
        ListedTokenizer(["<blk>", "a"], blank_id=3)


def test_workers_get_it_by_pickle():
    model = bytes(train_tokenizer(["THE CAT"], "unigram").state_dict()["model"].numpy())
    assert pickle.loads(pickle.dumps(pieces(model=model))).encode("THE") == pieces(model=model).encode("THE")
