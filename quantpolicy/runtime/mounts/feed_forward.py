"""diffusers' feed-forward with a tanh-GELU before an fp8 Linear, in whichever model it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from diffusers.models.activations import GELU, SwiGLU
from diffusers.models.attention import FeedForward
from torch import Tensor, nn

from quantpolicy.kernels.gelu_fp8_linear import gelu_fp8_linear
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.runtime.mounts.site import (
    Part,
    Rewrite,
    Site,
    Sites,
    find_in_each,
    former_class,
    is_still,
    is_unhooked,
    why_not_bypassed,
    why_not_passed_on,
    why_not_plain,
)
from quantpolicy.schemes import Scheme


class QuantisedFeedForward(Rewrite):
    """A feed-forward whose last Linear is fp8.

    Args:
        quantises: its GELU and the quantisation behind it in one pass.
    """

    quantises = False

    def forward(self: Part, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return the rows after the last Linear."""
        entry, last = self.net[0], self.net[2]
        is_free = is_tanh_gelu(entry) and is_free_fp8(last, entry) and has_idle_dropouts(self)
        if not (self.quantises and is_free):
            plain: Tensor = super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
            return plain
        rows = entry.proj(hidden_states)
        return gelu_fp8_linear(rows, None, *last.operands_for(rows))


def has_idle_dropouts(ff: Part) -> bool:
    """Return whether what an op leaves out of a feed-forward is dropout that drops nothing now."""
    left_out = [one for index, one in enumerate(ff.net) if index not in (0, 2)]
    if not is_still(nn.Dropout, *left_out):
        return False
    return not (ff.training and any(one.p > 0 for one in left_out))


def is_fp8(linear: Part) -> bool:
    """Return whether a Linear is an fp8 one in fused execution."""
    return isinstance(linear, FusedLinear) and linear.scheme is Scheme.FP8


def is_free_fp8(linear: Part, *before: Part) -> bool:
    """Return whether an op can do what an fp8 Linear and modules before it do, without them."""
    return is_fp8(linear) and is_unhooked(linear, *before)


def read_codes(linears: Iterable[Part]) -> bool:
    """Return whether Linears read the same e4m3 codes: fp8 ones with one activation floor."""
    first, *others = linears
    return is_fp8(first) and all(is_fp8(one) and one.floor == first.floor for one in others)


def take_codes(linears: Sequence[Part]) -> bool:
    """Return whether Linears can be given codes; asked at every call, for hooks read rows."""
    return len(linears) > 0 and read_codes(linears) and is_unhooked(*linears)


def why_not_entered(ff: Part) -> str:
    """Return why codes do not reach the first Linear of a feed-forward, "" when they do."""
    return why_not_passed_on(ff, FeedForward) or why_not_passed_on(ff.net[0], GELU, SwiGLU)


def find_gelu_fp8_linear(model: nn.Module) -> Sites:
    """Return the feed-forwards with a tanh-GELU whose last Linear is fp8."""
    candidates = ((name, module) for name, module in model.named_modules() if _is_candidate(module))
    return find_in_each(candidates, _site)


def _is_candidate(module: Part) -> bool:
    if former_class(module) is not FeedForward:
        return False
    return is_tanh_gelu(module.net[0]) and is_fp8(module.net[2])


def is_tanh_gelu(entry: Part) -> bool:
    """Return whether an activation is the GELU that the op computes; it may be exchanged later."""
    return former_class(entry) in (GELU, nn.GELU) and entry.approximate == "tanh"


def _site(name: str, ff: Part) -> tuple[Site, str]:
    reason = why_not_plain(ff)
    for part in ff.net:
        reason = reason or why_not_bypassed(part)
    return Site(name, ff, QuantisedFeedForward, "quantises"), reason


FINDERS: dict[str, Callable[[nn.Module], Sites]] = {"gelu_fp8_linear": find_gelu_fp8_linear}
