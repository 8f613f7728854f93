"""Texts of tokens: together they are the text that the tokenizer itself makes of the ids."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trakdask.samples.token_texts import Text, token_texts

CORPUS = [
    "utility for indexing text, isn't it?",
    "executable to call from the command line",
    "字符串处理 naïve 😀",
]
TEXTS = [*CORPUS, "the  textual utility isn't 👍 3-fold", "国 字 naïve"]
MARKS = ["[UNK]", "[CLS]"]


def word_level() -> Tokenizer:
    made = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=MARKS))
    return made


def word_piece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=80, special_tokens=MARKS)
    made.train_from_iterator(CORPUS, trainer)
    return made


def byte_pair() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet))
    return made


def byte_fallback() -> Tokenizer:
    """Return a tokenizer such as Llama's, which spells unknown characters in bytes."""
    made = Tokenizer(models.BPE(byte_fallback=True))
    space = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
    made.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[f"<0x{byte:02X}>" for byte in range(256)]
    )
    made.train_from_iterator(CORPUS[:2], trainer)
    return made


@pytest.mark.parametrize("make", [word_level, word_piece, byte_pair, byte_fallback])
def test_token_texts__together_are_the_decoded_text(make: Callable[[], Tokenizer]) -> None:
    plain = make()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=plain)
    only_decodes = SimpleNamespace(decode=lambda ids: plain.decode(list(ids)))
    for text in TEXTS:
        ids = plain.encode(text).ids
        for tokenizer in (plain, wrapped, only_decodes):
            expected = tokenizer.decode(ids)
            for given in (tokenizer, tokenizer.decode):
                texts = token_texts(given)(ids)
                assert len(texts) == len(ids)
                assert "".join(texts).split() == expected.split()
                assert not any("\ufffd" in text or "##" in text for text in texts)


def test_token_texts__a_character_is_at_the_first_of_its_tokens() -> None:
    tokenizer = byte_pair()
    ids = [tokenizer.token_to_id(byte) for byte in ("a", "Ã", "¯", "b", "ð", "Ł", "ĺ", "Ģ", "Ġ")]
    assert token_texts(tokenizer)(ids) == ["a", "ï", "", "b", "😀", "", "", "", " "]


def test_token_texts__words_of_pieces_are_apart() -> None:
    vocabulary = {"[UNK]": 0, "index": 1, "##ing": 2, "to": 3, "call": 4, ".": 5}
    tokenizer = Tokenizer(models.WordPiece(vocabulary))
    tokenizer.decoder = decoders.WordPiece()
    texts = ["index", "ing", " to", " [UNK]", " call", "."]
    assert token_texts(tokenizer.decode)([1, 2, 3, 0, 4, 5]) == texts


@pytest.mark.parametrize("number", [190, 200, 225, 255])
def test_token_texts__bytes_that_are_no_text_do_not_take_their_neighbours(number: int) -> None:
    tokenizer = byte_pair()
    a, b = (tokenizer.token_to_id(letter) for letter in "ab")
    assert token_texts(tokenizer)([a, number, b])[::2] == ["a", "b"]


WORDS = ["a", "b", "c"]


@pytest.mark.parametrize(
    "text",
    [
        tuple(WORDS),
        WORDS.__getitem__,
        SimpleNamespace(decode=WORDS.__getitem__),
        SimpleNamespace(decode=lambda ids: "".join(WORDS[number] for number in ids)),
    ],
)
def test_token_texts__of_lists_and_functions(text: Text | Any) -> None:
    assert token_texts(text)([2, 0, 1, 0]) == ["c", "a", "b", "a"]
