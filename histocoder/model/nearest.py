"""Votes of the training rows that are nearest to a description, by their encodings."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from histocoder.ops import kernels

HIGHEST_VOTES = {"nearest": 0.0, "begins": 1.0, "ends": 1.0}
"""The most that each vote of a `NearestExpert` may be."""
_NUM_COMPONENTS = 64  # principal components of encodings; more of them decide no better
_SHARPNESS = 20.0  # factor of cosines, which makes log-odds of them
_AT_ONCE = 256  # descriptions that are compared with all rows at once
_PIECE = 32  # rows of a class that are reduced at once where there are no kernels
_LEAST = 1e-3  # what a code without any row nearby has, where one whose row is encoded alike has 1


class NearestExpert(nn.Module):
    """The nearest training row of each code, by the cosine of encodings.

    Memory helps where many descriptions are variants of others, as kNN-LM does in language models
    (Khandelwal et al. 2020, https://arxiv.org/abs/1911.00172). Encodings are centred, projected to
    their principal components, and normalized. Whether the row begins and ends with the same letter
    says more about variants than how much of it is the same.
    """

    constants: ClassVar[dict[str, float]] = {"sharpness": _SHARPNESS, "least": _LEAST}
    mean: Tensor  # of the encodings, of shape (dim,)
    components: Tensor  # their principal components, of shape (dim, num_components)
    # Projected encodings of the rows in the order of their classes, bf16 (num_rows, num_components)
    rows: Tensor
    ends: Tensor  # `end_characters` of the rows, int32 of shape (num_rows, 2)
    # The first row of each class, and the number of rows, int64 of shape (num_classes + 1,)
    first: Tensor

    def __init__(self, num_rows: int, dim: int, num_classes: int) -> None:
        super().__init__()
        size = min(_NUM_COMPONENTS, dim - dim % 2)
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("components", torch.zeros(dim, size))
        self.register_buffer("rows", torch.zeros(num_rows, size, dtype=torch.bfloat16))
        self.register_buffer("ends", torch.zeros(num_rows, 2, dtype=torch.int32))
        self.register_buffer("first", torch.zeros(num_classes + 1, dtype=torch.int64))
        # made when they are first used
        self._blocks: Tensor | None = None
        self._pieces: _Pieces | None = None

    @classmethod
    @torch.no_grad()
    def of(
        cls, encodings: Tensor, ends: Tensor, class_ids: Tensor, *, num_classes: int
    ) -> NearestExpert:
        """Return an expert that remembers rows by their encodings (n, dim), ends (n, 2) and classes
        (n,).
        """
        expert = cls(len(encodings), encodings.shape[1], num_classes).to(encodings.device)
        unit = F.normalize(encodings.float(), dim=-1)
        expert.mean.copy_(unit.mean(0))
        centred = F.normalize(unit - expert.mean, dim=-1)
        directions = torch.linalg.eigh((centred.T @ centred).cpu())[1]  # by ascending variance
        expert.components.copy_(directions[:, -expert.components.shape[1] :])
        expert._remember(expert.project(encodings), ends, class_ids)
        return expert

    @torch.no_grad()
    def with_rows(self, encodings: Tensor, ends: Tensor, class_ids: Tensor) -> NearestExpert:
        """Return an expert that remembers more rows, of the same shapes as for `of`, by the
        components that it has.
        """
        num_classes = len(self.first) - 1
        old_class_ids = torch.arange(num_classes, device=class_ids.device)
        old_class_ids = old_class_ids.repeat_interleave(self.first.diff())
        rows = torch.cat([self.rows.float(), self.project(encodings)])

        expert = NearestExpert(len(rows), len(self.mean), num_classes).to(rows.device)
        expert.mean.copy_(self.mean)
        expert.components.copy_(self.components)
        all_ends = torch.cat([self.ends, ends])
        expert._remember(rows, all_ends, torch.cat([old_class_ids, class_ids]))
        return expert

    def _remember(self, rows: Tensor, ends: Tensor, class_ids: Tensor) -> None:
        """Set the rows, sorted by their classes."""
        class_ids, order = class_ids.sort(stable=True)
        self.rows.copy_(rows[order])
        self.ends.copy_(ends[order])
        classes = torch.arange(len(self.first), device=class_ids.device)
        self.first.copy_(torch.searchsorted(class_ids, classes))

    def project(self, encodings: Tensor) -> Tensor:
        """Return encodings (n, dim) as they are compared, in fp32 of shape (n, num_components)."""
        centred = F.normalize(F.normalize(encodings.float(), dim=-1) - self.mean, dim=-1)
        return F.normalize(centred @ self.components, dim=-1)

    @torch.no_grad()
    def forward(self, encodings: Tensor, ends: Tensor, classes: Tensor) -> dict[str, Tensor]:
        """Return the votes of descriptions, by encodings (B, dim) and ends (B, 2), for some classes
        (B, K) each.

        They are `nearest`, the logarithm of a similarity, and `begins` and `ends`, 1 where the
        nearest row's first and last character is the same; each of shape (B, K).
        """
        queries = self.project(encodings)
        if kernels.supports(queries):
            if self._blocks is None:
                self._blocks = kernels.blocks_of(self.rows)
            cosine, row = kernels.nearest(queries, classes, self._blocks, self.first)
        else:
            cosine = torch.empty(classes.shape, device=classes.device)
            row = torch.empty_like(classes)
            for start in range(0, len(queries), _AT_ONCE):
                part = slice(start, start + _AT_ONCE)
                cosine[part], row[part] = self._nearest(queries[part], classes[part])

        same = (self.ends[row] == ends[:, None]) & (row >= 0)[..., None]
        begins, ended = same.float().unbind(-1)
        return {
            "nearest": ((_SHARPNESS * (cosine - 1)).exp() + _LEAST).log(),
            "begins": begins,
            "ends": ended,
        }

    def _nearest(self, queries: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines of the nearest row of each class, and these rows; -1 where there is
        none.

        The rows of a class are cut into pieces of one size. The best row of each piece is found by
        a plain reduction; only pieces, not rows, are reduced to classes by a scatter, which on a
        GPU takes an atomic operation for each.
        """
        if self._pieces is None or self._pieces.rows.device != self.first.device:
            self._pieces = _pieces(self.first)
        rows = self._pieces.rows
        cosine = queries @ self.rows[rows.flatten()].float().T
        of_pieces, place = cosine.unflatten(1, rows.shape).max(2)  # both (B, P)
        nearest_rows = rows.expand(len(queries), -1, -1).gather(2, place[..., None])[..., 0]

        # From pieces to classes; of the rows that are equally near, the last one.
        class_ids = self._pieces.class_ids.expand(len(queries), -1)
        best = cosine.new_full((len(queries), len(self.first) - 1), -1.0)
        best = best.scatter_reduce(1, class_ids, of_pieces, "amax")
        candidates = nearest_rows.where(of_pieces >= best.gather(1, class_ids), -1)
        row = nearest_rows.new_full(best.shape, -1).scatter_reduce(1, class_ids, candidates, "amax")
        return best.gather(1, classes), row.gather(1, classes)


class _Pieces(NamedTuple):
    """The rows of all classes, cut into P pieces of one size."""

    rows: Tensor  # of each piece, (P, size); the last piece of a class repeats a row
    class_ids: Tensor  # class of each piece, (P,)


def _pieces(first: Tensor) -> _Pieces:
    """Cut the rows of classes into pieces; `first` is that of `NearestExpert`."""
    device = first.device
    sizes = first.diff()
    num_pieces = -(-sizes // _PIECE)
    class_ids = torch.arange(len(sizes), device=device).repeat_interleave(num_pieces)

    # The place of a piece among those of its class, then its rows.
    first_piece = num_pieces.cumsum(0) - num_pieces
    place = torch.arange(len(class_ids), device=device) - first_piece[class_ids]
    start = first[class_ids] + _PIECE * place
    rows = start[:, None] + torch.arange(_PIECE, device=device)
    last = first[class_ids + 1] - 1
    return _Pieces(rows.minimum(last[:, None]), class_ids)
