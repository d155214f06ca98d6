"""Three small optimizers whose state has other forms than that of torch's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Factored(Optimizer):
    """As Adafactor: of a matrix, row and column means of the squares; of a vector, the squares themselves."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                decay = 1 - state["step"] ** -0.8
                squares = p.grad.square() + 1e-30
                if p.ndim == 2:
                    row = state.setdefault("row", torch.zeros(p.shape[0]))
                    column = state.setdefault("column", torch.zeros(p.shape[1]))
                    row.lerp_(squares.mean(1), 1 - decay)
                    column.lerp_(squares.mean(0), 1 - decay)
                    scale = torch.outer(row / row.mean(), column)
                else:
                    scale = state.setdefault("square", torch.zeros_like(p)).lerp_(squares, 1 - decay)
                p.sub_(group["lr"] * p.grad * scale.rsqrt())


class Lion(Optimizer):
    """As Lion: a single moment, and no count of steps."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            one, two = group["betas"]
            for p in group["params"]:
                moment: Tensor = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(group["lr"] * moment.lerp(p.grad, 1 - one).sign())
                moment.lerp_(p.grad, 1 - two)


class MixedAdam(Optimizer):
    """Adam for parameters of low precision: its moments and a master copy are float32, whatever the parameter is."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(
                        step=0, master=p.float(), exp_avg=torch.zeros(p.shape), exp_avg_sq=torch.zeros(p.shape)
                    )
                state["step"] += 1
                gradient = p.grad.float()
                state["exp_avg"].lerp_(gradient, 0.1)
                state["exp_avg_sq"].lerp_(gradient.square(), 0.01)
                first = state["exp_avg"] / (1 - 0.9 ** state["step"])
                second = state["exp_avg_sq"] / (1 - 0.99 ** state["step"])
                state["master"].sub_(group["lr"] * first / (second.sqrt() + 1e-8))
                p.copy_(state["master"])
