"""Texts of single tokens, by a tokenizer that drops the space before the first one."""

from types import SimpleNamespace

from serving import DEMO
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from attnres_serve.checkpoints import tokenizer
from attnres_serve.compat import requests
from attnres_serve.compat.token_texts import texts_behind_another

WORDS = ("<s>", "<unk>", "▁the", "▁a", "s", ",")


def test_a_space_before_a_word_is_kept():
    """In what a server answers."""
    own = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, "<unk>"))
    own.pre_tokenizer = pre_tokenizers.Metaspace()
    own.decoder = decoders.Metaspace()
    metaspace = PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>", unk_token="<unk>")
    ids = metaspace.convert_tokens_to_ids(["<s>", "▁the", "s", ",", "▁a"])
    expected = ["<s>", " the", "s", ",", " a"]
    assert metaspace.decode([ids[1]]) == "the"  # what is mended
    assert texts_behind_another(metaspace, ids) == expected
    model = SimpleNamespace(skip_tokenizer_init=False)
    client = SimpleNamespace(
        get_tokenizer=lambda: metaspace, vllm_config=SimpleNamespace(model_config=model)
    )
    assert requests.token_texts(client, ids) == expected


def test_bytes_that_are_no_whole_character():
    """As alone: a tokenizer of bytes has each space in its token."""
    own = tokenizer.load(DEMO)
    ids = own.encode("def über(x):\n    return '你'")
    texts = texts_behind_another(own, ids)
    assert texts == [own.decode([token]) for token in ids] and "\ufffd" in "".join(texts)
