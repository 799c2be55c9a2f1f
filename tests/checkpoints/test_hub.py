import shutil
from pathlib import Path

import huggingface_hub
import pytest
from models import save_tiny_model, tiny_model

from histocoder import Coder
from histocoder.checkpoints import model_files
from histocoder.errors import UserError


def test_a_card_says_what_the_model_is():
    config = tiny_model().config
    metrics = {"greedy_seq_acc": 81.25, "flat_acc": 40.0}
    card = model_files.model_card(config, num_train=1200, num_val=2000, metrics=metrics)
    for words in ("language:\n- da\n- en\n", "8 codes", "1,200 descriptions", "81.2 %", "1,024 of"):
        assert words in card
    assert "{" not in card.replace("{}", "") and "## Accuracy" not in model_files.model_card(config)


def test_a_card_stays_with_its_model(tmp_path: Path):
    model = save_tiny_model(tmp_path / "model")
    (model / "README.md").write_text("# A card of one's own\n")
    Coder.from_pretrained(model, "cpu").save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "README.md").read_text() == "# A card of one's own\n"


def test_a_model_is_fetched_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_tiny_model(tmp_path / "somebody" / "model")
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, local_files_only: str(tmp_path / name)
    )
    monkeypatch.setattr(model_files, "hub_answers", lambda: True)
    fetched = Coder.from_pretrained("hf://somebody/model", "cpu")
    assert fetched.predict("baker", "en").equals(Coder(tiny_model(), "cpu").predict("baker", "en"))


def test_path_is_never_looked_up_on_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match="hub can't be reached"):
        model_files.local_folder("hf://somebody/no-such-model")
    monkeypatch.chdir(tmp_path)  # the project's folder may hold the demo
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked")
    )
    with pytest.raises(UserError, match=r"no model folder demo/best\. .* write hf://demo/best"):
        model_files.local_folder("demo/best")


def test_a_model_is_shared_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    uploaded: dict[str, object] = {}

    def upload(_: object, *, repo_id: str, folder_path: Path) -> None:
        shutil.copytree(folder_path, tmp_path / repo_id)

    def create(_: object, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        uploaded.update(repo_id=repo_id, private=private, exist_ok=exist_ok)

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    coder = Coder(tiny_model(), "cpu")
    assert coder.push_to_hub("somebody/model", private=True) == "hf://somebody/model"
    assert uploaded == {"repo_id": "somebody/model", "private": True, "exist_ok": True}
    again = Coder.from_pretrained(tmp_path / "somebody" / "model", "cpu")
    assert again.predict("baker", "en").equals(coder.predict("baker", "en"))

    # the hub's own refusal, in a sentence
    def refuse(*_: object, **__: object) -> None:
        raise OSError("Token is required.\nTraceback")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", refuse)
    with pytest.raises(UserError, match=r"to somebody/model: Token is required\. Sign in with"):
        coder.push_to_hub("somebody/model")
