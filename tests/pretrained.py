"""Tiny encoders, CANINE and other kinds, with random weights and tokenizers, in folders as on the
hub.
"""

import string
from pathlib import Path

import torch
import transformers as hf
from conftest import NOTES, TITLES
from models import config_of
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from histocoder.formatters import build_formatter
from histocoder.model import MixerModel, load_encoder, load_tokenizer

KINDS = ("bert", "xlm-r", "byt5")
_WORDS = sorted(
    {word for title in TITLES for word in (title, title[:4], title[4:])}
    | {"of", "the", "en"} - {""}
)
_LETTERS = string.ascii_lowercase + "()',[]"


def save_pretrained(
    kind: str, folder: Path, *, dropout: float = 0.0, num_positions: int = 130
) -> Path:
    """The folder of such an encoder."""
    torch.manual_seed(3)
    save = {"bert": _save_bert, "xlm-r": _save_xlm_r, "byt5": _save_byt5, "canine": _save_canine}[
        kind
    ]
    save(folder, dropout, num_positions)
    return folder


def _sizes(dropout: float, num_positions: int) -> dict[str, float]:
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    return {**sizes, **dropouts, "max_position_embeddings": num_positions}


def _save_canine(folder: Path, dropout: float, num_positions: int) -> None:
    config = hf.CanineConfig(**_sizes(dropout, num_positions), num_hash_buckets=num_positions)
    hf.CanineModel(config).save_pretrained(folder)


def _save_bert(folder: Path, dropout: float, num_positions: int) -> None:
    starts = sorted({*_WORDS, *_LETTERS})
    vocabulary = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *[*starts, *(f"##{piece}" for piece in starts)],
    ]
    hf.BertModel(
        hf.BertConfig(vocab_size=len(vocabulary), **_sizes(dropout, num_positions))
    ).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")


def _save_xlm_r(folder: Path, dropout: float, num_positions: int) -> None:
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = [(f"▁{word}", -3.0) for word in _WORDS] + [
        (letter, -6.0) for letter in ("▁", *_LETTERS)
    ]
    tokenizer = Tokenizer(models.Unigram([*((piece, 0.0) for piece in special), *pieces], unk_id=3))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    forms = {"single": "<s> $A </s>", "pair": "<s> $A </s> </s> $B </s>"}
    tokenizer.post_processor = processors.TemplateProcessing(
        **forms, special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {
        "cls_token": "<s>",
        "bos_token": "<s>",
        "pad_token": "<pad>",
        "sep_token": "</s>",
        "eos_token": "</s>",
    }
    fast = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, unk_token="<unk>")
    fast.save_pretrained(folder)
    sizes = {"vocab_size": len(fast), "pad_token_id": 1, **_sizes(dropout, num_positions)}
    hf.XLMRobertaModel(hf.XLMRobertaConfig(**sizes)).save_pretrained(folder)


def _save_byt5(folder: Path, dropout: float, _num_positions: int) -> None:
    sizes = {
        "vocab_size": 384,
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 2,
    }
    config = hf.T5Config(**sizes, dropout_rate=dropout, feed_forward_proj="gated-gelu")
    hf.T5ForConditionalGeneration(config).save_pretrained(
        folder
    )  # as on the hub, with the decoder that is not needed
    hf.ByT5Tokenizer().save_pretrained(folder)


TEXTS = [f"{title}{note}" for title in TITLES for note in NOTES]


def model_of(folder: Path, *, max_len: int = 64) -> MixerModel:
    """A new model of the titles' codes with an encoder from a folder."""
    torch.manual_seed(5)
    encoder, formatter = (
        load_encoder(str(folder), max_len=max_len),
        build_formatter("hisco", num_blocks=1),
    )
    settings = {"target_cols": ("hisco_1",), "languages": ("en", "unk"), "max_len": max_len}
    config = config_of(encoder, formatter, sorted(TITLES.values()), **settings)
    model = MixerModel(config, encoder, tokenizer=load_tokenizer(str(folder)))
    torch.nn.init.normal_(model.linear_decoder.weight, std=0.3)
    return model.eval()
