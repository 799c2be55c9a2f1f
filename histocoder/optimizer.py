"""AdamW that clips; on a CPU in pieces that stay in its cache, since there a step waits for memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from histocoder.model.layers import kept_copy

_PIECE = 1 << 18
"""Numbers of a piece: with its gradient, moments and copy they fit into a core's second cache."""


class AdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019), fused, which scales gradients to a norm of at most `max_grad_norm` first.

    A step whose gradients are not all finite is left out: weights and state stay as they are.

    Parameters
    ----------
    parameters : iterable of Parameter
        All on one device.
    lr, weight_decay, max_grad_norm : float
    norm_of_all : callable, optional
        Takes the norm of these parameters' gradients, a tensor of shape (); gives that of all, also of those that other
        processes step.

    Notes
    -----
    State and arithmetic are those of `torch.optim.AdamW`. Gradients are those of the parameters, or of the copies that
    `keep_copies` keeps, which a step brings up to date.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        max_grad_norm: float,
        norm_of_all: Callable[[Tensor], Tensor] = lambda norm: norm,
    ) -> None:
        parameters = list(parameters)
        device = parameters[0].device
        super().__init__(parameters, lr=lr, weight_decay=weight_decay, fused=device.type in ("cpu", "cuda"))
        self._parameters, self._max_grad_norm, self._norm_of_all = parameters, max_grad_norm, norm_of_all
        self.grad_norm = torch.zeros((), device=device)
        """Of shape (): the norm of all gradients at the last step, before they were scaled."""
        self._bundles: list[_Bundle] = []
        self._bundled: list[int] = []
        self._tables: dict[nn.Parameter, _Table] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Clip and step; read `grad_norm` to know whether it was left out."""
        if self._parameters[0].device.type == "cpu":
            self._step_in_pieces()
        else:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            self.grad_norm = self._norm_of_all(nn.utils.get_total_norm(gradients).to(self.grad_norm.device))
            nn.utils.clip_grads_with_norm_(self._parameters, self._max_grad_norm, self.grad_norm)
            if self.defaults["fused"]:
                self.found_inf = 1.0 - self.grad_norm.isfinite().float()  # the kernel looks at it, without a wait
            if self.defaults["fused"] or self.grad_norm.isfinite():
                super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, those of copies as well."""
        super().zero_grad(set_to_none)
        for parameter in self._parameters:
            if (copy := kept_copy(parameter)) is not None:
                copy.forget_gradient()

    def _step_in_pieces(self) -> None:
        gradients = {p: gradient for p in self._parameters if (gradient := _gradient(p)) is not None}
        for parameter in gradients:
            if not (state := self.state[parameter]):
                state["step"] = torch.zeros(())
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        tables = [self._table(p).take(gradients.pop(p)) for p in list(gradients) if gradients[p].is_sparse]
        bundles = self._bundles_of(list(gradients))
        buffer = torch.empty(_PIECE)
        pieces = {p: gradient.view(-1).chunk(_num_pieces(p)) for p, gradient in gradients.items()}
        gathered = [[pieces[p][i] for p, i in bundle.places] for bundle in bundles]
        of_tables = [[piece] for table in tables for piece in table.gradient.view(-1).split(_PIECE)]
        self.grad_norm = self._norm_of_all(_norm(gathered + of_tables, buffer))
        shrink = ((self.grad_norm + 1e-6) / self._max_grad_norm).clamp(min=1.0)
        is_finite = self.grad_norm.isfinite().float()
        stepped = [*gradients, *(table.weight for table in tables)]
        torch._foreach_add_([self.state[p]["step"] for p in stepped], [is_finite] * len(stepped))
        for bundle, sources in zip(bundles, gathered, strict=True):
            self._update(bundle, _gathered(sources, buffer), shrink, is_finite)
            for copy, values in bundle.copies:
                copy.copy_(values)
        for parameter in gradients:
            if (copied := kept_copy(parameter)) is not None:
                copied.is_fresh()
        (group,) = self.param_groups
        decay = (1.0 - group["lr"] * group["weight_decay"] * is_finite.double()).float()
        for table in tables:
            bundle = table.rows()
            self._update(bundle, [table.gradient], shrink, is_finite)
            table.write(bundle, decay=decay)

    def _update(self, bundle: _Bundle, gradients: list[Tensor], shrink: Tensor, is_finite: Tensor) -> None:
        (group,) = self.param_groups
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            bundle.values,
            gradients,
            bundle.means,
            bundle.squares,
            [],
            bundle.steps,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=shrink,  # what gradients are divided by
            found_inf=1.0 - is_finite,
        )

    def _bundles_of(self, parameters: list[nn.Parameter]) -> list[_Bundle]:
        """Bundles that make up these parameters: those of the step before, where it was of the same tensors."""
        copies = [None if (copy := kept_copy(p)) is None else copy.tensor for p in parameters]
        tensors = [t for p in parameters for t in (p, *self.state[p].values())]
        tensors += [copy for copy in copies if copy is not None]
        key = [tensor.data_ptr() for tensor in tensors]
        if key != self._bundled:
            self._bundled, self._bundles = key, list(_bundles(parameters, [self.state[p] for p in parameters], copies))
        return self._bundles

    def _table(self, weight: nn.Parameter) -> _Table:
        """That of the step before, where its state is the same."""
        table = self._tables.get(weight)
        if table is None or table.state["exp_avg_sq"] is not self.state[weight]["exp_avg_sq"]:
            table = self._tables[weight] = _Table(weight, self.state[weight])
        return table


class _Bundle(NamedTuple):
    """Pieces of parameters, `_PIECE` numbers together at most; each list has one of shape (n,) for each of them."""

    places: list[tuple[nn.Parameter, int]]
    """Of which parameter, and which piece of it."""
    values: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]
    """Of shape ()."""
    copies: list[tuple[Tensor, Tensor]]
    """Where values are copied to, and these values."""


class _Table:
    """An embedding's weights of shape (rows, dim), few rows of which are ever looked up; its gradients are sparse.

    Where no gradient has ever reached a row, both moments are 0, and all that a step does is to decay the weights. So
    the result is that of a step of all rows.
    """

    def __init__(self, weight: nn.Parameter, state: dict[str, Tensor]) -> None:
        self.weight, self.state = weight, state
        self.gradient = torch.empty(0)
        """Of the rows that were ever reached."""
        is_reached = state["exp_avg"].any(dim=1) | state["exp_avg_sq"].any(dim=1)
        self._reached = is_reached.nonzero()[:, 0]

    def take(self, gradient: Tensor) -> _Table:
        """Take a sparse gradient; returns itself."""
        rows, values = gradient._indices()[0], gradient._values()
        self._reached = torch.cat([self._reached, rows]).unique()
        self.gradient = torch.zeros(len(self._reached), self.weight.shape[1])
        self.gradient.index_add_(0, torch.searchsorted(self._reached, rows), values.float())
        return self

    def rows(self) -> _Bundle:
        """Copies of those rows."""
        values, means, squares = ([tensor.detach()[self._reached]] for tensor in self._tensors())
        return _Bundle([], values, means, squares, [self.state["step"]], [])

    def write(self, bundle: _Bundle, *, decay: Tensor) -> None:
        """Put them back; all other rows decay."""
        self.weight.mul_(decay)
        for tensor, (rows,) in zip(self._tensors(), (bundle.values, bundle.means, bundle.squares), strict=True):
            tensor.index_copy_(0, self._reached, rows)

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.weight, self.state["exp_avg"], self.state["exp_avg_sq"]


def _bundles(
    parameters: list[nn.Parameter], states: list[dict[str, Tensor]], copies: list[Tensor | None]
) -> Iterator[_Bundle]:
    """Pieces, as many small ones together as make up a large one."""
    bundle, size = _Bundle([], [], [], [], [], []), 0
    for parameter, state, copy in zip(parameters, states, copies, strict=True):
        if not parameter.numel():  # a share may be empty
            continue
        columns = [x.view(-1).chunk(_num_pieces(parameter)) for x in (parameter, state["exp_avg"], state["exp_avg_sq"])]
        for i, (values, mean, square) in enumerate(zip(*columns, strict=True)):
            if size + len(values) > _PIECE:
                yield bundle
                bundle, size = _Bundle([], [], [], [], [], []), 0
            size += len(values)
            bundle.places.append((parameter, i))
            bundle.values.append(values)
            bundle.means.append(mean)
            bundle.squares.append(square)
            bundle.steps.append(state["step"])
            if copy is not None:
                bundle.copies.append((copy.view(-1).chunk(_num_pieces(parameter))[i], values))
    if size:
        yield bundle


def _num_pieces(parameter: nn.Parameter) -> int:
    return max(-(-parameter.numel() // _PIECE), 1)


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    """A parameter's, and its kept copy's, in the precision of either."""
    copied = None if (copy := kept_copy(parameter)) is None else copy.gradient
    if parameter.grad is None or copied is None:
        return copied if parameter.grad is None else parameter.grad
    return parameter.grad + copied


def _gathered(gradients: list[Tensor], buffer: Tensor) -> list[Tensor]:
    """Gradients of any precision, in a buffer."""
    sizes = list(map(len, gradients))
    places = buffer[: sum(sizes)].split(sizes)
    for place, gradient in zip(places, gradients, strict=True):
        place.copy_(gradient)
    return list(places)


def _norm(bundles: list[list[Tensor]], buffer: Tensor) -> Tensor:
    """Of all gradients together, of shape ()."""
    squares = []
    for gradients in bundles:
        _gathered(gradients, buffer)
        numbers = buffer[: sum(map(len, gradients))]
        squares.append(torch.dot(numbers, numbers))
    return torch.stack([torch.zeros(()), *squares]).sum().sqrt()
