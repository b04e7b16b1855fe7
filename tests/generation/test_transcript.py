"""Tests of text from tokens as they arrive: whole characters, stop strings, ends."""

import itertools
import random

import pytest

from sympow_jax import data as data_lib
from sympow_jax import generation
from sympow_jax.data import tokenizer
from tests.data import builders

BYTES = data_lib.Codec(tokenizer.load("byte"), 256)


def told(data, size, *, codec=BYTES, prompt=b"x", max_tokens=1000, stops=()):
    tokens = list(data)
    transcript = generation.Transcript(codec, list(prompt), max_tokens=max_tokens, stops=stops)
    pieces = [transcript.add(tokens[start : start + size]) for start in range(0, len(tokens), size)]
    assert "".join(pieces) == transcript.text
    return pieces, transcript


def test_characters_are_whole():
    text = "naïve € 𝄞 end"
    data = text.encode()
    for size in (1, 2, 3, 7):
        pieces, transcript = told(data, size, max_tokens=len(data))
        assert (transcript.text, transcript.done) == (text, True)
        assert all("\ufffd" not in piece for piece in pieces)


def test_invalid_utf8():
    assert told(b"a\xffb", 1, max_tokens=3)[1].text == "a\ufffdb"
    # The beginning of a character, cut off by max_tokens.
    pieces, transcript = told("a€".encode()[:3], 1, max_tokens=3)
    assert pieces == ["a", "", "\ufffd"]
    assert transcript.done


def test_the_text_ends_before_the_first_stop():
    for text, stops, expected in (
        ("one two three", ["two"], "one "),
        ("one two three", ["three", "two"], "one "),
        ("aaab", ["aab"], "a"),
        ("one tw", ["two"], "one tw"),
        ("one two", ["one"], ""),
        ("ab ac", ["ad"], "ab ac"),
        ("x\n\ny", ["\n\n"], "x"),
        ("a€b", ["€"], "a"),
    ):
        data = text.encode()
        for size in (1, 2, 3, 5, 100):
            pieces, transcript = told(data, size, stops=stops, max_tokens=len(data))
            assert (transcript.text, transcript.done) == (expected, True)
            assert transcript.stopped == (expected != text)
            assert all(expected.startswith(before) for before in itertools.accumulate(pieces))


def test_tokens_after_the_end_are_ignored():
    transcript = generation.Transcript(BYTES, [1], max_tokens=3)
    assert transcript.add(list(b"ab")) == "ab"
    assert not transcript.done
    assert transcript.add(list(b"cde")) == "c"
    assert transcript.done
    assert not transcript.stopped
    assert transcript.add(list(b"fgh")) == ""
    for stops in ([1], "ab"):
        with pytest.raises(ValueError, match="it must be a list of texts"):
            generation.Transcript(BYTES, [1], max_tokens=3, stops=stops)
    with pytest.raises(ValueError, match="a stop string is empty"):
        generation.Transcript(BYTES, [1], max_tokens=3, stops=["a", ""])


def test_the_end_of_a_document_ends_the_text():
    codec = data_lib.Codec(tokenizer.load("byte"), 256, end=0)
    _, transcript = told(b"ab\0cd", 2, codec=codec)
    assert transcript.text == "ab"
    assert transcript.done
    assert transcript.stopped


def byte_fallback(folder):
    return builders.write_byte_fallback(folder / "fallback.json")


def written(decoder, names):
    """Returns a writer of a tokenizer with this decoder, whose ids are those of the names."""

    def write(folder):
        tokenizers = pytest.importorskip("tokenizers")
        built = tokenizers.Tokenizer(
            tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0])
        )
        built.decoder = decoder(tokenizers.decoders)
        built.save(str(folder / "built.json"))
        return str(folder / "built.json")

    return write


def byte_level(folder):
    tokenizers = pytest.importorskip("tokenizers")
    split = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("é中😀\ufffda")
    names = sorted(set("".join(part for part, _ in split)))
    return written(lambda decoders: decoders.ByteLevel(), names)(folder)


TOKENIZERS = {
    "byte": lambda folder: "byte",
    "byte_fallback": byte_fallback,
    "byte_level": byte_level,
    "metaspace": written(lambda decoders: decoders.Metaspace(), ["▁", "a", "▁b", "▁▁c", "中"]),
    "wordpiece": written(lambda decoders: decoders.WordPiece(), ["a", "##b", ".", "n't", "中", "##,"]),
    "suffix": written(lambda decoders: decoders.BPEDecoder(), ["a", "b</w>", "中</w>", " "]),
    "spaces_stripped": written(
        lambda decoders: decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)]), ["a", " ", "  b "]
    ),
    "no_decoder": written(lambda decoders: None, ["a", "b", "中", " "]),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_make_what_the_tokens_decode_to(kind, tmp_path):
    codec = data_lib.Codec(tokenizer.load(TOKENIZERS[kind](tmp_path)), 300)
    rng = random.Random(0)
    whole = list("é中😀\ufffd a".encode())
    # Bytes of characters too, which random bytes hardly ever make.
    shift = 3 if kind == "byte_fallback" else 0
    for _ in range(150):
        tokens = rng.choices(range(codec.tokenizer.vocab_size), k=rng.randrange(2, 12))
        if codec.tokenizer.vocab_size > 100:
            tokens += [byte + shift for byte in whole[: rng.randrange(len(whole))]] + tokens[:2]
        prompt, new = tokens[: len(tokens) // 3 + 1], tokens[len(tokens) // 3 + 1 :]
        _, transcript = told(new, rng.randrange(1, 4), codec=codec, prompt=prompt, max_tokens=len(new))
        before, text = (codec.decode(ids).decode(errors="replace") for ids in (prompt, tokens))
        assert text.endswith(transcript.text)
        # A prompt may end within a character, which the text then has.
        assert text[: len(text) - len(transcript.text)].rstrip("\ufffd") == before.rstrip("\ufffd")


def test_byte_fallback_keeps_whole_characters(tmp_path):
    codec = data_lib.Codec(tokenizer.load(byte_fallback(tmp_path)), 300)
    text = "中文字符😀" * 12
    tokens = codec.tokenizer.encode(text.encode()).tolist()[1:]
    prompt = codec.tokenizer.encode(b"a").tolist()
    pieces, transcript = told(tokens, 1, codec=codec, prompt=prompt, max_tokens=len(tokens))
    assert transcript.text == text
    assert set(pieces) == {"", *text}
    # The last character is cut off by `max_tokens`.
    _, transcript = told(tokens[:-1], 1, codec=codec, prompt=prompt, max_tokens=len(tokens) - 1)
    assert transcript.text == text[:-1] + "\ufffd"
    with pytest.raises(ValueError, match="300 is no token of the model, whose ids are 0 to 299"):
        codec.decode([3, 300])
