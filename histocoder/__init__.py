"""Train and use models that code occupational descriptions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from histocoder.predict import Coder

__all__ = ["Coder"]


def __getattr__(name: str) -> Any:  # so that importing a part does not import torch and transformers
    if name == "Coder":
        from histocoder.predict import Coder

        return Coder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
