"""Models on the Hugging Face hub, and the card that goes with them."""

from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment

from histocoder.config import NUM_GREEDY, ModelConfig
from histocoder.data.languages import Language
from histocoder.errors import UserError
from histocoder.model.encoder import encoder_sizes, hub_answers, reads_characters

HUB_PREFIX = "hf://"
_TEMPLATE = Path(__file__).with_name("card.md.jinja")


def model_card(
    config: ModelConfig, *, num_train: int | None = None, num_val: int = 0, metrics: Mapping[str, float] | None = None
) -> str:
    """Return the text of a model's README.md, with the results of `validation.validate` if they are known."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters["iso_code"] = lambda lang: Language(lang).iso
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        config=config,
        num_train=num_train,
        num_val=num_val,
        num_greedy=NUM_GREEDY,
        metrics=metrics,
        system=config.system,
        languages=[lang for lang in config.languages if lang != "unk"],
        encoder=encoder_sizes(config.encoder),
        unit="characters" if reads_characters(config.encoder) else "tokens",
    )


def is_on_hub(name: str) -> bool:
    """Return whether a name is that of a repository on the hub, such as hf://owner/name."""
    return name.startswith(HUB_PREFIX)


def local_folder(path_or_url: str | Path) -> Path:
    """Return a model's folder; `hf://owner/name` is downloaded from the hub.

    A name without the prefix is never looked up there: a misspelt path could be a repository of somebody else's.
    """
    name = str(path_or_url)
    if not is_on_hub(name):
        if Path(name).is_dir():
            return Path(name)
        advice = f" For a repository on the Hugging Face hub, write {HUB_PREFIX}{name}." if name.count("/") == 1 else ""
        raise UserError(f"There is no model folder {name}.{advice}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    repo_id, is_reached = name.removeprefix(HUB_PREFIX), hub_answers()
    try:
        return Path(snapshot_download(repo_id, local_files_only=not is_reached))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = "has no such repository" if is_reached else "can't be reached, and there is no cached copy"
        raise UserError(f"Could not open the model {name}: the Hugging Face hub {reason}.") from error


def push_folder(folder: Path, repo_id: str, *, private: bool) -> str:
    """Upload a folder to a repository on the hub, created if it does not exist; return its URL."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    if not hub_answers():
        raise UserError("The hub can't be reached; try again with a network connection.")
    try:
        api = HfApi()
        api.create_repo(repo_id, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repo_id, folder_path=str(folder)))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(
            f"The hub refused {repo_id}: {str(error).splitlines()[0]} Log in with 'hf auth login'."
        ) from error
