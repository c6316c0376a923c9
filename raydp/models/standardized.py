"""Weight standardisation: convolutions whose filters are centred and of length one (De et al. 2022, arXiv 2204.13650).

Of a filter w with k entries, ŵ = (w − mean w)/√(‖w − mean w‖² + ε): unit length is variance 1/k, which keeps the
variance of activations (Brock et al. 2021, arXiv 2101.08692; without the gain, since a normalisation follows).
"""

from __future__ import annotations

import torch
from opacus.grad_sample import GradSampleModule, register_grad_sampler
from torch import Tensor, nn

_EPSILON = 1e-5


class StandardizedConv2d(nn.Conv2d):
    """A Conv2d that convolves with its standardised filters; the parameters are those of a Conv2d.

    For DP-NGD: what passes through the layer describes ŵ and not w, so it is no Kronecker block of w's Fisher matrix.
    The layer gets a diagonal block (:func:`raydp.geometry.blocks.blocks_of`): correct, but without what K-FAC knows
    of it. Use the model without standardisation there.
    """

    def forward(self, input: Tensor) -> Tensor:
        filters, _ = self.standardized()
        return self._conv_forward(input, filters, self.bias)

    def standardized(self) -> tuple[Tensor, Tensor]:
        """ŵ (outputs, inputs, h, w) and the lengths (outputs, 1, 1, 1) by which w − mean w was divided."""
        centred = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        lengths = (centred.square().sum(dim=(1, 2, 3), keepdim=True) + _EPSILON).sqrt()
        return centred / lengths, lengths

    @torch.no_grad()
    def weight_gradient(self, gradient: Tensor) -> Tensor:
        """From gradients (n, *shape) with respect to ŵ to those with respect to w: the chain rule, example by example.

        (ĝ − mean ĝ − ŵ⟨ŵ, ĝ⟩)/length, since ŵ has mean zero.
        """
        filters, lengths = self.standardized()
        along = (gradient * filters).sum(dim=(2, 3, 4), keepdim=True)
        return (gradient - gradient.mean(dim=(2, 3, 4), keepdim=True) - filters * along) / lengths

    def plain(self) -> nn.Conv2d:
        """An ordinary Conv2d with the same parameters, for formulas that look at the type."""
        layer = nn.Conv2d(
            self.in_channels,
            self.out_channels,
            self.kernel_size,  # type: ignore[arg-type]
            self.stride,  # type: ignore[arg-type]
            self.padding,  # type: ignore[arg-type]
            self.dilation,  # type: ignore[arg-type]
            self.groups,
            self.bias is not None,
            self.padding_mode,
            device="meta",
        )
        layer.weight, layer.bias = self.weight, self.bias
        return layer


@register_grad_sampler(StandardizedConv2d)
def _per_example(layer: StandardizedConv2d, activations: list[Tensor], output_gradient: Tensor) -> dict[Tensor, Tensor]:
    """Opacus' formula for the layer, which curvature and other engines look up by type."""
    found: dict[Tensor, Tensor] = GradSampleModule.GRAD_SAMPLERS[nn.Conv2d](layer.plain(), activations, output_gradient)
    return {p: layer.weight_gradient(g) if p is layer.weight else g for p, g in found.items()}
