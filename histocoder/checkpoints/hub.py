"""Models on the Hugging Face hub, and the card that goes with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from histocoder.config import NUM_GREEDY, ModelConfig
from histocoder.data.languages import iso_code
from histocoder.errors import UserError
from histocoder.files import replacing
from histocoder.model.encoder import encoder_sizes, hub_answers, reads_characters

CARD_FILE = "README.md"

_CARD = """---
library_name: histocoder
pipeline_tag: text-classification
license: apache-2.0
{languages}tags:
- occupations
- history
- {system}
---

# Occupational descriptions to {system_title}

A model that codes occupational descriptions into {system_title}, {num_codes:,} codes, trained with histocoder.

{data}

## Load it

```python
from histocoder import Coder

coder = Coder.from_pretrained("PATH OR HUB NAME")
coder.predict(["wine and spirit merchant", "husmand"], ["en", "da"])
```

or `histocoder predict --model PATH "wine and spirit merchant" --language en`.

{metrics}
## What it is

An encoder ({encoder}, {layers} deep layers of width {width}), a sequence decoder over code tokens, and a flat head.
Descriptions are read up to {max_len} {unit}, text normalisation: {normalization}. It knows the languages {known};
give `unk` for others. Codes outside its key have not been seen in training.

## Licence

Apache-2.0, as histocoder. That of the data it was trained on may ask for more: see to it before you share the model.
"""

_METRICS = """## How right it is

On {rows:,} descriptions that were not trained on: {greedy:.1f} % got exactly the right set of codes from the decoder
(measured on {sample:,} of them), {flat:.1f} % from the flat head. `report.html`, if it is there, says more.

"""


def model_card(
    config: ModelConfig, *, num_train: int | None = None, num_val: int = 0, metrics: Mapping[str, float] | None = None
) -> str:
    """Return the text of a model's README.md.

    Parameters
    ----------
    config : ModelConfig
    num_train, num_val : int, optional
        Rows it was trained and validated on.
    metrics : dict, optional
        As `validation.validate` returns.
    """
    known = [lang for lang in config.languages if lang != "unk"]
    codes = sorted(map(iso_code, known))
    system = config.system
    sizes = encoder_sizes(config.encoder)
    figures = ""
    if metrics:
        shares = {"greedy": metrics["greedy_seq_acc"], "flat": metrics["flat_acc"]}
        figures = _METRICS.format(rows=num_val, sample=min(num_val, NUM_GREEDY), **shares)
    return _CARD.format(
        languages="".join(["language:\n", *(f"- {code}\n" for code in codes)]) if codes else "",
        system=system.lower(),
        system_title=system.upper() if system in ("hisco", "occ1950", "psti") else system,
        num_codes=config.num_classes,
        data=f"It was trained on {num_train:,} descriptions." if num_train else "Its training data are not known here.",
        metrics=figures,
        encoder=sizes.name,
        layers=sizes.num_layers,
        width=sizes.hidden_size,
        max_len=config.max_len,
        unit="characters" if reads_characters(config.encoder) else "tokens",
        normalization=config.text_normalization,
        known=", ".join(known) or "(not recorded)",
    )


def with_remark(card: str, remark: str) -> str:
    """Return a model card with a sentence added to what it says of accuracy."""
    return card.replace("\n## What it is", f"\n{remark}\n\n## What it is", 1)


def write_card(folder: Path, card: str) -> None:
    """Write a model's README.md."""
    with replacing(folder / CARD_FILE) as temporary:
        temporary.write_text(card, encoding="utf-8")


def may_be_hub_id(name: str) -> bool:
    """Return whether a name is that of a repo on the hub, by its form, and of nothing here."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()


def local_folder(path_or_hub_id: str | Path) -> Path:
    """Return a model's folder, fetched from the hub where it is none here.

    Raises
    ------
    UserError
        Where it is neither a folder nor a name that the hub knows.
    """
    path = Path(path_or_hub_id)
    if path.is_dir():
        return path
    name = str(path_or_hub_id)
    if not may_be_hub_id(name):
        raise UserError(f"There is no model folder {name}.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=not hub_answers()))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise UserError(f"There is no model folder {name}, and the hub gives none of that name.") from error


def push_folder(folder: Path, repo_id: str, *, private: bool) -> str:
    """Upload a folder as a hub repo, made where it is not there yet; return its address.

    Raises
    ------
    UserError
        Where the hub can't be reached, or refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    if not hub_answers():
        raise UserError("The hub can't be reached; try again where there is a network.")
    try:
        api = HfApi()
        api.create_repo(repo_id, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repo_id, folder_path=str(folder)))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(
            f"The hub refused {repo_id}: {str(error).splitlines()[0]} Log in with 'hf auth login'."
        ) from error
