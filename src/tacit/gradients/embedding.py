"""The rule for `nn.Embedding`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
    >>> found["weight"].ghost()[0], found["weight"].per_example().flatten()
    (tensor([16.]), tensor([0., 0., 4., 0., 0.]))
    """
    batch, rows, width = len(inputs), module.num_embeddings, module.embedding_dim
    tokens, g = inputs.reshape(batch, -1), gradients.reshape(batch, -1, width)
    if module.padding_idx is not None:  # `where`, not a product: a gradient that is not finite must vanish as well
        g = torch.where((tokens == module.padding_idx).unsqueeze(2), g.new_zeros(()), g)
    examples = torch.arange(batch, device=tokens.device).unsqueeze(1)
    keys = (examples * rows + tokens).flatten()  # one number for each (example, token)

    def per_example() -> Tensor:
        found = g.new_zeros(batch * rows, width).index_add_(0, keys, g.flatten(0, 1))
        return found.view(batch, rows, width)

    occurring: list[
        tuple[Tensor, Tensor, Tensor, Tensor]
    ] = []  # examples and tokens, their sums, and the squared norms

    def ghost() -> tuple[Tensor, Add]:
        pairs, where = torch.unique(keys, return_inverse=True)
        sums = g.new_zeros(len(pairs), width).index_add_(0, where, g.flatten(0, 1))
        owners = pairs // rows
        squares = g.new_zeros(batch).index_add_(0, owners, sums.square().sum(dim=1))
        occurring.append((owners, pairs - owners * rows, sums, squares))

        def second_pass(factors: Tensor) -> Tensor:
            scaled = g * factors.to(g.dtype)[:, None, None]
            return g.new_zeros(rows, width).index_add_(0, tokens.flatten(), scaled.flatten(0, 1))

        return squares, second_pass

    def along() -> Tensor:
        """Inner products of the sums with their rows of the weight, of `width` numbers each, and for the rounding of the squares
        beside them: over as many positions as there are."""
        assert toward is not None
        (owners, held, sums, squares), summands = occurring[-1], width + tokens.shape[1] + 8
        weights = module.weight.detach().index_select(0, held).to(sums.dtype)
        products = (
            torch.bmm(sums.unsqueeze(1), weights.unsqueeze(2)).flatten().double()
        )  # without a tensor of all the products
        values = products.new_zeros(batch).index_add_(0, owners, products)
        return values.add_(squares.sqrt(), alpha=summands * torch.finfo(sums.dtype).eps / 2 * toward.length)

    return {"weight": Contribution(per_example, ghost, None, True, None if toward is None else along)}
