"""The rule for `nn.Embedding`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tacit.gradients import kernels
from tacit.gradients.contribution import Add, Contribution
from tacit.gradients.toward import Toward


def embedding(
    module: nn.Embedding, inputs: Tensor, gradients: Tensor, toward: Toward | None = None
) -> dict[str, Contribution]:
    """The gradient of row v is the sum of g_t over the positions t that hold the token v; the padding row has none.

    The ghost norm adds up the output gradients of each (example, token) that occurs, and takes the norm of these sums: the
    per-example gradient without its zero rows. It is the very sum that is clipped, so it needs no allowance for rounding.

    *Guarantee.* Row i of every result comes from row i of `inputs` and `gradients` alone.

    >>> found = embedding(nn.Embedding(5, 1), torch.tensor([[2, 2]]), torch.tensor([[[1.0], [3.0]]]))
    >>> found["weight"].ghost()[0].tolist(), found["weight"].per_example().flatten()
    ([16.0], tensor([0., 0., 4., 0., 0.]))
    """
    tokens = inputs.reshape(len(inputs), -1)
    call = _Call(module, tokens, gradients.reshape(*tokens.shape, module.embedding_dim), toward)
    if kernels.usable(gradients, module.weight):
        weight = Contribution(call.per_example, call.compiled, None, True, ghost_decays=toward is not None)
    else:
        along = None if toward is None else call.along
        weight = Contribution(call.per_example, call.ghost, None, True, along)
    return {"weight": weight}


class _Call:
    """One call: its tokens, [batch, positions], and the gradients of what it gave for them, [batch, positions, width]."""

    def __init__(self, module: nn.Embedding, tokens: Tensor, g: Tensor, toward: Toward | None) -> None:
        self.module, self.tokens, self.g, self.toward = module, tokens, g, toward
        self.rows, self.width = module.num_embeddings, module.embedding_dim
        self.occurring: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def compiled(self) -> tuple[Tensor, Add]:
        table, rate = self.module.weight.detach(), 0.0
        if self.toward is not None:
            table, rate = self.toward.weight, self.toward.rate
        found = kernels.embedding_sums(self.tokens, self.g, table, self.module.padding_idx, rate)
        toward = self.toward
        if toward is None:
            return found.norms, found.weighted_sum
        return found.norms, lambda factors: found.weighted_sum(factors, toward.decay.total(factors))

    def per_example(self) -> Tensor:
        batch, g = len(self.tokens), self._without_padding()
        found = g.new_zeros(batch * self.rows, self.width).index_add_(0, self._keys(), g.flatten(0, 1))
        return found.view(batch, self.rows, self.width)

    def ghost(self) -> tuple[Tensor, Add]:
        g = self._without_padding()
        pairs, where = torch.unique(self._keys(), return_inverse=True)
        sums = g.new_zeros(len(pairs), self.width).index_add_(0, where, g.flatten(0, 1))
        owners = pairs // self.rows
        squares = g.new_zeros(len(g)).index_add_(0, owners, sums.square().sum(dim=1))
        if self.toward is not None:
            self.occurring = owners, pairs - owners * self.rows, sums, squares

        def second_pass(factors: Tensor) -> Tensor:
            scaled = g * factors.to(g.dtype)[:, None, None]
            return g.new_zeros(self.rows, self.width).index_add_(0, self.tokens.flatten(), scaled.flatten(0, 1))

        return squares, second_pass

    def along(self) -> Tensor:
        """Inner products of the sums with their rows of the weight, of `width` numbers each, and for the rounding of the squares
        beside them: over as many positions as there are."""
        assert self.toward is not None
        assert self.occurring is not None
        (owners, held, sums, squares), summands = self.occurring, self.width + self.tokens.shape[1] + 8
        weights = self.module.weight.detach().index_select(0, held).to(sums.dtype)
        # without a tensor of all the products
        products = torch.bmm(sums.unsqueeze(1), weights.unsqueeze(2)).flatten().double()
        values = products.new_zeros(len(self.tokens)).index_add_(0, owners, products)
        return values.add_(squares.sqrt(), alpha=summands * torch.finfo(sums.dtype).eps / 2 * self.toward.length)

    def _without_padding(self) -> Tensor:
        if self.module.padding_idx is None:
            return self.g
        # `where`, not a product: a gradient that is not finite must vanish as well
        return torch.where((self.tokens == self.module.padding_idx).unsqueeze(2), self.g.new_zeros(()), self.g)

    def _keys(self) -> Tensor:
        """One number for each (example, token)."""
        examples = torch.arange(len(self.tokens), device=self.tokens.device).unsqueeze(1)
        return (examples * self.rows + self.tokens).flatten()
