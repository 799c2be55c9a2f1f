from pathlib import Path

import huggingface_hub
import pytest
from models import tiny_model

from histocoder import Coder
from histocoder.checkpoints import hub
from histocoder.errors import UserError


def test_a_card_says_what_the_model_is():
    config = tiny_model().config
    card = hub.model_card(config, num_train=1200, num_val=2000, metrics={"greedy_seq_acc": 81.25, "flat_acc": 40.0})
    for words in (
        "language:\n- da\n- en\n",
        "license: apache-2.0",
        "8 codes",
        "1,200 descriptions",
        "81.2 %",
        "1,024 of",
    ):
        assert words in card
    assert "{" not in card.replace("{}", "") and "## Accuracy" not in hub.model_card(config)


def test_a_card_stays_with_its_model(tmp_path: Path):
    coder = Coder(tiny_model(), "cpu")
    coder.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("# A card of one's own\n")
    Coder.from_pretrained(tmp_path / "model", "cpu").save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "README.md").read_text() == "# A card of one's own\n"


def test_a_model_is_pushed_whole_and_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = tmp_path / "hub"

    class Api:
        def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
            assert private and exist_ok
            (store / repo_id).mkdir(parents=True)

        def upload_folder(self, *, repo_id: str, folder_path: str) -> str:
            for path in Path(folder_path).iterdir():
                (store / repo_id / path.name).write_bytes(path.read_bytes())
            return f"hub/{repo_id}"

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, local_files_only: str(store / name))
    monkeypatch.setattr(hub, "hub_answers", lambda: True)
    coder = Coder(tiny_model(), "cpu")
    assert coder.push_to_hub("somebody/model", private=True) == "hub/somebody/model"
    pushed = {path.name for path in (store / "somebody/model").iterdir()}
    assert pushed == {"config.json", "model.safetensors", "manifest.json", "README.md"}
    fetched = Coder.from_pretrained("hf://somebody/model", "cpu")
    assert fetched.predict("baker", "en").equals(coder.predict("baker", "en"))


def test_path_is_never_looked_up_on_hub(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(UserError, match=r"no model folder demo/best\. .* write hf://demo/best"):
        hub.local_folder("demo/best")


def test_no_hub_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub, "hub_answers", lambda: False)
    with pytest.raises(UserError, match="hub can't be reached"):
        Coder(tiny_model(), "cpu").push_to_hub("somebody/model")
